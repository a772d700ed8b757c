//! Whole runs through the library.

use std::path::Path;

use trainer::{Config, RunOptions};

use crate::fixture::{Folder, bits, losses, on_cards};

const TRAIN: &str = "[layout]\ndp = 2\n[train]\nsteps = 12\nglobal_batch = 8\nmicro_batch = 2\nseed = 7\n\
                     [optimizer]\nlr = 3e-3\nwarmup_steps = 3\n";

#[test]
fn the_simulator_gives_the_losses_of_the_cpu_bit_for_bit() {
    let folder = Folder::with_config(TRAIN);
    let (evals, token) = ("train.eval_interval=5", "train.loss_normalization=token");
    let cpu = folder.train(&["device.threads=2", evals, token]);
    assert_eq!(cpu.metrics.len(), 12);
    for seed in ["device.seed=1", "device.seed=2"] {
        let sim = folder.train(&["device.kind=sim", seed, evals, token]);
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

/// Everything that can be set about data parallelism, and does not change what is computed.
const SETUPS: [&[&str]; 7] = [
    &["ddp.bucket_size=3000"],
    &["ddp.bucket_size=3000", "ddp.overlap_grad_reduce=false"],
    &["optimizer.distributed=true"],
    &["optimizer.distributed=true", "ddp.bucket_size=3000"],
    &["optimizer.distributed=true", "ddp.bucket_size=3000", "ddp.dispatch=aligned"],
    &["optimizer.distributed=true", "ddp.bucket_size=3000", "ddp.dispatch=with-optimizer"],
    &["optimizer.distributed=true", "ddp.bucket_size=3000", "ddp.overlap_param_gather=false"],
];

#[test]
fn buckets_shards_and_dispatch_leave_the_losses_on_every_number_of_ranks() {
    let folder = Folder::with_config(TRAIN);
    // With evaluations in between, whose reads publish, too.
    let run = |settings: &[&str]| {
        let always = ["optimizer.lr=3e-4", "train.eval_interval=3", "log.sample_tokens=0"];
        folder.train(&[settings, &always].concat())
    };
    let whole = run(&["layout.dp=1"]);
    for (setup, dp) in SETUPS.into_iter().flat_map(|setup| ["1", "2", "4"].map(|dp| (setup, dp))) {
        let dp = format!("layout.dp={dp}");
        let settings = [&[dp.as_str()], setup].concat();
        let trained = run(&settings);
        for (a, b) in whole.metrics.iter().zip(&trained.metrics) {
            let same = |a: f32, b: f32| (a - b).abs() <= 2e-6 * a.abs();
            assert!(same(a.loss, b.loss), "{settings:?}, step {}: {} and {}", a.step, a.loss, b.loss);
            let (eval, want) = (b.eval_loss.unwrap_or(0.0), a.eval_loss.unwrap_or(0.0));
            assert!(same(eval, want), "{settings:?}, evaluation behind step {}: {eval} and {want}", a.step);
        }
    }
}

#[test]
fn the_simulator_gives_the_bits_of_the_cpu_for_every_setup_and_dispatch_changes_none() {
    let folder = Folder::with_config(TRAIN);
    let mut by_sharding: [Vec<_>; 2] = Default::default();
    for setup in SETUPS {
        let run = |device: &[&str]| folder.train(&[setup, device, &["layout.dp=4", "train.eval_interval=5"]].concat());
        let cpu = run(&["device.threads=2"]);
        for seed in ["device.seed=3", "device.seed=4"] {
            let sim = run(&["device.kind=sim", seed]);
            assert_eq!(bits(&sim), bits(&cpu), "{setup:?} {seed}");
            assert_eq!(sim.sample, cpu.sample);
        }
        if setup.contains(&"ddp.bucket_size=3000") {
            by_sharding[usize::from(setup.contains(&"optimizer.distributed=true"))].push(bits(&cpu));
        }
    }
    for same in by_sharding {
        assert!(same.len() > 1 && same.iter().all(|run| *run == same[0]));
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
    assert!(trained.curve.as_ref().is_some_and(|curve| curve.is_file()));
}

#[test]
fn a_run_whose_loss_is_no_number_any_more_ends_with_the_step_and_no_success() {
    let folder = Folder::with_config(TRAIN);
    // A learning rate that throws the weights out of range in its first step.
    let error = folder.try_train(&["optimizer.lr=1e38", "optimizer.warmup_steps=0", "train.steps=9"]).unwrap_err();
    let error = format!("{:#}", anyhow::Error::new(error));
    assert!(error.contains("step 2: the loss is NaN"), "{error}");
    let metrics = trainer::read_metrics(&folder.path().join("run/metrics.jsonl")).unwrap();
    assert_eq!(metrics.len(), 2);
    assert!(metrics[0].loss.is_finite() && !metrics[1].loss.is_finite());
}

#[test]
fn two_runs_of_one_configuration_are_equal_to_the_bit() {
    let folder = Folder::with_config(TRAIN);
    let [first, second] = [0, 1].map(|_| folder.train(&["train.eval_interval=4"]));
    assert_eq!(bits(&first), bits(&second));
    assert_eq!(first.sample, second.sample);
    assert_eq!(first.steps_by_rank, [12, 12]);
}

#[test]
fn two_unlike_runs_beside_each_other_do_not_change_each_other() {
    let (folder, other) = (Folder::with_config(TRAIN), Folder::with_config(TRAIN));
    let settings: [&[&str]; 2] = [
        &["device.threads=1", "train.eval_interval=3"],
        &[
            "device.threads=2",
            "layout.dp=4",
            "model.dim=48",
            "model.heads=3",
            "train.seed=9",
            "optimizer.schedule=wsd",
            "train.loss_normalization=token",
        ],
    ];
    let alone = [folder.train(settings[0]), other.train(settings[1])];
    let together = std::thread::scope(|scope| {
        let first = scope.spawn(|| folder.train(settings[0]));
        let second = other.train(settings[1]);
        [first.join().unwrap(), second]
    });
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(bits(alone), bits(together));
        assert_eq!(alone.sample, together.sample);
    }
}

#[test]
fn random_tokens_of_a_vocabulary_that_is_padded_or_does_not_divide_take_the_place_of_text() {
    for (rows, tp) in [(1024, 2), (1001, 2), (1001, 4)] {
        let folder = Folder::new();
        let text = format!(
            "[model]\nlayers = 1\ndim = 16\nheads = 4\nseq_len = 16\nvocab = 1001\nvocab_rows = {rows}\n\
             [layout]\ntp = {tp}\n[train]\nsteps = 3\nglobal_batch = 4\n[data]\nrandom_tokens = 5000\n\
             [log]\nprogress = \"none\"\n"
        );
        let read = |text: &str| Config::parse(text, Path::new("test"), folder.path(), &[] as &[&str]).unwrap();
        let config = read(&text);
        assert_eq!(read(&config.to_toml()), config);
        let trained = trainer::train(&config, RunOptions::new(folder.path().join("run"))).unwrap();
        // Nothing is known yet: the loss of an even guess among the ids that there are.
        let first = f64::from(trained.metrics[0].loss);
        assert!((first - 1001f64.ln()).abs() < 0.05, "{first}");
        assert!(trained.sample.is_none(), "there is no text to go on with");
    }
}

#[test]
fn every_schedule_trains_with_the_rates_it_says() {
    let folder = Folder::with_config(TRAIN);
    for kind in ["constant", "linear", "cosine", "wsd"] {
        let set = [format!("optimizer.schedule={kind}"), "log.sample_tokens=0".to_owned()];
        let trained = folder.train(&[&set[0], &set[1]]);
        let config = trainer::Config::load(&folder.config(), &set).unwrap();
        let rates: Vec<f64> = trained.metrics.iter().map(|m| m.lr).collect();
        let want: Vec<f64> = (0..12).map(|step| config.schedule().lr(step)).collect();
        assert_eq!(rates, want, "{kind}");
    }
}

#[test]
fn an_order_without_the_axes_that_are_one_trains_too() {
    let folder = Folder::with_config(TRAIN);
    let short = folder.train(&["layout.order=dp-tp", "train.eval_interval=6"]);
    assert_eq!(bits(&short), bits(&folder.train(&["train.eval_interval=6"])));
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

#[test]
fn every_step_tells_where_its_time_went_on_the_slowest_and_the_fastest_rank() {
    let folder = Folder::with_config(
        "[layout]\ndp = 2\n[optimizer]\ndistributed = true\n[train]\nsteps = 6\nglobal_batch = 8\nmicro_batch = 2\n",
    );
    for set in [&["device.kind=cpu"], &["device.kind=sim"], &["optimizer.clip=0"]] {
        let run = folder.train(set);
        for m in &run.metrics {
            let phases = [m.phases.forward, m.phases.backward, m.phases.update];
            assert!(phases.iter().all(|p| p.fastest > 0.0 && p.slowest >= p.fastest), "{set:?}: {m:?}");
        }
        assert_eq!(trainer::read_metrics(&run.metrics_file).unwrap(), run.metrics);
    }
    // The passes of one rank run one after another, so they fit into the time of all steps.
    let run = folder.train(&["layout.dp=1"]);
    let passes: f32 = run.metrics.iter().map(|m| m.phases.forward.slowest + m.phases.backward.slowest).sum();
    assert!(f64::from(passes) <= run.summary.seconds, "{passes} s of {} s", run.summary.seconds);
}

#[test]
fn graphs_of_every_scope_give_the_bits_of_eager_steps() {
    let folder = Folder::with_config(TRAIN);
    let setups: [&[&str]; 4] = [
        &["ddp.bucket_size=3000"],
        &["optimizer.distributed=true", "ddp.bucket_size=3000"],
        &["optimizer.distributed=true", "ddp.bucket_size=3000", "ddp.dispatch=with-optimizer"],
        &["model.arch=llama", "optimizer.distributed=true", "ddp.bucket_size=3000", "train.recompute=block"],
    ];
    let on_hosts = (&["device.threads=2"][..], vec![&["device.kind=cpu"][..], &["device.kind=sim"]]);
    let on_cards = on_cards().into_iter().map(|card| (card, vec![card]));
    let places: Vec<_> = [on_hosts].into_iter().chain(on_cards).collect();
    let mut turn = 0;
    for (setup, (first, devices)) in setups.into_iter().flat_map(|setup| places.iter().map(move |place| (setup, place)))
    {
        let run = |more: &[&str]| folder.train(&[setup, &["train.eval_interval=4", "train.steps=8"], more].concat());
        let eager = run(first);
        for scope in ["layer", "chunk", "microbatch", "step"] {
            let scoped = format!("graph.scope={scope}");
            let gates: &[&str] =
                if scope == "step" { &[] } else { &["graph.gates=before-replay", "graph.gates=in-graph"] };
            let gates = gates.iter().map(Some).chain((scope == "step").then_some(None));
            for gates in gates {
                turn += 1;
                for device in devices {
                    // A card has its turn with every third of them.
                    if device.contains(&"device.kind=cuda") && turn % 3 != 0 {
                        continue;
                    }
                    let more: Vec<&str> =
                        [scoped.as_str()].into_iter().chain(device.iter().chain(gates).copied()).collect();
                    let graphs = run(&more);
                    assert_eq!(bits(&graphs), bits(&eager), "{setup:?} {more:?}");
                    assert_eq!(graphs.sample, eager.sample);
                }
            }
        }
    }
}
