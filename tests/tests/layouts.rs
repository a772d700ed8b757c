//! Steps of every layout of up to eight ranks under the verifier: every scope, both modes, both architectures, the
//! optimizer shared by replicas or not.

use std::path::Path;

use device::{Machine, TraceEvent};
use graphcap::verify::{VerifyOptions, verify};
use trainer::{Config, plan_run, trace_steps};

/// Two blocks of 32, T 16; an evaluation behind the second of three steps, two microbatches in each.
const CONFIG: &str = "[model]\nlayers = 2\ndim = 32\nheads = 8\nseq_len = 16\n\
                      [train]\nsteps = 3\nmicro_batch = 1\neval_interval = 2\neval_samples = 8\n\
                      [data]\npath = \"none\"\n";

/// Sizes along tp, gtp and dp.
type Sizes = [u32; 3];

/// Powers of two whose product is at most eight.
fn layouts() -> Vec<Sizes> {
    let sizes = [1, 2, 4, 8];
    let all = sizes.iter().flat_map(|tp| sizes.iter().flat_map(move |gtp| sizes.map(|dp| [*tp, *gtp, dp])));
    all.filter(|sizes| sizes.iter().product::<u32>() <= 8).collect()
}

const GRAPHS: [&[&str]; 8] = [
    &["graph.scope=none"],
    &["graph.scope=layer", "graph.gates=in-graph"],
    &["graph.scope=layer", "graph.gates=before-replay"],
    &["graph.scope=chunk", "graph.gates=in-graph"],
    &["graph.scope=chunk", "graph.gates=before-replay"],
    &["graph.scope=microbatch", "graph.gates=in-graph"],
    &["graph.scope=microbatch", "graph.gates=before-replay"],
    &["graph.scope=step"],
];

/// Whole tokens on every rank, and tokens split over the tensor group with one layer in two recomputed.
fn archs([tp, _, _]: Sizes) -> [Vec<String>; 2] {
    let llama =
        ["model.arch=llama".to_owned(), format!("model.kv_heads={}", tp.max(2)), "train.recompute=block".into()];
    let split = (tp > 1).then(|| "layout.sequence_parallel=true".to_owned());
    [vec!["model.arch=gpt2".to_owned()], llama.into_iter().chain(split).collect()]
}

/// The layout, with about one bucket a layer, and whether replicas share the optimizer.
fn on([tp, gtp, dp]: Sizes, distributed: bool) -> Vec<String> {
    vec![
        format!("layout.tp={tp}"),
        format!("layout.gtp={gtp}"),
        format!("layout.dp={dp}"),
        format!("train.global_batch={}", 2 * gtp * dp),
        // What a block's matrices have.
        format!("ddp.bucket_size={}", 12 * 32 * 32 / (tp * gtp)),
        format!("optimizer.distributed={distributed}"),
    ]
}

/// Asserts that nothing is wrong with the steps of a configuration.
fn assert_clean(machine: &Machine, overrides: &[String]) {
    let config = Config::parse(CONFIG, Path::new("layouts"), Path::new(""), overrides);
    let config = config.unwrap_or_else(|error| panic!("{overrides:?}: {error}"));
    let trace = trace_steps(&config, machine, 3).unwrap_or_else(|error| panic!("{overrides:?}: {error:?}"));
    let report = verify(&trace, &VerifyOptions::default());
    assert!(report.is_clean(), "{overrides:?} on {}: {report}", machine.driver());
    // Two steps and an evaluation of each rank are launched, if there are graphs.
    let launches = trace.events.iter().filter(|event| matches!(event, TraceEvent::Launch { .. })).count();
    let ranks = plan_run(&config).expect("a plan").ranks as usize;
    let captured = !overrides.iter().any(|set| set == "graph.scope=none");
    assert!(if captured { launches >= 2 * ranks } else { launches == 0 }, "{overrides:?}: {launches} launches");
    assert!(report.operations() > 300 * ranks as u64, "{overrides:?}: {report}");
}

/// Every combination that `wanted` picks, by number.
fn assert_layouts_clean(layouts: &[Sizes], wanted: impl Fn(usize) -> bool) -> usize {
    let mut at = 0;
    let mut checked = 0;
    for &sizes in layouts {
        for arch in archs(sizes) {
            for graphs in GRAPHS {
                for distributed in [false, true] {
                    at += 1;
                    if wanted(at) {
                        let graphs = graphs.iter().map(|set| (*set).to_owned());
                        let overrides: Vec<String> =
                            on(sizes, distributed).into_iter().chain(arch.clone()).chain(graphs).collect();
                        assert_clean(&Machine::dry(), &overrides);
                        checked += 1;
                    }
                }
            }
        }
    }
    checked
}

#[test]
fn layouts_of_up_to_eight_ranks_are_twenty() {
    assert_eq!(layouts().len(), 20);
}

/// One combination in so many: coprime to all counts of choices, so that every choice comes up on some layout.
const ORDINARY: usize = 27;

#[test]
fn steps_of_layouts_are_free_of_races() {
    let checked = assert_layouts_clean(&layouts(), |at| at % ORDINARY == 0);
    assert!(checked > 20, "{checked}");
}

#[cfg(feature = "full")]
mod full {
    use super::*;

    #[test]
    fn steps_of_every_layout_are_free_of_races_at_every_scope_in_both_modes() {
        assert_eq!(assert_layouts_clean(&layouts(), |_| true), 20 * 2 * 8 * 2);
    }

    #[test]
    fn steps_of_sixty_four_ranks_are_free_of_races_at_every_scope() {
        let mut checked = 0;
        for sizes in [[4, 4, 4], [2, 8, 4], [8, 2, 4]] {
            checked += assert_layouts_clean(&[sizes], |at| at % 7 == 1);
        }
        assert!(checked >= 12, "{checked}");
    }

    #[test]
    fn orders_of_steps_on_eight_ranks_are_free_of_races_at_every_scope_in_both_modes() {
        for (seed, graphs) in (1..).zip(GRAPHS) {
            let [_, arch] = archs([2, 2, 2]);
            let graphs = graphs.iter().map(|set| (*set).to_owned());
            let overrides: Vec<String> = on([2, 2, 2], true).into_iter().chain(arch).chain(graphs).collect();
            assert_clean(&Machine::sim(seed), &overrides);
        }
    }
}
