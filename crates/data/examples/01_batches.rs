//! Two data ranks share each global batch; one rank alone reads the same sequences.
//!
//! `cargo run -p data --example 01_batches`

use data::{Batches, BatchesConfig, Corpus, DataError, DataRank, DataRanks, Part, Source, Tokenizer};
use std::path::Path;

fn main() -> Result<(), DataError> {
    let patterns = ["../src/*.rs".to_owned(), "01_batches.rs".to_owned()];
    let corpus = Corpus::load(&Source {
        base: &Path::new(env!("CARGO_MANIFEST_DIR")).join("examples"),
        patterns: &patterns,
        tokenizer: Tokenizer::Bytes,
        split: "0.9,0.1".parse()?,
    })?;
    let windows = corpus.windows(Part::Train, 48)?;
    println!("{} files, {} tokens, {} samples", corpus.files().len(), corpus.tokens(), windows.samples());

    for ranks in [2, 1] {
        for rank in 0..ranks {
            let mut batches = Batches::new(
                windows.clone(),
                BatchesConfig {
                    global_batch: 4,
                    micro_batch: 2,
                    rank: DataRank(rank),
                    ranks: DataRanks(ranks),
                    seed: 1,
                    consumed: 0,
                },
            )?;
            let batch = batches.next_batch()?;
            for (m, micro) in batch.microbatches().enumerate() {
                for sequence in micro.inputs.chunks(windows.seq_len()) {
                    let text = corpus.tokenizer().decode(sequence);
                    println!("rank {rank} of {ranks}, microbatch {m}: {text:?}");
                }
            }
        }
    }
    Ok(())
}
