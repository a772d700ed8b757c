//! Gathers ahead of uses: what is planned, what is done, where it lies.

use device::{Label, Machine, Trace, TraceEvent};
use gtp::{GatherIndex, GtpPlan, PassKind, Slot, UseIndex};

use crate::api::{
    rig::{Caught, machines, options},
    script::{Act, forward, there_and_back},
    stand::{Model, check_all},
};

fn sim() -> Machine {
    Machine::sim_with(3, options())
}

/// Gathers and uses of a rank, in the order of submission.
fn submitted(trace: &Trace, rank: u32) -> Vec<String> {
    let told = |event: &TraceEvent| match event {
        TraceEvent::Joint { rank: of, group, .. } if *of == rank => {
            let planned = group.ends_with("gtp_gather").then(|| "gather".to_owned());
            planned.or_else(|| group.ends_with("gtp_on_demand").then(|| "gather!".to_owned()))
        }
        TraceEvent::Op { rank: of, name, .. } if *of == rank => {
            matches!(name.as_str(), "use" | "wgrad").then(|| name.to_string())
        }
        _ => None,
    };
    trace.events.iter().filter_map(told).collect()
}

#[test]
fn the_first_pass_gathers_on_demand_and_the_second_one_use_ahead() {
    let model = Model::new(2, &[(4, 4), (6, 4), (4, 4), (6, 4)]);
    let acts = there_and_back(&[0, 1, 2, 3]);
    let of_pass = |number: usize| {
        let (results, trace) = model.traced(&sim(), None, |stand| {
            (0..number).try_for_each(|_| stand.pass(&acts))?;
            stand.rank.device.synchronize()?;
            Ok(())
        });
        results.unwrap();
        submitted(&trace, 1)
    };
    let (first, both) = (of_pass(1), of_pass(2));
    let on_demand = |gradient: &'static str| ["gather!", "use", "use", gradient].into_iter().filter(|s| !s.is_empty());
    let want: Vec<&str> = (0..4).flat_map(|_| on_demand("")).chain((0..4).flat_map(|_| on_demand("wgrad"))).collect();
    assert_eq!(first, want);
    // The head of forward is gathered in the open, with the next one behind it; the last one stays for backward.
    let forward = "gather gather use use gather use use gather use use use use";
    let backward = "gather use use wgrad gather use use wgrad gather use use wgrad use use wgrad";
    let second: Vec<&str> = forward.split(' ').chain(backward.split(' ')).collect();
    assert_eq!(both[first.len()..], second);
}

