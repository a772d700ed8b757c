//! What a rank keeps, layout by layout: laws of the plan.

use std::collections::BTreeMap;

use device::MemoryKind;
use pgroups::{Axis, ParamClass, ParamSpec};

use super::{
    plan::{RunPlan, plan_run},
    rank::gpt_plan,
};
use crate::Config;

/// Elements of one rank: of matrices and tables with a row per token, and of everything else.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Kept {
    matrices: usize,
    rest: usize,
    /// Elements that only pad a matrix.
    padding: usize,
}

fn parse(model: &str, (tp, gtp, dp): (u32, u32, u32), distributed: bool) -> Config {
    let text = format!(
        "[model]\n{model}\n[layout]\ntp = {tp}\ngtp = {gtp}\ndp = {dp}\n[train]\nsteps = 1\nglobal_batch = 8\n\
         micro_batch = 1\n[optimizer]\nlr = 1e-3\ndistributed = {distributed}\n[data]\npath = \"none\"\n"
    );
    Config::parse::<&str>(&text, "test".as_ref(), "".as_ref(), &[]).expect("a valid configuration")
}

/// Positions are no part of the law: tensor ranks have all of them.
fn is_matrix(spec: &ParamSpec) -> bool {
    spec.placement.global.len() == 2 && !spec.name.contains("wpe")
}

fn kept(config: &Config) -> Kept {
    let layout = config.ranks();
    let mut kept = Kept { matrices: 0, rest: 0, padding: 0 };
    for spec in gpt_plan(config).expect("a model").specs() {
        let map = spec.placement.on(layout.grid(ParamClass::Dense)).expect("a placement");
        let local: usize = map.local_shape().iter().product();
        if is_matrix(&spec) {
            kept.matrices += local;
            let shards: usize =
                [Axis::TP, Axis::GTP].iter().map(|a| layout.size(ParamClass::Dense, a) as usize).product();
            kept.padding += local - spec.placement.global.iter().product::<usize>() / shards;
        } else {
            kept.rest += local;
        }
    }
    kept
}

fn bytes(plan: &RunPlan) -> BTreeMap<&'static str, usize> {
    let of = |kind| plan.memory.get(&kind).copied().unwrap_or(0);
    [("param", of(MemoryKind::Param)), ("grad", of(MemoryKind::Grad)), ("optimizer", of(MemoryKind::Optimizer))].into()
}

/// Scalars of the optimizer: rates, counts, norms.
const SCALARS: usize = 4096;

#[test]
fn matrices_fall_as_one_over_tp_times_gtp_and_optimizer_state_as_one_over_all_ranks() {
    // Of the reference: 4 layers, 1024 wide, 32,000 tokens, two tables; 12 bytes of optimizer state for an element.
    let model = "layers = 4\ndim = 1024\nheads = 8\nseq_len = 16\nvocab = 32_000\ntied = false";
    let total = 115_867_648;
    for (tp, gtp, dp, weights) in [
        (1, 1, 8, 231_735_296),
        (1, 8, 1, 28_966_912),
        (2, 4, 1, 28_966_912),
        (2, 2, 2, 57_933_824),
        (8, 1, 1, 28_966_912),
    ] {
        let config = parse(model, (tp, gtp, dp), true);
        let kept = kept(&config);
        assert_eq!((kept.matrices * 2, kept.padding), (weights, 0), "{tp} {gtp} {dp}");
        assert_eq!(kept.matrices * (tp * gtp) as usize, total);
        let plan = plan_run(&config).expect("a plan");
        let bytes = bytes(&plan);
        // Buckets are padded so that shards are equal: by less than this for each parameter and each bucket.
        let (params, buckets) = (gpt_plan(&config).expect("a model").specs().len(), plan.buckets());
        let padding = 4 * (64 * params + 128 * dp as usize * buckets);
        for what in ["param", "grad"] {
            let least = 4 * (kept.matrices + kept.rest);
            assert!((least..=least + padding).contains(&bytes[what]), "{what} of {tp} {gtp} {dp}: {bytes:?}, {least}");
        }
        // Moments; masters are the f32 values themselves.
        let least = 8 * (kept.matrices + kept.rest) / dp as usize;
        let most = least + 2 * padding / dp as usize + SCALARS;
        assert!((least..=most).contains(&bytes["optimizer"]), "{tp} {gtp} {dp}: {bytes:?}, {least}");
        // 173,801,472 bytes, 12 for an element, whatever the layout.
        let share = kept.matrices / dp as usize;
        assert_eq!(share * 12, 173_801_472, "{tp} {gtp} {dp}");
    }
}

#[test]
fn padding_is_what_a_plan_has_beyond_the_law() {
    // 257 tokens and 3 heads of 20 divide over nothing; the alignment pads every matrix.
    let model = "layers = 1\ndim = 60\nheads = 3\nseq_len = 8\nvocab = 257\ntied = false";
    let alone = kept(&parse(model, (1, 1, 1), false));
    assert_eq!(alone.padding, 0);
    for (gtp, dp) in [(2, 1), (4, 1), (4, 2)] {
        let mut config = parse(model, (1, gtp, dp), false);
        config.gtp.alignment = Some(16);
        let kept = kept(&config);
        assert!(kept.padding > 0, "{gtp}");
        let exact: usize = kept.matrices - kept.padding;
        assert!(exact.abs_diff(alone.matrices / gtp as usize) <= 16, "{gtp}: {exact} of {}", alone.matrices);
        // Without a distributed optimizer buckets have no padding of their own.
        let bytes = bytes(&plan_run(&config).expect("a plan"));
        assert_eq!(bytes["param"], 4 * (kept.matrices + kept.rest));
        assert_eq!(bytes["grad"], bytes["param"]);
        assert!(bytes["optimizer"] - 2 * bytes["param"] <= SCALARS, "{bytes:?}");
    }
}
