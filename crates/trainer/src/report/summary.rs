//! A run in a few numbers.

use crate::metrics::StepMetrics;
use std::fmt;

/// Steps whose mean loss is the run's result: a single one depends on its batch.
const LAST: usize = 5;

/// A run in a few numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunSummary {
    /// Steps done.
    pub steps: u64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Wall time of all steps.
    pub seconds: f64,
    /// Loss of the first step, in nats per token.
    pub first_loss: f32,
    /// Mean loss of the last five steps.
    pub last_loss: f64,
    /// Of the last evaluation; none if there was none.
    pub eval_loss: Option<f32>,
    /// Median over the steps: the first one, and what else the machine did, count little.
    pub tokens_per_s: f64,
    /// Median over the steps.
    pub mfu: f64,
}

impl RunSummary {
    /// Of a run's steps, in order; none if there are none.
    pub fn of(metrics: &[StepMetrics]) -> Option<RunSummary> {
        let (first, last) = (metrics.first()?, metrics.last()?);
        let ending = &metrics[metrics.len().saturating_sub(LAST)..];
        Some(RunSummary {
            steps: metrics.len() as u64,
            tokens: last.tokens,
            seconds: metrics.iter().map(|m| m.seconds).sum(),
            first_loss: first.loss,
            eval_loss: metrics.iter().rev().find_map(|m| m.eval_loss),
            last_loss: ending.iter().map(|m| f64::from(m.loss)).sum::<f64>() / ending.len() as f64,
            tokens_per_s: median(metrics.iter().map(|m| m.tokens_per_s).collect()),
            mfu: median(metrics.iter().map(|m| m.mfu).collect()),
        })
    }
}

impl fmt::Display for RunSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &RunSummary { steps, tokens, seconds, first_loss, last_loss, tokens_per_s, mfu, eval_loss } = self;
        let ratio = last_loss / f64::from(first_loss);
        write!(
            f,
            "{steps} steps, {tokens} tokens in {seconds:.1} s ({tokens_per_s:.0} tokens/s, mfu {:.1} %, medians)\n\
             loss {first_loss:.4} -> {last_loss:.4} (mean of the last {}; {ratio:.2} of the first)",
            mfu * 100.0,
            steps.min(LAST as u64)
        )?;
        eval_loss.map_or(Ok(()), |loss| write!(f, "\neval loss {loss:.4}"))
    }
}

/// Of at least one number.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    if numbers.len().is_multiple_of(2) { (numbers[middle - 1] + numbers[middle]) / 2.0 } else { numbers[middle] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f32, tokens_per_s: f64) -> StepMetrics {
        StepMetrics {
            step,
            loss,
            lr: 1e-3,
            grad_norm: 1.0,
            tokens: step * 100,
            tokens_per_s,
            mfu: tokens_per_s / 1000.0,
            seconds: 100.0 / tokens_per_s,
            phases: crate::PhaseTimes::default(),
            eval_loss: None,
        }
    }

    #[test]
    fn a_run_is_judged_by_its_last_five_steps_and_its_median_speed() {
        let losses = [6.0, 5.0, 3.0, 2.0, 4.0, 1.0, 2.0];
        let rates = [10.0, 200.0, 250.0, 200.0, 250.0, 400.0, 200.0];
        let metrics: Vec<_> = (0..7).map(|i| step(i as u64 + 1, losses[i], rates[i])).collect();
        let summary = RunSummary::of(&metrics).unwrap();
        assert_eq!((summary.steps, summary.tokens, summary.first_loss), (7, 700, 6.0));
        assert!((summary.last_loss - 12.0 / 5.0).abs() < 1e-12);
        assert_eq!((summary.tokens_per_s, summary.mfu), (200.0, 0.2));
        assert!((summary.seconds - (10.0 + 3.0 * 0.5 + 2.0 * 0.4 + 0.25)).abs() < 1e-12);
        let text = summary.to_string();
        assert!(text.contains("loss 6.0000 -> 2.4000 (mean of the last 5; 0.40 of the first)"), "{text}");
        assert!(!text.contains("eval"));
    }

    #[test]
    fn the_last_evaluation_is_told() {
        let mut metrics = [step(1, 4.0, 1.0), step(2, 3.0, 1.0), step(3, 2.0, 1.0)];
        metrics[0].eval_loss = Some(3.5);
        metrics[1].eval_loss = Some(2.75);
        let summary = RunSummary::of(&metrics).unwrap();
        assert_eq!(summary.eval_loss, Some(2.75));
        assert!(summary.to_string().ends_with("\neval loss 2.7500"), "{summary}");
    }

    #[test]
    fn a_run_shorter_than_five_steps_is_judged_by_what_it_has() {
        assert_eq!(RunSummary::of(&[]), None);
        let summary = RunSummary::of(&[step(1, 4.0, 100.0), step(2, 2.0, 300.0)]).unwrap();
        assert_eq!((summary.last_loss, summary.tokens_per_s), (3.0, 200.0));
        assert!(summary.to_string().contains("mean of the last 2"));
    }
}
