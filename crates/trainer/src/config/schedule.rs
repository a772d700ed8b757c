//! The learning rate of every step.

use super::choices::ScheduleKind;

/// Learning rate as a function of the step; nothing is remembered between steps.
///
/// Warm-up rises in a straight line and reaches `lr` with its last step. The step after it is at `lr`, too; from there
/// the schedule goes down and reaches `min_lr` with the last step of the run, where it stays. `warmup_steps` may exceed
/// `steps`: the run then ends within warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// What happens after warm-up.
    pub kind: ScheduleKind,
    /// The peak.
    pub lr: f64,
    /// What linear and cosine end with.
    pub min_lr: f64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Steps of the run.
    pub steps: u64,
}

impl Schedule {
    /// The learning rate of `step`, the first being 0.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.lr * ((step + 1) as f64 / self.warmup_steps as f64);
        }
        let left = match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Linear => 1.0 - self.way_down(step),
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * self.way_down(step)).cos()),
        };
        // Both ends exactly: `min + (lr - min)` need not be `lr` in floating point.
        self.lr * left + self.min_lr * (1.0 - left)
    }

    /// From 0 at the first step after warm-up to 1 at the last step of the run.
    fn way_down(&self, step: u64) -> f64 {
        let last = self.steps.saturating_sub(1).max(self.warmup_steps);
        let whole = last - self.warmup_steps;
        if whole == 0 {
            return if step > last { 1.0 } else { 0.0 };
        }
        ((step - self.warmup_steps) as f64 / whole as f64).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, lr: 1e-3, min_lr: 1e-4, warmup_steps: 4, steps: 15 }
    }

    #[test]
    fn warm_up_rises_evenly_to_the_peak() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
            let rates: Vec<f64> = (0..5).map(|step| schedule(kind).lr(step)).collect();
            assert_eq!(rates, [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3]);
        }
    }

    #[test]
    fn each_schedule_passes_its_middle_and_its_end() {
        // After warm-up: steps 4 to 14, the middle is 9.
        let at = |kind, step| schedule(kind).lr(step);
        assert_eq!(at(ScheduleKind::Constant, 14), 1e-3);
        assert_eq!(at(ScheduleKind::Linear, 14), 1e-4);
        assert_eq!(at(ScheduleKind::Cosine, 14), 1e-4);
        assert_eq!(at(ScheduleKind::Linear, 100), 1e-4);
        assert!((at(ScheduleKind::Linear, 9) - 5.5e-4).abs() < 1e-18);
        assert!((at(ScheduleKind::Cosine, 9) - 5.5e-4).abs() < 1e-18);
        // A quarter of the way, half a cosine wave has fallen by (1 - cos(pi/4)) / 2 and less than a line.
        let quarter = Schedule { steps: 25, ..schedule(ScheduleKind::Cosine) }.lr(9);
        assert!((quarter - (1e-4 + 9e-4 * (1.0 + std::f64::consts::FRAC_1_SQRT_2) / 2.0)).abs() < 1e-18);
    }

    #[test]
    fn a_warm_up_longer_than_the_run_never_reaches_the_peak() {
        let long = Schedule { warmup_steps: 100, steps: 10, ..schedule(ScheduleKind::Cosine) };
        let rates: Vec<f64> = (0..10).map(|step| long.lr(step)).collect();
        assert_eq!(rates[9], 1e-3 * (10.0 / 100.0));
        assert!(rates.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn a_run_of_one_step_is_at_the_peak() {
        let one = Schedule { warmup_steps: 0, steps: 1, ..schedule(ScheduleKind::Linear) };
        assert_eq!(one.lr(0), 1e-3);
    }

    proptest! {
        #[test]
        fn rates_stay_between_the_ends_and_never_rise_after_warm_up(
            kind in prop::sample::select(vec![ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine]),
            warmup_steps in 0u64..50, steps in 1u64..100, lr in 1e-6f64..1.0, low in 0.0f64..1.0,
        ) {
            let s = Schedule { kind, lr, min_lr: lr * low, warmup_steps, steps };
            for step in 0..steps + 10 {
                let rate = s.lr(step);
                prop_assert!(rate > 0.0 || low == 0.0);
                prop_assert!(rate <= lr * (1.0 + 1e-15));
                if step > warmup_steps {
                    prop_assert!(rate <= s.lr(step - 1) * (1.0 + 1e-15));
                    prop_assert!(rate >= s.min_lr * (1.0 - 1e-15));
                }
            }
        }
    }
}
