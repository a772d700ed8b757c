//! Sizes, and memory of a card with values in it.

use std::fmt;

use device::{
    DType, Device, Error, MemoryKind, Stream, View,
    ops::{Cast, Fill},
};

/// Of the model whose kernels are measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) seq: usize,
    pub(crate) dim: usize,
    pub(crate) heads: usize,
    /// Rows of the table.
    pub(crate) vocab: usize,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { batch: 32, seq: 1024, dim: 768, heads: 12, vocab: 50304 }
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { batch, seq, dim, heads, vocab } = self;
        write!(f, "{batch} sequences of {seq} tokens, {dim} columns, {heads} heads, {vocab} ids, bf16")
    }
}

impl Sizes {
    /// From `--name value` pairs; what is no such pair is the name of a case.
    pub(crate) fn from_words(words: impl Iterator<Item = String>) -> Result<(Sizes, Vec<String>), String> {
        let (mut sizes, mut names, mut words) = (Sizes::default(), Vec::new(), words);
        while let Some(word) = words.next() {
            let size = match word.as_str() {
                "--batch" => &mut sizes.batch,
                "--seq" => &mut sizes.seq,
                "--dim" => &mut sizes.dim,
                "--heads" => &mut sizes.heads,
                "--vocab" => &mut sizes.vocab,
                // Of cargo.
                "--bench" => continue,
                _ => {
                    names.push(word);
                    continue;
                }
            };
            let value = words.next().and_then(|value| value.parse().ok()).filter(|value| *value > 0);
            *size = value.ok_or_else(|| format!("{word} needs a number over 0 behind it"))?;
        }
        if sizes.dim % sizes.heads != 0 {
            return Err(format!("--heads {} must divide --dim {}", sizes.heads, sizes.dim));
        }
        Ok((sizes, names))
    }

    pub(crate) fn rows(&self) -> usize {
        self.batch * self.seq
    }
}

/// A stream, and noise that all memory is filled from.
pub(crate) struct Rig {
    pub(crate) stream: Stream,
    device: Device,
    noise: View,
}

/// Elements of the noise; what is longer repeats it.
const NOISE: usize = 1 << 20;

impl Rig {
    pub(crate) fn new(device: Device) -> Result<Rig, Error> {
        let stream = device.stream("bench")?;
        let noise = device.alloc("noise", &[NOISE], DType::F32, MemoryKind::Other)?;
        let values = random().map(|bits| (bits >> 8) as f32 / (1u32 << 23) as f32 - 1.0);
        stream.upload::<f32>(&noise, values.take(NOISE).collect())?;
        Ok(Rig { stream, device, noise })
    }

    fn noisy(&self, dims: &[usize], dtype: DType) -> Result<View, Error> {
        let view = self.device.alloc("x", dims, dtype, MemoryKind::Other)?;
        let flat = view.reshape(&[view.numel()])?;
        for from in (0..view.numel()).step_by(NOISE) {
            let y = flat.flat(from..view.numel().min(from + NOISE))?;
            self.stream.launch(Cast { x: &self.noise.flat(0..y.numel())?, y: &y }.op("noise")?)?;
        }
        Ok(view)
    }

    pub(crate) fn bf16(&self, dims: &[usize]) -> Result<View, Error> {
        self.noisy(dims, DType::Bf16)
    }

    pub(crate) fn f32(&self, dims: &[usize]) -> Result<View, Error> {
        self.noisy(dims, DType::F32)
    }

    /// All 0.
    pub(crate) fn i16(&self, dims: &[usize]) -> Result<View, Error> {
        let view = self.device.alloc("x", dims, DType::I16, MemoryKind::Other)?;
        self.stream.launch(Fill { y: &view, value: 0.0 }.op("fill")?)?;
        Ok(view)
    }

    /// f32, the same value everywhere.
    pub(crate) fn filled(&self, dims: &[usize], value: f32) -> Result<View, Error> {
        let view = self.device.alloc("x", dims, DType::F32, MemoryKind::Other)?;
        self.stream.launch(Fill { y: &view, value }.op("fill")?)?;
        Ok(view)
    }

    /// Any of `0..vocab`, each as likely.
    pub(crate) fn ids(&self, rows: usize, vocab: usize) -> Result<View, Error> {
        let view = self.device.alloc("ids", &[rows], DType::I32, MemoryKind::Other)?;
        self.stream.upload(&view, random().map(|bits| (bits as usize % vocab) as i32).take(rows).collect())?;
        Ok(view)
    }
}

/// The same numbers every time.
fn random() -> impl Iterator<Item = u32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    })
}
