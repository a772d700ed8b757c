//! The handle of a rank's sharded weights.

use std::{fmt, sync::Arc};

use device::Stream;
use pgroups::{HostState, Layout, Param, ParamSpec, ProcessGroups, Rank, TensorParallel, Turn};

use crate::{
    GtpConfig, GtpError, Sharded,
    core::{Core, Counters, Last},
    plan::GtpPlan,
    schedule::PassKind,
    weight::{Lane, Weight},
    why,
};

/// The sharded weights of one model on one rank.
///
/// Every kind of pass has a plan: given at the start, usually made by the same program on the `dry` driver, or made of
/// the first pass of the kind, which gathers every weight on demand. All ranks of a group run the same passes in the
/// same order.
pub struct Gtp {
    core: Arc<Core>,
}

impl Gtp {
    /// Finds the weights that the configured axes cut among `params` (with their specs, in declared order) and opens
    /// their communicators. No kind of pass is planned yet. Axes of size 1 cut nothing: without any sharded weight
    /// nothing is opened, allocated or submitted, ever.
    ///
    /// # Errors
    /// [`GtpError::CutTwice`], [`GtpError::NotInnermost`], [`GtpError::ShardShape`], [`GtpError::GradType`]; those of
    /// groups and of the device.
    pub fn new<'p>(
        rank: &Rank,
        layout: &Layout,
        groups: &ProcessGroups,
        params: impl IntoIterator<Item = (&'p Param, &'p ParamSpec)>,
        config: GtpConfig,
    ) -> Result<Gtp, GtpError> {
        Gtp::build(rank, layout, groups, params, config, None)
    }

    /// As [`Gtp::new`], with plans: what is planned takes its memory here, and never more.
    ///
    /// # Errors
    /// As [`Gtp::new`]; [`GtpError::PlanOfOthers`].
    pub fn planned<'p>(
        rank: &Rank,
        layout: &Layout,
        groups: &ProcessGroups,
        params: impl IntoIterator<Item = (&'p Param, &'p ParamSpec)>,
        config: GtpConfig,
        plan: &GtpPlan,
    ) -> Result<Gtp, GtpError> {
        Gtp::build(rank, layout, groups, params, config, Some(plan.clone()))
    }

    fn build<'p>(
        rank: &Rank,
        layout: &Layout,
        groups: &ProcessGroups,
        params: impl IntoIterator<Item = (&'p Param, &'p ParamSpec)>,
        config: GtpConfig,
        plan: Option<GtpPlan>,
    ) -> Result<Gtp, GtpError> {
        let mut weights = Vec::new();
        for (param, spec) in params {
            weights.extend(Weight::new(param, spec, layout, &config)?);
        }
        let lane = |at: usize| {
            let shards = weights.iter().filter(|weight| weight.lane == at).map(|weight| weight.param.numel());
            shards.max().map(|shard| Lane::open(&rank.device, groups, &config, at, shard)).transpose()
        };
        let lanes = (0..config.axes.len()).map(lane).collect::<Result<Vec<_>, _>>()?;
        Ok(Gtp { core: Arc::new(Core::new(&rank.device, config, weights, lanes, plan)?) })
    }

    /// The weights are, besides, this rank's parts of a tensor group's: whoever takes them learns of the group.
    #[must_use]
    pub fn over(self, tensor: TensorParallel) -> Gtp {
        let core = Arc::into_inner(self.core).expect("BUG: no pass, account or graph of a model that is being built");
        Gtp { core: Arc::new(Core { tensor: Some(tensor), ..core }) }
    }

    /// Begins a pass. A pass before it that ended early, or had no plan, is planned anew from what it did.
    ///
    /// # Errors
    /// [`GtpError::NotPlanned`] in a capture; [`GtpError::StillOpen`] for the pass before.
    pub fn pass<'c>(&'c mut self, kind: PassKind, turn: Turn<'c>) -> Result<Sharded<'c>, GtpError> {
        self.core.begin(kind, turn.is_recorded())?;
        Ok(Sharded::new(&self.core, turn))
    }

    /// Goes on with the pass under way: its next layer, or its backward part.
    pub fn resume<'c>(&'c mut self, turn: Turn<'c>) -> Sharded<'c> {
        Sharded::new(&self.core, turn)
    }

    /// Orders `stream` behind the uses and gathers of the graphs so far, and behind their reductions too unless they
    /// drain in two stages: what follows a pass whose graphs run on other streams.
    ///
    /// # Errors
    /// The device's.
    pub fn follow_graphs(&self, stream: &Stream) -> Result<(), GtpError> {
        let state = self.core.lock();
        match &state.last {
            Last::Graph(Some(drained)) => Ok(stream.wait(drained, why::GRAPH_AFTER_GRAPH)?),
            Last::Graph(None) => state.behind_graphs(stream, why::GRAPH_AFTER_GRAPH),
            Last::Marked | Last::Eager(..) | Last::Loose(_) => Ok(()),
        }
    }

    /// The plans of all kinds of pass so far, the last pass included. Pure data: the same program on another machine
    /// can begin with it.
    ///
    /// # Errors
    /// [`GtpError::StillOpen`]; the device's, for the memory of a new plan.
    pub fn plan(&mut self) -> Result<GtpPlan, GtpError> {
        let mut state = self.core.lock();
        self.core.settle(&mut state)?;
        Ok(state.plan.clone())
    }

    /// Whether any weight is sharded.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.core.weights.is_empty()
    }

    /// What was done how often.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.core.lock().counters
    }

    /// What graphs of whole steps must keep in order on the host.
    #[must_use]
    pub fn account(&self) -> Arc<dyn HostState> {
        self.core.clone()
    }
}

impl fmt::Debug for Gtp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gtp({} sharded weights)", self.core.weights.len())
    }
}
