//! Graphs: what a capture made. Immutable operations, and the order among them.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use crate::{
    Device, Error, Event, Meeting, Op, TraceGraph, View, Why,
    capture::{Draft, DraftNode},
    device::DeviceInner,
    executable::ExecInner,
    joint::JointBody,
    launch::Launches,
    launch_trace::{trace_graph, with_events},
};

/// What a node does.
pub(crate) enum NodeKind {
    Op(Op),
    Joint(JointNode),
    /// An external wait.
    Wait(u32, Why),
    /// An external record.
    Record(u32),
}

/// A member's call of a joint operation in a graph.
pub(crate) struct JointNode {
    pub(crate) body: JointBody,
    /// Which of the graph's groups.
    pub(crate) group: u32,
    /// Among the graph's calls of that group.
    pub(crate) position: u32,
}

pub(crate) struct Node {
    pub(crate) kind: NodeKind,
    /// Earlier nodes that it is directly behind.
    pub(crate) behind: Vec<u32>,
    /// Later nodes directly behind it.
    pub(crate) after: Vec<u32>,
    /// Later results do not wait for it.
    pub(crate) aside: bool,
}

/// All that a graph is, without handles: queues that hold finished launches for a while keep no rank and no group open.
pub(crate) struct GraphInner {
    pub(crate) name: String,
    pub(crate) nodes: Vec<Node>,
    /// By group: its nodes, in the order of capture.
    pub(crate) groups: Vec<Vec<u32>>,
    /// By gate: its node, in the order of capture.
    pub(crate) gates: Vec<u32>,
    pub(crate) trace: Arc<TraceGraph>,
}

impl GraphInner {
    pub(crate) fn joint(&self, node: u32) -> &JointNode {
        match &self.nodes[node as usize].kind {
            NodeKind::Joint(joint) => joint,
            _ => unreachable!("BUG: node {node} of graph '{}' is no joint operation", self.name),
        }
    }

    /// All calls of the group that the joint operation `node` belongs to.
    pub(crate) fn calls(&self, node: u32) -> &[u32] {
        &self.groups[self.joint(node).group as usize]
    }

    pub(crate) fn op(&self, node: u32) -> &Op {
        match &self.nodes[node as usize].kind {
            NodeKind::Op(op) => op,
            _ => unreachable!("BUG: node {node} of graph '{}' is no operation", self.name),
        }
    }
}

/// Graphs of one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GraphUse {
    /// Captures that have begun and not ended.
    pub captures: usize,
    /// Graphs with a handle.
    pub graphs: usize,
    /// Executables with a handle or a launch that has not ended.
    pub executables: usize,
    /// Nodes of both.
    pub nodes: usize,
}

#[derive(Default)]
pub(crate) struct GraphCounters {
    graphs: AtomicUsize,
    executables: AtomicUsize,
    nodes: AtomicUsize,
    /// The number of the next graph.
    next: AtomicU64,
}

impl GraphCounters {
    pub(crate) fn read(&self, captures: usize) -> GraphUse {
        let load = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        GraphUse {
            captures,
            graphs: load(&self.graphs),
            executables: load(&self.executables),
            nodes: load(&self.nodes),
        }
    }
}

/// Counts a graph, or an executable, for as long as somebody could still run it.
pub(crate) struct Counted {
    counters: Arc<GraphCounters>,
    what: fn(&GraphCounters) -> &AtomicUsize,
    nodes: usize,
}

impl Counted {
    fn new(counters: &Arc<GraphCounters>, what: fn(&GraphCounters) -> &AtomicUsize, nodes: usize) -> Counted {
        what(counters).fetch_add(1, Ordering::Relaxed);
        counters.nodes.fetch_add(nodes, Ordering::Relaxed);
        Counted { counters: counters.clone(), what, nodes }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.what)(&self.counters).fetch_sub(1, Ordering::Relaxed);
        self.counters.nodes.fetch_sub(self.nodes, Ordering::Relaxed);
    }
}

/// The operations that streams submitted between [`Stream::begin_capture`](crate::Stream::begin_capture) and
/// [`Stream::end_capture`](crate::Stream::end_capture), and the order among them. Immutable; it keeps the memory of its
/// accesses alive, the groups of its joint operations open and the rank of its device taken. Cloning shares it.
#[derive(Clone)]
pub struct CapturedGraph(Arc<Captured>);

