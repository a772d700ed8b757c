//! Counts, tables and orders of capture: reference rows, and laws that hold for any pipeline.
//!
//! The rows come from running Megatron-LM's own functions (`get_schedule_table`, `get_pp_rank_microbatches`,
//! `convert_schedule_table_to_order`).

use graphcap::{
    ChunkIndex, Direction, ExpertOverlap, Interleaving, MicrobatchIndex, PassKind, PipelinePlan, PipelineSetup,
    ScheduleError, ScheduleViolation, Step,
};

use super::schedule_support::{from_numbers, plan, settings, setup};

/// A reference pipeline. By stage: order, warm-up, remaining, whether all is warm-up.
struct Case {
    microbatches: u32,
    pp: u32,
    vpp: Option<u32>,
    group: u32,
    table_microbatch: &'static [u32],
    table_chunk: &'static [u32],
    ranks: &'static [(&'static str, u64, u64, bool)],
}

/// The last one breaks a rule: those functions take it, and a setup that asks for it is refused.
const CASES: &[Case] = &[
    Case {
        microbatches: 1,
        pp: 1,
        vpp: None,
        group: 1,
        table_microbatch: &[0],
        table_chunk: &[0],
        ranks: &[("[1,-1]", 0, 1, false)],
    },
    Case {
        microbatches: 4,
        pp: 1,
        vpp: None,
        group: 1,
        table_microbatch: &[0, 1, 2, 3],
        table_chunk: &[0, 0, 0, 0],
        ranks: &[("[1,-1,1,-1,1,-1,1,-1]", 0, 4, false)],
    },
    Case {
        microbatches: 4,
        pp: 2,
        vpp: None,
        group: 2,
        table_microbatch: &[0, 1, 2, 3],
        table_chunk: &[0, 0, 0, 0],
        ranks: &[("[1,1,-1,1,-1,1,-1,-1]", 1, 3, false), ("[1,-1,1,-1,1,-1,1,-1]", 0, 4, false)],
    },
    Case {
        microbatches: 8,
        pp: 4,
        vpp: None,
        group: 4,
        table_microbatch: &[0, 1, 2, 3, 4, 5, 6, 7],
        table_chunk: &[0, 0, 0, 0, 0, 0, 0, 0],
        ranks: &[
            ("[1,1,1,1,-1,1,-1,1,-1,1,-1,1,-1,-1,-1,-1]", 3, 5, false),
            ("[1,1,1,-1,1,-1,1,-1,1,-1,1,-1,1,-1,-1,-1]", 2, 6, false),
            ("[1,1,-1,1,-1,1,-1,1,-1,1,-1,1,-1,1,-1,-1]", 1, 7, false),
            ("[1,-1,1,-1,1,-1,1,-1,1,-1,1,-1,1,-1,1,-1]", 0, 8, false),
        ],
    },
    Case {
        microbatches: 2,
        pp: 4,
        vpp: None,
        group: 4,
        table_microbatch: &[0, 1],
        table_chunk: &[0, 0],
        ranks: &[
            ("[1,1,-1,-1]", 2, 0, true),
            ("[1,1,-1,-1]", 2, 0, true),
            ("[1,1,-1,-1]", 1, 1, false),
            ("[1,-1,1,-1]", 0, 2, false),
        ],
    },
    Case {
        microbatches: 5,
        pp: 2,
        vpp: Some(2),
        group: 3,
        table_microbatch: &[0, 1, 2, 0, 1, 2, 3, 4, 3, 4],
        table_chunk: &[0, 0, 0, 1, 1, 1, 0, 0, 1, 1],
        ranks: &[
            ("[1,1,1,2,2,2,-2,1,-2,1,-2,2,-1,2,-1,-1,-2,-2,-1,-1]", 5, 5, false),
            ("[1,1,1,2,-2,2,-2,2,-2,1,-1,1,-1,2,-1,2,-2,-2,-1,-1]", 3, 7, false),
        ],
    },
    Case {
        microbatches: 4,
        pp: 2,
        vpp: Some(2),
        group: 2,
        table_microbatch: &[0, 1, 0, 1, 2, 3, 2, 3],
        table_chunk: &[0, 0, 1, 1, 0, 0, 1, 1],
        ranks: &[
            ("[1,1,2,2,1,-2,1,-2,2,-1,2,-1,-2,-2,-1,-1]", 4, 4, false),
            ("[1,1,2,-2,2,-2,1,-1,1,-1,2,-2,2,-2,-1,-1]", 2, 6, false),
        ],
    },
    Case {
        microbatches: 8,
        pp: 4,
        vpp: Some(2),
        group: 4,
        table_microbatch: &[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7],
        table_chunk: &[0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1],
        ranks: &[
            ("[1,1,1,1,2,2,2,2,1,1,1,-2,1,-2,2,-2,2,-2,2,-1,2,-1,-1,-1,-2,-2,-2,-2,-1,-1,-1,-1]", 10, 6, false),
            ("[1,1,1,1,2,2,2,2,1,-2,1,-2,1,-2,1,-2,2,-1,2,-1,2,-1,2,-1,-2,-2,-2,-2,-1,-1,-1,-1]", 8, 8, false),
            ("[1,1,1,1,2,2,2,-2,2,-2,1,-2,1,-2,1,-1,1,-1,2,-1,2,-1,2,-2,2,-2,-2,-2,-1,-1,-1,-1]", 6, 10, false),
            ("[1,1,1,1,2,-2,2,-2,2,-2,2,-2,1,-1,1,-1,1,-1,1,-1,2,-2,2,-2,2,-2,2,-2,-1,-1,-1,-1]", 4, 12, false),
        ],
    },
    Case {
        microbatches: 4,
        pp: 4,
        vpp: Some(2),
        group: 4,
        table_microbatch: &[0, 1, 2, 3, 0, 1, 2, 3],
        table_chunk: &[0, 0, 0, 0, 1, 1, 1, 1],
        ranks: &[
            ("[1,1,1,1,2,2,2,2,-2,-2,-2,-2,-1,-1,-1,-1]", 8, 0, true),
            ("[1,1,1,1,2,2,2,2,-2,-2,-2,-2,-1,-1,-1,-1]", 8, 0, true),
            ("[1,1,1,1,2,2,2,-2,2,-2,-2,-2,-1,-1,-1,-1]", 6, 2, false),
            ("[1,1,1,1,2,-2,2,-2,2,-2,2,-2,-1,-1,-1,-1]", 4, 4, false),
        ],
    },
    Case {
        microbatches: 6,
        pp: 2,
        vpp: Some(3),
        group: 2,
        table_microbatch: &[0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 4, 5, 4, 5],
        table_chunk: &[0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2],
        ranks: &[
            (
                "[1,1,2,2,3,3,1,-3,1,-3,2,-2,2,-2,3,-1,3,-1,1,-3,1,-3,2,-2,2,-2,3,-1,3,-1,-3,-3,-2,-2,-1,-1]",
                6,
                12,
                false,
            ),
            (
                "[1,1,2,2,3,-3,3,-3,1,-2,1,-2,2,-1,2,-1,3,-3,3,-3,1,-2,1,-2,2,-1,2,-1,3,-3,3,-3,-2,-2,-1,-1]",
                4,
                14,
                false,
            ),
        ],
    },
    Case {
        microbatches: 8,
        pp: 2,
        vpp: Some(2),
        group: 4,
        table_microbatch: &[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7],
        table_chunk: &[0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1],
        ranks: &[
            ("[1,1,1,1,2,2,2,-2,2,-2,1,-2,1,-2,1,-1,1,-1,2,-1,2,-1,2,-2,2,-2,-2,-2,-1,-1,-1,-1]", 6, 10, false),
            ("[1,1,1,1,2,-2,2,-2,2,-2,2,-2,1,-1,1,-1,1,-1,1,-1,2,-2,2,-2,2,-2,2,-2,-1,-1,-1,-1]", 4, 12, false),
        ],
    },
    Case {
        microbatches: 3,
        pp: 2,
        vpp: Some(2),
        group: 2,
        table_microbatch: &[0, 1, 0, 1, 2, 2],
        table_chunk: &[0, 0, 1, 1, 0, 1],
        ranks: &[("[1,1,2,2,1,-2,2,-2,-1,-1,-2,-1]", 4, 2, false), ("[1,1,2,-2,2,-2,1,-1,2,-1,-2,-1]", 2, 4, false)],
    },
];

