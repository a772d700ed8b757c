//! Text from the trained model.

use data::Tokenizer;
use model::{Draw, Sampling, sample};

use super::rank::RankRun;
use crate::{Config, TrainError};

/// What a sample begins with: how most lines of sources and docs could begin.
const PROMPT: &str = "//! ";

/// Below 1: likelier tokens more often than the model says, which reads better after a short run.
const TEMPERATURE: f32 = 0.7;

/// `count` tokens drawn from the model behind the prompt, which is part of the text. A pure function of the weights
/// and the run's seed.
pub(super) fn write_sample(run: &mut RankRun, config: &Config, tokenizer: Tokenizer) -> Result<String, TrainError> {
    let _span = tracing::info_span!("trainer.write_sample").entered();
    let seq_len = config.model.seq_len;
    let mut tokens = tokenizer.encode(PROMPT);
    tokens.truncate(seq_len);
    for index in 0..config.log.sample_tokens as u64 {
        let from = tokens.len().saturating_sub(seq_len);
        let mut window = tokens[from..].to_vec();
        let at = window.len() - 1;
        window.resize(seq_len, 0);
        let logits = run.next_logits(&window, at)?;
        let logits = run.stream.download::<f32>(&logits)?.wait()?;
        let draw = Draw { seed: config.train.seed, index };
        tokens.push(sample(&logits, Sampling::Temperature(TEMPERATURE), draw)? as i32);
    }
    Ok(tokenizer.decode(&tokens))
}
