//! Steps of every layout of up to eight ranks under the verifier: every scope, both modes, both architectures, the
//! optimizer shared by replicas or not.

use std::path::Path;

use device::{Machine, Options, TraceEvent, cuda::CudaOptions};
use graphcap::verify::{VerifyOptions, verify};
use trainer::{Config, plan_run, trace_steps};

use crate::{cards::cards, graphs::GRAPHS};

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
fn assert_layouts_clean(layouts: &[Sizes], graphs: &[&[&str]], wanted: impl Fn(usize) -> bool) -> usize {
    let choices = layouts.iter().flat_map(|&sizes| {
        let graphs = graphs.iter().flat_map(|graphs| [false, true].map(|distributed| (*graphs, distributed)));
        archs(sizes).into_iter().flat_map(move |arch| graphs.clone().map(move |more| (sizes, arch.clone(), more)))
    });
    let picked = choices.enumerate().filter(|(at, _)| wanted(*at)).map(|(_, choice)| choice);
    picked
        .map(|(sizes, arch, (graphs, distributed))| {
            let graphs = graphs.iter().map(|set| (*set).to_owned());
            let overrides: Vec<String> = on(sizes, distributed).into_iter().chain(arch).chain(graphs).collect();
            assert_clean(&Machine::dry(), &overrides);
        })
        .count()
}

#[test]
fn layouts_of_up_to_eight_ranks_are_twenty() {
    assert_eq!(layouts().len(), 20);
}

/// One combination in so many: coprime to all counts of choices, so that every choice comes up on some layout.
const ORDINARY: usize = 27;

#[test]
fn steps_of_layouts_are_free_of_races() {
    let checked = assert_layouts_clean(&layouts(), &GRAPHS, |at| at % ORDINARY == 0);
    assert!(checked > 20, "{checked}");
}

/// Traces of cards are taken from the same submissions as those of hosts; what they were of ran there.
#[test]
fn steps_of_eight_ranks_are_free_of_races_at_every_scope_in_both_modes_and_on_a_card() {
    let machines: Vec<_> =
        [Machine::dry()].into_iter().chain(cards(CudaOptions::default(), Options::default())).collect();
    for (at, graphs) in GRAPHS.into_iter().enumerate() {
        // All of them on one layout, and each on one of the others.
        let others = [[1, 4, 2], [4, 1, 1], [1, 1, 8], [2, 1, 4]];
        for (sizes, machine) in [[2, 2, 2], others[at % 4]].iter().flat_map(|s| machines.iter().map(move |m| (*s, m))) {
            let arch = archs(sizes)[at % 2].clone();
            let graphs = graphs.iter().map(|set| (*set).to_owned());
            let overrides: Vec<String> = on(sizes, at % 3 != 0).into_iter().chain(arch).chain(graphs).collect();
            assert_clean(machine, &overrides);
        }
    }
}

#[cfg(feature = "full")]
mod full {
    use super::*;

    /// On every layout, with both architectures, the optimizer shared by replicas or not.
    fn assert_all_clean(graphs: usize) {
        assert_eq!(assert_layouts_clean(&layouts(), &GRAPHS[graphs..=graphs], |_| true), 20 * 2 * 2);
    }

    #[test]
    fn submitted_steps_of_every_layout_are_free_of_races() {
        assert_all_clean(0);
    }

    #[test]
    fn graphs_of_layers_with_gates_inside_are_free_of_races_on_every_layout() {
        assert_all_clean(1);
    }

    #[test]
    fn graphs_of_layers_with_waits_before_replays_are_free_of_races_on_every_layout() {
        assert_all_clean(2);
    }

    #[test]
    fn graphs_of_chunks_with_gates_inside_are_free_of_races_on_every_layout() {
        assert_all_clean(3);
    }

    #[test]
    fn graphs_of_chunks_with_waits_before_replays_are_free_of_races_on_every_layout() {
        assert_all_clean(4);
    }

    #[test]
    fn graphs_of_microbatches_with_gates_inside_are_free_of_races_on_every_layout() {
        assert_all_clean(5);
    }

    #[test]
    fn graphs_of_microbatches_with_waits_before_replays_are_free_of_races_on_every_layout() {
        assert_all_clean(6);
    }

    #[test]
    fn graphs_of_whole_steps_are_free_of_races_on_every_layout() {
        assert_all_clean(7);
    }

    #[test]
    fn steps_of_sixty_four_ranks_are_free_of_races() {
        let checked = assert_layouts_clean(&[[4, 4, 4], [2, 8, 4], [8, 2, 4]], &GRAPHS, |at| at % 11 == 0);
        assert_eq!(checked, 9);
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
