//! The learning rate of every step.

use super::choices::ScheduleKind;

/// Learning rate as a function of the step; nothing is remembered between steps.
///
/// Warm-up rises in a straight line and reaches `lr` with its last step. The step after it is at `lr`, too; from there
/// the schedule goes down and reaches `min_lr` with the last step of the run, where it stays. WSD stays at `lr` up to
/// the step before the last `decay_steps` and goes down over those. `warmup_steps` may exceed `steps`: the run then ends
/// within warm-up; and a decay that would begin before the end of warm-up begins there.
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
    /// Steps of WSD's way down, the last one at `min_lr`; the others have none.
    pub decay_steps: u64,
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
            ScheduleKind::Linear => 1.0 - self.way_down(self.warmup_steps, step),
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * self.way_down(self.warmup_steps, step)).cos()),
            ScheduleKind::Wsd => 1.0 - self.way_down(self.last_at_peak(), step),
        };
        // Both ends exactly: `min + (lr - min)` need not be `lr` in floating point.
        self.lr * left + self.min_lr * (1.0 - left)
    }

    /// The last step of WSD that is at the peak.
    fn last_at_peak(&self) -> u64 {
        self.steps.saturating_sub(self.decay_steps.saturating_add(1)).max(self.warmup_steps)
    }

    /// From 0 at step `from` and before to 1 at the last step of the run.
    fn way_down(&self, from: u64, step: u64) -> f64 {
        let last = self.steps.saturating_sub(1).max(from);
        let whole = last - from;
        if whole == 0 {
            return if step > last { 1.0 } else { 0.0 };
        }
        (step.saturating_sub(from) as f64 / whole as f64).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, lr: 1e-3, min_lr: 1e-4, warmup_steps: 4, decay_steps: 5, steps: 15 }
    }

    const KINDS: [ScheduleKind; 4] =
        [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::Wsd];

    #[test]
    fn warm_up_rises_evenly_to_the_peak() {
        for kind in KINDS {
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
    fn warm_up_stable_decay_stays_up_and_comes_down_over_its_last_steps() {
        let wsd = schedule(ScheduleKind::Wsd);
        // Steps 4 to 9 are at the peak; 10 to 14 fall by a fifth of 9e-4 each.
        let rates: Vec<f64> = (4..16).map(|step| wsd.lr(step)).collect();
        assert_eq!(rates[..6], [1e-3; 6]);
        for (i, want) in [8.2e-4, 6.4e-4, 4.6e-4, 2.8e-4, 1e-4, 1e-4].into_iter().enumerate() {
            assert!((rates[6 + i] - want).abs() < 1e-18, "step {}: {} and {want}", 10 + i, rates[6 + i]);
        }
        // No room for all of the decay: it begins right behind warm-up and still ends at the bottom.
        let tight = Schedule { decay_steps: 100, ..wsd };
        assert_eq!((tight.lr(4), tight.lr(14)), (1e-3, 1e-4));
        assert!((tight.lr(9) - 5.5e-4).abs() < 1e-18);
        // No decay: the peak to the end.
        let none = Schedule { decay_steps: 0, ..wsd };
        assert_eq!((none.lr(13), none.lr(14)), (1e-3, 1e-3));
    }

    #[test]
    fn a_warm_up_longer_than_the_run_never_reaches_the_peak() {
        for kind in KINDS {
            let long = Schedule { warmup_steps: 100, steps: 10, ..schedule(kind) };
            let rates: Vec<f64> = (0..10).map(|step| long.lr(step)).collect();
            assert_eq!(rates[9], 1e-3 * (10.0 / 100.0));
            assert!(rates.is_sorted_by(|a, b| a < b));
        }
    }

    #[test]
    fn a_run_of_one_step_is_at_the_peak() {
        let one = Schedule { warmup_steps: 0, steps: 1, ..schedule(ScheduleKind::Linear) };
        assert_eq!(one.lr(0), 1e-3);
    }

    proptest! {
        #[test]
        fn rates_stay_between_the_ends_and_never_rise_after_warm_up(
            kind in prop::sample::select(KINDS.to_vec()),
            warmup_steps in 0u64..50, decay_steps in 0u64..120, steps in 1u64..100, lr in 1e-6f64..1.0, low in 0.0f64..1.0,
        ) {
            let s = Schedule { kind, lr, min_lr: lr * low, warmup_steps, decay_steps, steps };
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
