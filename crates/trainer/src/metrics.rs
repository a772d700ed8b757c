//! What every step leaves in the run folder: `metrics.jsonl`, one JSON object per line.

use crate::error::TrainError;
use serde::{Deserialize, Deserializer, Serialize};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// One step's numbers, in full precision: reading a line gives the same bits back.
///
/// JSON has no NaN and no infinity; both are written as `null` and read as NaN.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps done, this one included: the first is 1.
    pub step: u64,
    /// Mean over the global batch, in nats per token, before the step's update.
    #[serde(deserialize_with = "f32_or_null")]
    pub loss: f32,
    /// Learning rate of this step.
    #[serde(deserialize_with = "f64_or_null")]
    pub lr: f64,
    /// Global norm of the gradient, before clipping.
    #[serde(deserialize_with = "f32_or_null")]
    pub grad_norm: f32,
    /// Tokens predicted since the start of training, by all ranks.
    pub tokens: u64,
    /// `global_batch * seq_len / seconds`.
    #[serde(deserialize_with = "f64_or_null")]
    pub tokens_per_s: f64,
    /// FLOP utilisation: the model's products per second as a fraction of the product peak measured at start.
    #[serde(deserialize_with = "f64_or_null")]
    pub mfu: f64,
    /// Wall time from when the last step's loss was known to when this one's was, evaluations left out.
    #[serde(deserialize_with = "f64_or_null")]
    pub seconds: f64,
    /// Where the time went. The next step's forward may run beside this one's update.
    #[serde(default)]
    pub phases: PhaseTimes,
    /// Mean loss on the eval split behind this step's update, in nats per token; none where there was no evaluation.
    #[serde(default, deserialize_with = "some_f32_or_null", skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f32>,
}

/// Seconds that ranks spent in the phases of a step, by the clock of whoever computes; NaN on cards, which would stand still
/// for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// Forward passes of all microbatches, waits for gathered parameters included.
    pub forward: Spread,
    /// Backward passes of all microbatches.
    pub backward: Spread,
    /// From the end of the last backward pass to the end of the update: what is left of the reductions then, norm,
    /// update.
    pub update: Spread,
}

/// Seconds of all ranks. Far apart, they show that ranks wait for one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Of the fastest rank.
    #[serde(deserialize_with = "f32_or_null")]
    pub fastest: f32,
    /// Of the slowest rank.
    #[serde(deserialize_with = "f32_or_null")]
    pub slowest: f32,
}

fn f32_or_null<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
    Option::deserialize(from).map(|n| n.unwrap_or(f32::NAN))
}

/// Of a key that is there.
fn some_f32_or_null<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f32>, D::Error> {
    f32_or_null(from).map(Some)
}

fn f64_or_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Option::deserialize(from).map(|n| n.unwrap_or(f64::NAN))
}

/// Writes `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Makes the folder if need be, and a new `metrics.jsonl` in it. One that is already there belongs to an earlier
    /// run and is kept, as `metrics.1.jsonl` or the next free number. While a run has it open it is locked.
    ///
    /// # Errors
    /// [`TrainError::FolderInUse`] while another run writes there; [`TrainError::Write`] with the file or folder.
    pub fn create(dir: &Path) -> Result<MetricsFile, TrainError> {
        let cannot = |path: &Path| {
            let path = path.to_owned();
            move |source| TrainError::Write { path, source }
        };
        fs::create_dir_all(dir).map_err(cannot(dir))?;
        let path = dir.join("metrics.jsonl");
        if path.is_dir() {
            return Err(cannot(&path)(io::ErrorKind::IsADirectory.into()));
        }
        if path.exists() {
            lock(&OpenOptions::new().append(true).open(&path).map_err(cannot(&path))?, &path)?;
            let free = (1u64..).map(|n| dir.join(format!("metrics.{n}.jsonl"))).find(|kept| !kept.exists());
            let free = free.expect("BUG: one of 2^64 names is free");
            fs::rename(&path, &free).map_err(cannot(&free))?;
        }
        let file = File::create_new(&path).map_err(cannot(&path))?;
        lock(&file, &path)?;
        Ok(MetricsFile { path, file })
    }

    /// Adds a line, which is in the file when this returns: whoever follows a run sees whole lines.
    ///
    /// # Errors
    /// [`TrainError::Write`], as when the disk is full.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let mut line = serde_json::to_string(metrics).expect("BUG: numbers are plain JSON");
        line.push('\n');
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.flush());
        written.map_err(|source| TrainError::Write { path: self.path.clone(), source })
    }

    /// Where the lines go.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Marks a file as in use for as long as it is open.
