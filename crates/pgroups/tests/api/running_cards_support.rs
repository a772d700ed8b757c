//! Machines with a card that all ranks share, and how close sums on it must be.

use std::{fs::File, time::Duration};

use device::{DType, Machine, Options, cuda::CudaOptions};
use pgroups::{Group, PgError, Rank, local};

use crate::{cards::cards, running_support::*};

/// A machine, and the right to its card: one test after the other uses it.
pub(crate) struct Card {
    pub(crate) machine: Machine,
    _turn: File,
}

pub(crate) fn card() -> Card {
    card_with(None, Duration::from_secs(20))
}

pub(crate) fn card_with(ctas: Option<u32>, timeout: Duration) -> Card {
    let turn = File::create(std::env::temp_dir().join("warpweft-test-card.lock")).unwrap();
    turn.lock().unwrap();
    let cuda = CudaOptions { ctas, ..CudaOptions::default() };
    let machine = cards(cuda, Options { timeout, ..Options::default() }).remove(0);
    Card { machine, _turn: turn }
}

impl Card {
    /// What `body` gives on every rank of `world`, by rank.
    pub(crate) fn run<T: Send>(
        &self,
        world: u32,
        body: impl Fn(&Rank, &Group) -> Result<T, PgError> + Sync,
        members: &[u32],
    ) -> Vec<T> {
        let ran = local(&self.machine, world, |rank| {
            let group = group_of(&rank, &custom("mine", &[members]), "mine")?;
            body(&rank, &group)
        });
        ran.unwrap_or_else(|error| panic!("{members:?}: {}", error.chain()))
    }
}

/// Compares what a rank got with the exact sums of the members' values. Each of the `n - 1` additions, in whatever
/// order, rounds by half a unit of the partial sum, which is at most the sum of the magnitudes; a mean rounds once
/// more. In bf16 NCCL rounds every partial sum.
pub(crate) fn expect_sums<T: Real>(what: &str, got: &[T], exact: &[f64], magnitudes: &[f64], n: usize) {
    let unit = if T::DTYPE == DType::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-23) };
    assert_eq!(got.len(), exact.len(), "{what}");
    for (i, ((got, want), magnitude)) in got.iter().zip(exact).zip(magnitudes).enumerate() {
        let bound = n as f64 * unit * magnitude;
        let off = (f64::from(got.wide()) - want).abs();
        assert!(off <= bound, "{what}: {} at {i}, not {want}: off by {off:e}, at most {bound:e}", got.wide());
    }
}
