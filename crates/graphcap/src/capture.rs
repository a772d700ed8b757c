//! Captures: one at a time on a device, each by a scope that is handed down.

use std::{
    collections::HashMap, error::Error as StdError, fmt, marker::PhantomData, num::NonZeroUsize, sync::Arc,
    time::Instant,
};

use device::{CapturedGraph, Error, Event, GraphOrder, GraphUse, Stream, View};
use pgroups::{HandOver, HostState, ParamId, Pass, Turn, WeakParam};

use crate::{
    CaptureCost, GateMode, Graph, GraphError, Scope, Survivor,
    accounts::{Accounts, Open},
    cost::Costs,
    graph::{Lane, Live},
    inputs::Slot,
    links::Links,
    recording::{OutGates, Recording},
};

/// Settings of a [`GraphSet`].
#[derive(Clone)]
pub struct GraphConfig {
    /// How much of a step each of its graphs holds.
    pub scope: Scope,
    /// Where replays wait.
    pub gates: GateMode,
    /// What orders the operations of each graph.
    pub order: GraphOrder,
    /// Executables of each graph. One never overlaps itself; replays on different streams may overlap if there are
    /// more.
    pub lanes: NonZeroUsize,
    /// Whoever keeps account on the host of what a whole step submits.
    pub accounts: Vec<Arc<dyn HostState>>,
}

impl GraphConfig {
    /// Gates inside the graphs, operations in the order of submission, one lane, no accounts.
    #[must_use]
    pub fn new(scope: Scope) -> GraphConfig {
        let (gates, order, lanes) = (GateMode::InGraph, GraphOrder::Submission, NonZeroUsize::MIN);
        GraphConfig { scope, gates, order, lanes, accounts: Vec::new() }
    }
}

impl fmt::Debug for GraphConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GraphConfig { scope, gates, order, lanes, accounts } = self;
        write!(f, "GraphConfig({scope}, {gates}, order of {order}, {lanes} lanes, {} accounts)", accounts.len())
    }
}

/// The graphs of one kind of pass: training microbatches, evaluation, generation.
///
/// A parameter's first gradient of the pass is the first over all of its graphs, in the order of capture, so graphs are
/// captured in the order in which they will run.
pub struct GraphSet {
    config: GraphConfig,
    gates: Stream,
    graphs: Vec<Graph>,
    /// Held weakly: as long as they are here, no other parameter has their number.
    first_uses: HashMap<ParamId, WeakParam>,
    costs: Costs,
    /// What the device had when the set was made.
    before: GraphUse,
}

impl GraphSet {
    /// No graphs yet. `stream` is of the device that they will run on.
    ///
    /// # Errors
    /// [`GraphError::AccountsBelowStep`]; the device's.
    pub fn new(stream: &Stream, config: GraphConfig) -> Result<GraphSet, GraphError> {
        let (scope, accounts) = (config.scope, config.accounts.len());
        if accounts > 0 && scope.is_below_step() {
            let graph = "(a new set)".to_owned();
            return Err(GraphError::AccountsBelowStep { graph, scope, accounts });
        }
        let device = stream.device();
        let gates = device.stream("graph.gates")?;
        let (graphs, first_uses, costs) = (Vec::new(), HashMap::new(), Costs::new(&device));
        Ok(GraphSet { config, gates, graphs, first_uses, costs, before: device.graphs() })
    }

