//! Captured graphs as CUDA graphs: our nodes become theirs, with exactly our edges.

use std::{
    collections::VecDeque,
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys;

use super::{
    CudaEngine, CudaError,
    branches::Branches,
    card::{Card, Priority, RawEvent, RawStream, SideStream, lock},
    clique::Lease,
    collective::{CapturedCall, copies_alone},
    event::{CardEvent, Point},
    fault::Post,
    host::{HostCall, Told, run_host},
    steps::{self, Launchable, Place},
    workspace::Workspace,
};
use crate::{
    Launch, Op, Position,
    device::DeviceInner,
    graph::{GraphInner, JointNode, Node, NodeKind},
    launch::LaunchBody,
    queue::Mark,
};

/// What a card launches. Lives as long as a handle of the executable or a launch that has not ended.
pub(crate) struct GraphOnCard {
    exec: Exec,
    gates: Mutex<Vec<Gate>>,
    post: Post,
    issued: Arc<Mutex<Issued>>,
    /// What its nodes call.
    _calls: Vec<Arc<HostCall>>,
    /// What its nodes work in.
    _workspaces: Vec<Workspace>,
    /// By group; none for groups of one.
    communicators: Vec<Option<End>>,
}

/// Its rank's end of a communicator.
struct End {
    lease: Arc<Lease>,
    member: usize,
}

/// An external wait or record.
struct Gate {
    gate: u32,
    node: sys::CUgraphNode,
    way: Way,
    /// What the executable's node has.
    event: RawEvent,
    /// Of a record: the event, so that the next launch finds it free. Setting another one costs a call.
    own: Option<Arc<CardEvent>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Wait,
    Record,
}

// SAFETY: a node's handle is a name; the driver takes it from any thread.
unsafe impl Send for Gate {}
// SAFETY: as above.
unsafe impl Sync for Gate {}

/// Stream and position of the launches that have not ended; their host operations tell them when they fail.
#[derive(Default)]
struct Issued {
    ended: u64,
    launches: VecDeque<(u32, u64)>,
}

/// A graph and its executable. Nodes are told by their handles in the graph, so it stays.
struct Exec {
    card: Arc<Card>,
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: handles are names; the driver takes them from any thread, and calls that change the executable are made
// for one launch after the other.
unsafe impl Send for Exec {}
// SAFETY: as above.
unsafe impl Sync for Exec {}

impl GraphOnCard {
    /// The context is current.
    pub(super) fn new(
        card: &Arc<Card>,
        engine: &CudaEngine,
        device: &Arc<DeviceInner>,
        graph: &Arc<GraphInner>,
    ) -> Result<GraphOnCard, CudaError> {
        let settled = graph.nodes.iter().map(|node| settle(card, node)).collect::<Result<Vec<_>, _>>()?;
        let own_end = |calls: &Vec<u32>| {
            let body = &graph.joint(calls[0]).body;
            let lease = (body.meeting.members.len() > 1).then(|| engine.lease(&body.meeting)).transpose()?;
            Ok(lease.map(|lease| End { lease, member: body.member }))
        };
        let mut making = Making {
            card,
            engine,
            communicators: graph.groups.iter().map(own_end).collect::<Result<_, CudaError>>()?,
            before: vec![Vec::new(); graph.groups.len()],
            device,
            source: graph,
            exec: Exec::new(card)?,
            post: Post::new(card)?,
            issued: Arc::default(),
            gates: Vec::new(),
            calls: Vec::new(),
            ends: Vec::with_capacity(graph.nodes.len()),
            branches: Branches::new(card, graph, &settled)?,
            sides: [SideStream::with(card, Priority::First)?, SideStream::with(card, Priority::Usual)?],
        };
        settled.iter().enumerate().try_for_each(|(node, steps)| making.add(node, steps))?;
        let Making { mut exec, post, issued, gates, calls, branches, communicators, .. } = making;
        exec.instantiate()?;
        let (gates, _workspaces) = (Mutex::new(gates), branches.workspaces);
        Ok(GraphOnCard { exec, gates, post, issued, _calls: calls, _workspaces, communicators })
    }

    pub(super) fn post(&self) -> &Post {
        &self.post
    }

    /// Queues `launch` and puts its marks on the card. Launches of an executable come here one after the other: those of
    /// one stream in its order, and one of another stream waits for the end of the one before. So gates are set for
    /// this launch and no other. With collectives in it, whoever launches has the turn.
    pub(super) fn launch(&self, stream: RawStream, launch: &LaunchBody) -> Result<(), CudaError> {
        let card = &self.exec.card;
        let (mut gates, mut marks) = (lock(&self.gates), launch.gates());
        gates.iter_mut().try_for_each(|gate| self.exec.set(gate, marks[gate.gate as usize].as_deref()))?;
        let seats = self.communicators.iter().flatten().map(|end| Ok(&end.lease.clique()?.seats[end.member]));
        let seats = seats.collect::<Result<Vec<_>, CudaError>>()?;
        seats.iter().try_for_each(|seat| seat.wait_for_last_use(stream))?;
        lock(&self.issued).launches.push_back((launch.stream, launch.seq));
        self.exec.launch(stream)?;
        for gate in &*gates {
            let Some(event) = &gate.own else { continue };
            let mark = marks[gate.gate as usize].as_ref().expect("BUG: a record without a mark");
            mark.put_on_card(Point::Event(event.clone()));
        }
        // It is bound to what it waits for, and of its records it has no need: whoever has, holds them.
        marks.fill(None);
        launch.end.put_on_card(Point::Event(Arc::new(CardEvent::record(card, stream)?)));
        seats.iter().for_each(|seat| seat.used(stream, &launch.end));
        Ok(())
    }

    /// `launch` has ended. One that did not get to the card is not the oldest there.
    pub(super) fn passed(&self, launch: &LaunchBody) {
        let mut issued = lock(&self.issued);
        if issued.launches.front() == Some(&(launch.stream, launch.seq)) {
            issued.launches.pop_front();
            issued.ended += 1;
        }
    }

    /// Stops all that waits in its groups.
    pub(super) fn give_up_collectives(&self) {
        self.communicators.iter().flatten().for_each(|end| end.lease.give_up());
    }
}

/// Marks of a launch that did not get there: whoever waits for them finds the error.
pub(super) fn lose(launch: &LaunchBody) {
    launch.gates().iter().flatten().chain([&launch.end]).for_each(|mark| mark.lose());
}

struct Making<'a> {
    card: &'a Arc<Card>,
    engine: &'a CudaEngine,
    communicators: Vec<Option<End>>,
    /// By group: the end of its last call. A communicator does one thing at a time, in the order of capture.
    before: Vec<Vec<sys::CUgraphNode>>,
    device: &'a Arc<DeviceInner>,
    source: &'a Arc<GraphInner>,
    exec: Exec,
    post: Post,
    issued: Arc<Mutex<Issued>>,
    gates: Vec<Gate>,
    calls: Vec<Arc<HostCall>>,
    /// By node of ours: those of the card that are its end.
    ends: Vec<Vec<sys::CUgraphNode>>,
    branches: Branches,
    /// For nodes of the main lanes, and for those beside them.
    sides: [SideStream; 2],
}

/// What a node launches; nothing if it is no kernel.
fn settle(card: &Card, node: &Node) -> Result<Vec<Launchable>, CudaError> {
    match &node.kind {
        NodeKind::Op(Op { launch: Launch::Kernel(kernel), accesses, .. }) => steps::settle(card, kernel, accesses),
        _ => Ok(Vec::new()),
    }
}

impl Making<'_> {
    fn add(&mut self, node: usize, steps: &[Launchable]) -> Result<(), CudaError> {
        let source = &self.source.nodes[node];
        let mut behind: Vec<sys::CUgraphNode> = Vec::new();
        for end in source.behind.iter().flat_map(|before| &self.ends[*before as usize]) {
            // The driver refuses an edge that it is told twice.
            if !behind.contains(end) {
                behind.push(*end);
            }
        }
        let end = match &source.kind {
            NodeKind::Op(op) => match &op.launch {
                Launch::Kernel(_) => self.add_steps(node, steps, behind)?,
                launch => {
                    let is_upload = matches!(launch, Launch::Upload(_));
                    let call = if is_upload { self.upload(node as u32)? } else { self.host_call(node as u32)? };
                    self.calls.push(call.clone());
                    match is_upload {
                        true => call.add_upload(self.card, self.exec.graph, &behind)?,
                        false => call.add_nodes(self.card, self.exec.graph, &behind)?,
                    }
                }
            },
            NodeKind::Wait(gate, _) => vec![self.add_gate(*gate, &behind, Way::Wait)?],
            NodeKind::Record(gate) => {
                // Whoever is behind it needs no more than what is before it, and a chain that goes on beside its records
                // is cheaper to launch.
                self.add_gate(*gate, &behind, Way::Record)?;
                behind
            }
            NodeKind::Joint(joint) => self.add_joint(joint, behind)?,
        };
        self.ends.push(end);
        Ok(())
    }

    /// One behind the other.
    fn add_steps(
        &self,
        node: usize,
        steps: &[Launchable],
        behind: Vec<sys::CUgraphNode>,
    ) -> Result<Vec<sys::CUgraphNode>, CudaError> {
        let (graph, workspace) = (self.exec.graph, self.branches.of(node));
        let aside = self.source.nodes[node].aside;
        let (side, priority) =
            (self.sides[usize::from(aside)].raw, if aside { Priority::Usual } else { Priority::First });
        steps.iter().try_fold(behind, |behind, step| {
            let at = Place { graph, behind: &behind, side, priority };
            step.add_node(self.card, &at, &self.post, node as u64 + 1, workspace).map(|added| vec![added])
        })
    }

    fn add_joint(
        &mut self,
        joint: &JointNode,
        mut behind: Vec<sys::CUgraphNode>,
    ) -> Result<Vec<sys::CUgraphNode>, CudaError> {
        let (graph, group) = (self.exec.graph, joint.group as usize);
        let Some(end) = &self.communicators[group] else {
            let copies = copies_alone(&joint.body).into_iter();
            let nodes = copies.map(|copy| copy.add_node(self.card, graph, &behind)).collect::<Result<Vec<_>, _>>()?;
            return if nodes.is_empty() { Ok(vec![self.exec.add_empty(&behind)?]) } else { Ok(nodes) };
        };
        // The driver refuses an edge that it is told twice.
        let before: Vec<_> = self.before[group].iter().filter(|node| !behind.contains(node)).copied().collect();
        behind.extend(before);
        let turn = self.engine.turn();
        let captured = end.lease.clique()?.capture(&turn, &joint.body)?;
        let added = vec![self.exec.add_child(&behind, &captured)?];
        self.before[group].clone_from(&added);
        Ok(added)
    }

    fn add_gate(&mut self, gate: u32, behind: &[sys::CUgraphNode], way: Way) -> Result<sys::CUgraphNode, CudaError> {
        let node = self.exec.add_gate(behind, way)?;
        self.gates.push(Gate { gate, node, way, event: self.card.reached, own: None });
        Ok(node)
    }

    /// The same values at every launch, so they are made once.
    fn upload(&self, node: u32) -> Result<Arc<HostCall>, CudaError> {
        let (device, graph, at) =
            (self.device.clone(), self.source.clone(), Position { stream: 0, seq: 0, node: Some(node) });
        let run = move |staged: &_| run_host(&device, (graph.op(node), at), staged, Told::Not);
        HostCall::new(self.card, self.engine.workers(), self.device, &self.source.op(node).accesses, run)
    }

    fn host_call(&self, node: u32) -> Result<Arc<HostCall>, CudaError> {
        let (device, graph, issued) = (self.device.clone(), self.source.clone(), self.issued.clone());
        let runs = AtomicU64::new(0);
        HostCall::new(self.card, self.engine.workers(), self.device, &self.source.op(node).accesses, move |staged| {
            let run = runs.fetch_add(1, Ordering::Relaxed);
            let (stream, seq) = {
                // Launches run in the order they were issued, and each runs every node once.
                let issued = lock(&issued);
                issued.launches[(run - issued.ended) as usize]
            };
            let at = Position { stream, seq, node: Some(node) };
            run_host(&device, (graph.op(node), at), staged, Told::AsItRuns);
        })
    }
}

