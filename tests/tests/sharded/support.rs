//! Machines for tests that run ranks.

use std::{error::Error as StdError, time::Duration};

use device::{Element, Fresh, Machine, Options, Stream, View};
use graphcap::{GateMode, Scope};

pub(crate) type Caught = Box<dyn StdError + Send + Sync>;

pub(crate) const MODES: [GateMode; 2] = [GateMode::BeforeReplay, GateMode::InGraph];

/// Scopes below a step, in both modes.
pub(crate) fn captures() -> Vec<(Scope, GateMode)> {
    let below = [Scope::Layer, Scope::Chunk, Scope::Microbatch];
    below.into_iter().flat_map(|scope| MODES.map(|gates| (scope, gates))).collect()
}

/// Gives up after seconds without progress, so that no test hangs; fresh memory holds NaN.
fn options() -> Options {
    Options { timeout: Duration::from_secs(20), fresh: Fresh::Poisoned }
}

pub(crate) fn cpu() -> Machine {
    Machine::cpu_with(2, options()).expect("workers")
}

pub(crate) fn sim(seed: u64) -> Machine {
    Machine::sim_with(seed, options())
}

/// The first card, if the tests were built for one.
pub(crate) fn cards() -> Vec<Machine> {
    crate::cards::cards(device::cuda::CudaOptions::default(), options())
}

/// Machines by seed: a simulator takes its order from it, a card has its own.
pub(crate) type Machines = Box<dyn Fn(u64) -> Machine>;

/// Simulators, and the first card, which then is opened once for all seeds.
pub(crate) fn kinds() -> Vec<Machines> {
    let card = |card: Machine| Box::new(move |_| card.clone()) as Machines;
    [Box::new(sim) as Machines].into_iter().chain(cards().into_iter().map(card)).collect()
}

pub(crate) fn get<T: Element>(stream: &Stream, view: &View) -> Result<Vec<T>, device::Error> {
    stream.download::<T>(view)?.wait()
}
