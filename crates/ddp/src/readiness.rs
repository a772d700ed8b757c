//! When a bucket group is complete: counts of landed gradients, and nothing else.
//!
//! The first step counts how often each parameter's gradient lands in its last microbatch (a tied embedding: twice)
//! and hands everything out at the end. Later steps hand a group out when its counts are those of the step before,
//! groups always in order: ranks whose backward differs must not reduce different buckets with each other.

use std::ops::Range;

/// Counts of one step.
#[derive(Clone)]
pub(crate) struct Readiness {
    /// By group.
    members: Vec<Vec<usize>>,
    /// By parameter.
    group_of: Vec<usize>,
    /// By parameter: landings in the last microbatch of the step before.
    expected: Option<Vec<u32>>,
    arrived: Vec<u32>,
    /// Groups before this one were handed out.
    next: usize,
}

/// A group that is not complete.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Missing {
    pub(crate) group: usize,
    /// Parameters whose gradients have all landed.
    pub(crate) ready: usize,
    pub(crate) total: usize,
    /// The first parameter that is not ready.
    pub(crate) first: usize,
}

impl Readiness {
    pub(crate) fn new(members: Vec<Vec<usize>>, params: usize) -> Readiness {
        let mut group_of = vec![0; params];
        for (group, members) in members.iter().enumerate() {
            members.iter().for_each(|&param| group_of[param] = group);
        }
        Readiness { members, group_of, expected: None, arrived: vec![0; params], next: 0 }
    }

    /// A gradient of the last microbatch has landed. False if its group was handed out before.
    #[must_use]
    pub(crate) fn land(&mut self, param: usize) -> bool {
        self.arrived[param] += 1;
        self.group_of[param] >= self.next
    }

    /// Hands out the groups that are complete and next in order, none that `held` holds back.
    pub(crate) fn take_ready(&mut self, held: impl Fn(&[usize]) -> bool) -> Range<usize> {
        let first = self.next;
        while self.next < self.members.len() && self.is_complete(self.next) && !held(&self.members[self.next]) {
            self.next += 1;
        }
        first..self.next
    }

    fn is_complete(&self, group: usize) -> bool {
        let Some(expected) = &self.expected else { return false };
        self.members[group].iter().all(|&param| self.arrived[param] == expected[param])
    }

    /// Groups of which a gradient is missing; in the first step, parameters that `used` has never seen.
    pub(crate) fn missing(&self, used: &[u32]) -> Vec<Missing> {
        let is_ready = |param: usize| match &self.expected {
            Some(expected) => self.arrived[param] >= expected[param] && used[param] > 0,
            None => used[param] > 0,
        };
        let group = |(group, members): (usize, &Vec<usize>)| {
            let first = members.iter().copied().find(|&param| !is_ready(param))?;
            let ready = members.iter().filter(|&&param| is_ready(param)).count();
            Some(Missing { group, ready, total: members.len(), first })
        };
        self.members.iter().enumerate().filter_map(group).collect()
    }

    /// Hands out all that is left, and begins the next step with what this one has counted.
    pub(crate) fn finish(&mut self) -> Range<usize> {
        let rest = self.next..self.members.len();
        self.expected = Some(std::mem::replace(&mut self.arrived, vec![0; self.group_of.len()]));
        self.next = 0;
        rest
    }

    /// Forgets the step that was begun, as if no gradient had landed.
    pub(crate) fn reset(&mut self) {
        self.arrived.fill(0);
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> Readiness {
        Readiness::new(vec![vec![0], vec![1], vec![2]], 3)
    }

    fn land(r: &mut Readiness, param: usize) -> Range<usize> {
        assert!(r.land(param));
        r.take_ready(|_| false)
    }

    #[test]
    fn the_first_step_hands_out_at_the_end_the_second_at_each_arrival() {
        let mut r = three();
        for param in 0..3 {
            assert!(land(&mut r, param).is_empty());
        }
        assert_eq!(r.finish(), 0..3);
        assert_eq!([0, 1, 2].map(|param| land(&mut r, param)), [0..1, 1..2, 2..3]);
        assert_eq!(r.finish(), 3..3);
    }

    #[test]
    fn a_parameter_used_twice_is_complete_behind_its_second_gradient() {
        let mut r = Readiness::new(vec![vec![0, 1]], 2);
        for param in [0, 1, 0] {
            assert!(land(&mut r, param).is_empty());
        }
        r.finish();
        assert_eq!([0, 1, 0].map(|param| land(&mut r, param)), [0..0, 0..0, 0..1]);
    }

    #[test]
    fn a_group_that_fills_early_waits_for_the_ones_before_it() {
        let mut r = three();
        r.expected = Some(vec![1; 3]);
        assert!(land(&mut r, 2).is_empty() && land(&mut r, 1).is_empty());
        assert_eq!(land(&mut r, 0), 0..3);
    }

    #[test]
    fn a_gradient_behind_the_reduction_is_noticed() {
        let mut r = three();
        r.expected = Some(vec![1; 3]);
        assert_eq!(land(&mut r, 0), 0..1);
        assert!(!r.land(0));
    }

    #[test]
    fn a_group_that_is_held_back_is_handed_out_later() {
        let mut r = three();
        r.expected = Some(vec![1, 0, 1]);
        assert!(r.land(0));
        assert_eq!(r.take_ready(|members| members.contains(&1)), 0..1);
        assert_eq!(r.take_ready(|_| false), 1..2);
    }

    #[test]
    fn what_never_landed_is_listed_with_ready_and_total() {
        let mut r = Readiness::new(vec![vec![0], vec![1, 2]], 3);
        assert!(r.land(2));
        let missing = r.missing(&[0, 0, 1]);
        let want =
            [Missing { group: 0, ready: 0, total: 1, first: 0 }, Missing { group: 1, ready: 1, total: 2, first: 1 }];
        assert_eq!(missing, want);
    }
}