struct Captured {
    inner: Arc<GraphInner>,
    device: Device,
    /// By gate.
    events: Vec<Event>,
    /// By group.
    meetings: Vec<Meeting>,
    _counted: Counted,
}

impl CapturedGraph {
    pub(crate) fn new(device: Device, name: &str, drafts: Vec<DraftNode>) -> CapturedGraph {
        let id = device.inner().graphs.next.fetch_add(1, Ordering::Relaxed);
        let trace = Arc::new(trace_graph(id, name, &drafts));
        let mut made = Making { nodes: Vec::with_capacity(drafts.len()), ..Making::default() };
        drafts.into_iter().for_each(|draft| made.add(draft));
        let Making { nodes, groups, gates, events, meetings } = made;
        let counted = Counted::new(&device.inner().graphs, |counters| &counters.graphs, nodes.len());
        let inner = GraphInner { name: name.to_owned(), nodes, groups, gates, trace };
        CapturedGraph(Arc::new(Captured { inner: Arc::new(inner), device, events, meetings, _counted: counted }))
    }

    /// Name given when the capture began.
    pub fn name(&self) -> &str {
        &self.0.inner.name
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.0.device.clone()
    }

    /// Operations, joint operations and gates.
    pub fn node_count(&self) -> usize {
        self.0.inner.nodes.len()
    }

    /// Nodes and order, as traces tell them.
    pub fn trace(&self) -> &Arc<TraceGraph> {
        &self.0.inner.trace
    }

    /// Memory that its nodes write, in the order of first writes; each region once, though regions may overlap.
    pub fn writes(&self) -> Vec<View> {
        let mut seen = HashSet::new();
        let accesses = self.0.inner.nodes.iter().flat_map(|node| match &node.kind {
            NodeKind::Op(op) => &op.accesses[..],
            NodeKind::Joint(joint) => &joint.body.accesses[..],
            NodeKind::Wait(..) | NodeKind::Record(_) => &[],
        });
        let written = accesses.filter(|access| access.mode.writes()).map(|access| &access.view);
        written.filter(|view| seen.insert((view.allocation_id(), view.region()))).cloned().collect()
    }

    /// Something that streams can launch. A graph can have several, which then overlap each other, never themselves.
    ///
    /// # Errors
    /// The device's sticky error; [`Error::Cuda`] when a card refuses the graph.
    pub fn instantiate(&self) -> Result<Executable, Error> {
        self.0.device.inner().check()?;
        let device = self.0.device.inner();
        let on_card = device.machine.engine.instantiate(device, &self.0.inner)?;
        let counted = Counted::new(&device.graphs, |counters| &counters.executables, self.node_count());
        let gates = Gates::new(device, self.0.events.clone(), self.trace());
        Ok(Executable(Arc::new(Instance {
            inner: Arc::new(ExecInner::new(self.0.inner.clone(), on_card)),
            device: self.0.device.clone(),
            gates: Mutex::new(gates),
            meetings: self.0.meetings.clone(),
            launches: Mutex::new(Launches::default()),
            counted: Arc::new(counted),
        })))
    }
}

impl fmt::Debug for CapturedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CapturedGraph('{}', {} nodes)", self.name(), self.node_count())
    }
}

/// A graph that is ready to run, see [`Stream::launch_graph`](crate::Stream::launch_graph). Cloning gives another handle of the same executable;
/// the last one may go while launches are under way.
#[derive(Clone)]
pub struct Executable(pub(crate) Arc<Instance>);

pub(crate) struct Instance {
    pub(crate) inner: Arc<ExecInner>,
    pub(crate) device: Device,
    gates: Mutex<Gates>,
    pub(crate) meetings: Vec<Meeting>,
    pub(crate) launches: Mutex<Launches>,
    pub(crate) counted: Arc<Counted>,
}

/// What can be exchanged in an executable.
pub(crate) struct Gates {
    /// By gate.
    pub(crate) events: Vec<Event>,
    pub(crate) trace: Arc<TraceGraph>,
}