impl Case {
    fn setup(&self, stage: u32) -> PipelineSetup {
        setup(self.microbatches, self.pp, stage, self.vpp, Some(self.group))
    }
}

fn numbers(order: &str) -> Vec<i64> {
    order.trim_matches(['[', ']']).split(',').map(|id| id.parse().unwrap()).collect()
}

#[test]
fn counts_tables_and_orders_are_the_reference_values() {
    let (_, kept) = CASES.split_last().unwrap();
    for case in kept {
        for (stage, &(order, warm_up, remaining, all_in_warm_up)) in (0..).zip(case.ranks) {
            let plan = plan(case.setup(stage));
            let counts = plan.counts();
            let context = format!("M{} pp{} vpp{:?} stage {stage}", case.microbatches, case.pp, case.vpp);
            assert_eq!(plan.setup().group_size(), case.group, "{context}");
            assert_eq!((counts.warm_up, counts.remaining()), (warm_up, remaining), "{context}");
            assert_eq!(counts.all_in_warm_up(), all_in_warm_up, "{context}");
            assert_eq!(counts.total, case.table_chunk.len() as u64, "{context}");
            let (microbatches, chunks): (Vec<_>, Vec<_>) = plan.table().into_iter().map(|(mb, c)| (mb.0, c.0)).unzip();
            assert_eq!((&*microbatches, &*chunks), (case.table_microbatch, case.table_chunk), "{context}");
            assert_eq!(plan.schedule().order().to_string(), order, "{context}");
        }
        assert_eq!(case.ranks.len() as u32, case.pp);
    }
    assert_eq!(kept.len(), 11);
}

