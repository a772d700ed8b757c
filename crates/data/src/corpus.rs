//! The stream of tokens, and the windows of a part.

use crate::{
    error::DataError,
    files::resolve,
    order::{SampleId, mix},
    split::{Part, Split},
    tokenizer::Tokenizer,
};
use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Where text comes from and how it becomes tokens.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    /// The folder at which relative patterns start: that of the configuration file.
    pub base: &'a Path,
    /// Files, folders and globs, as in [`resolve`].
    pub patterns: &'a [String],
    /// Text to tokens.
    pub tokenizer: Tokenizer,
    /// Which tokens are trained on.
    pub split: Split,
}

/// All tokens of a run as one stream. Of text: the files one after the other, sorted by path, nothing between them.
///
/// Text is held in memory, one byte per token, and a clone shares it; random tokens are held nowhere.
#[derive(Clone, Debug)]
pub struct Corpus {
    stream: Stream,
    files: Arc<[PathBuf]>,
    tokenizer: Tokenizer,
    split: Split,
}

/// Tokens, one after the other.
#[derive(Clone, Debug)]
enum Stream {
    /// UTF-8: with the byte tokenizer, the tokens themselves.
    Text(Arc<[u8]>),
    /// Each follows from its place.
    Random { tokens: usize, vocab: u32, seed: u64 },
}

impl Stream {
    fn len(&self) -> usize {
        match self {
            Stream::Text(text) => text.len(),
            Stream::Random { tokens, .. } => *tokens,
        }
    }

    fn at(&self, place: usize) -> i32 {
        match self {
            Stream::Text(text) => i32::from(text[place]),
            Stream::Random { vocab, seed, .. } => {
                // The upper half of a product of 32 and 32 bits: as even as 2^32 values can be spread.
                let random = mix(mix(*seed).wrapping_add(place as u64)) >> 32;
                ((random * u64::from(*vocab)) >> 32) as i32
            }
        }
    }
}

impl Corpus {
    /// Reads every file that the patterns stand for.
    ///
    /// # Errors
    /// Those of [`resolve`]; [`DataError::Read`] and [`DataError::NotUtf8`] name the file, the latter with the offset.
    pub fn load(source: &Source<'_>) -> Result<Corpus, DataError> {
        let files = resolve(source.base, source.patterns)?;
        let mut text = Vec::new();
        for path in &files {
            // A pipe or a device would never end.
            if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
                return Err(DataError::NoFile { path: path.clone() });
            }
            let bytes = fs::read(path).map_err(|source| DataError::Read { path: path.clone(), source })?;
            if let Err(error) = std::str::from_utf8(&bytes) {
                let offset = error.valid_up_to();
                return Err(DataError::NotUtf8 { path: path.clone(), offset, byte: bytes[offset] });
            }
            text.extend_from_slice(&bytes);
        }
        let (stream, split) = (Stream::Text(text.into()), source.split.clone());
        Ok(Corpus { stream, files: files.into(), tokenizer: source.tokenizer, split })
    }

    /// A corpus of text that is already in memory.
    pub fn from_text(text: &str, tokenizer: Tokenizer, split: Split) -> Corpus {
        let stream = match tokenizer {
            Tokenizer::Bytes => Stream::Text(text.as_bytes().into()),
        };
        Corpus { stream, files: Arc::from([]), tokenizer, split }
    }

    /// So many tokens of `0..vocab`, each as likely as any other, in place of text: to measure speed and memory with
    /// any vocabulary. A pure function of seed and place, which costs no memory.
    ///
    /// # Errors
    /// [`DataError::Vocab`] for a vocabulary without an id, or with ids that are no `i32`.
    pub fn random(tokens: usize, vocab: usize, seed: u64, split: Split) -> Result<Corpus, DataError> {
        let fits = u32::try_from(vocab).ok().filter(|vocab| (1..=1 << 31).contains(vocab));
        let vocab = fits.ok_or(DataError::Vocab { vocab })?;
        let stream = Stream::Random { tokens, vocab, seed };
        Ok(Corpus { stream, files: Arc::from([]), tokenizer: Tokenizer::Bytes, split })
    }

    /// Tokens of the whole stream.
    pub fn tokens(&self) -> usize {
        self.stream.len()
    }

    /// The files that were read, in the order of the stream; none for what came from elsewhere.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// How text became tokens.
    pub fn tokenizer(&self) -> Tokenizer {
        self.tokenizer
    }

    /// The samples of a part: windows of `seq_len + 1` tokens, each beginning with the last token of the one before,
    /// so that every token but the first is predicted once. Tokens that fill no window are left out.
    ///
    /// # Errors
    /// [`DataError::NoSeqLen`]; [`DataError::TooFewTokens`] if the part has no whole window.
    pub fn windows(&self, part: Part, seq_len: usize) -> Result<Windows, DataError> {
        if seq_len == 0 {
            return Err(DataError::NoSeqLen);
        }
        let range = self.split.range(part, self.tokens());
        let needed = seq_len.saturating_add(1);
        if range.len() < needed {
            return Err(DataError::TooFewTokens {
                part,
                split: self.split.to_string(),
                available: range.len(),
                total: self.tokens(),
                seq_len,
                needed,
            });
        }
        Ok(Windows { stream: self.stream.clone(), range, part, seq_len })
    }
}

/// The samples of a part of the corpus. A clone shares the text.
#[derive(Clone, Debug)]
pub struct Windows {
    stream: Stream,
    range: Range<usize>,
    part: Part,
    seq_len: usize,
}

impl Windows {
    /// Which part of the stream.
    pub fn part(&self) -> Part {
        self.part
    }

    /// Tokens that a sample predicts.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Tokens of the part, those that fill no window included.
    pub fn tokens(&self) -> usize {
        self.range.len()
    }

    /// Number of samples: ids go from 0 to this less 1.
    pub fn samples(&self) -> u64 {
        ((self.range.len() - 1) / self.seq_len) as u64
    }

    /// Refuses a global batch that the part does not fill.
    ///
    /// # Errors
    /// [`DataError::TooFewSamples`] with the tokens that are there and that are needed.
    pub fn must_fill(&self, global_batch: u64) -> Result<(), DataError> {
        if self.samples() >= global_batch {
            return Ok(());
        }
        Err(DataError::TooFewSamples {
            part: self.part,
            available: self.tokens(),
            samples: self.samples(),
            seq_len: self.seq_len,
            global_batch,
            needed: global_batch.saturating_mul(self.seq_len as u64).saturating_add(1),
        })
    }

    /// The `seq_len + 1` token ids of a sample: all but the last are the input, all but the first are the targets.
    ///
    /// # Errors
    /// [`DataError::NoSuchSample`] with the number of samples.
    pub fn window(&self, sample: SampleId) -> Result<impl ExactSizeIterator<Item = i32> + '_, DataError> {
        if sample.0 >= self.samples() {
            return Err(DataError::NoSuchSample { sample: sample.0, samples: self.samples() });
        }
        let start = self.range.start + sample.0 as usize * self.seq_len;
        Ok((start..start + self.seq_len + 1).map(|place| self.stream.at(place)))
    }
}
