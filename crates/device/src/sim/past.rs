//! What comes before what, in one run.

/// Steps of a run, by number: those that something comes after, whatever the order of the others.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Past(Vec<u64>);

impl Past {
    pub(crate) fn insert(&mut self, step: usize) {
        let word = step / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (step % 64);
    }

    pub(crate) fn contains(&self, step: usize) -> bool {
        self.0.get(step / 64).is_some_and(|word| word & (1 << (step % 64)) != 0)
    }

    pub(crate) fn join(&mut self, other: &Past) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(own, more)| *own |= more);
    }

    /// Both.
    pub(crate) fn and(mut self, other: &Past) -> Past {
        self.join(other);
        self
    }

    /// And this step.
    pub(crate) fn with(mut self, step: usize) -> Past {
        self.insert(step);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_past_holds_what_was_put_in_and_nothing_else() {
        let few = Past::default().with(3).with(64);
        let many = Past::default().with(200).and(&few);
        for step in 0..300 {
            assert_eq!(few.contains(step), [3, 64].contains(&step), "{step}");
            assert_eq!(many.contains(step), [3, 64, 200].contains(&step), "{step}");
        }
        assert_eq!(few.clone().and(&many), many);
    }
}
