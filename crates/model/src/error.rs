//! What can go wrong, one variant per cause.

use gtp::layers::LayerError;
use pgroups::{PgError, Sequence};
use thiserror::Error;

use crate::ConfigViolations;

/// Everything this crate refuses.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The device: shapes that do not fit, a frame's plan that was left, a failed operation.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// The weights: a stale parameter, a failed group.
    #[error(transparent)]
    Groups(Box<PgError>),
    /// A layer.
    #[error(transparent)]
    Layer(Box<LayerError>),
    /// Weights that are cut in another way than the model.
    #[error(
        "the model is planned over a tensor group of {planned}, its weights are handed over one of {given}: plan it on \
         the layout that the weights lie on (GptPlan::on)"
    )]
    TensorSize {
        /// Members in the plan.
        planned: u32,
        /// Members of the group that the weights name; 1 if they name none.
        given: u32,
    },
    /// Weights whose group splits sequences where the model does not, or the other way round.
    #[error(
        "the model is planned with the sequence {planned:?} between parallel regions, its weights are handed over with \
         {given:?}: give both the same"
    )]
    SequenceSplit {
        /// In the plan.
        planned: Sequence,
        /// Of the weights.
        given: Sequence,
    },
    /// Sizes that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigViolations),
    /// Parameters handed over are not as many as the model declares.
    #[error("the model declares {declared} parameters, {given} were given; make one for each of GptPlan::specs()")]
    ParamCount {
        /// Declared.
        declared: usize,
        /// Given.
        given: usize,
    },
    /// A parameter handed over is not the one that is declared at its place.
    #[error("parameter {position} must be '{declared}', '{given}' was given; keep the order of GptPlan::specs()")]
    ParamOrder {
        /// Place in the list, from 0.
        position: usize,
        /// Declared.
        declared: String,
        /// Given.
        given: String,
    },
    /// A layer to recompute that the model does not have.
    #[error("layer {layer} is to be recomputed, the model has layers 0 to {}", layers - 1)]
    NoSuchLayer {
        /// Asked, from 0.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A weight of which only a part was handed out.
    #[error("'{param}' is {have:?} here and {need:?} whole: an export takes whole weights")]
    NotWhole {
        /// The parameter.
        param: String,
        /// Sizes of what was handed out.
        have: Vec<usize>,
        /// Sizes of the global tensor.
        need: Vec<usize>,
    },
    /// Bytes that are no safetensors file.
    #[error("the weights are not in the safetensors format")]
    File(#[from] safetensors::SafeTensorError),
    /// A weight that the file lacks.
    #[error("the file has no tensor '{tensor}'; is it of the same architecture, with as many layers?")]
    FileMissing {
        /// Its name in files.
        tensor: String,
    },
    /// A tensor that belongs to no parameter.
    #[error("the model has no place for the file's tensor '{tensor}'; check layers, and whether the output is tied")]
    FileExtra {
        /// Its name.
        tensor: String,
    },
    /// A weight with other sizes than the model's.
    #[error("tensor '{tensor}' has sizes {have:?} in the file, the model needs {need:?}")]
    FileShape {
        /// Its name in files.
        tensor: String,
        /// Sizes in the file.
        have: Vec<usize>,
        /// Sizes that fit.
        need: Vec<usize>,
    },
    /// A weight of a type that is not read.
    #[error("tensor '{tensor}' is {have} in the file; F32 and BF16 are read")]
    FileType {
        /// Its name in files.
        tensor: String,
        /// The type as the file names it.
        have: String,
    },
    /// Tokens that are no batch of sequences the model can take.
    #[error(
        "{tensor} has sizes {shape:?}: it must be [batch, sequence] with sequences of 1 to {seq_len} tokens, the \
         model's seq_len"
    )]
    Tokens {
        /// Which of the inputs.
        tensor: &'static str,
        /// Its sizes.
        shape: Vec<usize>,
        /// The longest sequence.
        seq_len: usize,
    },
    /// Targets that do not go with the tokens.
    #[error("tokens have sizes {tokens:?}, targets {targets:?}: there must be one target for each token")]
    Targets {
        /// Sizes of the tokens.
        tokens: Vec<usize>,
        /// Sizes of the targets.
        targets: Vec<usize>,
    },
    /// Activations that are no batch of sequences.
    #[error("{site}: the input has sizes {shape:?}, it must be [batch, sequence, {dim}]")]
    Activations {
        /// The block.
        site: String,
        /// Sizes.
        shape: Vec<usize>,
        /// Width of the residual stream.
        dim: usize,
    },
    /// Activations that are not this rank's part under a sequence split.
    #[error(
        "{site}: the input has sizes {shape:?}; under a sequence split over {size} ranks it must be [{rows}, {dim}], \
         this rank's part of all tokens"
    )]
    Slice {
        /// The block.
        site: String,
        /// Sizes.
        shape: Vec<usize>,
        /// Rows of the part.
        rows: usize,
        /// Width of the residual stream.
        dim: usize,
        /// Members of the tensor group.
        size: u32,
    },
    /// Logits asked behind the sequence.
    #[error("logits at position {position} asked, the sequences have {tokens} tokens")]
    Position {
        /// Asked, from 0.
        position: usize,
        /// Tokens in a sequence.
        tokens: usize,
    },
    /// A temperature that is no positive number.
    #[error("temperature {0}: it must be over 0 and finite; Sampling::Greedy takes the likeliest token")]
    Temperature(f32),
    /// Nothing to choose from.
    #[error("there are no logits to sample from")]
    NoLogits,
    /// A logit that is NaN or infinite.
    #[error("the logit of token {token} is {value}: no token can be chosen; training has diverged or weights are bad")]
    Logit {
        /// The token.
        token: usize,
        /// Its logit.
        value: f32,
    },
}

impl From<LayerError> for ModelError {
    /// What a layer only passes on keeps its own kind.
    fn from(error: LayerError) -> ModelError {
        match error {
            LayerError::Device(error) => ModelError::Device(error),
            LayerError::Groups(error) => error.into(),
            error => ModelError::Layer(Box::new(error)),
        }
    }
}

impl From<PgError> for ModelError {
    fn from(error: PgError) -> ModelError {
        ModelError::Groups(Box::new(error))
    }
}
