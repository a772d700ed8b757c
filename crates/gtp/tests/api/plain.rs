//! One shard: nothing is gathered, and nothing is there.

use std::collections::BTreeMap;

use device::{Machine, MemoryKind, Trace};
use graphcap::{GateMode, GraphError, Scope};
use gtp::{Counters, PassKind};
use pgroups::{LayoutConfig, Pass, PgError, Turn, Whole};

use crate::api::{
    mixed::{MODES, set},
    rig::{Caught, options},
    script::{Act, forward, there_and_back},
    stand::{Found, Model, Stand},
};

/// A tensor group of two, replicas of two, one shard.
fn model() -> Model {
    let mut model = Model::new(1, &[(6, 4), (5, 8), (4, 4)]);
    model.layout = LayoutConfig { dp: Some(2), ..model.layout };
    model
}

type Seen = (Found, Vec<String>, BTreeMap<MemoryKind, usize>);

/// Who hands out weights.
#[derive(Clone, Copy, PartialEq)]
enum By {
    Gtp,
    Whole,
}

fn play<'c>(by: By, stand: &'c mut Stand, kind: PassKind, turn: Turn<'c>, acts: &[Act]) -> Result<(), Caught> {
    if by == By::Whole {
        return stand.script.play(&mut Whole::new(turn), acts);
    }
    let mut weights = stand.gtp.pass(kind, turn)?;
    stand.script.play(&mut weights, acts)?;
    Ok(weights.finish()?)
}

/// Passes of both kinds, submitted and replayed, by whole weights or by a `Gtp` of one shard.
fn run(seed: u64, gates: Option<GateMode>, by: By) -> (Vec<Seen>, Trace) {
    let (train, eval) = (there_and_back(&[0, 1, 2, 0]), forward(&[0, 1, 2]));
    let (results, trace) = model().traced(&Machine::sim_with(seed, options()), None, |stand| {
        if let Some(gates) = gates {
            // Captured before any pass has run.
            let mut set = set(stand, Scope::Microbatch, gates, 1)?;
            let on = stand.script.streams[0].clone();
            let captured: Result<_, GraphError> =
                set.capture("pass", &on, |scope| play(by, stand, PassKind::TRAIN, scope.turn(Pass::Forward), &train));
            let (graph, ()) = captured?;
            (0..2).try_for_each(|_| graph.replay(&on, &[]))?;
        }
        for _ in 0..2 {
            play(by, stand, PassKind::TRAIN, Turn::eager(Pass::Forward), &train)?;
            play(by, stand, PassKind::EVAL, Turn::eager(Pass::Forward), &eval)?;
            play(by, stand, PassKind::TRAIN, Turn::eager(Pass::Forward), &eval)?;
        }
        assert!(stand.gtp.is_plain());
        assert_eq!(stand.gtp.counters(), Counters::default());
        assert_eq!(stand.gtp.plan()?.bytes(), 0);
        // Nothing to wait for either.
        stand.gtp.account().join(&stand.script.streams[1])?;
        let device = &stand.rank.device;
        Ok((stand.found()?, device.stream_names(), device.memory_by_kind()))
    });
    (results.unwrap_or_else(|error: PgError| panic!("{error:?}")), trace)
}

#[test]
fn one_shard_gives_the_very_trace_streams_and_memory_of_whole_weights() {
    for seed in 0..4 {
        for gates in [None, Some(MODES[0]), Some(MODES[1])] {
            let ((seen, trace), (want, plain)) = (run(seed, gates, By::Gtp), run(seed, gates, By::Whole));
            assert_eq!(seen, want);
            assert_eq!(trace.events.len(), plain.events.len());
            for (event, plain) in trace.events.iter().zip(&plain.events) {
                assert_eq!(event.to_string(), plain.to_string());
            }
        }
    }
}
