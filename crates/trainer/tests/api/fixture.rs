//! Text and configurations that do not change with the workspace.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use trainer::{Config, RunOptions, StepMetrics, TrainError, Trained};

/// A folder of this process that is removed with the value.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        // Every test has a thread of its own, and may have several folders.
        let test = format!("trainer-test-{}-{:?}", std::process::id(), std::thread::current().id());
        let names = (0..).map(|n| std::env::temp_dir().join(format!("{test}-{n}")));
        let path = names.into_iter().find(|path| fs::create_dir(path).is_ok()).expect("BUG: some name is free");
        share_kernels(&path);
        Folder(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes `text.txt` and `run.toml` with `settings` under the smallest sections that train.
    pub(crate) fn with_config(settings: &str) -> Folder {
        let folder = Folder::new();
        fs::write(folder.0.join("text.txt"), text()).unwrap();
        let config = format!(
            "[model]\narch = \"gpt2\"\nlayers = 2\ndim = 32\nheads = 2\nseq_len = 24\n\
             [data]\npath = \"text.txt\"\n[log]\nprogress = \"none\"\nsample_tokens = 8\n{settings}"
        );
        fs::write(folder.config(), config).unwrap();
        folder
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.0.join("run.toml")
    }

    pub(crate) fn train(&self, set: &[&str]) -> Trained {
        self.train_with(set, |_| ())
    }

    pub(crate) fn try_train(&self, set: &[&str]) -> Result<Trained, TrainError> {
        trainer::train(&Config::load(&self.config(), set).unwrap(), RunOptions::new(self.0.join("run")))
    }

    /// As [`Folder::train`], with other options than none.
    pub(crate) fn train_with(&self, set: &[&str], change: impl FnOnce(&mut RunOptions)) -> Trained {
        let config = Config::load(&self.config(), set).unwrap();
        let mut options = RunOptions::new(self.0.join("run"));
        change(&mut options);
        trainer::train(&config, options).unwrap()
    }
}

/// Settings that put a run on the first card, if the tests were built for one; they then run one after the other
/// (`--test-threads=1`).
#[cfg(feature = "gpu-tests")]
pub(crate) fn on_cards() -> Vec<&'static [&'static str]> {
    // Tests have no `main` of ours: the first one that comes here starts all of them again.
    device::cuda::prepare().expect("the environment can be prepared");
    vec![&["device.kind=cuda", "device.measure_products=false", "device.timeout_seconds=20"]]
}

#[cfg(not(feature = "gpu-tests"))]
pub(crate) fn on_cards() -> Vec<&'static [&'static str]> {
    Vec::new()
}

/// Runs of a folder find compiled kernels beside it: those of all tests.
#[cfg(feature = "gpu-tests")]
fn share_kernels(folder: &Path) {
    let kernels = std::env::temp_dir().join("warpweft-test-kernels");
    fs::create_dir_all(&kernels).unwrap();
    std::os::unix::fs::symlink(kernels, folder.join(".kernels")).unwrap();
}

#[cfg(not(feature = "gpu-tests"))]
fn share_kernels(_: &Path) {}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that stays behind is no reason to fail.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Sentences with enough order to learn from and enough change not to be known at once.
pub(crate) fn text() -> String {
    let (who, does) = (["rank", "group", "bucket", "shard"], ["gathers", "reduces", "publishes", "waits for"]);
    (0..600).fold(String::new(), |mut text, i| {
        writeln!(text, "The {} {} its {} in step {}.", who[i % 4], does[(i / 3) % 4], who[(i / 7) % 4], i % 10)
            .unwrap();
        text
    })
}

pub(crate) fn losses(metrics: &[StepMetrics]) -> Vec<f32> {
    metrics.iter().map(|m| m.loss).collect()
}

/// Everything a run computed, to the bit.
pub(crate) fn bits(run: &Trained) -> Vec<u32> {
    let numbers = |m: &StepMetrics| [Some(m.loss), Some(m.grad_norm), m.eval_loss];
    run.metrics.iter().flat_map(numbers).flatten().map(f32::to_bits).collect()
}