impl Gates {
    fn new(device: &DeviceInner, events: Vec<Event>, graph: &TraceGraph) -> Gates {
        let id = device.graphs.next.fetch_add(1, Ordering::Relaxed);
        let trace = Arc::new(with_events(graph, id, &events));
        Gates { events, trace }
    }
}

impl Instance {
    pub(crate) fn gates(&self) -> MutexGuard<'_, Gates> {
        self.gates.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

impl Executable {
    /// Name of the graph.
    pub fn name(&self) -> &str {
        &self.0.inner.graph.name
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.0.device.clone()
    }

    /// Operations, joint operations and gates.
    pub fn node_count(&self) -> usize {
        self.0.inner.graph.nodes.len()
    }

    /// Nodes and order, as traces of its next launch tell them. Other events at its gates make it another graph there.
    pub fn trace(&self) -> Arc<TraceGraph> {
        self.0.gates().trace.clone()
    }

    /// How often it was launched.
    pub fn launches(&self) -> u64 {
        self.0.launches.lock().unwrap_or_else(|poison| poison.into_inner()).count
    }

    /// The events of its gates, each once, in the order of capture.
    pub fn gate_events(&self) -> Vec<Event> {
        let mut distinct: Vec<Event> = Vec::new();
        for event in &self.0.gates().events {
            if !distinct.iter().any(|known| known.same_as(event)) {
                distinct.push(event.clone());
            }
        }
        distinct
    }

    /// In later launches, gates of each first event are gates of the second. All at once, so two can change places.
    ///
    /// # Errors
    /// [`Error::NoSuchGate`] when no gate has a first event, [`Error::Foreign`] for an event of another device; then
    /// nothing is replaced.
    pub fn set_events(&self, replace: &[(Event, Event)]) -> Result<(), Error> {
        let mut gates = self.0.gates();
        for (from, to) in replace {
            if !gates.events.iter().any(|event| event.same_as(from)) {
                let (rank, graph) = (self.0.device.rank(), self.name().to_owned());
                return Err(Error::NoSuchGate { rank, graph, event: from.name().to_owned() });
            }
            to.check_owner(self.0.device.inner())?;
        }
        let replaced = gates.events.iter().map(|event| {
            let to = replace.iter().find(|(from, _)| event.same_as(from));
            to.map_or(event, |(_, to)| to).clone()
        });
        *gates = Gates::new(self.0.device.inner(), replaced.collect(), &gates.trace);
        Ok(())
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executable('{}', {} nodes)", self.name(), self.node_count())
    }
}

/// A graph in the making.
#[derive(Default)]
struct Making {
    nodes: Vec<Node>,
    groups: Vec<Vec<u32>>,
    gates: Vec<u32>,
    events: Vec<Event>,
    meetings: Vec<Meeting>,
}

impl Making {
    fn add(&mut self, draft: DraftNode) {
        let at = self.nodes.len() as u32;
        let kind = match draft.what {
            Draft::Op(op) => NodeKind::Op(op),
            Draft::Joint { body, meeting } => NodeKind::Joint(self.joint(at, body, meeting)),
            Draft::Wait { event, why } => NodeKind::Wait(self.gate(at, event), why),
            Draft::Record { event } => NodeKind::Record(self.gate(at, event)),
        };
        draft.behind.iter().for_each(|before| self.nodes[*before as usize].after.push(at));
        self.nodes.push(Node { kind, behind: draft.behind, after: Vec::new(), aside: draft.aside });
    }

    fn gate(&mut self, at: u32, event: Event) -> u32 {
        self.gates.push(at);
        self.events.push(event);
        self.events.len() as u32 - 1
    }

    fn joint(&mut self, at: u32, body: JointBody, meeting: Meeting) -> JointNode {
        let known = self.meetings.iter().position(|known| Arc::ptr_eq(&known.inner, &meeting.inner));
        let group = known.unwrap_or_else(|| {
            self.meetings.push(meeting);
            self.groups.push(Vec::new());
            self.groups.len() - 1
        });
        self.groups[group].push(at);
        JointNode { body, group: group as u32, position: self.groups[group].len() as u32 - 1 }
    }
}