impl Exec {
    fn new(card: &Arc<Card>) -> Result<Exec, CudaError> {
        let mut graph = ptr::null_mut();
        // SAFETY: the context is current; writes one handle.
        card.check("cuGraphCreate", unsafe { sys::cuGraphCreate(&mut graph, 0) })?;
        Ok(Exec { card: card.clone(), graph, exec: ptr::null_mut() })
    }

    fn instantiate(&mut self) -> Result<(), CudaError> {
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        // SAFETY: the graph is whole and lives.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut self.exec, self.graph, flags.0.into()) };
        self.card.check("cuGraphInstantiate", code)?;
        // Or the first launch would ask for memory, and wait there for every stream that stands still.
        // SAFETY: the executable was just made; the stream is of this card.
        self.card.on_side(|stream| unsafe { ("cuGraphUpload", sys::cuGraphUpload(self.exec, stream.0)) })
    }

    /// Until a launch says otherwise, a gate has an event that is reached.
    fn add_gate(&self, behind: &[sys::CUgraphNode], way: Way) -> Result<sys::CUgraphNode, CudaError> {
        let (mut node, event) = (ptr::null_mut(), self.card.reached.0);
        let (first, count) = (behind.as_ptr(), behind.len());
        // SAFETY: `behind` are nodes of this graph; the event lives as long as the card.
        let code = unsafe {
            match way {
                Way::Wait => sys::cuGraphAddEventWaitNode(&mut node, self.graph, first, count, event),
                Way::Record => sys::cuGraphAddEventRecordNode(&mut node, self.graph, first, count, event),
            }
        };
        self.card.check("cuGraphAddEventNode", code).map(|()| node)
    }

