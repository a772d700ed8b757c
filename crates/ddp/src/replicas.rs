//! Gradients averaged over the ranks that hold the same parameters.

use device::{Reduce, Stream, View};
use pgroups::Group;

use crate::DdpError;

/// The ranks that hold the same parameters and see different data.
#[derive(Clone)]
pub struct Replicas {
    group: Group,
}

impl Replicas {
    /// `group` is the one over which data is split (`dp_cp`; with sharded weights the replicas only).
    pub fn new(group: Group) -> Replicas {
        Replicas { group }
    }

    /// How many there are.
    pub fn size(&self) -> u32 {
        self.group.size()
    }

    /// Averages `grads` over the replicas, in place: each rank brings the mean over its own samples. Once a step,
    /// behind the last microbatch. All replicas call it.
    ///
    /// # Errors
    /// Those of the group.
    pub fn average_grads(&self, stream: &Stream, grads: &View) -> Result<(), DdpError> {
        Ok(self.group.all_reduce(stream, grads, Reduce::Avg)?)
    }

    /// Averages a loss over the replicas, in place, f32 `[1]`.
    ///
    /// # Errors
    /// Those of the group.
    pub fn average_loss(&self, stream: &Stream, loss: &View) -> Result<(), DdpError> {
        Ok(self.group.all_reduce(stream, loss, Reduce::Avg)?)
    }

    /// Nothing behind this point of the stream runs before every replica has reached it.
    ///
    /// # Errors
    /// Those of the group.
    pub fn meet(&self, stream: &Stream) -> Result<(), DdpError> {
        Ok(self.group.barrier(stream)?)
    }
}
