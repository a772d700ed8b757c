//! What a run leaves.

use std::{fmt, path::PathBuf};

use super::{plan::RunPlan, stop::Signal};
use crate::{Config, DeviceKind, RunSummary, StepMetrics};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// Every step was done.
    Finished,
    /// It was asked to end before.
    Stopped(Signal),
}

/// What computed a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Ranks.
    pub ranks: u32,
    /// Axes with more than one rank, as in `dp=2`; empty if there are none.
    pub axes: String,
    /// Driver.
    pub device: DeviceKind,
    /// Threads that compute, all ranks' together; none where a card computes.
    pub workers: usize,
    /// Cores that the process may use; none where the system does not tell.
    pub cores: Option<usize>,
}

impl Placement {
    /// Of what `config` asks for, on this machine.
    pub fn of(config: &Config) -> Placement {
        let l = &config.layout;
        let sizes = [("tp", l.tp), ("gtp", l.gtp), ("cp", l.cp), ("ep", l.ep), ("dp", l.dp), ("pp", l.pp)];
        let axes = sizes.into_iter().filter(|(_, size)| *size > 1).map(|(axis, size)| format!("{axis}={size}"));
        let cores = std::thread::available_parallelism().ok().map(usize::from);
        let workers = match config.device.kind {
            DeviceKind::Cpu => config.device.threads.map_or(cores.unwrap_or(1), |threads| threads as usize),
            DeviceKind::Sim | DeviceKind::Dry => 1,
            DeviceKind::Cuda => 0,
        };
        Placement {
            ranks: config.ranks().world_size(),
            axes: axes.collect::<Vec<_>>().join(" "),
            device: config.device.kind,
            workers,
            cores,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        write!(f, "{} rank{}", self.ranks, plural(self.ranks as usize))?;
        if !self.axes.is_empty() {
            write!(f, " ({})", self.axes)?;
        }
        write!(f, " on {}", self.device)?;
        if self.workers == 0 {
            return Ok(());
        }
        write!(f, ", {} worker thread{}", self.workers, plural(self.workers))?;
        match self.cores {
            Some(cores) => write!(f, " on {cores} core{}", plural(cores)),
            None => Ok(()),
        }
    }
}

/// What a run leaves.
#[derive(Clone, Debug)]
pub struct Trained {
    /// How it ended.
    pub end: RunEnd,
    /// Steps that each rank has done: the same number.
    pub steps_by_rank: Vec<u64>,
    /// Every step.
    pub metrics: Vec<StepMetrics>,
    /// The run in a few numbers.
    pub summary: RunSummary,
    /// What computed it.
    pub placement: Placement,
    /// Text from the trained model, if the configuration asks for some and training finished.
    pub sample: Option<String>,
    /// What was planned.
    pub plan: RunPlan,
    /// Bytes by which the process grew from before the ranks were made until the last step; none where the system
    /// does not tell.
    pub resident_growth: Option<usize>,
    /// The loss curve; none where it could not be written.
    pub curve: Option<PathBuf>,
    /// The metrics.
    pub metrics_file: PathBuf,
    /// TensorBoard's event file, if the configuration asks for one.
    pub event_file: Option<PathBuf>,
    /// The timeline, if one was asked for, its steps were reached and it could be written.
    pub timeline: Option<PathBuf>,
    /// What the traced steps took of gathers and publications, if steps were traced and details asked for.
    pub detail: Option<String>,
}

impl fmt::Display for Trained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let RunEnd::Stopped(signal) = self.end {
            writeln!(f, "stopped by {signal} after step {}, on all ranks", self.summary.steps)?;
        }
        writeln!(f, "{}\nplacement: {}", self.summary, self.placement)?;
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        write!(f, "memory: {:.1} MiB planned", mib(self.plan.bytes()))?;
        match self.resident_growth {
            Some(bytes) => writeln!(f, ", {:.1} MiB grown", mib(bytes))?,
            None => writeln!(f)?,
        }
        writeln!(f, "metrics: {}", self.metrics_file.display())?;
        let files = [("loss curve", &self.curve), ("tensorboard", &self.event_file), ("timeline", &self.timeline)];
        for (what, path) in files {
            if let Some(path) = path {
                writeln!(f, "{what}: {}", path.display())?;
            }
        }
        if let Some(detail) = &self.detail {
            writeln!(f, "{detail}")?;
        }
        match &self.sample {
            Some(text) => writeln!(f, "sample:\n{}", printable(text)),
            None => Ok(()),
        }
    }
}

/// With control characters as escapes: what a model writes must not switch a terminal.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_reaches_the_terminal_without_control_characters() {
        let sample = "let x = 1;\n\tgrün \\ \0\u{7}\u{e}\u{f}\r\u{1b}[31m\u{7f}\u{9b}2J";
        let shown = printable(sample);
        assert_eq!(shown, "let x = 1;\n\tgrün \\ \\u{0}\\u{7}\\u{e}\\u{f}\\r\\u{1b}[31m\\u{7f}\\u{9b}2J");
        for code in 0..=0x10_FFFF {
            let Some(c) = char::from_u32(code) else { continue };
            let shown = printable(&c.to_string());
            assert!(shown.chars().all(|c| c == '\n' || c == '\t' || !c.is_control()), "{code:#x} becomes {shown:?}");
        }
    }
}
