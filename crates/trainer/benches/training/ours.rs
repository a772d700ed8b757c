//! Runs of the trainer with the benchmark's configuration.

use std::{
    fs,
    path::{Path, PathBuf},
};

use trainer::{Config, RunOptions, TimelineConfig};

use crate::Failed;

pub(crate) const BATCH: usize = 8;
pub(crate) const SEQ: usize = 256;

/// Steps before the ones that count: they touch memory for the first time.
const WARM_UP: usize = 2;

/// Steps behind them: the host runs ahead, so that the last one's time leaves out work that the first one's had waited for.
const TAIL: usize = 2;

/// How the ranks share the work.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    tp: u32,
    gtp: u32,
    dp: u32,
    optimizer: Optimizer,
}

#[derive(Clone, Copy, PartialEq)]
enum Optimizer {
    Whole,
    Distributed,
}

impl Setup {
    /// `ranks` replicas with an optimizer each.
    pub(crate) const fn replicas(ranks: u32) -> Setup {
        Setup { tp: 1, gtp: 1, dp: ranks, optimizer: Optimizer::Whole }
    }

    /// `ranks` replicas that share the optimizer's state.
    pub(crate) const fn distributed(ranks: u32) -> Setup {
        Setup { optimizer: Optimizer::Distributed, ..Setup::replicas(ranks) }
    }

    /// Matrices cut over `tp` ranks, and each part over `gtp` ranks that gather it before use.
    pub(crate) const fn sharded(tp: u32, gtp: u32) -> Setup {
        Setup { tp, gtp, ..Setup::replicas(1) }
    }
}

/// A folder with the text and the runs, removed with the value.
pub(crate) struct Ours {
    folder: PathBuf,
    text: PathBuf,
}

impl Ours {
    /// Writes the text: the source of this workspace.
    pub(crate) fn new() -> Result<Ours, Failed> {
        let folder = std::env::temp_dir().join(format!("training-bench-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let text = folder.join("text.txt");
        let ours = Ours { folder, text };
        let mut all = Vec::new();
        collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut all)?;
        all.sort();
        fs::write(&ours.text, all.iter().map(fs::read).collect::<Result<Vec<_>, _>>()?.concat())?;
        Ok(ours)
    }

    pub(crate) fn text(&self) -> &Path {
        &self.text
    }

    /// Seconds a step, out of `steps` of them, and the loss of the last one.
    pub(crate) fn measure(&self, setup: Setup, steps: usize) -> Result<(f64, f64), Failed> {
        let config = self.config(setup, WARM_UP + steps + TAIL)?;
        let trained = trainer::train(&config, RunOptions::new(self.folder.join("run")))?;
        let counted = &trained.metrics[WARM_UP..WARM_UP + steps];
        let seconds = counted.iter().map(|step| step.seconds).sum::<f64>() / steps as f64;
        Ok((seconds, f64::from(counted[steps - 1].loss)))
    }

    /// The picture of one step of one rank, in the form that `trainer --timeline` writes.
    pub(crate) fn timeline(&self) -> Result<String, Failed> {
        let path = self.folder.join("timeline.json");
        let mut options = RunOptions::new(self.folder.join("run"));
        let step = WARM_UP as u64 + 1;
        options.timeline = Some(TimelineConfig { path: path.clone(), steps: step..=step });
        trainer::train(&self.config(Setup::replicas(1), WARM_UP + 2)?, options)?;
        Ok(fs::read_to_string(path)?)
    }

    fn config(&self, setup: Setup, steps: usize) -> Result<Config, Failed> {
        let Setup { tp, gtp, dp, optimizer } = setup;
        let distributed = optimizer == Optimizer::Distributed;
        let text = format!(
            "[model]\narch = \"gpt2\"\nlayers = 6\ndim = 384\nheads = 6\nseq_len = {SEQ}\n\
             [layout]\ntp = {tp}\ngtp = {gtp}\ndp = {dp}\n[train]\nsteps = {steps}\nglobal_batch = {BATCH}\n\
             [optimizer]\nlr = 3e-4\nschedule = \"constant\"\ndistributed = {distributed}\n\
             [ddp]\nbucket_size = 2_000_000\n[data]\npath = \"text.txt\"\n\
             [log]\nprogress = \"none\"\nsample_tokens = 0\ntensorboard = false\n"
        );
        Ok(Config::parse(&text, Path::new("training bench"), &self.folder, &[] as &[&str])?)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            eprintln!("{} is left behind: {error}", self.folder.display());
        }
    }
}

/// Rust files below a folder; build output is never in it.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Failed> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
