//! A fast hash for small keys of numbers. Keys come from our own traces, so nobody chooses them to collide.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

pub(super) type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<Mixer>>;

/// Multiplies and rotates word by word.
#[derive(Default)]
pub(super) struct Mixer(u64);

/// Odd, with bits spread evenly: 2^64 divided by the golden ratio.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

impl Mixer {
    fn mix(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(FACTOR);
    }
}

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.mix(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.mix(word);
    }

    fn write_usize(&mut self, word: usize) {
        self.mix(word as u64);
    }
}