    /// Captures what `body` submits to `origin`, and to streams that wait for events recorded there. Nothing runs, and
    /// nothing that training can see changes. `body` reads parameters through [`CaptureScope::turn`] and nothing else;
    /// streams that it forks must be joined to `origin` again.
    ///
    /// The members of a group capture the same calls of it, in one order, with none of its collectives under way.
    ///
    /// # Errors
    /// [`GraphError::CaptureOpen`] while another capture of the device goes on, which is left alone;
    /// [`GraphError::Body`] with what `body` failed with; the device's for what may not be captured. Then nothing is
    /// left of the capture, and everything goes on as if it had not been tried.
    pub fn capture<T, E>(
        &mut self,
        name: &str,
        origin: &Stream,
        body: impl FnOnce(&mut CaptureScope<'_>) -> Result<T, E>,
    ) -> Result<(Graph, T), GraphError>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        let _span = tracing::debug_span!("graphcap.capture_graph", graph = name, scope = %self.config.scope).entered();
        let (device, known) = (origin.device(), self.first_uses.clone());
        if device.graphs().captures > 0 {
            return Err(GraphError::CaptureOpen { graph: name.to_owned(), rank: device.rank() });
        }
        let begun = Instant::now();
        let accounts = self.config.accounts.clone();
        let open = Open::begin(&accounts, origin)?;
        origin.begin_capture(name)?;
        let ending = Ending { origin, order: self.config.order };
        let recorded = self.record(name, origin, &open, body);
        let captured = ending.end();
        let accounts = open.end();
        let taken = match (recorded, captured) {
            (Ok((links, (inputs, hand_overs), out, value)), Ok(captured)) => accounts.and_then(|accounts| {
                let live = self.instantiate(captured, links, (inputs, hand_overs), accounts, &out)?;
                Ok((Graph::new(name, self.config.scope, self.config.gates, live), value))
            }),
            // A body that stopped half way has not joined its streams; any other broken rule is why it stopped.
            (Err(failed), Ok(_) | Err(Error::Unjoined { .. })) => Err(failed),
            (_, Err(broken)) => Err(broken.into()),
        };
        match &taken {
            Ok((graph, _)) => {
                self.costs.add(begun.elapsed(), &device);
                self.graphs.push(graph.clone());
            }
            Err(_) => self.first_uses = known,
        }
        taken
    }

    /// Runs `body` in the capture, and adds the gates.
    fn record<T, E>(
        &mut self,
        name: &str,
        origin: &Stream,
        open: &Open<'_>,
        body: impl FnOnce(&mut CaptureScope<'_>) -> Result<T, E>,
    ) -> Result<Recorded<T>, GraphError>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        let GraphConfig { scope, gates: mode, .. } = self.config;
        let mut recording = Recording::new(mode, &mut self.first_uses);
        open.enter()?;
        let value = {
            let mut scope = CaptureScope { graph: name, scope, recording: &mut recording, not_send: PhantomData };
            body(&mut scope)
        };
        let value =
            value.map_err(|error| GraphError::Body { graph: name.to_owned(), source: Arc::from(error.into()) })?;
        let out = recording.add_out_gates(origin, &self.gates)?;
        open.leave()?;
        let links = Links::new(mode, &recording, &out);
        let free = recording.buckets.iter().map(|bucket| bucket.free.clone()).collect();
        Ok((links, (recording.inputs, recording.hand_overs), Captured { out, free }, value))
    }

    fn instantiate(
        &self,
        captured: CapturedGraph,
        links: Links,
        (inputs, hand_overs): Beside,
        accounts: Accounts,
        first: &Captured,
    ) -> Result<Live, GraphError> {
        let device = captured.device();
        let mut lanes = Vec::new();
        for lane in 0..self.config.lanes.get() {
            let executable = captured.instantiate()?;
            // Every lane has gates of its own: the first has those of the capture.
            let own = |event: &Event| match lane {
                0 => event.clone(),
                _ => device.event(&format!("{}.{lane}", event.name())),
            };
            let out: Vec<Event> = first.out.events.iter().map(own).collect();
            let free: Vec<Option<Event>> = first.free.iter().map(|event| event.as_ref().map(own)).collect();
            if lane > 0 {
                let outs = first.out.events.iter().cloned().zip(out.iter().cloned());
                let frees = first.free.iter().flatten().cloned().zip(free.iter().flatten().cloned());
                executable.set_events(&outs.chain(frees).collect::<Vec<_>>())?;
            }
            let ended = device.event(&format!("graphcap.ended.{}.{lane}", captured.name()));
            lanes.push(Lane { executable, out, free, ended });
        }
        Ok(Live {
            captured,
            lanes,
            next: 0,
            replays: 0,
            links,
            inputs,
            hand_overs,
            accounts,
            gates: self.gates.clone(),
        })
    }

    /// The graphs, in the order of capture.
    #[must_use]
    pub fn graphs(&self) -> &[Graph] {
        &self.graphs
    }

