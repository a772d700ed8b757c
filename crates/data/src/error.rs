//! What can be wrong with the text, and what to change.

use crate::split::Part;
use std::{io, path::PathBuf};

/// Why text could not be read, cut or dealt out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A vocabulary that random tokens cannot be of.
    #[error("a vocabulary of {vocab} ids: random tokens take 1 to 2147483648")]
    Vocab {
        /// Asked for.
        vocab: usize,
    },
    /// The list of patterns is empty.
    #[error("no file, folder or glob is given: name at least one")]
    NoPatterns,
    /// A pattern that is not a valid glob.
    #[error("entry {position}, '{pattern}', is not a valid glob")]
    BadGlob {
        /// Place in the list, from 1.
        position: usize,
        /// As written.
        pattern: String,
        /// What the glob parser says, with the offset.
        #[source]
        source: glob::PatternError,
    },
    /// A glob that stands for no file.
    #[error(
        "entry {position}, '{pattern}', matches no file under '{root}' ({excluded} left out: target, runs, hidden \
         and run folders are never read); relative patterns start at the configuration file's folder"
    )]
    NoMatch {
        /// Place in the list, from 1.
        position: usize,
        /// As written.
        pattern: String,
        /// The folder that was searched.
        root: PathBuf,
        /// Folders and hidden files that were passed over.
        excluded: usize,
    },
    /// A plain path that does not exist.
    #[error(
        "entry {position}, '{pattern}': there is no file or folder '{path}'; relative paths start at the \
         configuration file's folder"
    )]
    NotFound {
        /// Place in the list, from 1.
        position: usize,
        /// As written.
        pattern: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The operating system refused a file or folder.
    #[error("cannot read '{path}'")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// Neither a file nor a folder: a pipe or a device.
    #[error("'{path}' is not a regular file")]
    NoFile {
        /// What it is called.
        path: PathBuf,
    },
    /// A file that is not text.
    #[error(
        "'{path}' is not UTF-8: the byte at offset {offset} (0x{byte:02x}) starts no character; convert the file or \
         leave it out of the patterns"
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Of the first bad byte, from 0.
        offset: usize,
        /// That byte.
        byte: u8,
    },
    /// A tokenizer name that is not known.
    #[error("there is no tokenizer '{name}'; known: {known}")]
    UnknownTokenizer {
        /// As written.
        name: String,
        /// All names.
        known: &'static str,
    },
    /// A split with too few or too many weights.
    #[error("split '{text}' has {parts} weights; write \"train,eval\" or \"train,eval,test\", such as \"0.9,0.1\"")]
    SplitParts {
        /// As written.
        text: String,
        /// How many weights were found.
        parts: usize,
    },
    /// A split with something that is not a weight.
    #[error("split '{text}': weight {position}, '{weight}', is not a finite number of at least 0")]
    SplitWeight {
        /// As written.
        text: String,
        /// Which weight, from 1.
        position: usize,
        /// That weight.
        weight: String,
    },
    /// A split whose weights add up to nothing.
    #[error("split '{text}': the weights add up to 0; give at least one of them more")]
    SplitEmpty {
        /// As written.
        text: String,
    },
    /// Samples without length.
    #[error("seq_len is 0; a sample needs at least 1 token to predict")]
    NoSeqLen,
    /// A part of the text that is shorter than one sample.
    #[error(
        "the {part} split has {available} tokens (of {total}, split \"{split}\"), but one sample of seq_len {seq_len} \
         needs {needed}: add text, shorten seq_len or give the split more"
    )]
    TooFewTokens {
        /// Which part.
        part: Part,
        /// The split as written.
        split: String,
        /// Tokens in the part.
        available: usize,
        /// Tokens in the whole text.
        total: usize,
        /// Predicted tokens per sample.
        seq_len: usize,
        /// `seq_len + 1`.
        needed: usize,
    },
    /// A part of the text that does not fill one global batch.
    #[error(
        "the {part} split has {available} tokens, which is {samples} samples of seq_len {seq_len}, but a global batch \
         of {global_batch} needs {needed} tokens: add text, shorten seq_len or lower global_batch to at most {samples}"
    )]
    TooFewSamples {
        /// Which part.
        part: Part,
        /// Tokens in the part.
        available: usize,
        /// Samples that they make.
        samples: u64,
        /// Predicted tokens per sample.
        seq_len: usize,
        /// Sequences in a global batch.
        global_batch: u64,
        /// `global_batch * seq_len + 1`.
        needed: u64,
    },
    /// A global batch without sequences.
    #[error("global_batch is 0; a step needs at least 1 sequence")]
    NoBatch,
    /// A sampler over fewer samples than one batch.
    #[error("{samples} samples do not fill one global batch of {global_batch}: lower global_batch or add samples")]
    BatchAboveSamples {
        /// Samples in an epoch.
        samples: u64,
        /// Sequences in a global batch.
        global_batch: u64,
    },
    /// A batch that cannot be dealt out evenly.
    #[error(
        "a global batch of {global_batch} cannot be dealt out in microbatches of {micro_batch} to {ranks} data ranks: \
         it must be a multiple of {multiple}"
    )]
    Uneven {
        /// Sequences in a global batch.
        global_batch: u64,
        /// Sequences per rank and microbatch.
        micro_batch: u64,
        /// Data ranks.
        ranks: u64,
        /// `micro_batch * ranks`.
        multiple: u64,
    },
    /// A data rank outside its group.
    #[error("data rank {rank} is not among {ranks} data ranks; ranks go from 0 to the count less 1")]
    NoSuchRank {
        /// The rank asked for.
        rank: u64,
        /// How many there are.
        ranks: u64,
    },
    /// A sample that the part does not have.
    #[error("sample {sample} was asked for, but the part has {samples}; samples go from 0 to the count less 1")]
    NoSuchSample {
        /// The sample asked for.
        sample: u64,
        /// How many there are.
        samples: u64,
    },
}
