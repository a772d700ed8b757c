//! Short forms for tests of schedules.

use graphcap::{
    ChunkIndex, Direction, ExpertOverlap, Interleaving, MicrobatchIndex, PassKind, PipelinePlace, PipelinePlan,
    PipelineSetup, Schedule, Step,
};
use pgroups::GroupRank;

/// A stage's training pipeline; `vpp` chunks a stage, or one.
pub(crate) fn setup(microbatches: u32, pp: u32, stage: u32, vpp: Option<u32>, group: Option<u32>) -> PipelineSetup {
    let interleaving = vpp.map_or(Interleaving::Off, |chunks| Interleaving::Chunks { chunks, group });
    PipelineSetup {
        place: PipelinePlace::new(pp, GroupRank(stage)).unwrap(),
        microbatches,
        interleaving,
        pass: PassKind::Training,
        overlap: ExpertOverlap::Off,
    }
}

pub(crate) fn plan(setup: PipelineSetup) -> PipelinePlan {
    PipelinePlan::of_step(setup).unwrap()
}

/// A schedule from chunk numbers, negative for backward; each chunk takes its microbatches in order.
pub(crate) fn from_numbers(order: &[i64]) -> Schedule {
    let count = |before: &[i64], id: i64| before.iter().filter(|&&other| other == id).count() as u32;
    let step = |(at, &id): (usize, &i64)| Step {
        chunk: ChunkIndex(id.unsigned_abs() as u32 - 1),
        microbatch: MicrobatchIndex(count(&order[..at], id)),
        direction: if id > 0 { Direction::Forward } else { Direction::Backward },
    };
    Schedule::new(order.iter().enumerate().map(step).collect()).unwrap()
}

/// Every stage of every pipeline that keeps the rules, up to these sizes, with its neighbours' settings in between.
pub(crate) fn settings() -> Vec<PipelineSetup> {
    let mut all = Vec::new();
    for pp in 1..=5 {
        for stage in 0..pp {
            for microbatches in 1..=11 {
                all.push(setup(microbatches, pp, stage, None, None));
                for vpp in 2..=4 {
                    for group in pp..=pp + 2 {
                        all.push(setup(microbatches, pp, stage, Some(vpp), Some(group)));
                    }
                }
            }
        }
    }
    all.retain(|setup| setup.check().is_ok());
    assert!(all.len() > 400, "{} settings", all.len());
    all
}
