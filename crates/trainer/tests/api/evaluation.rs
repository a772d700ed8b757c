//! Evaluation within whole runs.

use crate::fixture::{Folder, bits, losses};
use trainer::{Config, RunOptions, Trained};

const TRAIN: &str = "[layout]\ndp = 2\n[train]\nsteps = 10\nglobal_batch = 12\nmicro_batch = 3\nseed = 7\n\
                     eval_interval = 4\n[optimizer]\nlr = 3e-3\nwarmup_steps = 3\n";

fn evals(run: &Trained) -> Vec<(u64, f32)> {
    run.metrics.iter().filter_map(|m| Some((m.step, m.eval_loss?))).collect()
}

#[test]
fn evaluations_come_at_their_interval_and_behind_the_last_step() {
    let folder = Folder::with_config(TRAIN);
    let trained = folder.train(&["log.progress=lines"]);
    let steps: Vec<u64> = evals(&trained).iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [4, 8, 10]);
    assert_eq!(trained.summary.eval_loss, Some(evals(&trained)[2].1));
    assert_eq!(trainer::read_metrics(&trained.metrics_file).unwrap(), trained.metrics);
    let text = trained.to_string();
    assert!(text.contains("\neval loss ") && text.contains("placement: 2 ranks (dp=2) on cpu"), "{text}");
}

#[test]
fn evaluating_changes_nothing_that_training_can_see() {
    let folder = Folder::with_config(TRAIN);
    let (with, without) = (folder.train(&[]), folder.train(&["train.eval_interval=0"]));
    assert_eq!(losses(&with.metrics), losses(&without.metrics));
    assert_eq!(with.sample, without.sample);
}

#[test]
fn the_time_of_an_evaluation_is_no_part_of_its_steps() {
    // Half of the text, sequence by sequence, behind each step of 12 sequences: far more work than the step.
    let folder = Folder::with_config(TRAIN);
    let median = |eval_interval: &str| {
        let set = [eval_interval, "data.split=0.5,0.5", "train.micro_batch=1", "train.steps=9"];
        let run = folder.train(&set);
        let mut seconds: Vec<f64> = run.metrics.iter().map(|m| m.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        seconds[4]
    };
    let (with, without) = (median("train.eval_interval=1"), median("train.eval_interval=0"));
    assert!(with < 4.0 * without, "{with} s a step beside evaluations, {without} s alone");
}

/// Weights differ between runs on other numbers of ranks by the order of sums, so the weights are held still.
fn still(folder: &Folder, dp: u32, samples: u64) -> Vec<u32> {
    let set = [format!("layout.dp={dp}"), format!("train.eval_samples={samples}"), "train.steps=1".to_owned()];
    let set: Vec<&str> =
        set.iter().map(String::as_str).chain(["optimizer.lr=1e-30", "optimizer.weight_decay=0"]).collect();
    evals(&folder.train(&set)).iter().map(|(_, loss)| loss.to_bits()).collect()
}

#[test]
fn the_eval_loss_is_the_same_on_any_number_of_ranks_however_unequal_their_shares() {
    let folder = Folder::with_config(TRAIN);
    // 7 samples, 3 at a time: the last pass is part empty; on 2 ranks one of four passes is empty, on 4 too.
    for samples in [7, 5, 1, 0] {
        let one = still(&folder, 1, samples);
        assert_eq!(one.len(), 1);
        for dp in [2, 4] {
            assert_eq!(still(&folder, dp, samples), one, "{samples} samples on {dp} ranks");
        }
    }
}

#[test]
fn places_that_hold_no_sample_do_not_count() {
    let folder = Folder::with_config(TRAIN);
    let of = |samples: u64, micro: u64| {
        let set = [
            format!("train.eval_samples={samples}"),
            format!("train.micro_batch={micro}"),
            "train.steps=1".to_owned(),
            "optimizer.lr=1e-30".to_owned(),
            "log.sample_tokens=0".to_owned(),
        ];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        f64::from(evals(&folder.train(&set))[0].1)
    };
    // One at a time no pass is part empty; the same samples in passes of 3 and 6 leave up to five places empty.
    for samples in [1, 4, 7] {
        let want = of(samples, 1);
        for micro in [3, 6] {
            let got = of(samples, micro);
            assert!((got - want).abs() <= 2e-6 * want, "{samples} samples, {micro} at a time: {got} and {want}");
        }
    }
    // They are not all alike, so a wrong weight would show.
    assert!((of(1, 1) - of(7, 1)).abs() > 1e-4);
}

#[test]
fn evaluation_reads_text_that_is_not_trained_on() {
    // The eval part is of one letter that the train part never shows: the more is learnt, the worse it is.
    let folder = Folder::with_config(TRAIN);
    let text = crate::fixture::text();
    let eval = "~".repeat(text.len() / 9);
    std::fs::write(folder.path().join("text.txt"), format!("{text}{eval}")).unwrap();
    let trained = folder.train(&["train.steps=40", "train.eval_interval=20", "data.split=0.89,0.11"]);
    let losses = evals(&trained);
    assert!(losses[1].1 > losses[0].1 && losses[0].1 > trained.metrics[19].loss + 1.0, "{losses:?}");
}

#[test]
fn too_little_text_to_evaluate_is_told_before_anything_is_made() {
    let folder = Folder::with_config(TRAIN);
    let config = Config::load(&folder.config(), &["data.split=0.9999,0.0001"]).unwrap();
    let error = trainer::train(&config, RunOptions::new(folder.path().join("run"))).unwrap_err().to_string();
    assert!(error.contains("the eval split has") && error.contains("needs 25"), "{error}");
    assert!(!folder.path().join("run").exists());
}

#[test]
fn the_simulator_evaluates_as_the_cpu_does() {
    let folder = Folder::with_config(TRAIN);
    assert_eq!(bits(&folder.train(&["device.kind=sim", "device.seed=3"])), bits(&folder.train(&[])));
}

#[test]
fn passes_of_an_evaluation_are_replayed_where_training_is() {
    let folder = Folder::with_config(TRAIN);
    let launches = |scope: &str| {
        let set = [
            &format!("graph.scope={scope}"),
            "layout.dp=2",
            "train.eval_interval=2",
            "train.eval_samples=7",
            "train.global_batch=4",
            "train.micro_batch=1",
        ];
        let config = Config::load(&folder.config(), &set).unwrap();
        let trace = trainer::trace_steps(&config, &device::Machine::dry(), 3).unwrap();
        let mut count = std::collections::BTreeMap::new();
        for event in &trace.events {
            if let device::TraceEvent::Launch { graph, .. } = event
                && graph.name.starts_with("eval")
            {
                *count.entry(graph.name.to_string()).or_insert(0) += 1;
            }
        }
        // The embedding and the output have a graph each.
        (count.into_iter().collect::<Vec<_>>(), config.model.layers + 2)
    };
    // Four passes on each of two ranks, however many graphs a pass is.
    for scope in ["chunk", "microbatch", "step"] {
        assert_eq!(launches(scope).0, [("eval".to_owned(), 8)], "{scope}");
    }
    let (graphs, parts) = launches("layer");
    assert_eq!(graphs, (0..parts).map(|at| (format!("eval {at}"), 8)).collect::<Vec<_>>());
    assert_eq!(launches("none").0, []);
}