#[test]
fn a_last_group_too_short_for_the_pipeline_is_refused_with_the_numbers_around_it() {
    let case = CASES.last().unwrap();
    for stage in 0..case.pp {
        let error = PipelinePlan::of_step(case.setup(stage)).unwrap_err();
        let ScheduleError::Setup { source } = &error else { panic!("{error}") };
        let broken = ScheduleViolation::LastGroup { microbatches: 3, group: 2, rest: 1, pp: 2 };
        assert_eq!(source.list(), [broken]);
        assert!(source.to_string().ends_with("nearest: microbatches = 2 or 4"), "{source}");
        // A pipeline of the user's own may run it all the same.
        let order = case.ranks[stage as usize].0;
        assert_eq!(from_numbers(&numbers(order)).order().to_string(), order);
    }
}

#[test]
fn a_forward_only_pass_is_all_warm_up() {
    for (vpp, stage) in [(None, 1), (Some(2), 0)] {
        let microbatches = if vpp.is_some() { 4 } else { 8 };
        let training = setup(microbatches, 2, stage, vpp, None);
        let plan = plan(PipelineSetup { pass: PassKind::ForwardOnly, ..training });
        let counts = plan.counts();
        assert_eq!((counts.total, counts.warm_up, counts.remaining()), (8, 8, 0));
        assert!(counts.all_in_warm_up());
        let schedule = plan.schedule();
        assert!(schedule.is_forward_only());
        let order = if vpp.is_some() { "[1,1,2,2,1,1,2,2]" } else { "[1,1,1,1,1,1,1,1]" };
        assert_eq!(schedule.order().to_string(), order);
    }
}

#[test]
fn expert_overlap_warms_up_one_microbatch_longer() {
    let counts = [0, 1].map(|stage| {
        let overlap = ExpertOverlap::On;
        let counts = plan(PipelineSetup { overlap, ..setup(4, 2, stage, Some(2), None) }).counts();
        (counts.total, counts.all_in_warm_up(), counts.warm_up, counts.remaining())
    });
    assert_eq!(counts, [(8, false, 5, 3), (8, false, 3, 5)]);
    // With one stage, forward-only, or with everything in warm-up there is nothing to prolong.
    for base in settings() {
        let off = plan(base).counts();
        let on = PipelineSetup { overlap: ExpertOverlap::On, ..base };
        let longer = u64::from(base.interleaving != Interleaving::Off && !off.all_in_warm_up());
        if on.check().is_ok() {
            assert_eq!(plan(on).counts().warm_up, off.warm_up + longer, "{base:?}");
            let pass = PassKind::ForwardOnly;
            assert_eq!(plan(PipelineSetup { pass, ..on }).counts(), plan(PipelineSetup { pass, ..base }).counts());
        }
    }
}

