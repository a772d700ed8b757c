//! What only shows on a card, one level below the suite: the facts about CUDA that this driver is built on, and a
//! kernel that breaks its card.

use std::{
    fs::File,
    process::{Command, Stdio},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{
    CudaOptions, DeviceMemory,
    card::{Card, RawEvent, RawStream, open_driver},
    memory::PinnedBlock,
    prepare::prepare,
};
use crate::{
    Access, Allocation, DType, Error, Machine, MemoryKind, Op, Options, Shape, View, memory::Backing, ops::Fill,
};

const LIMIT: Duration = Duration::from_secs(20);

fn options() -> CudaOptions {
    let kernel_cache = Some(std::env::temp_dir().join("warpweft-test-kernels"));
    CudaOptions { kernel_cache, ..CudaOptions::default() }
}

/// A card, and the right to it: closing a context, and giving memory back, wait for all streams of a process, also for
/// those that another test holds.
pub(super) fn card() -> (Arc<Card>, File) {
    let turn = File::create(std::env::temp_dir().join("warpweft-test-card.lock")).unwrap();
    turn.lock().unwrap();
    (open_card(), turn)
}

fn open_card() -> Arc<Card> {
    prepare().expect("the environment can be prepared");
    open_driver().unwrap();
    let card = Card::open(0, &options(), &Arc::default()).unwrap();
    card.bind().unwrap();
    card
}

/// A word that streams wait for.
struct Word(PinnedBlock);

impl Word {
    fn closed(card: &Arc<Card>) -> Word {
        let word = Word(PinnedBlock::new(card, 4).unwrap());
        word.at().store(0, Ordering::SeqCst);
        word
    }

    fn at(&self) -> &AtomicU32 {
        // SAFETY: the block is aligned and larger, and used for this word only.
        unsafe { AtomicU32::from_ptr(self.0.host().as_ptr().cast()) }
    }

    fn hold(&self, stream: RawStream) {
        let equal = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
        // SAFETY: the word lives until the test has seen the stream pass it.
        let code = unsafe { sys::cuStreamWaitValue32_v2(stream.0, self.0.card(), 1, equal) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }

    fn open(&self) {
        self.at().store(1, Ordering::SeqCst);
    }
}

fn done(stream: RawStream) -> bool {
    // SAFETY: a live stream.
    match unsafe { sys::cuStreamQuery(stream.0) } {
        sys::CUresult::CUDA_SUCCESS => true,
        sys::CUresult::CUDA_ERROR_NOT_READY => false,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn wait(what: &str, ready: impl Fn() -> bool) {
    let begin = Instant::now();
    while !ready() {
        assert!(begin.elapsed() < LIMIT, "{what}: not in {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A graph of one node that waits for, or records, `event`; its executable.
fn graph_of(event: RawEvent, waits: bool) -> sys::CUgraphExec {
    let (mut graph, mut node, mut exec) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: the context is current and the event lives longer than the test's launches. The graph is left to the
    // process.
    unsafe {
        assert_eq!(sys::cuGraphCreate(&mut graph, 0), sys::CUresult::CUDA_SUCCESS);
        let code = match waits {
            true => sys::cuGraphAddEventWaitNode(&mut node, graph, ptr::null(), 0, event.0),
            false => sys::cuGraphAddEventRecordNode(&mut node, graph, ptr::null(), 0, event.0),
        };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), sys::CUresult::CUDA_SUCCESS);
    }
    exec
}

fn launch(exec: sys::CUgraphExec, stream: RawStream) {
    // SAFETY: both live.
    assert_eq!(unsafe { sys::cuGraphLaunch(exec, stream.0) }, sys::CUresult::CUDA_SUCCESS);
}

#[test]
fn an_external_wait_takes_the_last_record_issued_before_the_launch_and_no_later_one() {
    let (card, _turn) = card();
    let [launched, before, after] = [0; 3].map(|_| card.new_stream().unwrap());
    let (event, starts, never) = (card.take_event().unwrap(), Word::closed(&card), Word::closed(&card));
    let exec = graph_of(event, true);
    card.record(event, before).unwrap();
    wait("the first record", || done(before));
    starts.hold(launched);
    launch(exec, launched);
    // The launch is issued and has not started; the event is recorded again where nothing gets to.
    never.hold(after);
    card.record(event, after).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    assert!(!done(launched));
    starts.open();
    wait("a launch that needs the first record only", || done(launched));
    assert!(!done(after));
    // The next launch takes the later one.
    launch(exec, launched);
    std::thread::sleep(Duration::from_millis(5));
    assert!(!done(launched));
    never.open();
    wait("the second launch", || done(launched) && done(after));
}

#[test]
fn cuda_lets_a_wait_for_an_event_never_recorded_pass() {
    let (card, _turn) = card();
    let (stream, event) = (card.new_stream().unwrap(), card.take_event().unwrap());
    launch(graph_of(event, true), stream);
    wait("a wait for nothing", || done(stream));
}

/// What `Event::is_done` of an out-gate stands on.
#[test]
fn an_event_that_a_launch_will_record_is_not_reached_before() {
    let (card, _turn) = card();
    let (stream, event, starts) = (card.new_stream().unwrap(), card.take_event().unwrap(), Word::closed(&card));
    let exec = graph_of(event, false);
    for _ in 0..2 {
        starts.at().store(0, Ordering::SeqCst);
        starts.hold(stream);
        launch(exec, stream);
        std::thread::sleep(Duration::from_millis(5));
        assert!(!card.is_reached(event).unwrap(), "counts as issued with the launch");
        starts.open();
        wait("the record", || card.is_reached(event).unwrap());
    }
}

/// What lets a gate keep its event from launch to launch.
#[test]
fn whoever_waits_for_a_record_of_a_launch_does_not_wait_for_that_of_the_next() {
    let (card, _turn) = card();
    let [launched, stream, other] = [0; 3].map(|_| card.new_stream().unwrap());
    let (event, first, second) = (card.take_event().unwrap(), Word::closed(&card), Word::closed(&card));
    let (records, waits) = (graph_of(event, false), graph_of(event, true));
    for _ in 0..3 {
        [&first, &second].into_iter().for_each(|word| word.at().store(0, Ordering::SeqCst));
        first.hold(launched);
        launch(records, launched);
        // SAFETY: both live.
        let code = unsafe { sys::cuStreamWaitEvent(stream.0, event.0, 0) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        launch(waits, other);
        // The same event again, before anybody has got to its first record.
        second.hold(launched);
        launch(records, launched);
        std::thread::sleep(Duration::from_millis(5));
        assert!(!done(stream) && !done(other));
        first.open();
        wait("those who wait for the first record", || done(stream) && done(other));
        assert!(!done(launched) && !card.is_reached(event).unwrap());
        second.open();
        wait("the second record", || done(launched) && card.is_reached(event).unwrap());
    }
}

/// A capture that one stream begins and another joins, with or without work there; how it ends.
fn unjoined(with_work: bool) -> sys::CUresult {
    let (card, _turn) = card();
    let [origin, fork] = [0; 2].map(|_| card.new_stream().unwrap());
    let memory = DeviceMemory::new(&card, 16, crate::Fresh::Zeroed).unwrap().unwrap();
    let (event, mut graph) = (card.take_event().unwrap(), ptr::null_mut());
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: all handles live; the capture ends here.
    unsafe {
        assert_eq!(sys::cuStreamBeginCapture_v2(origin.0, mode), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuEventRecord(event.0, origin.0), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuStreamWaitEvent(fork.0, event.0, 0), sys::CUresult::CUDA_SUCCESS);
        if with_work {
            let code = sys::cuMemsetD8Async(memory.address(), 1, 16, fork.0);
            assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        }
        sys::cuStreamEndCapture(origin.0, &mut graph)
    }
}

#[test]
fn cuda_refuses_a_capture_that_leaves_work_of_a_forked_stream_unjoined() {
    assert_eq!(unjoined(true), sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    // As our captures do.
    assert_eq!(unjoined(false), sys::CUresult::CUDA_SUCCESS);
}

/// Given to the process that breaks its card, as one more filter of tests.
const BREAK: &str = "break-the-card";

/// The context of a process is lost with it, so another process does it.
#[test]
fn a_kernel_that_breaks_its_card_is_named_and_no_host_hangs() {
    prepare().expect("the environment can be prepared");
    if std::env::args().any(|arg| arg == BREAK) {
        break_the_card();
        return;
    }
    let own = "cuda::card_tests::a_kernel_that_breaks_its_card_is_named_and_no_host_hangs";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", own, BREAK, "--nocapture"])
        .stdout(Stdio::inherit())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begin.elapsed() > 6 * LIMIT {
            child.kill().unwrap();
            panic!("the host hangs behind a broken card");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(status.success(), "{status}");
}

fn break_the_card() {
    let limit = Options { timeout: LIMIT, ..Options::default() };
    let machine = Machine::cuda_with(options(), limit).unwrap();
    let (device, peer) = (machine.device(2).unwrap(), machine.device(5).unwrap());
    let (stream, idle) = (device.stream("backward").unwrap(), peer.stream("idle").unwrap());
    let good = device.alloc("good", &[1000], DType::F32, MemoryKind::Other).unwrap();
    let shape = Shape::new(&[64]).unwrap();
    let nowhere = Allocation {
        rank: 2,
        id: 99,
        label: "nowhere".into(),
        bytes: 256,
        kind: MemoryKind::Other,
        storage: Some(Backing::Card(DeviceMemory::nowhere(&open_card()))),
        only_stream: None,
        owner: device.inner().identity.clone(),
    };
    let nowhere = View::whole(Arc::new(nowhere), shape, DType::F32);
    let begin = Instant::now();
    for (site, view) in [("h0", &good), ("h1.bad", &nowhere), ("h2", &good)] {
        let _ = stream.launch(Fill { y: view, value: 1.0 }.op(site).unwrap());
    }
    let error = stream.synchronize().unwrap_err();
    let Error::Failed { op, .. } = &error else { panic!("{error}") };
    assert_eq!(
        (op.name, &op.site[..], op.rank, &op.stream[..]),
        ("fill", "h1.bad", 2, "backward"),
        "{}",
        error.chain()
    );
    assert!(error.chain().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{}", error.chain());
    // Sticky, and for every rank on the card.
    let again = Op::host("more", "test", vec![Access::read(&good)], |_| Ok(()));
    assert!(matches!(stream.launch(again), Err(Error::Failed { .. })));
    assert!(idle.synchronize().is_err() && peer.error().is_some());
    drop((stream, idle, good, nowhere, device, peer, machine));
    assert!(begin.elapsed() < LIMIT, "{:?}", begin.elapsed());
}
