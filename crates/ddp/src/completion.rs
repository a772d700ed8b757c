//! What the end of a step does to reduced gradients: sums over other axes, then the division by the tokens.

use device::{
    Access, Op, Reduce, Stream, View,
    ops::{Factor, Scale},
};
use pgroups::{GlobalRank, Group};

use crate::{
    DdpError,
    core::{Core, Record},
    why,
};

/// Gradients of some parameters that are complete only when they are reduced over another group too: copies on other
/// stages, partial gradients of replicated weights.
#[derive(Clone)]
pub struct Completion {
    /// When it is done.
    pub stage: CompletionStage,
    /// Names of the parameters, in an order that is the same on all members.
    pub params: Vec<String>,
    /// The group, on a communicator that nobody else uses.
    pub group: Group,
    /// Sum, or average under means over ranks.
    pub reduce: Reduce,
}

/// The order in which completions are done, all of them behind the buckets and before the division by the tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CompletionStage {
    /// Weights that condition every stage.
    Conditional,
    /// Norms and biases whose gradients are partial under sequence parallelism.
    SequenceParallel,
    /// Weights that are not sharded over the weight-shard axis.
    WeightShards,
    /// Embeddings that the first and the last stage hold.
    Embeddings,
    /// Statistics of routers.
    Routers,
}

/// A completion with its views.
pub(crate) struct Planned {
    pub(crate) grads: Vec<View>,
    group: Group,
    reduce: Reduce,
}

impl Core {
    /// By stage; of equals in the order in which they were given.
    pub(crate) fn plan_completions(&self, completions: &[Completion]) -> Result<Vec<Planned>, DdpError> {
        let mut sorted: Vec<&Completion> = completions.iter().collect();
        sorted.sort_by_key(|completion| completion.stage);
        let plan = |completion: &Completion| {
            let grad = |name: &String| {
                let param = self.params.iter().find(|param| param.name() == name);
                let param = param.ok_or_else(|| DdpError::NoSuchParam { param: name.clone() })?;
                Ok(param.main_grad().flat(0..param.numel())?)
            };
            self.check_shards(&completion.group)?;
            let grads = completion.params.iter().map(grad).collect::<Result<_, DdpError>>()?;
            Ok(Planned { grads, group: completion.group.clone(), reduce: completion.reduce })
        };
        sorted.into_iter().map(plan).collect()
    }

    /// Only what a rank owns of a gradient is reduced, so members have to own the same parts.
    fn check_shards(&self, group: &Group) -> Result<(), DdpError> {
        let (rank, place) = (group.rank(), self.dense.reduce.place().0);
        let of = |other: &GlobalRank| Some((*other, self.places.get(other.0 as usize).copied().flatten()?));
        let differs = group.members().iter().filter_map(of).find(|(_, other_place)| *other_place != place);
        differs.map_or(Ok(()), |(other, other_place)| {
            Err(DdpError::OtherShard { group: group.name().to_owned(), rank, place, other, other_place })
        })
    }

    /// Submits all that follows the buckets, behind them.
    pub(crate) fn complete(&self, completions: &[Planned], tokens: Option<(&Stream, &View)>) -> Result<(), DdpError> {
        for Planned { grads, group, reduce } in completions {
            // Of a shard's gradient only this rank's part is reduced; peers of another axis hold the same part.
            let batch = grads.iter().fold(group.batch(), |batch, grad| batch.all_reduce(grad, *reduce));
            batch.submit(&self.reduce)?;
        }
        if let Some((stream, tokens)) = tokens {
            self.divide_by(tokens, stream)?;
        }
        self.record(Record::Finished, &self.reduce, &self.finished)
    }

    /// Divides the gradients, once, by the tokens of all ranks, at least 1: ranks and steps without a valid token
    /// contribute nothing and divide by nothing.
    fn divide_by(&self, tokens: &View, stream: &Stream) -> Result<(), DdpError> {
        let (own, t) = (&self.reduce, &self.tokens);
        stream.record(&t.counted)?;
        own.wait(&t.counted, why::DIVIDE_AFTER_COUNT)?;
        match &t.group {
            Some(group) => group.all_reduce_into(own, tokens, &t.total, Reduce::Sum)?,
            None => own.launch(device::ops::Cast { x: tokens, y: &t.total }.op("ddp.tokens")?)?,
        }
        let accesses = vec![Access::read(&t.total), Access::write(&t.factor)];
        own.launch(Op::host("reciprocal", "ddp.tokens", accesses, |args| {
            args.write::<f32>(1)?[0] = 1.0 / args.read::<f32>(0)?[0].max(1.0);
            Ok(())
        }))?;
        for bucket in self.groups.iter().flat_map(|group| &group.buckets) {
            let grads = &bucket.own_grads;
            own.launch(Scale { x: grads, factor: Factor::Device(&t.factor), y: grads }.op("ddp.per_token")?)?;
        }
        Ok(())
    }
}