#[test]
fn one_stage_captures_one_microbatch_and_several_stages_capture_all() {
    let captured = |setup| PipelinePlan::for_capture(setup).unwrap();
    let alone = captured(setup(6, 1, 0, None, None));
    assert_eq!(alone.setup().microbatches, 1);
    assert_eq!(alone.schedule().order().to_string(), "[1,-1]");
    let overlap = captured(PipelineSetup { overlap: ExpertOverlap::On, ..setup(3, 1, 0, None, None) });
    assert_eq!(overlap.schedule().order().to_string(), "[1,-1,1,-1,1,-1]");
    for stage in 0..3 {
        let setup = setup(6, 3, stage, Some(2), None);
        assert_eq!(captured(setup), plan(setup), "every microbatch of a pipeline is captured");
    }
}

#[test]
fn every_stage_runs_each_forward_and_backward_once_and_backwards_in_forward_order() {
    for setup in settings() {
        let plan = plan(setup);
        let schedule = plan.schedule();
        let of = |direction| schedule.steps().iter().filter(move |step| step.direction == direction);
        let table = plan.table();
        let last = setup.chunks() - 1;
        let forwards = of(Direction::Forward).map(|step| (step.microbatch, step.chunk));
        let backwards = of(Direction::Backward).map(|step| (step.microbatch, ChunkIndex(last - step.chunk.0)));
        assert!(forwards.eq(table.iter().copied()), "{setup:?}");
        assert!(backwards.eq(table.iter().copied()), "{setup:?}");
        assert_eq!(schedule.steps().len(), 2 * table.len());
        assert_eq!(schedule.microbatches(), vec![setup.microbatches; setup.chunks() as usize]);
    }
}

/// Runs all stages, each in its own order, whenever what a step needs is there.
#[test]
fn no_pipeline_that_keeps_the_rules_waits_in_a_circle() {
    for first in settings().into_iter().filter(|setup| setup.place.index().0 == 0) {
        let (pp, chunks) = (first.place.size(), first.chunks());
        let vpp = (first.interleaving != Interleaving::Off).then_some(chunks);
        let stage = |stage| setup(first.microbatches, pp, stage, vpp, Some(first.group_size()));
        let schedules: Vec<_> = (0..pp).map(|at| plan(stage(at)).schedule()).collect();
        // Virtual stages of the model: chunk by chunk, stage by stage.
        let place = |stage: u32, chunk: ChunkIndex| chunk.0 * pp + stage;
        let end = chunks * pp - 1;
        let mut done = std::collections::HashSet::new();
        let mut at = vec![0; pp as usize];
        let needs = |stage: u32, step: &Step| -> Option<(u32, MicrobatchIndex, Direction)> {
            match (step.direction, place(stage, step.chunk)) {
                (Direction::Forward, 0) => None,
                (Direction::Forward, own) => Some((own - 1, step.microbatch, Direction::Forward)),
                (_, own) if own == end => Some((own, step.microbatch, Direction::Forward)),
                (_, own) => Some((own + 1, step.microbatch, Direction::Backward)),
            }
        };
        loop {
            let before = done.len();
            for stage in 0..pp {
                while let Some(step) = schedules[stage as usize].steps().get(at[stage as usize]) {
                    if needs(stage, step).is_some_and(|need| !done.contains(&need)) {
                        break;
                    }
                    done.insert((place(stage, step.chunk), step.microbatch, step.direction));
                    at[stage as usize] += 1;
                }
            }
            if done.len() == before {
                break;
            }
        }
        assert_eq!(done.len() as u32, 2 * chunks * pp * first.microbatches, "stuck at {at:?}: {first:?}");
    }
}
