//! What claims are made of: small operations whose order shows in the values.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
    mpsc,
};

use device::*;

use super::drivers::LIMIT;

/// A device, and a stream of it.
pub(crate) fn open(machine: &Machine, rank: u32, stream: &str) -> (Device, Stream) {
    let device = machine.device(rank).unwrap();
    let stream = device.stream(stream).unwrap();
    (device, stream)
}

/// `n` floats.
pub(crate) fn floats(device: &Device, label: &str, n: usize) -> View {
    device.alloc(label, &[n], DType::F32, MemoryKind::Other).unwrap()
}

/// Writes `value` everywhere.
pub(crate) fn set(view: &View, value: f32) -> Op {
    Op::host("set", "test", vec![Access::write(view)], move |args| {
        args.write::<f32>(0)?.fill(value);
        Ok(())
    })
}

/// `x = (factor * x + term) % 8191`: in f32 exact for small integers, and no two different ones commute.
pub(crate) fn step(view: &View, factor: f32, term: f32) -> Op {
    Op::host("step", "test", vec![Access::update(view)], move |args| {
        args.write::<f32>(0)?.iter_mut().for_each(|x| *x = stepped(*x, factor, term));
        Ok(())
    })
}

pub(crate) fn stepped(x: f32, factor: f32, term: f32) -> f32 {
    (factor * x + term) % 8191.0
}

/// `to = from`.
pub(crate) fn copy(from: &View, to: &View) -> Op {
    Op::host("copy", "test", vec![Access::read(from), Access::write(to)], |args| {
        let from = args.read::<f32>(0)?;
        args.write::<f32>(1)?.copy_from_slice(from);
        Ok(())
    })
}

/// Counts how often it ran.
#[derive(Clone, Default)]
pub(crate) struct Counter(Arc<AtomicUsize>);

impl Counter {
    pub(crate) fn op(&self, accesses: Vec<Access>) -> Op {
        let count = self.0.clone();
        Op::host("count", "test", accesses, move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    }

    pub(crate) fn add(&self, n: usize) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A stream that cannot go on until [`Gate::open`]: its rank waits for another one in a barrier, or, where there are no
/// barriers, an operation waits for the gate.
pub(crate) enum Gate {
    Barrier { other: Stream, meetings: [Meeting; 2] },
    Held(mpsc::Sender<()>),
}

impl Gate {
    pub(crate) fn before(stream: &Stream) -> Gate {
        let machine = stream.device().machine();
        if machine.driver() == "cuda" {
            let (op, _, go) = held(Vec::new());
            stream.launch(op).unwrap();
            return Gate::Held(go);
        }
        let (_, other) = open(&machine, 99, "gate");
        let ranks = [stream.rank(), 99];
        let meetings = ranks.map(|rank| machine.meeting("gate", &ranks, rank).unwrap());
        stream.joint(&meetings[0], Exchange::Barrier, "gate", Vec::new()).unwrap();
        Gate::Barrier { other, meetings }
    }

    pub(crate) fn open(self) {
        match self {
            Gate::Barrier { other, meetings } => {
                other.joint(&meetings[1], Exchange::Barrier, "gate", Vec::new()).unwrap();
                other.synchronize().unwrap();
            }
            Gate::Held(go) => go.send(()).unwrap(),
        }
    }
}

/// A stream that stands still for as long as this lives: it waits for rank 77, which never comes, or for an operation
/// that waits for this.
pub(crate) struct Never(Option<mpsc::Sender<()>>);

impl Never {
    pub(crate) fn before(stream: &Stream) -> Never {
        let machine = stream.device().machine();
        if machine.driver() == "cuda" {
            let (op, _, go) = held(Vec::new());
            stream.launch(op).unwrap();
            return Never(Some(go));
        }
        let meeting = machine.meeting("never", &[stream.rank(), 77], stream.rank()).unwrap();
        stream.joint(&meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
        Never(None)
    }
}

impl Drop for Never {
    fn drop(&mut self) {
        // The operation may have given up, when a claim took too long.
        self.0.take().map(|go| go.send(()));
    }
}

/// Fails with `text`.
pub(crate) fn failing(site: &'static str, text: &'static str) -> Op {
    Op::host("fail", site, Vec::new(), move |_| Err(text.into()))
}

/// An operation that runs until it is let go, and says when it has begun to whoever still listens.
pub(crate) fn held(accesses: Vec<Access>) -> (Op, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let ((begun, begin), (go, wait)) = (mpsc::channel(), mpsc::channel());
    let ends = Mutex::new((begun, wait));
    let op = Op::host("held", "test", accesses, move |_| {
        let ends = ends.lock().unwrap();
        let _ = ends.0.send(());
        ends.1.recv_timeout(LIMIT)?;
        Ok(())
    });
    (op, begin, go)
}

/// Checks the values of `view` where the driver has values; always waits for the stream.
#[track_caller]
pub(crate) fn expect_values(stream: &Stream, view: &View, want: &[f32]) {
    if stream.device().machine().computes() {
        assert_eq!(stream.download::<f32>(view).unwrap().wait().unwrap(), want);
    } else {
        stream.synchronize().unwrap();
    }
}

/// The operation that an error names.
#[track_caller]
pub(crate) fn op_of(error: &Error) -> &OpRef {
    match error {
        Error::Failed { op, .. } | Error::Panicked { op, .. } => op,
        other => panic!("names no operation: {other}"),
    }
}
