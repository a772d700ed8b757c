//! A run's losses do not depend on its layout.

use crate::fixture::{Folder, on_cards};
use trainer::StepMetrics;

const TRAIN: &str = "[train]\nsteps = 20\nglobal_batch = 16\nseed = 7\neval_interval = 5\neval_samples = 8\n\
                     [optimizer]\nlr = 3e-4\nwarmup_steps = 10\n";

const ARCHS: [&[&str]; 2] = [&["model.arch=gpt2"], &["model.arch=llama", "model.kv_heads=2", "model.tied=false"]];

/// Sizes along tp, gtp and dp.
const LAYOUTS: [[u64; 3]; 7] = [[2, 1, 1], [1, 2, 1], [2, 2, 1], [1, 4, 1], [2, 1, 2], [1, 2, 2], [2, 2, 2]];

/// Those that a card has besides.
const MORE: [[u64; 3]; 3] = [[4, 1, 1], [1, 4, 2], [1, 1, 8]];

/// Everything that must not matter on a layout, by turns: each choice meets each other one on some layout.
fn settings(layout: usize, turn: usize) -> Vec<String> {
    let [tp, gtp, dp] = LAYOUTS.into_iter().chain(MORE).nth(layout).expect("a layout");
    let bit = |bits: usize| bits % 2 == 1;
    let microbatches = if bit(turn) { 4 } else { 1 };
    let mut all = vec![
        format!("layout.tp={tp}"),
        format!("layout.gtp={gtp}"),
        format!("layout.dp={dp}"),
        format!("train.micro_batch={}", 16 / (gtp * dp * microbatches)),
        format!("train.recompute={}", if bit(turn / 2) { "block" } else { "none" }),
        "ddp.bucket_size=6000".to_owned(),
    ];
    if tp > 1 {
        all.push(format!("layout.sequence_parallel={}", bit(turn + layout)));
    }
    if dp > 1 {
        all.push(format!("optimizer.distributed={}", bit(turn / 2 + layout)));
    }
    if gtp > 1 {
        all.push(format!("gtp.look_ahead={}", turn % 3));
        all.push(format!("gtp.f32_reduce={}", bit(turn / 2)));
    }
    // Replicas fastest: groups with gaps.
    if bit(turn) {
        all.push("layout.order=dp-gtp-tp".to_owned());
    }
    all.push(format!("graph.scope={}", ["none", "layer", "microbatch", "step"][(turn + layout) % 4]));
    all
}

fn assert_same(whole: &[StepMetrics], other: &[StepMetrics], what: &[String]) {
    assert_eq!(whole.len(), other.len());
    for (a, b) in whole.iter().zip(other) {
        let same = |a: f32, b: f32| (a - b).abs() <= 2e-6 * a.abs();
        assert!(same(a.loss, b.loss), "{what:?}, step {}: {} and {}", a.step, a.loss, b.loss);
        let (eval, want) = (b.eval_loss.unwrap_or(0.0), a.eval_loss.unwrap_or(0.0));
        assert!(same(eval, want), "{what:?}, evaluation behind step {}: {eval} and {want}", a.step);
    }
}

#[test]
fn losses_are_those_of_one_rank_on_every_layout() {
    let folder = Folder::with_config(TRAIN);
    let run = |arch: &[&str], more: &[String]| {
        let always =
            ["model.dim=24", "model.heads=4", "model.layers=2", "log.sample_tokens=0", "log.tensorboard=false"];
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        folder.train(&[&always[..], arch, &more].concat()).metrics
    };
    let on_hosts = (&[][..], (0..LAYOUTS.len()).flat_map(|layout| (0..4).map(move |turn| (layout, turn))).collect());
    // One turn each; eight ranks that all have samples of their own have no more than one microbatch of them.
    let turns: Vec<(usize, usize)> = [0, 0, 1, 1, 2, 2, 3, 0, 2, 0].into_iter().enumerate().collect();
    let on_cards = on_cards().into_iter().map(|card| (card, turns.clone()));
    for (device, turns) in [on_hosts].into_iter().chain(on_cards) {
        let device: Vec<String> = device.iter().map(|setting| (*setting).to_owned()).collect();
        let whole = ARCHS.map(|arch| run(arch, &device));
        assert!(whole[0].last().unwrap().loss < whole[0][0].loss - 0.02, "it learns");
        for (layout, turn) in turns {
            // Two heads of keys are too few for tensor groups of four.
            let arch = if layout < LAYOUTS.len() { (turn + turn / 2 + layout) % 2 } else { 0 };
            let more = [settings(layout, turn), device.clone()].concat();
            assert_same(&whole[arch], &run(ARCHS[arch], &more), &more);
        }
    }
}
