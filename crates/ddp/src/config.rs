//! Settings of the reduction and of the publication.

use std::{fmt, sync::Arc};

use device::{DType, Stream, View};

use crate::{BucketSize, DdpError, GradType, Scaling};

/// When gradients are reduced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GradOverlap {
    /// While backward runs: a bucket as soon as its last gradient has landed in the last microbatch.
    #[default]
    Overlapped,
    /// All at the end of the step.
    AtFinish,
}

/// When the values that a step has written are gathered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Dispatch {
    /// At the first read of each bucket, which also starts the next one's.
    #[default]
    Chain,
    /// At the first read of each bucket, which starts no other: whoever aligns stages calls [`Ddp::publish`].
    ///
    /// [`Ddp::publish`]: crate::Ddp::publish
    Aligned,
    /// By the optimizer, bucket by bucket, each as soon as it is written.
    WithOptimizer,
    /// By the optimizer, and its stream waits for all: nothing overlaps.
    AtStep,
}

/// How the ranks' gradients are summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Accumulation {
    /// By the collective, in the gradients' type.
    #[default]
    Collective,
    /// In f32: the pieces travel in the gradients' type, are summed in f32 by their owner, and rounded once. Needs
    /// sharding and sums.
    F32,
}

/// What a bucket means in which not every parameter has had its gradients when the step ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Unfilled {
    /// A mistake.
    #[default]
    Refuse,
    /// A parameter without use contributes zeros; its bucket is reduced at the end of the step.
    Zero,
}

/// What follows a gather, on its stream, exactly once for each publication: casts, quantisation.
///
/// Called with the stream and the whole bucket's values, `[numel]`, bucket by bucket. It submits, calls nothing of the
/// [`Ddp`](crate::Ddp) that calls it, and leaves the values as they are: they are masters, or halves of them.
pub type PostGather = Arc<dyn Fn(&Stream, &View) -> Result<(), DdpError> + Send + Sync>;

/// Settings of a [`Ddp`](crate::Ddp).
#[derive(Clone, Default)]
pub struct DdpConfig {
    /// What a step's gradient is the mean of.
    pub scaling: Scaling,
    /// When gradients are reduced.
    pub overlap: GradOverlap,
    /// When written values are gathered.
    pub dispatch: Dispatch,
    /// How the ranks' gradients are summed.
    pub accumulation: Accumulation,
    /// What unfilled buckets mean.
    pub unfilled: Unfilled,
    /// What follows each gather.
    pub post_gather: Option<PostGather>,
}

/// All but what follows gathers.
impl fmt::Debug for DdpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DdpConfig { scaling, overlap, dispatch, accumulation, unfilled, post_gather } = self;
        write!(f, "{scaling:?} {overlap:?} {dispatch:?} {accumulation:?} {unfilled:?}")?;
        if post_gather.is_some() { write!(f, " with work behind gathers") } else { Ok(()) }
    }
}

/// The element types of a run, each a setting of its own, to be printed at start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Precision {
    /// Stored parameters.
    pub param: DType,
    /// Gradient buffers: what microbatches are added up in.
    pub grad: GradType,
    /// How the ranks' gradients are summed.
    pub accumulation: Accumulation,
}

impl Default for Precision {
    /// f32 throughout.
    fn default() -> Precision {
        Precision { param: DType::F32, grad: GradType::F32, accumulation: Accumulation::Collective }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grad = self.grad.of(self.param.into());
        let sum = match self.accumulation {
            Accumulation::F32 => format!("{grad} pieces summed in f32"),
            Accumulation::Collective => grad.to_string(),
        };
        let param = self.param;
        write!(f, "parameters {param}, gradients {grad}, reduced as {sum}, master values f32, moments f32")
    }
}

/// Where a chunk of a model stands, as far as bucket sizes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChunkPlace {
    /// The first stage's first chunk: its backward is the last, and ends in the open.
    First,
    /// Any other: the reduction has the backward passes of earlier stages to hide behind.
    Later,
}

impl BucketSize {
    /// The size that is of use for a chunk: unlimited where nothing overlaps, and where one large reduction hides as
    /// well as many small ones.
    #[must_use]
    pub fn for_chunk(self, overlap: GradOverlap, place: ChunkPlace) -> BucketSize {
        match (overlap, place) {
            (GradOverlap::Overlapped, ChunkPlace::First) => self,
            _ => BucketSize::Unlimited,
        }
    }
}
