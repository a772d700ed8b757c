//! Machines and memory for tests that run ranks.

use std::{error::Error as StdError, time::Duration};

use device::{Access, DType, Device, Element, Fresh, Machine, MemoryKind, Op, Options, Stream, View, Why};
use graphcap::GateMode;

pub(crate) type Caught = Box<dyn StdError + Send + Sync>;

pub(crate) const MODES: [GateMode; 2] = [GateMode::BeforeReplay, GateMode::InGraph];

/// Gives up after seconds without progress, so that no test hangs; fresh memory holds NaN.
fn options() -> Options {
    Options { timeout: Duration::from_secs(10), fresh: Fresh::Poisoned }
}

pub(crate) fn cpu() -> Machine {
    Machine::cpu_with(2, options()).unwrap()
}

pub(crate) fn sim(seed: u64) -> Machine {
    Machine::sim_with(seed, options())
}

/// The first card, if the tests were built for one.
pub(crate) fn cards() -> Vec<Machine> {
    crate::cards::cards(device::cuda::CudaOptions::default(), options())
}

/// Waits on `to` for what is on `from` now.
pub(crate) fn order(from: &Stream, to: &Stream, why: &'static str) -> Result<(), device::Error> {
    let event = from.device().event(why);
    from.record(&event)?;
    to.wait(&event, Why(why))
}

pub(crate) fn floats(device: &Device, label: &str, n: usize) -> View {
    device.alloc(label, &[n], DType::F32, MemoryKind::Other).unwrap()
}

pub(crate) fn get<T: Element>(stream: &Stream, view: &View) -> Vec<T> {
    stream.download::<T>(view).unwrap().wait().unwrap()
}

/// `out = (3 out + value) % 8191`: no two of them commute.
pub(crate) fn fold(value: &View, out: &View) -> Op {
    Op::host("fold", value.label().to_owned(), vec![Access::read(value), Access::update(out)], |args| {
        let value = args.read::<f32>(0)?;
        args.write::<f32>(1)?.iter_mut().zip(value).for_each(|(out, value)| *out = (3.0 * *out + value) % 8191.0);
        Ok(())
    })
}
