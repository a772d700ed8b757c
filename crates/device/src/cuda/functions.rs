//! The functions of a card's kernels, by their names.

use std::{
    collections::{HashMap, hash_map},
    iter, ptr,
    sync::OnceLock,
};

use super::card::Function;

/// A function, and how many bytes of shared memory a launch may ask for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Loaded {
    pub(super) raw: Function,
    pub(super) shared: u32,
}

/// Every launch looks one up, by a name that is written in this crate. Its text stays where it is, so from the second
/// time on its address is enough to know it.
pub(super) struct Functions {
    by_name: HashMap<&'static str, Loaded>,
    /// Names that were asked for, each at the place that its address tells unless another one has it.
    asked: Box<[OnceLock<(&'static str, Loaded)>]>,
}

/// Several times as many as there are names.
const PLACES: usize = 512;

fn place(name: &'static str) -> usize {
    // The upper bits of a product depend on all bits of the address.
    let mixed = (name.as_ptr().addr() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize % PLACES
}

impl Functions {
    pub(super) fn get(&self, name: &'static str) -> Option<Loaded> {
        let place = &self.asked[place(name)];
        match place.get() {
            Some((known, loaded)) if ptr::eq(*known, name) => Some(*loaded),
            _ => {
                let loaded = *self.by_name.get(name)?;
                let _another_has_it = place.set((name, loaded));
                Some(loaded)
            }
        }
    }

    pub(super) fn values(&self) -> hash_map::Values<'_, &'static str, Loaded> {
        self.by_name.values()
    }

    pub(super) fn insert(&mut self, name: &'static str, loaded: Loaded) {
        self.by_name.insert(name, loaded);
    }
}

impl Default for Functions {
    fn default() -> Functions {
        let asked = iter::repeat_with(OnceLock::new).take(PLACES).collect();
        Functions { by_name: HashMap::new(), asked }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(shared: u32) -> Loaded {
        Loaded { raw: Function(ptr::null_mut()), shared }
    }

    fn elsewhere(name: &str) -> &'static str {
        name.to_owned().leak()
    }

    #[test]
    fn names_are_known_by_what_they_say_wherever_their_text_is() {
        let mut functions = Functions::default();
        for (name, shared) in [("add", 1), ("added", 2), ("scale", 3)] {
            functions.insert(name, loaded(shared));
        }
        // More texts than places, so that some share one; parts of a text begin at the same address.
        let texts: Vec<&'static str> = (0..PLACES).map(|_| elsewhere("added")).collect();
        for _ in 0..2 {
            for text in &texts {
                assert_eq!(functions.get(text), Some(loaded(2)));
                assert_eq!(functions.get(&text[..3]), Some(loaded(1)));
                assert_eq!(functions.get(elsewhere("scale")), Some(loaded(3)));
                assert_eq!(functions.get(&text[..2]), None);
            }
        }
    }
}
