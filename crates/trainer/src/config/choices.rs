//! The settings that are one of a few names.

use std::fmt;

use device::GraphOrder;
use graphcap::{GateMode, GraphScope};

/// A closed set of named values.
pub(crate) trait Choice: Copy + Sized + 'static {
    /// Every value with its name, in the order in which they are told to the user: the default first, which is offered in the
    /// place of a name that is like none of them.
    const ALL: &'static [(&'static str, Self)];
}

macro_rules! choices {
    ($($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:literal,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
        pub enum $name {
            $($(#[$value_doc])* #[serde(rename = $text)] $value,)+
        }

        impl Choice for $name {
            const ALL: &'static [(&'static str, Self)] = &[$(($text, $name::$value),)+];
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    $($name::$value => $text,)+
                })
            }
        }
    )+};
}

choices! {
    /// Which model.
    Arch {
        /// Learned positions, LayerNorm, GELU; the embedding is the output layer unless `tied = false`.
        Gpt2 = "gpt2",
        /// Rotary positions, RMSNorm, SwiGLU, grouped-query attention, an output layer of its own unless `tied = true`.
        Llama = "llama",
    }

    /// What is computed again in backward instead of being kept from forward.
    Recompute {
        /// Nothing: all activations are kept.
        None = "none",
        /// Every block, from its input.
        Block = "block",
    }

    /// What a gradient is divided by.
    LossNormalization {
        /// Microbatches and data ranks: the mean of their means.
        Mean = "mean",
        /// Predicted tokens of the global batch.
        Token = "token",
    }

    /// How the learning rate goes on after warm-up.
    ScheduleKind {
        /// In half a cosine wave to `min_lr` at the last step.
        Cosine = "cosine",
        /// It stays.
        Constant = "constant",
        /// In a straight line to `min_lr` at the last step.
        Linear = "linear",
        /// It stays, then goes in a straight line to `min_lr` over the last `decay_steps` (warm-up, stable, decay).
        Wsd = "wsd",
    }

    /// When updated parameters are gathered.
    Dispatch {
        /// Each bucket's gather starts the next one's.
        Chain = "chain",
        /// All gathers at the same points on every pipeline stage.
        Aligned = "aligned",
        /// Each right behind its bucket's optimizer step.
        WithOptimizer = "with-optimizer",
    }

    /// How a number is stored.
    Number {
        /// 32 bits, IEEE.
        F32 = "f32",
        /// 16 bits: the upper half of an f32.
        Bf16 = "bf16",
    }

    /// How text becomes tokens.
    TokenizerKind {
        /// A token per byte, 256 of them.
        Bytes = "bytes",
    }

    /// What the run's operations are carried out by.
    DeviceKind {
        /// Worker threads of this process.
        Cpu = "cpu",
        /// One operation at a time, in an order drawn from a seed.
        Sim = "sim",
        /// Shapes only: plans, no numbers.
        Dry = "dry",
        /// An NVIDIA card.
        Cuda = "cuda",
    }

    /// How progress is shown.
    ProgressKind {
        /// A bar on a terminal, lines elsewhere.
        Auto = "auto",
        /// A line per reported step.
        Lines = "lines",
        /// Not at all.
        None = "none",
    }
}

/// Named by the crate that captures.
impl Choice for GraphScope {
    const ALL: &'static [(&'static str, GraphScope)] = &[
        (GraphScope::None.name(), GraphScope::None),
        (GraphScope::Layer.name(), GraphScope::Layer),
        (GraphScope::Chunk.name(), GraphScope::Chunk),
        (GraphScope::Microbatch.name(), GraphScope::Microbatch),
        (GraphScope::Step.name(), GraphScope::Step),
    ];
}

impl Choice for GateMode {
    const ALL: &'static [(&'static str, GateMode)] =
        &[(GateMode::InGraph.name(), GateMode::InGraph), (GateMode::BeforeReplay.name(), GateMode::BeforeReplay)];
}

impl Choice for GraphOrder {
    const ALL: &'static [(&'static str, GraphOrder)] =
        &[(GraphOrder::Accesses.name(), GraphOrder::Accesses), (GraphOrder::Submission.name(), GraphOrder::Submission)];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scope_and_gate_mode_can_be_chosen() {
        let scopes = <GraphScope as Choice>::ALL.iter().map(|(_, scope)| *scope);
        assert!(scopes.eq(GraphScope::ALL));
        let gates = <GateMode as Choice>::ALL.iter().map(|(_, gates)| *gates).collect::<Vec<_>>();
        assert!(gates.len() == GateMode::ALL.len() && GateMode::ALL.iter().all(|one| gates.contains(one)));
        let orders = <GraphOrder as Choice>::ALL.iter().map(|(_, order)| *order).collect::<Vec<_>>();
        assert!(orders.len() == GraphOrder::ALL.len() && GraphOrder::ALL.iter().all(|one| orders.contains(one)));
    }
}