    fn add_empty(&self, behind: &[sys::CUgraphNode]) -> Result<sys::CUgraphNode, CudaError> {
        let mut node = ptr::null_mut();
        // SAFETY: `behind` are nodes of this graph.
        let code = unsafe { sys::cuGraphAddEmptyNode(&mut node, self.graph, behind.as_ptr(), behind.len()) };
        self.card.check("cuGraphAddEmptyNode", code).map(|()| node)
    }

    fn add_child(&self, behind: &[sys::CUgraphNode], child: &CapturedCall) -> Result<sys::CUgraphNode, CudaError> {
        let (mut node, first, count) = (ptr::null_mut(), behind.as_ptr(), behind.len());
        // SAFETY: `behind` are nodes of this graph; the child is copied, with what its nodes hold.
        let code = unsafe { sys::cuGraphAddChildGraphNode(&mut node, self.graph, first, count, child.0) };
        self.card.check("cuGraphAddChildGraphNode", code).map(|()| node)
    }

    /// Gives `gate` the event that `mark` asks for, unless it has it. Handles are never given back to the driver while
    /// the card is open, so the same handle is the same event.
    fn set(&self, gate: &mut Gate, mark: Option<&Mark>) -> Result<(), CudaError> {
        match gate.way {
            Way::Wait => {
                // A wait that a test dropped has no mark.
                let event = mark.and_then(|mark| mark.on_card().raw()).unwrap_or(self.card.reached);
                if event != gate.event {
                    self.set_wait(gate.node, event)?;
                    gate.event = event;
                }
            }
            Way::Record => {
                // Whoever could still ask for the record of the launch before holds its mark, and so the event.
                let is_free = gate.own.as_mut().is_some_and(|own| Arc::get_mut(own).is_some());
                if !is_free {
                    let event = Arc::new(CardEvent::new(&self.card)?);
                    self.set_record(gate.node, event.raw())?;
                    (gate.event, gate.own) = (event.raw(), Some(event));
                }
            }
        }
        Ok(())
    }

    fn set_wait(&self, node: sys::CUgraphNode, event: RawEvent) -> Result<(), CudaError> {
        // SAFETY: a wait node of this graph; the launch that this is for binds to the event's record.
        let code = unsafe { sys::cuGraphExecEventWaitNodeSetEvent(self.exec, node, event.0) };
        self.card.check("cuGraphExecEventWaitNodeSetEvent", code)
    }

    fn set_record(&self, node: sys::CUgraphNode, event: RawEvent) -> Result<(), CudaError> {
        // SAFETY: a record node of this graph; the launch's mark keeps the event.
        let code = unsafe { sys::cuGraphExecEventRecordNodeSetEvent(self.exec, node, event.0) };
        self.card.check("cuGraphExecEventRecordNodeSetEvent", code)
    }

    fn launch(&self, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: the stream is of this card; whatever the nodes touch is kept by the launch until its end is seen.
        self.card.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.0) })
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        if self.card.bind().is_err() {
            return;
        }
        // SAFETY: no launch is under way, for each of them keeps this; both were made here.
        unsafe {
            if !self.exec.is_null() {
                let _ = sys::cuGraphExecDestroy(self.exec);
            }
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}