fn lock(file: &File, path: &Path) -> Result<(), TrainError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(TrainError::FolderInUse { path: path.to_owned() }),
        // Some shared file systems have no locks, and runs there must not fail for it.
        Err(TryLockError::Error(source)) if source.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(source)) => Err(TrainError::Write { path: path.to_owned(), source }),
    }
}

/// Reads a `metrics.jsonl`, line by line.
///
/// # Errors
/// [`TrainError::ReadMetrics`]; [`TrainError::MetricsLine`] with the number of the line that is no metrics object.
pub fn read_metrics(path: &Path) -> Result<Vec<StepMetrics>, TrainError> {
    let text = fs::read_to_string(path).map_err(|source| TrainError::ReadMetrics { path: path.to_owned(), source })?;
    let parse = |(i, line)| {
        serde_json::from_str(line).map_err(|source| TrainError::MetricsLine {
            path: path.to_owned(),
            line: i + 1,
            source,
        })
    };
    text.lines().enumerate().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn folder(test: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("trainer-metrics-{}-{test}", std::process::id()));
        if path.exists() {
            fs::remove_dir_all(&path).unwrap();
        }
        path
    }

    fn step(step: u64, loss: f32) -> StepMetrics {
        StepMetrics {
            step,
            loss,
            lr: 3e-4,
            grad_norm: 1.25,
            tokens: step * 2048,
            tokens_per_s: 12_345.678,
            mfu: 0.4,
            seconds: 0.16,
            phases: PhaseTimes { backward: Spread { fastest: 0.1, slowest: 0.12 }, ..PhaseTimes::default() },
            eval_loss: None,
        }
    }

    #[test]
    fn every_line_is_in_the_file_before_the_next_step_begins() {
        let dir = folder("flushed").join("made/on/demand");
        let mut file = MetricsFile::create(&dir).unwrap();
        for n in 1..=3 {
            file.write(&step(n, 5.5 / n as f32)).unwrap();
            let read = read_metrics(file.path()).unwrap();
            assert_eq!(read.len() as u64, n);
            assert_eq!(read.last(), Some(&step(n, 5.5 / n as f32)));
        }
        let text = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
        let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        let keys: Vec<&str> = first.as_object().unwrap().keys().map(String::as_str).collect();
        for key in ["step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "seconds", "phases"] {
            assert!(keys.contains(&key), "{key} is not in {keys:?}");
        }
        // Lines of before there were phases are read, too.
        fs::write(dir.join("old.jsonl"), text.lines().next().unwrap().replace("\"phases\"", "\"other\"")).unwrap();
        assert_eq!(read_metrics(&dir.join("old.jsonl")).unwrap()[0].phases, PhaseTimes::default());
        fs::remove_dir_all(folder("flushed")).unwrap_or_default();
    }

    #[test]
    fn an_earlier_runs_metrics_are_kept() {
        let dir = folder("kept");
        for run in 1..=3u16 {
            MetricsFile::create(&dir).unwrap().write(&step(1, f32::from(run))).unwrap();
        }
        let losses = ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
            .map(|name| read_metrics(&dir.join(name)).unwrap()[0].loss);
        assert_eq!(losses, [1.0, 2.0, 3.0]);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_folder_that_another_run_writes_to_is_refused_until_it_ends() {
        let dir = folder("in-use");
        let mut first = MetricsFile::create(&dir).unwrap();
        first.write(&step(1, 4.0)).unwrap();
        let refused = MetricsFile::create(&dir).unwrap_err();
        assert!(matches!(&refused, TrainError::FolderInUse { path } if path.ends_with("metrics.jsonl")), "{refused}");
        assert!(refused.to_string().contains("--run-dir"), "{refused}");
        first.write(&step(2, 3.0)).unwrap();
        assert_eq!(read_metrics(first.path()).unwrap().len(), 2, "nothing was moved away");
        drop(first);
        MetricsFile::create(&dir).unwrap();
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_folder_in_the_place_of_the_file_is_told_and_left_there() {
        let dir = folder("is-a-folder");
        fs::create_dir_all(dir.join("metrics.jsonl")).unwrap();
        let refused = MetricsFile::create(&dir).unwrap_err();
        let TrainError::Write { path, source } = &refused else { panic!("{refused}") };
        assert!(path.ends_with("metrics.jsonl") && source.kind() == io::ErrorKind::IsADirectory, "{source}");
        assert!(dir.join("metrics.jsonl").is_dir());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_loss_that_is_no_number_is_written_as_null_and_read_as_nan() {
        let dir = folder("nan");
        let mut file = MetricsFile::create(&dir).unwrap();
        let phases = PhaseTimes { forward: Spread { fastest: f32::NAN, slowest: f32::NAN }, ..PhaseTimes::default() };
        file.write(&StepMetrics { grad_norm: f32::INFINITY, phases, ..step(1, f32::NAN) }).unwrap();
        assert!(fs::read_to_string(file.path()).unwrap().contains("\"loss\":null"));
        let read = read_metrics(file.path()).unwrap()[0];
        assert!(read.loss.is_nan() && read.grad_norm.is_nan() && read.phases.forward.slowest.is_nan());
        assert_eq!(read.lr, 3e-4);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn an_evaluation_is_in_the_line_of_its_step_and_nowhere_else() {
        let dir = folder("eval");
        let mut file = MetricsFile::create(&dir).unwrap();
        for eval_loss in [None, Some(2.25), Some(f32::NAN)] {
            file.write(&StepMetrics { eval_loss, ..step(1, 2.0) }).unwrap();
        }
        let text = fs::read_to_string(file.path()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(!lines[0].contains("eval_loss"));
        assert!(lines[1].contains("\"eval_loss\":2.25") && lines[2].contains("\"eval_loss\":null"), "{text}");
        let read: Vec<Option<f32>> = read_metrics(file.path()).unwrap().iter().map(|m| m.eval_loss).collect();
        assert_eq!(read[..2], [None, Some(2.25)]);
        assert!(read[2].is_some_and(f32::is_nan));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_cut_line_is_named_by_its_number_and_a_folder_that_cannot_be_made_by_its_path() {
        let dir = folder("cut");
        let mut file = MetricsFile::create(&dir).unwrap();
        file.write(&step(1, 2.0)).unwrap();
        file.file.write_all(b"{\"step\":2,\"lo").unwrap();
        let error = read_metrics(file.path()).unwrap_err();
        assert!(matches!(&error, TrainError::MetricsLine { line: 2, .. }), "{error}");
        let below_a_file = MetricsFile::create(&file.path().join("x")).unwrap_err();
        assert!(below_a_file.to_string().contains("metrics.jsonl/x"), "{below_a_file}");
        fs::remove_dir_all(dir).unwrap();
    }

    proptest! {
        #[test]
        fn numbers_come_back_bit_for_bit(loss: u32, norm: u32, lr: u64, rate: u64, tokens: u64) {
            let written = StepMetrics {
                loss: f32::from_bits(loss),
                grad_norm: f32::from_bits(norm),
                lr: f64::from_bits(lr),
                tokens_per_s: f64::from_bits(rate),
                tokens,
                ..step(7, 0.0)
            };
            let line = serde_json::to_string(&written).unwrap();
            let read: StepMetrics = serde_json::from_str(&line).unwrap();
            let same32 = |a: f32, b: f32| if a.is_finite() { a.to_bits() == b.to_bits() } else { b.is_nan() };
            let same64 = |a: f64, b: f64| if a.is_finite() { a.to_bits() == b.to_bits() } else { b.is_nan() };
            prop_assert!(same32(written.loss, read.loss) && same32(written.grad_norm, read.grad_norm), "{line}");
            prop_assert!(same64(written.lr, read.lr) && same64(written.tokens_per_s, read.tokens_per_s), "{line}");
            prop_assert_eq!(written.tokens, read.tokens);
        }
    }
}
