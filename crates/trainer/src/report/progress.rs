//! Progress of a run: a bar on a terminal, lines elsewhere.

use crate::{config::ProgressKind, metrics::StepMetrics};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write, stderr};

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgressConfig {
    /// Bar, lines or nothing.
    pub kind: ProgressKind,
    /// Steps of the run.
    pub steps: u64,
    /// Steps from one line to the next; the first, the last and every evaluated step have one.
    pub interval: u64,
}

/// Shows steps as they are done.
pub struct Progress {
    config: ProgressConfig,
    shown: Shown,
}

enum Shown {
    Bar { bar: ProgressBar, eval_loss: Option<f32>, pace: Pace },
    Lines { out: Box<dyn Write + Send>, pace: Pace },
    Nothing,
}

/// Speed over several steps: results of two steps may become known at nearly the same time, and the time between
/// them alone says nothing then.
#[derive(Clone, Copy, Default)]
struct Pace {
    tokens: f64,
    seconds: f64,
    /// Seconds times utilisation.
    used: f64,
}

impl Pace {
    /// What a step adds to is multiplied by this on a bar, which shows the last ten steps or so.
    const FADES: f64 = 0.9;

    fn add(&mut self, m: &StepMetrics) {
        self.tokens += m.tokens_per_s * m.seconds;
        self.seconds += m.seconds;
        self.used += m.mfu * m.seconds;
    }

    fn fade(&mut self) {
        [&mut self.tokens, &mut self.seconds, &mut self.used].into_iter().for_each(|sum| *sum *= Pace::FADES);
    }

    fn of(&self, m: &StepMetrics) -> StepMetrics {
        StepMetrics { tokens_per_s: self.tokens / self.seconds, mfu: self.used / self.seconds, ..*m }
    }
}

impl Progress {
    /// A bar on standard error if that is a terminal and the configuration leaves it open; else lines to `lines`.
    pub fn start(config: ProgressConfig, lines: Box<dyn Write + Send>) -> Progress {
        let shown = match config.kind {
            ProgressKind::None => Shown::Nothing,
            ProgressKind::Auto if stderr().is_terminal() => {
                let style = ProgressStyle::with_template("{bar:28} {pos}/{len} {msg} [{elapsed} < {eta}]");
                let bar = ProgressBar::new(config.steps);
                let bar = bar.with_style(style.expect("BUG: the template is constant"));
                Shown::Bar { bar, eval_loss: None, pace: Pace::default() }
            }
            ProgressKind::Auto | ProgressKind::Lines => Shown::Lines { out: lines, pace: Pace::default() },
        };
        Progress { config, shown }
    }

    /// Shows a step that is done. Speeds are over the steps since the last line, on a bar over the last ten or so.
    pub fn step(&mut self, metrics: &StepMetrics) {
        let ProgressConfig { steps, interval, .. } = self.config;
        match &mut self.shown {
            Shown::Bar { bar, eval_loss, pace } => {
                pace.fade();
                pace.add(metrics);
                // The last evaluation stays in sight until the next one.
                *eval_loss = metrics.eval_loss.or(*eval_loss);
                bar.set_message(numbers(&StepMetrics { eval_loss: *eval_loss, ..pace.of(metrics) }));
                bar.set_position(metrics.step);
            }
            Shown::Lines { out, pace } => {
                pace.add(metrics);
                let step = metrics.step;
                let evaluated = metrics.eval_loss.is_some();
                if evaluated || step == 1 || step == steps || step.is_multiple_of(interval) {
                    let width = steps.to_string().len();
                    say(out, &format!("step {step:>width$}/{steps}  {}", numbers(&std::mem::take(pace).of(metrics))));
                }
            }
            Shown::Nothing => {}
        }
    }

    /// Says something between steps, above the bar if there is one.
    pub fn note(&mut self, text: &str) {
        match &mut self.shown {
            Shown::Bar { bar, .. } => bar.println(text),
            Shown::Lines { out, .. } => say(out, text),
            Shown::Nothing => {}
        }
    }