    /// What its captures have taken; none if it has no graphs.
    #[must_use]
    pub fn cost(&self) -> Option<CaptureCost> {
        self.costs.of(&self.graphs)
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &GraphConfig {
        &self.config
    }

    /// [Warms up](Graph::warm_up) every graph, in the order of capture.
    ///
    /// # Errors
    /// As [`Graph::warm_up`].
    pub fn warm_up(&self, stream: &Stream, times: usize) -> Result<(), GraphError> {
        self.graphs.iter().try_for_each(|graph| graph.warm_up(stream, times))
    }

    /// Graphs whose parameters have moved, or changed owners in a way that their gates cannot follow: to be captured
    /// again, and no others.
    #[must_use]
    pub fn invalid(&self) -> Vec<Graph> {
        self.graphs.iter().filter(|graph| !graph.changes().is_empty()).cloned().collect()
    }

    /// Deletes all graphs, whoever has handles of them. What is under way ends. Returns what is left, with its holder;
    /// nothing if all is gone.
    pub fn delete(self) -> Vec<Survivor> {
        let GraphSet { graphs, gates, before, first_uses, .. } = self;
        drop(first_uses);
        let mut survivors: Vec<Survivor> = Vec::new();
        // One handle is ours.
        for graph in graphs {
            survivors.extend(graph.delete());
        }
        let device = gates.device();
        let (now, rank) = (device.graphs(), device.rank());
        if now.graphs > before.graphs {
            survivors.push(Survivor::Captured { rank, graphs: now.graphs - before.graphs });
        }
        if now.executables > before.executables {
            survivors.push(Survivor::Executables { rank, executables: now.executables - before.executables });
        }
        survivors
    }
}

/// Ends the capture, also if what is captured panics.
struct Ending<'s> {
    origin: &'s Stream,
    order: GraphOrder,
}

impl Ending<'_> {
    fn end(self) -> Result<CapturedGraph, Error> {
        let Ending { origin, order } = self;
        std::mem::forget(self);
        origin.end_capture_in(order)
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        // The panic is what is told.
        drop(self.origin.end_capture());
    }
}

type Recorded<T> = (Links, Beside, Captured, T);

/// What a graph takes and leaves beside parameters.
type Beside = (crate::inputs::Inputs, Vec<Arc<dyn HandOver>>);

/// The gates as captured.
struct Captured {
    out: OutGates,
    free: Vec<Option<Event>>,
}

/// A capture in progress: handed down to whoever submits what is captured. It dispatches nothing, and it stays on its
/// thread:
///
/// ```compile_fail,E0277
/// fn is_send<T: Send>() {}
/// is_send::<graphcap::CaptureScope<'static>>();
/// ```
///
/// A second capture inside the first does not compile, because the set is borrowed:
///
/// ```compile_fail,E0499
/// # fn nested(set: &mut graphcap::GraphSet, on: &device::Stream) -> Result<(), graphcap::GraphError> {
/// set.capture("outer", on, |_| set.capture("inner", on, |_| Ok::<_, device::Error>(())).map(drop))?;
/// # Ok(())
/// # }
/// ```
pub struct CaptureScope<'c> {
    graph: &'c str,
    scope: Scope,
    recording: &'c mut (dyn Scoped + 'c),
    not_send: PhantomData<*const ()>,
}

/// What a scope needs of its recording, without its lifetime.
trait Scoped: pgroups::Recorder {
    fn declare(&mut self, graph: &str, name: &str, slot: Slot) -> Result<(), GraphError>;
}

impl Scoped for Recording<'_> {
    fn declare(&mut self, graph: &str, name: &str, slot: Slot) -> Result<(), GraphError> {
        self.inputs.declare(graph, name, slot)
    }
}

impl CaptureScope<'_> {
    /// How parameters are read and gradients written in a pass of this capture. Below scope `step` it is written down
    /// and nothing is asked; in a whole step publications and reductions are part of the graph.
    pub fn turn(&mut self, pass: Pass) -> Turn<'_> {
        match self.scope {
            Scope::Step => Turn::eager(pass),
            Scope::Layer | Scope::Chunk | Scope::Microbatch => Turn::recorded(pass, self.recording),
        }
    }

    /// How much of a step the graph holds.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// Declares an argument: what is given for `name` at a replay is copied to `slot`, unless it lies there. Everything
    /// else that the graph touches stays where it is.
    ///
    /// # Errors
    /// [`GraphError::InputTwice`].
    pub fn input(&mut self, name: &str, slot: &View) -> Result<(), GraphError> {
        self.recording.declare(self.graph, name, Slot::Memory(slot.clone()))
    }

    /// Declares a value that the capture depends on: replays with another one are refused.
    ///
    /// # Errors
    /// [`GraphError::InputTwice`].
    pub fn value(&mut self, name: &str, value: impl fmt::Display) -> Result<(), GraphError> {
        self.recording.declare(self.graph, name, Slot::Value(value.to_string()))
    }
}
