//! Whole runs through the library.

use crate::fixture::{Folder, losses};

const TRAIN: &str = "[layout]\ndp = 2\n[train]\nsteps = 12\nglobal_batch = 8\nmicro_batch = 2\nseed = 7\n\
                     [optimizer]\nlr = 3e-3\nwarmup_steps = 3\n";

#[test]
fn the_simulator_gives_the_losses_of_the_cpu_bit_for_bit() {
    let folder = Folder::with_config(TRAIN);
    let cpu = folder.train(&["device.threads=2"]);
    assert_eq!(cpu.metrics.len(), 12);
    for seed in ["device.seed=1", "device.seed=2"] {
        let sim = folder.train(&["device.kind=sim", seed]);
        let bits = |run: &trainer::Trained| {
            let numbers = run.metrics.iter().flat_map(|m| [m.loss.to_bits(), m.grad_norm.to_bits()]);
            numbers.collect::<Vec<u32>>()
        };
        assert_eq!(bits(&sim), bits(&cpu), "{seed}");
        assert_eq!(sim.sample, cpu.sample);
    }
}

#[test]
fn workers_change_no_bit() {
    let folder = Folder::with_config(TRAIN);
    let [one, two, three] = ["1", "2", "3"].map(|n| losses(&folder.train(&[&format!("device.threads={n}")]).metrics));
    assert_eq!(one, two);
    assert_eq!(one, three);
}

#[test]
fn replicas_and_microbatches_share_a_batch_without_changing_the_loss() {
    let folder = Folder::with_config(TRAIN);
    let run = |dp: &str, micro: &str| {
        let set = [format!("layout.dp={dp}"), format!("train.micro_batch={micro}"), "optimizer.lr=3e-4".to_owned()];
        losses(&folder.train(&[&set[0], &set[1], &set[2]]).metrics)
    };
    let whole = run("1", "8");
    for (dp, micro) in [("1", "2"), ("2", "4"), ("2", "1"), ("4", "2")] {
        let split = run(dp, micro);
        for (step, (a, b)) in whole.iter().zip(&split).enumerate() {
            assert!((a - b).abs() <= 2e-6 * a.abs(), "dp {dp}, micro_batch {micro}, step {step}: {a} and {b}");
        }
    }
}

#[test]
fn the_model_learns() {
    let folder = Folder::with_config(TRAIN);
    let trained = folder.train(&["train.steps=60"]);
    let ratio = trained.summary.last_loss / f64::from(trained.summary.first_loss);
    assert!(ratio < 0.6, "{}", trained.summary);
    assert!(trained.sample.unwrap().starts_with("//! "));
    let written = trainer::read_metrics(&trained.metrics_file).unwrap();
    assert_eq!(written, trained.metrics);
    assert!(trained.curve.is_file());
}

#[test]
fn a_gradient_that_overflows_changes_nothing_and_the_run_says_so() {
    let folder = Folder::with_config(TRAIN);
    // A learning rate that throws the weights out of range in its first step.
    let trained =
        folder.train(&["optimizer.lr=1e38", "optimizer.warmup_steps=0", "train.steps=4", "log.sample_tokens=0"]);
    assert!(trained.metrics[0].loss.is_finite());
    assert!(!trained.metrics[3].loss.is_finite() || !trained.metrics[3].grad_norm.is_finite());
}

#[test]
fn a_llama_learns_and_recomputing_changes_no_bit_of_either_architecture() {
    let folder = Folder::with_config(TRAIN);
    for arch in
        [&["model.arch=gpt2"][..], &["model.arch=gpt2", "model.tied=false"], &["model.arch=llama", "model.kv_heads=1"]]
    {
        let run = |recompute: &str| folder.train(&[arch, &["train.steps=40", recompute]].concat());
        let (kept, again) = (run("train.recompute=none"), run("train.recompute=block"));
        assert_eq!(losses(&kept.metrics), losses(&again.metrics), "{arch:?}");
        assert_eq!(kept.sample, again.sample);
        let ratio = kept.summary.last_loss / f64::from(kept.summary.first_loss);
        assert!(ratio < 0.75, "{arch:?}: {}", kept.summary);
    }
}