#[test]
fn bytes_and_uses_bound_how_far_a_rank_gathers_ahead() {
    // 128, 128, 512, 128 bytes.
    let mut model = Model::new(2, &[(4, 8), (4, 8), (16, 8), (4, 8)]).look_ahead(8);
    model.config.axes[0].look_ahead_bytes = Some(300);
    let acts = forward(&[0, 1, 2, 3]);
    let want = model.whole(&vec![acts.clone(); 3]);
    for machine in machines() {
        let got = model.run(&machine, |stand| {
            (0..3).try_for_each(|_| stand.pass(&acts))?;
            let plan = stand.plan()?;
            let points: Vec<usize> = plan.gathers().iter().map(|gather| gather.issued_at.0).collect();
            assert_eq!(points, [0, 0, 2, 2], "the third is larger than may be ahead: in the open");
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

/// What overlaps in time lies apart: every use finds what was gathered for it, whoever comes between.
pub(crate) fn keep_apart(plan: &gtp::PassPlan) {
    let steps = |gather: usize| {
        let planned = &plan.gathers()[gather];
        let of = |taken: &UseIndex| plan.schedule().uses()[taken.0];
        let end = planned.uses.iter().map(|taken| of(taken).give_back).max().unwrap();
        (of(&planned.issued_at).take, end)
    };
    for a in 0..plan.gathers().len() {
        for b in 0..a {
            let ((from, to), (other_from, other_to)) = (steps(a), steps(b));
            let together = from <= other_to && other_from <= to;
            let slots: [&Slot; 2] = [&plan.gathers()[a].slot, &plan.gathers()[b].slot];
            assert!(!together || !slots[0].overlaps(slots[1]), "gathers {a} and {b} of {plan:?}");
        }
    }
}

#[test]
fn neighbours_of_equal_size_never_share_a_slot() {
    for look_ahead in 0..4 {
        let model = Model::new(2, &[(4, 4); 6]).look_ahead(look_ahead);
        let acts = there_and_back(&[0, 1, 2, 3, 4, 5]);
        let want = model.whole(&vec![acts.clone(); 3]);
        let got = model.run(&sim(), |stand| {
            (0..3).try_for_each(|_| stand.pass(&acts))?;
            let plan = stand.plan()?;
            keep_apart(&plan);
            stand.found()
        });
        check_all(&got, &want, "sim");
    }
}

#[test]
fn uses_inside_uses_keep_their_slots_until_the_outer_one_ends() {
    let nested = [
        vec![Act::Take(0), Act::Take(0), Act::Back(0)],
        forward(&[1, 2, 3]),
        vec![Act::Back(0)],
        forward(&[1, 2]),
        vec![Act::Take(3), Act::Take(2), Act::Back(3), Act::Take(1), Act::Back(2), Act::Back(1)],
    ];
    let (machines, acts) = (machines(), nested.concat());
    for look_ahead in 0..3 {
        let model = Model::new(2, &[(4, 4); 4]).look_ahead(look_ahead);
        let want = model.whole(&vec![acts.clone(); 3]);
        for machine in &machines {
            let got = model.run(machine, |stand| {
                (0..3).try_for_each(|_| stand.pass(&acts))?;
                let plan = stand.plan()?;
                keep_apart(&plan);
                stand.found()
            });
            check_all(&got, &want, machine.driver());
        }
    }
}

/// Where a rank's values lay in the order of their uses, and its gathers.
fn places(trace: &Trace, rank: u32) -> Vec<(Label, u32, usize)> {
    let of = |event: &TraceEvent| match event {
        TraceEvent::Op { rank: of, name, accesses, .. } if *of == rank && *name == *"use" => {
            Some((accesses[0].label.clone(), accesses[0].allocation, accesses[0].region.start))
        }
        _ => None,
    };
    trace.events.iter().filter_map(of).collect()
}

#[test]
fn addresses_never_change_over_passes_and_nothing_is_allocated_any_more() {
    let model = Model::new(3, &[(6, 4), (5, 8), (9, 2), (4, 4)]).look_ahead(2);
    let acts = there_and_back(&[0, 1, 2, 3, 0]);
    for machine in machines() {
        let (memory, trace) = model.traced(&machine, None, |stand| {
            let memory = |stand: &crate::api::stand::Stand| -> Result<_, Caught> { Ok(stand.rank.device.memory()) };
            (0..2).try_for_each(|_| stand.pass(&acts))?;
            let before = memory(stand)?;
            for _ in 0..3 {
                stand.pass(&acts)?;
                // What only the first pass needed may go when the last operation on it has run.
                let new: Vec<_> = memory(stand)?.into_iter().filter(|used| !before.contains(used)).collect();
                assert!(new.is_empty(), "a step allocates nothing, not {new:?}");
            }
            Ok(stand.gtp.plan()?)
        });
        for (rank, plan) in (0..).zip(memory.unwrap()) {
            let uses = places(&trace, rank);
            let per_pass = uses.len() / 5;
            for pass in 2..5 {
                assert_eq!(uses[per_pass..2 * per_pass], uses[pass * per_pass..(pass + 1) * per_pass]);
            }
            let plan = plan.pass(PassKind::TRAIN).unwrap().clone();
            let starts: Vec<usize> = (0..plan.schedule().uses().len())
                .flat_map(|u| [plan.gathers()[plan.gather_of(UseIndex(u)).0].slot.offset * 4; 2])
                .collect();
            let real: Vec<usize> = uses[per_pass..2 * per_pass].iter().map(|place| place.2).collect();
            assert_eq!(starts, real, "the plan says where each lies");
        }
    }
}

#[test]
fn a_plan_made_on_the_dry_driver_runs_ahead_from_the_first_pass() {
    let model = Model::new(2, &[(4, 4), (6, 4), (4, 4)]);
    let acts = there_and_back(&[0, 1, 2]);
    let plan = |machine: &Machine| -> GtpPlan {
        let (plans, _) = model.traced(machine, None, |stand| {
            stand.pass(&acts)?;
            Ok(stand.gtp.plan()?)
        });
        plans.unwrap().remove(0)
    };
    let dry = plan(&Machine::dry());
    assert_eq!(dry, plan(&sim()), "a plan is data: shapes alone decide it");
    let want = model.whole(std::slice::from_ref(&acts));
    let (found, _) = model.traced(&sim(), Some(&dry), |stand| {
        stand.pass(&acts)?;
        let counters = stand.gtp.counters();
        assert_eq!((counters.on_demand, counters.plans, counters.planned), (0, 0, 5));
        stand.found()
    });
    check_all(&found.unwrap(), &want, "planned");
    let told = dry.to_string();
    for line in ["3 sharded weights", "in the open", "behind use 0 (w0)", "stays from use 2"] {
        assert!(told.contains(line), "no '{line}' in\n{told}");
    }
}

#[test]
fn a_plan_of_other_weights_is_refused() {
    let acts = there_and_back(&[0, 1]);
    let (plans, _) = Model::new(2, &[(4, 4), (6, 4)]).traced(&sim(), None, |stand| {
        stand.pass(&acts)?;
        Ok(stand.gtp.plan()?)
    });
    let plan = plans.unwrap().remove(0);
    let (refused, _) = Model::new(2, &[(4, 4), (8, 4)]).traced(&sim(), Some(&plan), |_| Ok(()));
    let text = format!("{:?}", refused.unwrap_err());
    assert!(text.contains("PlanOfOthers") && text.contains("at: 1"), "{text}");
}

#[test]
fn a_gather_is_issued_once_for_each_use_that_no_other_serves() {
    let model = Model::new(2, &[(4, 4); 3]).look_ahead(2);
    model.run(&sim(), |stand| {
        stand.pass(&there_and_back(&[0, 1, 2, 1]))?;
        let plan = stand.plan()?;
        let uses = plan.schedule().uses().len();
        let mut issued: Vec<GatherIndex> = (0..uses).flat_map(|u| plan.issues(UseIndex(u)).to_vec()).collect();
        issued.sort_unstable();
        assert_eq!(issued, (0..plan.gathers().len()).map(GatherIndex).collect::<Vec<_>>());
        let before = stand.gtp.counters();
        stand.pass(&there_and_back(&[0, 1, 2, 1]))?;
        assert_eq!(stand.gtp.counters().planned - before.planned, issued.len() as u64);
        Ok(())
    });
}
