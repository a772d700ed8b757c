//! What gathers hide behind, as traces of passes tell.

use device::{Machine, Tick, Trace};
use gtp::{GatherIndex, GatherReport, GtpPlan, PassKind};
use pgroups::Pass;

use crate::api::rig::{Chain, SAMPLES, on_all, options};

const DIMS: [usize; 5] = [6, 4, 8, 5, 3];

/// `passes` passes of a chain; the first has no plan yet.
fn traced(machine: &Machine, look_ahead: usize, passes: usize) -> (GtpPlan, Trace) {
    let chain = Chain { look_ahead, ..Chain::new(2, &DIMS) };
    machine.trace_start();
    let plans = on_all(machine, &chain, |mut rig| {
        let all = rig.all();
        (0..passes).try_for_each(|_| rig.pass(&all))?;
        rig.rank.device.synchronize()?;
        Ok(rig.gtp.plan()?)
    });
    (plans.unwrap().remove(0), machine.trace_stop())
}

/// Of a product of weight `i` over the samples.
fn product(i: usize) -> u64 {
    (2 * SAMPLES * DIMS[i] * DIMS[i + 1]) as u64
}

#[test]
fn a_gather_hides_behind_the_products_between_its_issue_and_its_use() {
    // Uses 0 1 2 3 forward, 4 5 6 7 of weights 3 2 1 0 backward, each followed by its weight gradient.
    let forward = |uses: &[usize]| uses.iter().map(|&i| product(i)).sum::<u64>();
    let backward = |uses: &[usize]| uses.iter().map(|&u| 2 * product(7 - u)).sum::<u64>();
    let want = |look_ahead| match look_ahead {
        0 => vec![(1, 0); 8],
        // The last weight of forward is there when backward begins.
        1 => {
            let hidden = [forward(&[0]), forward(&[1]), forward(&[2]), backward(&[4]), backward(&[5]), backward(&[6])];
            [0].into_iter().chain(hidden).map(|flops| (1, flops)).collect()
        }
        _ => {
            let hidden = [
                forward(&[0]),
                forward(&[0, 1]),
                forward(&[1, 2]),
                forward(&[3]) + backward(&[4]),
                backward(&[4, 5]),
                backward(&[5, 6]),
            ];
            [0].into_iter().chain(hidden).map(|flops| (1, flops)).collect::<Vec<_>>()
        }
    };
    for machine in [Machine::dry(), Machine::sim_with(4, options()), Machine::cpu_with(2, options()).unwrap()] {
        for look_ahead in [0, 1, 2] {
            let (plan, trace) = traced(&machine, look_ahead, 2);
            let report = GatherReport::new(&plan, &trace, 1);
            let got: Vec<(u64, u64)> = report.gathers().iter().map(|g| (g.times, g.flops)).collect();
            assert_eq!(got, want(look_ahead), "look-ahead {look_ahead} on {}", machine.driver());
            assert_eq!((report.on_demand(), report.in_graphs()), (8, 0), "the pass that the plan was made of");
            assert!(report.gathers().iter().all(|g| g.exposed.is_some()), "{report:?}");
        }
    }
}

#[test]
fn the_table_says_what_is_in_the_open() {
    let (plan, trace) = traced(&Machine::dry(), 1, 3);
    let report = GatherReport::new(&plan, &trace, 0);
    let open: Vec<GatherIndex> = report.gathers().iter().filter(|g| g.is_open()).map(|g| g.gather).collect();
    assert_eq!(open, [GatherIndex(0)]);
    let first = &report.gathers()[0];
    assert_eq!((first.kind, first.pass, first.times), (PassKind::TRAIN, Pass::Forward, 2));
    assert_eq!(first.bytes, DIMS[0] * DIMS[1] * 4);
    let text = report.table(Tick::Step);
    assert!(text.starts_with("pass 'train': 7 gathers, 1 of them behind nothing\n"), "{text}");
    assert!(text.lines().count() == 10 && text.ends_with("8 gathers that no plan had foreseen\n"), "{text}");
    let lines: Vec<&str> = text.lines().skip(1).take(8).collect();
    assert!(lines.iter().all(|line| line.chars().count() == lines[0].chars().count()), "{text}");
}
