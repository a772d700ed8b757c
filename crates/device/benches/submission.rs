//! What it costs to hand work over, apart from the work: aims, on two cores, under 0.35 µs an eager operation and
//! under 2 µs a joint operation of four ranks. Times are per run; the item rate is per operation.
//! `cargo bench -p device --bench submission`.

use device::*;
use divan::{Bencher, counter::ItemsCount};

fn main() {
    divan::main();
}

/// Short, so that the median of many runs is not that of a busy machine.
const OPERATIONS: usize = 1_000;

const MEETINGS: usize = 200;

fn open(machine: &Machine) -> (Device, Stream, View) {
    let device = machine.device(0).expect("a free rank");
    let stream = device.stream("compute").expect("a healthy device");
    let view = device.alloc("v", &[16], DType::F32, MemoryKind::Other).expect("memory");
    (device, stream, view)
}

fn nothing(view: &View) -> Op {
    Op::host("nothing", "bench", vec![Access::update(view)], |_| Ok(()))
}

fn submit(stream: &Stream, view: &View) {
    for _ in 0..OPERATIONS {
        stream.launch(nothing(view)).expect("a healthy device");
    }
    stream.synchronize().expect("a healthy device");
}

/// Made, submitted, claimed, run and waited for.
#[divan::bench(args = [1, 2], sample_count = 2_000)]
fn eager_operation(bencher: Bencher<'_, '_>, workers: usize) {
    let (_device, stream, view) = open(&Machine::cpu(workers).expect("a machine"));
    bencher.counter(ItemsCount::new(OPERATIONS)).bench(|| submit(&stream, &view));
}

/// As [`eager_operation`], while a trace is recorded: aim, under 0.5 µs more.
#[divan::bench(args = [1, 2], sample_count = 2_000)]
fn traced_operation(bencher: Bencher<'_, '_>, workers: usize) {
    let machine = Machine::cpu(workers).expect("a machine");
    let (_device, stream, view) = open(&machine);
    bencher.counter(ItemsCount::new(OPERATIONS)).bench(|| {
        machine.trace_start();
        submit(&stream, &view);
        machine.trace_stop()
    });
}

/// The same, one thing at a time.
#[divan::bench(sample_count = 300)]
fn simulated_operation(bencher: Bencher<'_, '_>) {
    let (_device, stream, view) = open(&Machine::sim(1));
    bencher.counter(ItemsCount::new(OPERATIONS)).bench(|| submit(&stream, &view));
}

/// A simulated operation while 24 streams of 8 ranks have something that could run.
#[divan::bench(sample_count = 300)]
fn simulated_operation_of_24_streams(bencher: Bencher<'_, '_>) {
    let machine = Machine::sim(1);
    let ranks: Vec<Device> = (0..8).map(|rank| machine.device(rank).expect("a free rank")).collect();
    let open = |device: &Device| {
        let view = device.alloc("v", &[16], DType::F32, MemoryKind::Other).expect("memory");
        (device.stream("s").expect("a healthy device"), view)
    };
    let streams: Vec<(Stream, View)> = ranks.iter().flat_map(|d| [open(d), open(d), open(d)]).collect();
    bencher.counter(ItemsCount::new(OPERATIONS)).bench(|| {
        for (stream, view) in streams.iter().cycle().take(OPERATIONS) {
            stream.launch(nothing(view)).expect("a healthy device");
        }
        ranks.iter().for_each(|device| device.synchronize().expect("a healthy device"));
    });
}

/// A wait that adds no order.
#[divan::bench(sample_count = 2_000)]
fn elided_wait(bencher: Bencher<'_, '_>) {
    let (device, stream, _view) = open(&Machine::cpu(2).expect("a machine"));
    let (other, event) = (device.stream("other").expect("a healthy device"), device.event("e"));
    other.record(&event).expect("a healthy device");
    bencher.counter(ItemsCount::new(OPERATIONS)).bench(|| {
        for _ in 0..OPERATIONS {
            stream.wait(&event, Why("bench.elided")).expect("a healthy device");
        }
    });
    device.synchronize().expect("a healthy device");
}

/// A record on one stream and a wait for it on another, with an operation on each.
#[divan::bench(args = [1, 2], sample_count = 1_000)]
fn hand_over_between_streams(bencher: Bencher<'_, '_>, workers: usize) {
    let (device, one, view) = open(&Machine::cpu(workers).expect("a machine"));
    let two = device.stream("two").expect("a healthy device");
    let events = [device.event("e"), device.event("f")];
    bencher.counter(ItemsCount::new(MEETINGS)).bench(|| {
        for i in 0..MEETINGS {
            let (from, to) = if i % 2 == 0 { (&one, &two) } else { (&two, &one) };
            from.launch(nothing(&view)).expect("a healthy device");
            from.record(&events[i % 2]).expect("a healthy device");
            to.wait(&events[i % 2], Why("bench.hand_over")).expect("a healthy device");
        }
        device.synchronize().expect("a healthy device");
    });
}

struct Member {
    stream: Stream,
    meeting: Meeting,
    view: View,
}

fn members(machine: &Machine) -> Vec<Member> {
    let ranks = [0, 1, 2, 3];
    let member = |rank: u32| {
        let device = machine.device(rank).expect("a free rank");
        let stream = device.stream("comm").expect("a healthy device");
        let view = device.alloc("v", &[16], DType::F32, MemoryKind::Other).expect("memory");
        Member { stream, meeting: machine.meeting("all", &ranks, rank).expect("a group"), view }
    };
    ranks.into_iter().map(member).collect()
}

fn meet(member: &Member) {
    let accesses = vec![Access::update(&member.view)];
    let sum = Exchange::AllReduce(Reduce::Max);
    member.stream.joint(&member.meeting, sum, "bench", accesses).expect("a healthy device");
}

/// Four ranks, submitted by one thread.
#[divan::bench(args = [1, 2], sample_count = 1_000)]
fn joint_operation_of_one_thread(bencher: Bencher<'_, '_>, workers: usize) {
    let members = members(&Machine::cpu(workers).expect("a machine"));
    bencher.counter(ItemsCount::new(MEETINGS)).bench(|| {
        (0..MEETINGS).for_each(|_| members.iter().for_each(meet));
        members.iter().for_each(|m| m.stream.synchronize().expect("a healthy device"));
    });
}

/// Four ranks, a thread each.
#[divan::bench(args = [1, 2], sample_count = 100)]
fn joint_operation_of_rank_threads(bencher: Bencher<'_, '_>, workers: usize) {
    // So many that starting the threads does not count.
    let meetings = 20 * MEETINGS;
    let members = members(&Machine::cpu(workers).expect("a machine"));
    bencher.counter(ItemsCount::new(meetings)).bench(|| {
        std::thread::scope(|scope| {
            for member in &members {
                scope.spawn(|| {
                    (0..meetings).for_each(|_| meet(member));
                    member.stream.synchronize().expect("a healthy device");
                });
            }
        });
    });
}
