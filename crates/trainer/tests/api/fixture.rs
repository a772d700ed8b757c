//! Text and configurations that do not change with the workspace.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use trainer::{Config, StepMetrics, Trained};

/// A folder of this process that is removed with the value.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        // Every test has a thread of its own.
        let name = format!("trainer-test-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
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
        let config = Config::load(&self.config(), set).unwrap();
        let dir = self.0.join("run");
        trainer::train(&config, &dir, Box::new(std::io::sink())).unwrap()
    }
}

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
