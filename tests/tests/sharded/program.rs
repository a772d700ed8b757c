//! What a sharded model and its training are: layout, architecture, schedule of publications, graphs.

use ddp::{BucketSize, Completion, CompletionStage, DdpConfig, Dispatch, PlanConfig, Scaling, Sharding};
use device::Reduce;
use graphcap::{GateMode, Scope};
use gtp::{Drain, GtpConfig, ShardAxis};
use model::{GptConfig, GptPlan, LlamaConfig, Output, RecomputeLayers, ShardConfig};
use pgroups::{
    Axis, GlobalRank, Group, Key, Layout, LayoutConfig, Needs, ParamClass, PgError, ProcessGroups, Sequence, WorldPart,
};

use super::support::Caught;

pub(crate) const LAYERS: usize = 2;
pub(crate) const SEQ_LEN: usize = 6;
pub(crate) const VOCAB: usize = 29;

/// Which blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arch {
    Gpt2,
    Llama,
}

/// Whether replicas share the work of the optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Optimizing {
    Everywhere,
    Distributed,
}

/// Where its weights come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Held {
    /// From gtp, which gathers what is sharded.
    Sharded,
    /// From nobody: every rank has them.
    Whole,
}

/// Where passes run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lanes {
    /// On one stream.
    One,
    /// Microbatches, and graphs of one, on two streams in turn, so that the reductions of one end behind the next; what
    /// begins and ends microbatches on a third.
    Turns,
}

/// What replays of training are given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Inputs {
    /// Memory of their own, which is copied to where the graphs read it.
    Copied,
    /// What lies where the graphs read it: nothing is copied, and no copy waits for the whole graph before.
    InPlace,
}

/// How one model is trained.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) layout: LayoutConfig,
    /// Member lists in place of the layout's.
    pub(crate) custom: Vec<(Key, Vec<Vec<u32>>)>,
    pub(crate) held: Held,
    pub(crate) arch: Arch,
    pub(crate) sequence: Sequence,
    pub(crate) recompute: RecomputeLayers,
    pub(crate) microbatches: usize,
    /// Sequences of a step, over all ranks.
    pub(crate) batch: usize,
    pub(crate) optimizing: Optimizing,
    pub(crate) dispatch: Dispatch,
    /// 0: nothing is clipped, and every bucket is stepped as soon as it is reduced.
    pub(crate) clip: f64,
    pub(crate) look_ahead: usize,
    /// None: steps are submitted as they are.
    pub(crate) graphs: Option<(Scope, GateMode)>,
    pub(crate) lanes: Lanes,
    pub(crate) inputs: Inputs,
}

impl Program {
    /// Distributed optimizer, one bucket a layer, two microbatches, nothing captured.
    pub(crate) fn on(tp: u32, gtp: u32, dp: u32) -> Program {
        Program {
            layout: LayoutConfig { tp, gtp, dp: Some(dp), ..LayoutConfig::default() },
            custom: Vec::new(),
            held: Held::Sharded,
            arch: Arch::Gpt2,
            sequence: Sequence::Whole,
            recompute: RecomputeLayers::None,
            microbatches: 2,
            batch: 8,
            optimizing: Optimizing::Distributed,
            dispatch: Dispatch::Chain,
            clip: 0.5,
            look_ahead: 1,
            graphs: None,
            lanes: Lanes::One,
            inputs: Inputs::Copied,
        }
    }

    pub(crate) fn captured(self, scope: Scope, gates: GateMode) -> Program {
        Program { graphs: Some((scope, gates)), ..self }
    }

    pub(crate) fn plan(&self) -> Layout {
        Layout::new(&self.layout).expect("a layout")
    }

    /// Ranks in the world, those that the layout leaves out included.
    pub(crate) fn world(&self) -> u32 {
        self.layout.world_size.unwrap_or_else(|| self.plan().world_size())
    }

    /// Whether the layout covers a rank.
    pub(crate) fn covers(&self, rank: GlobalRank) -> bool {
        match self.layout.part {
            WorldPart::Whole => true,
            WorldPart::From { .. } => self.plan().grid(ParamClass::Dense).contains(rank),
        }
    }

