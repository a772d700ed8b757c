//! A captured graph and its replay.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::{CapturedGraph, Event, Executable, Note, Stream};
use pgroups::{HandOver, Param};

use crate::{
    GateMode, Given, GraphError, Scope, Survivor,
    accounts::Accounts,
    error::Change,
    inputs::Inputs,
    links::{Gates, Links},
};

/// Work that was captured once and is launched as a unit, with all that must hold before.
///
/// It holds parameters, publishers and sinks weakly. Cloning gives another handle of the same graph.
#[derive(Clone)]
pub struct Graph(Arc<Inner>);

struct Inner {
    name: String,
    scope: Scope,
    mode: GateMode,
    /// None: deleted.
    live: Mutex<Option<Live>>,
}

/// All that a deleted graph lets go.
pub(crate) struct Live {
    pub(crate) captured: CapturedGraph,
    pub(crate) lanes: Vec<Lane>,
    /// The lane of the next replay.
    pub(crate) next: usize,
    pub(crate) replays: u64,
    pub(crate) links: Links,
    pub(crate) inputs: Inputs,
    pub(crate) hand_overs: Vec<Arc<dyn HandOver>>,
    pub(crate) accounts: Accounts,
    /// Where gates inside are opened.
    pub(crate) gates: Stream,
}

/// One executable, with the events of its own gates: replays on different lanes may overlap.
pub(crate) struct Lane {
    pub(crate) executable: Executable,
    /// As captured: in order.
    pub(crate) out: Vec<Event>,
    /// By bucket.
    pub(crate) free: Vec<Option<Event>>,
    /// Behind its last replay, if that may have read arguments.
    pub(crate) ended: Event,
}

impl Live {
    /// Follows what has changed about its parameters, or refuses.
    fn refresh(&mut self, graph: &str) -> Result<(), GraphError> {
        let exchange = self.links.refresh(graph)?;
        if !exchange.is_empty() {
            self.lanes.iter().try_for_each(|lane| lane.executable.set_events(&exchange))?;
        }
        Ok(())
    }
}

impl Graph {
    pub(crate) fn new(name: &str, scope: Scope, mode: GateMode, live: Live) -> Graph {
        Graph(Arc::new(Inner { name: name.to_owned(), scope, mode, live: Mutex::new(Some(live)) }))
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, Option<Live>> {
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Name given when it was captured.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How much of a step it holds.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.0.scope
    }

    /// Where its replays wait.
    #[must_use]
    pub fn gate_mode(&self) -> GateMode {
        self.0.mode
    }

    /// Nodes, gates included; 0 when it was deleted.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.live().as_ref().map_or(0, |live| live.captured.node_count())
    }

    /// Replays so far; 0 when it was deleted.
    #[must_use]
    pub fn replays(&self) -> u64 {
        self.live().as_ref().map_or(0, |live| live.replays)
    }

    /// Names of the parameters that it reads in forward, each once, in the order of first reads.
    #[must_use]
    pub fn reads(&self) -> Vec<String> {
        self.live().as_ref().map_or(Vec::new(), |live| live.links.reads().map(str::to_owned).collect())
    }

    /// What must be published before it runs: of each publisher the parameter that is read first, in that order.
    #[must_use]
    pub fn conditions(&self) -> Vec<String> {
        self.live().as_ref().map_or(Vec::new(), |live| live.links.conditions().map(str::to_owned).collect())
    }

    /// Names of its arguments, in the order in which they were declared.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        self.live().as_ref().map_or(Vec::new(), |live| live.inputs.names().map(str::to_owned).collect())
    }

    /// Whether it reads `param` or writes its gradient.
    #[must_use]
    pub fn uses(&self, param: &Param) -> bool {
        self.live().as_ref().is_some_and(|live| live.links.uses(param))
    }

    /// In what its parameters differ from when it was captured: while there is anything, replays are refused.
    #[must_use]
    pub fn changes(&self) -> Vec<Change> {
        self.live().as_ref().map_or(Vec::new(), |live| live.links.changes())
    }

    /// The nodes, in the order of capture, and the order among them; none when it was deleted.
    #[must_use]
    pub fn captured(&self) -> Option<CapturedGraph> {
        self.live().as_ref().map(|live| live.captured.clone())
    }

    /// Submits the graph to `stream`. Arguments are compared first; then everything that it reads is published, in the
    /// order of first reads; then arguments are copied to where they were captured, unless they are there; then it is
    /// launched, and what captured code would have said is said: reads that end, gradients that land.
    ///
    /// Never waits for the device.
    ///
    /// # Errors
    /// [`GraphError::Arguments`], [`GraphError::Invalid`] and [`GraphError::Deleted`], and nothing has happened then;
    /// [`PgError::Stale`](pgroups::PgError::Stale) in [`GraphError::Groups`] if something cannot be published, and
    /// nothing is launched then; those of publishers, of sinks and of the device.
    pub fn replay(&self, stream: &Stream, given: &[(&str, Given<'_>)]) -> Result<(), GraphError> {
        let mut live = self.live();
        let name = &self.0.name;
        let Some(live) = live.as_mut() else { return Err(GraphError::Deleted { graph: name.clone() }) };
        live.inputs.check(name, given)?;
        live.refresh(name)?;
        let accounts = live.accounts.hold(name)?;
        live.links.issue()?;
        live.links.wait_for_reads(stream)?;
        live.links.note_reads(stream);
        let lane = &live.lanes[live.next];
        let gates = Gates { out: &lane.out, free: &lane.free, stream: &live.gates };
        live.links.open_gradients(&gates, stream)?;
        accounts.join(stream)?;
        live.hand_overs.iter().try_for_each(|hand_over| hand_over.prepare(stream))?;
        let readers = live.lanes.iter().map(|lane| &lane.ended).filter(|ended| ended.generation() > 0);
        live.inputs.copy_in(name, stream, given, readers)?;
        stream.note(|| Note::Scope { graph: lane.executable.trace().id, scope: self.0.scope.name().into() });
        accounts.announce(stream);
        stream.launch_graph(&lane.executable)?;
        if live.inputs.has_memory() {
            stream.record(&lane.ended)?;
        }
        live.replays += 1;
        live.links.apply(&gates, stream)?;
        live.hand_overs.iter().try_for_each(|hand_over| hand_over.apply(stream))?;
        accounts.apply(stream)?;
        live.next = (live.next + 1) % live.lanes.len();
        Ok(())
    }

    /// Publishes everything that it reads, as the next replay would: in the same order, and at the cost of one load for
    /// each publisher that has nothing to do. Gathers can begin while something else runs.
    ///
    /// # Errors
    /// As [`Graph::replay`], without arguments.
    pub fn make_ready(&self) -> Result<(), GraphError> {
        let mut live = self.live();
        let name = &self.0.name;
        let Some(live) = live.as_mut() else { return Err(GraphError::Deleted { graph: name.clone() }) };
        live.refresh(name)?;
        live.links.issue()
    }

    /// Lets go of everything that it holds, at once, whoever else has a handle: their replays are refused. What is
    /// under way ends. Lists who keeps something of it.
    pub(crate) fn delete(&self) -> Vec<Survivor> {
        let Some(live) = self.live().take() else { return Vec::new() };
        let mut survivors = Vec::new();
        let handles = Arc::strong_count(&self.0) - 1;
        if handles > 0 {
            survivors.push(Survivor::Handles { graph: self.0.name.clone(), handles });
        }
        drop(live);
        survivors
    }
}
