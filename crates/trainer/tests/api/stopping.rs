//! Runs that are asked to end before their last step.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use crate::fixture::{Folder, losses};
use trainer::{RunEnd, Signal, StopSource};

const TRAIN: &str = "[layout]\ndp = 2\n[train]\nsteps = 12\nglobal_batch = 8\nmicro_batch = 2\nseed = 7\n";

#[test]
fn one_ranks_signal_ends_all_ranks_behind_the_same_step() {
    let folder = Folder::with_config(TRAIN);
    let whole = losses(&folder.train(&[]).metrics);
    for (rank, kind) in [(0, "cpu"), (1, "cpu"), (1, "sim")] {
        let set = [&*format!("device.kind={kind}"), "train.eval_interval=3"];
        let stop = StopSource::AtStep { rank, step: 5, signal: Signal::Terminate };
        let run = folder.train_with(&set, |options| options.stop = stop);
        assert_eq!(run.end, RunEnd::Stopped(Signal::Terminate));
        // The answer of step 5 is known when step 6 is under way.
        assert_eq!(run.steps_by_rank, [6, 6], "rank {rank} on {kind}");
        assert_eq!(losses(&run.metrics), whole[..6]);
        assert_eq!(trainer::read_metrics(&run.metrics_file).unwrap(), run.metrics);
        assert!(run.curve.as_ref().is_some_and(|curve| curve.is_file()) && run.sample.is_none());
        assert!(run.to_string().starts_with("stopped by SIGTERM after step 6, on all ranks\n"), "{run}");
    }
}

#[test]
fn a_signal_that_comes_too_late_to_leave_out_a_step_changes_nothing() {
    let folder = Folder::with_config(TRAIN);
    for step in [11, 12] {
        let stop = StopSource::AtStep { rank: 1, step, signal: Signal::Interrupt };
        let run = folder.train_with(&[], |options| options.stop = stop);
        assert_eq!((run.end, run.steps_by_rank), (RunEnd::Finished, vec![12, 12]));
    }
}

#[test]
fn a_signal_in_an_evaluation_ends_it_on_all_ranks_before_the_same_pass() {
    let folder = Folder::with_config(TRAIN);
    let evaluating = ["train.eval_interval=6", "train.micro_batch=1"];
    let whole = folder.train(&evaluating);
    assert!(whole.metrics[5].eval_loss.is_some());
    for (rank, kind) in [(0, "cpu"), (1, "cpu"), (1, "sim")] {
        let kind = format!("device.kind={kind}");
        let set = [&evaluating[..], &[&*kind]].concat();
        let stop = StopSource::AtEvaluation { rank, step: 6, signal: Signal::Interrupt };
        let run = folder.train_with(&set, |options| options.stop = stop);
        assert_eq!((run.end, run.steps_by_rank), (RunEnd::Stopped(Signal::Interrupt), vec![6, 6]), "{rank} on {kind}");
        assert_eq!(losses(&run.metrics), losses(&whole.metrics[..6]));
        assert_eq!(run.metrics[5].eval_loss, None, "there is no loss of half an evaluation");
        assert_eq!(trainer::read_metrics(&run.metrics_file).unwrap(), run.metrics);
    }
    // Two passes are submitted before the first answer is read: the next step hears of it.
    let set = [&evaluating[..], &["train.eval_samples=3"]].concat();
    let stop = StopSource::AtEvaluation { rank: 1, step: 6, signal: Signal::Interrupt };
    let run = folder.train_with(&set, |options| options.stop = stop);
    assert!(run.metrics[5].eval_loss.is_some());
    assert_eq!(run.steps_by_rank, [8, 8], "its bit went round with step 7, and 8 was under way");
}

/// A run of the command that gets `signal` when it has done some steps.
fn signalled(folder: &Folder, signal: &str) -> (Output, usize) {
    let run_dir = folder.path().join("signalled");
    let config = folder.config();
    let child = Command::new(env!("CARGO_BIN_EXE_trainer"))
        .args(["train", config.to_str().unwrap(), "--set", "train.steps=1000000", "--set", "device.threads=2"])
        .args(["--run-dir", run_dir.to_str().unwrap()])
        .env("RUST_LOG", "trainer=info")
        .stdout(Stdio::piped())
        .stderr(fs::File::create(folder.path().join("stderr")).unwrap())
        .spawn()
        .unwrap();
    let metrics = run_dir.join("metrics.jsonl");
    let deadline = Instant::now() + Duration::from_secs(120);
    while lines(&metrics) < 4 {
        assert!(Instant::now() < deadline, "no steps in two minutes");
        std::thread::sleep(Duration::from_millis(20));
    }
    let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status().unwrap();
    assert!(sent.success());
    (child.wait_with_output().unwrap(), trainer::read_metrics(&metrics).unwrap().len())
}

fn lines(path: &Path) -> usize {
    fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

#[test]
#[cfg(unix)]
fn a_process_that_gets_a_signal_ends_its_ranks_at_one_step_with_whole_files_and_says_so() {
    for (signal, name, code) in [("TERM", "SIGTERM", 143), ("INT", "Ctrl-C (SIGINT)", 130)] {
        let folder = Folder::with_config(TRAIN);
        let (output, steps) = signalled(&folder, signal);
        let stdout = String::from_utf8(output.stdout).unwrap();
        let stderr = fs::read_to_string(folder.path().join("stderr")).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stdout}\n{stderr}");
        assert!(stdout.contains(&format!("stopped by {name} after step {steps}, on all ranks")), "{stdout}");
        for rank in [0, 1] {
            let told = |line: &&str| line.contains("trainer.end_rank") && line.contains(&format!("rank={rank}"));
            let line = stderr.lines().find(told).unwrap_or_else(|| panic!("rank {rank} in {stderr}"));
            assert!(line.contains(&format!("steps={steps}")), "{line}");
        }
        assert!(folder.path().join("signalled/loss.svg").is_file());
    }
}

#[test]
#[cfg(unix)]
fn a_command_that_trains_nothing_ends_with_its_first_signal() {
    use std::os::unix::process::ExitStatusExt;
    let folder = Folder::with_config(TRAIN);
    for (name, number) in [("TERM", 15), ("INT", 2)] {
        // A plan that takes many seconds.
        let mut child = Command::new(env!("CARGO_BIN_EXE_trainer"))
            .args(["plan", folder.config().to_str().unwrap(), "--set", "layout.dp=128", "--set", "layout.gtp=2"])
            .args(["--set", "train.global_batch=512", "--set", "model.layers=16"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {}", child.id())]).status().unwrap();
        assert!(sent.success());
        assert_eq!(child.wait().unwrap().signal(), Some(number), "{name}");
    }
}