    /// Sequences of a microbatch.
    pub(crate) fn micro_batch(&self) -> usize {
        let size = |axis: &Axis| self.plan().size(ParamClass::Dense, axis) as usize;
        self.batch / (size(&Axis::GTP) * size(&Axis::DP) * self.microbatches)
    }

    pub(crate) fn gpt(&self) -> Result<GptPlan, Caught> {
        let (arch, output) = match self.arch {
            Arch::Gpt2 => (model::Arch::Gpt2, Output::Tied),
            Arch::Llama => {
                let llama = LlamaConfig { kv_heads: 2, rope_base: LlamaConfig::ROPE_BASE };
                (model::Arch::Llama(llama), Output::Own)
            }
        };
        let sizes = GptConfig {
            arch,
            layers: LAYERS,
            dim: 16,
            heads: 4,
            ffn_dim: 24,
            vocab: VOCAB,
            vocab_rows: VOCAB,
            seq_len: SEQ_LEN,
            output,
        };
        let shards = ShardConfig { alignment: 3, sequence: self.sequence, micro_batch: self.micro_batch() };
        Ok(GptPlan::on(sizes, &self.plan(), shards)?)
    }

    pub(crate) fn needs(&self) -> Needs {
        let ranks = |list: &Vec<u32>| list.iter().map(|&rank| GlobalRank(rank)).collect();
        let custom: Vec<(Key, Vec<Vec<GlobalRank>>)> =
            self.custom.iter().map(|(key, lists)| (key.clone(), lists.iter().map(ranks).collect())).collect();
        let given = |key: &Key| custom.iter().any(|(own, _)| own == key);
        let keys = [Key::DP_CP, Key::DP_CP_GTP, Key::MP, Key::TP, Key::GTP].into_iter().filter(|key| !given(key));
        Needs { custom: custom.clone(), ..Needs::keys(keys) }
    }

    pub(crate) fn buckets(&self) -> PlanConfig {
        let dense = self.plan().size(ParamClass::Dense, &Axis::DP);
        let sharding = match self.optimizing {
            Optimizing::Everywhere => Sharding::Off,
            Optimizing::Distributed => Sharding::On { dense, expert: 1 },
        };
        PlanConfig { bucket_size: BucketSize::PerUnit, sharding, ..PlanConfig::default() }
    }

    pub(crate) fn ddp(&self) -> DdpConfig {
        let scaling = if self.layout.gtp > 1 { Scaling::Mean } else { Scaling::Averaging };
        DdpConfig { scaling, dispatch: self.dispatch, ..DdpConfig::default() }
    }

    pub(crate) fn gtp(&self) -> GtpConfig {
        let axis = ShardAxis { look_ahead: self.look_ahead, ..ShardAxis::new(ParamClass::Dense, Axis::GTP) };
        let drain = match self.lanes {
            Lanes::One => Drain::Whole,
            Lanes::Turns => Drain::TwoStage,
        };
        GtpConfig { axes: vec![axis], drain, ..GtpConfig::default() }
    }

    /// Gradients that are not whole when the buckets are reduced.
    pub(crate) fn completions(&self, groups: &ProcessGroups, plan: &GptPlan) -> Result<Vec<Completion>, Caught> {
        let mut all = Vec::new();
        let partial = (CompletionStage::SequenceParallel, plan.partial_over_tp(), Key::TP, Reduce::Sum);
        let whole = (CompletionStage::WeightShards, plan.whole_over_gtp(), Key::GTP, Reduce::Avg);
        for (stage, params, key, reduce) in [partial, whole] {
            if !params.is_empty() {
                let group = groups.get(&key, "gradients of whole weights")?;
                all.push(Completion { stage, params, group: own(group, "completion")?, reduce });
            }
        }
        Ok(all)
    }
}

/// A communicator of its own; a model that is wrapped again opens another.
fn own(group: &Group, label: &str) -> Result<Group, PgError> {
    let mut found = group.second(label);
    for again in 1..10 {
        if !matches!(found, Err(PgError::SecondTwice { .. })) {
            break;
        }
        found = group.second(&format!("{label}_{again}"));
    }
    found
}
