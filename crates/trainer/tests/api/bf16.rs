//! Runs whose parameters and activations are bf16.

use device::MemoryKind;
use trainer::{Config, Trained, plan_run};

use crate::fixture::{Folder, bits, losses, on_cards};

const TRAIN: &str = "[train]\nsteps = 12\nglobal_batch = 8\nmicro_batch = 2\nseed = 7\n\
                     [optimizer]\nlr = 3e-3\nwarmup_steps = 3\n";
const BF16: &str = "precision.param=bf16";
const F32: &str = "precision.param=f32";

/// Of the last five steps.
fn end(run: &Trained) -> f64 {
    run.summary.last_loss
}

#[test]
fn thirty_steps_end_near_those_in_f32() {
    let folder = Folder::with_config(TRAIN);
    for arch in [&["model.arch=gpt2"][..], &["model.arch=llama", "model.kv_heads=1"]] {
        let run = |precision| folder.train(&[arch, &["train.steps=30", precision]].concat());
        let (wide, narrow) = (run(F32), run(BF16));
        assert_ne!(losses(&wide.metrics), losses(&narrow.metrics), "{arch:?}: something is rounded");
        // The first losses differ by what rounding does to one pass, the last by what it has done to the way there.
        let (a, b) = (wide.metrics[0].loss, narrow.metrics[0].loss);
        assert!((a - b).abs() <= a / 8192.0, "{arch:?}: {a} and {b}");
        assert!(end(&wide) < 0.8 * f64::from(a), "{arch:?}: f32 learns, {} to {}", a, end(&wide));
        assert!(
            (end(&wide) - end(&narrow)).abs() <= 1e-3 * end(&wide),
            "{arch:?}: {} and {}",
            end(&wide),
            end(&narrow)
        );
    }
}

#[test]
fn layouts_agree_up_to_roundings() {
    let folder = Folder::with_config(TRAIN);
    let run = |device: &[&str], settings: &[&str]| {
        let always = [BF16, "optimizer.lr=3e-4", "train.eval_interval=6", "log.sample_tokens=0"];
        folder.train(&[device, settings, &always].concat())
    };
    let layouts: [&[&str]; 8] = [
        &["layout.dp=2"],
        &["layout.dp=2", "optimizer.distributed=true", "ddp.bucket_size=3000"],
        &["layout.tp=2"],
        &["layout.tp=2", "layout.sequence_parallel=true"],
        &["layout.gtp=2"],
        &["layout.gtp=2", "gtp.f32_reduce=true"],
        &["layout.tp=2", "layout.gtp=2", "layout.dp=2", "optimizer.distributed=true", "train.micro_batch=1"],
        &["train.micro_batch=8"],
    ];
    for device in [&[][..]].into_iter().chain(on_cards()) {
        let whole = run(device, &[]);
        for layout in layouts {
            let cut = run(device, layout);
            for (a, b) in whole.metrics.iter().zip(&cut.metrics) {
                // Sums over ranks are of rounded parts. Half a step of bf16, 2⁻⁹ of a token's loss, in the mean over 192 tokens.
                let same = |a: f32, b: f32| (a - b).abs() <= a.abs() / 8192.0;
                assert!(same(a.loss, b.loss), "{device:?} {layout:?}, step {}: {} and {}", a.step, a.loss, b.loss);
                let (eval, want) = (b.eval_loss.unwrap_or(0.0), a.eval_loss.unwrap_or(0.0));
                assert!(
                    same(eval, want),
                    "{device:?} {layout:?}, evaluation behind step {}: {eval} and {want}",
                    a.step
                );
            }
        }
    }
}

#[test]
fn graphs_of_every_scope_and_the_simulator_give_the_bits_of_eager_steps() {
    let folder = Folder::with_config(TRAIN);
    let setups: [&[&str]; 3] = [
        &["layout.dp=2", "optimizer.distributed=true", "ddp.bucket_size=3000"],
        &["layout.dp=2", "model.arch=llama", "optimizer.distributed=true", "train.recompute=block"],
        &["layout.tp=2", "layout.gtp=2"],
    ];
    let places = || [&["device.threads=2"][..]].into_iter().chain(on_cards());
    for (setup, device) in setups.into_iter().flat_map(|setup| places().map(move |place| (setup, place))) {
        let run =
            |more: &[&str]| folder.train(&[setup, &[BF16, "train.eval_interval=4", "train.steps=8"], more].concat());
        let eager = run(device);
        assert!(losses(&eager.metrics).iter().all(|loss| loss.is_finite()));
        if !device.contains(&"device.kind=cuda") {
            let sim = run(&["device.kind=sim", "device.seed=3"]);
            assert_eq!((bits(&sim), &sim.sample), (bits(&eager), &eager.sample), "{setup:?}, the simulator");
        }
        for scope in ["layer", "chunk", "microbatch", "step"] {
            let graphs = run(&[&[format!("graph.scope={scope}").as_str()], device].concat());
            assert_eq!((bits(&graphs), &graphs.sample), (bits(&eager), &eager.sample), "{setup:?} {scope} {device:?}");
        }
    }
}

#[test]
fn parameters_and_activations_take_half_and_masters_are_added() {
    let folder = Folder::with_config(TRAIN);
    for layout in [&[][..], &["layout.tp=2", "layout.gtp=2"]] {
        let plan =
            |precision| plan_run(&Config::load(&folder.config(), &[layout, &[precision]].concat()).unwrap()).unwrap();
        let (wide, narrow) = (plan(F32), plan(BF16));
        let of = |kind| (wide.memory[&kind], narrow.memory[&kind]);
        let (param, half) = of(MemoryKind::Param);
        assert_eq!(half * 2, param);
        let (grad, same) = of(MemoryKind::Grad);
        assert_eq!(same, grad);
        // Two moments of f32, and the master that the f32 values were themselves.
        let (moments, with_masters) = of(MemoryKind::Optimizer);
        assert_eq!(with_masters - moments, param);
        let (arena, narrow_arena) = of(MemoryKind::Arena);
        assert!(narrow_arena * 2 >= arena && (narrow_arena as f64) < 0.7 * arena as f64, "{narrow_arena} of {arena}");
        let text = narrow.to_string();
        let want = "parameters bf16, gradients f32, reduced as f32, master values f32, moments f32";
        assert!(text.contains(want), "{text}");
    }
}