    /// Ends the bar, which stays on the screen as it is.
    pub fn finish(self) {
        if let Shown::Bar { bar, .. } = self.shown {
            bar.abandon();
        }
    }
}

fn numbers(m: &StepMetrics) -> String {
    let eval = m.eval_loss.map_or_else(String::new, |loss| format!("  eval loss {loss:.4}"));
    format!(
        "loss {:.4}  lr {:.2e}  grad norm {:.3}  {:.0} tokens/s  mfu {:.1} %{eval}",
        m.loss,
        m.lr,
        m.grad_norm,
        m.tokens_per_s,
        m.mfu * 100.0
    )
}

fn say(out: &mut dyn Write, text: &str) {
    // Whoever read the lines may be gone (`| head`); training goes on without them.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn shown(kind: ProgressKind, steps: u64, interval: u64) -> Vec<String> {
        let page = Page::default();
        let mut progress = Progress::start(ProgressConfig { kind, steps, interval }, Box::new(page.clone()));
        progress.note("12 parameters");
        for step in 1..=steps {
            progress.step(&StepMetrics {
                step,
                loss: 2.5,
                lr: 1e-3,
                grad_norm: 0.75,
                tokens: 0,
                tokens_per_s: 41_234.4,
                mfu: 0.4321,
                seconds: 0.1,
                phases: crate::PhaseTimes::default(),
                eval_loss: (step % 10 == 2).then_some(3.125),
            });
        }
        progress.finish();
        let text = page.0.lock().unwrap().clone();
        String::from_utf8(text).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn lines_come_for_the_first_the_last_evaluated_and_every_so_many_steps() {
        let lines = shown(ProgressKind::Lines, 25, 10);
        assert_eq!(lines[0], "12 parameters");
        let numbers = "loss 2.5000  lr 1.00e-3  grad norm 0.750  41234 tokens/s  mfu 43.2 %";
        let of = |step: &str| format!("step {step}/25  {numbers}");
        let evaluated = |step: &str| of(step) + "  eval loss 3.1250";
        assert_eq!(
            lines[1..],
            [of(" 1"), evaluated(" 2"), of("10"), evaluated("12"), of("20"), evaluated("22"), of("25")]
        );
    }

    #[test]
    fn a_lines_speed_is_that_of_all_steps_since_the_last_line() {
        let page = Page::default();
        let config = ProgressConfig { kind: ProgressKind::Lines, steps: 6, interval: 3 };
        let mut progress = Progress::start(config, Box::new(page.clone()));
        for (step, seconds) in [(1, 1.0), (2, 1.75), (3, 0.25), (4, 2.0), (5, 2.0), (6, 1.0)] {
            let (tokens_per_s, mfu) = (100.0 / seconds, 0.5 / seconds);
            let (loss, lr, grad_norm, eval_loss) = (2.5, 1e-3, 0.75, None);
            let phases = crate::PhaseTimes::default();
            progress.step(&StepMetrics {
                step,
                loss,
                lr,
                grad_norm,
                tokens: 0,
                tokens_per_s,
                mfu,
                seconds,
                phases,
                eval_loss,
            });
        }
        let text = String::from_utf8(page.0.lock().unwrap().clone()).unwrap();
        let speeds: Vec<&str> = text.lines().map(|line| line.split("0.750  ").nth(1).unwrap()).collect();
        assert_eq!(speeds, ["100 tokens/s  mfu 50.0 %", "100 tokens/s  mfu 50.0 %", "60 tokens/s  mfu 30.0 %"]);
    }

    #[test]
    fn nothing_is_shown_if_nothing_is_wanted() {
        assert!(shown(ProgressKind::None, 5, 1).is_empty());
    }

    #[test]
    fn a_reader_that_is_gone_does_not_stop_the_run() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let config = ProgressConfig { kind: ProgressKind::Lines, steps: 2, interval: 1 };
        let mut progress = Progress::start(config, Box::new(Gone));
        progress.note("still here");
        progress.finish();
    }
}
