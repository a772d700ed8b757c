//! Captured graphs as CUDA graphs: our nodes become theirs, with exactly our edges.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys;

use super::{
    CudaEngine, CudaError,
    branches::Branches,
    card::{Card, Priority, RawStream, SideStream, lock},
    clique::Lease,
    collective::{OwnCopy, copies_alone},
    event::{CardEvent, Point},
    exec::{Exec, Gate, Way},
    fault::Post,
    host::{Copies, HostCall, Told, run_host},
    launch,
    steps::{self, Launchable, Place},
    stream::wait_for,
    workspace::Workspace,
};
use crate::{
    Launch, Position,
    device::DeviceInner,
    graph::{GraphInner, JointNode, Node, NodeKind},
    launch::LaunchBody,
    queue::Mark,
};

/// What a card launches. Lives as long as a handle of the executable or a launch that has not ended.
pub(crate) struct GraphOnCard {
    exec: Exec,
    gates: Mutex<Vec<Gate>>,
    /// Gates whose waits are before a launch, and whose records behind it: where members of its groups share a card. A record
    /// in one member's graph may hold up a wait in another's, though nothing orders them.
    around: Vec<(u32, Way)>,
    /// Members of its groups share a card.
    pub(super) on_one_card: bool,
    post: Post,
    /// Kept while its nodes call the host.
    issued: Arc<Mutex<Issued>>,
    /// What its nodes call.
    calls: Vec<Arc<HostCall>>,
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

/// Marks of a launch that is on its card. Until this is dropped, nothing that is submitted waits there for them.
pub(super) struct Unplaced(Vec<(Arc<Mark>, Arc<CardEvent>)>);

impl Drop for Unplaced {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|(mark, event)| mark.put_on_card(Point::Event(event)));
    }
}

/// Stream and position of the launches that have not ended; their host operations tell them when they fail.
#[derive(Default)]
struct Issued {
    ended: u64,
    launches: VecDeque<(u32, u64)>,
}

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
        let communicators = graph.groups.iter().map(own_end).collect::<Result<Vec<_>, CudaError>>()?;
        let on_one_card = communicators.iter().flatten().any(|end| end.lease.shares_a_card());
        let mut making = Making {
            card,
            engine,
            communicators,
            around: on_one_card.then(Vec::new),
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
        let Making { mut exec, post, issued, gates, around, calls, branches, communicators, .. } = making;
        exec.instantiate()?;
        let (gates, around, _workspaces) = (Mutex::new(gates), around.unwrap_or_default(), branches.workspaces);
        Ok(GraphOnCard { exec, gates, around, on_one_card, post, issued, calls, _workspaces, communicators })
    }

    pub(super) fn post(&self) -> &Post {
        &self.post
    }

    /// Queues `launch`. Launches of an executable come here one after the other: those of one stream in its order, and one
    /// of another stream waits for the end of the one before. So gates are set for this launch and no other. With
    /// collectives in it, whoever launches has the turn.
    ///
    /// What others wait on their cores for is no more than it must be: the lock of gates only where there are some. Gives
    /// back what the communicators' uses before ended with, to be dropped where it was made.
    pub(super) fn launch(
        &self,
        stream: RawStream,
        launch: &LaunchBody,
    ) -> Result<(Unplaced, Vec<Arc<Mark>>), CudaError> {
        let card = &self.exec.card;
        let mut gated = (!launch.exec.graph.gates.is_empty()).then(|| (lock(&self.gates), launch.gates()));
        if let Some((gates, marks)) = &mut gated {
            gates.iter_mut().try_for_each(|gate| self.exec.set(gate, marks[gate.gate as usize].as_deref()))?;
            let waits = self.around(Way::Wait).filter_map(|gate| marks[gate].as_deref());
            waits.into_iter().try_for_each(|mark| wait_for(card, stream, mark))?;
        }
        let seats = self.communicators.iter().flatten().map(|end| Ok(&end.lease.clique()?.seats[end.member]));
        let seats = seats.collect::<Result<Vec<_>, CudaError>>()?;
        seats.iter().try_for_each(|seat| seat.wait_for_last_use(stream))?;
        if !self.calls.is_empty() {
            lock(&self.issued).launches.push_back((launch.stream, launch.seq));
        }
        self.exec.launch(stream)?;
        let end = Arc::new(CardEvent::record(card, stream)?);
        let mut points = vec![(launch.end.clone(), end.clone())];
        if let Some((gates, marks)) = &mut gated {
            let mark = |gate: usize| marks[gate].clone().expect("BUG: a record without a mark");
            // Only records have events of their own: a wait that was dropped has no mark.
            let inside = gates.iter().filter_map(|gate| gate.own.clone().map(|own| (mark(gate.gate as usize), own)));
            let around = self.around(Way::Record).map(|gate| (mark(gate), end.clone()));
            points.extend(inside.chain(around));
            // It is bound to what it waits for, and of its records it has no need: whoever has, holds them.
            marks.fill(None);
        }
        let before = seats.iter().filter_map(|seat| seat.used(stream, &launch.end)).collect();
        Ok((Unplaced(points), before))
    }

    fn around(&self, way: Way) -> impl Iterator<Item = usize> {
        self.around.iter().filter(move |(_, own)| *own == way).map(|(gate, _)| *gate as usize)
    }

    /// `launch` has ended. One that did not get to the card is not the oldest there.
    pub(super) fn passed(&self, launch: &LaunchBody) {
        if self.calls.is_empty() {
            return;
        }
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
    /// As in [`GraphOnCard`], if they are not nodes.
    around: Option<Vec<(u32, Way)>>,
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
        NodeKind::Op(op) => match &op.launch {
            Launch::Kernel(kernel) => steps::settle(card, kernel, &op.accesses),
            _ => Ok(Vec::new()),
        },
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
                    let at = self.place(node, &behind);
                    let by_kernels = self.around.is_some().then_some((&self.post, node as u64 + 1));
                    let copies = Copies { card: self.card, at, by_kernels };
                    if is_upload { call.add_upload(copies)? } else { call.add_nodes(copies)? }
                }
            },
            NodeKind::Wait(gate, _) => self.add_gate(*gate, behind, Way::Wait)?,
            NodeKind::Record(gate) => self.add_gate(*gate, behind, Way::Record)?,
            NodeKind::Joint(joint) => self.add_joint(node, joint, behind)?,
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
        let workspace = self.branches.of(node);
        steps.iter().try_fold(behind, |behind, step| {
            let at = self.place(node, &behind);
            step.add_node(self.card, &at, &self.post, node as u64 + 1, workspace).map(|added| vec![added])
        })
    }

    fn place<'b>(&self, node: usize, behind: &'b [sys::CUgraphNode]) -> Place<'b> {
        let aside = self.source.nodes[node].aside;
        let (side, priority) =
            (self.sides[usize::from(aside)].raw, if aside { Priority::Usual } else { Priority::First });
        Place { graph: self.exec.graph, behind, side, priority }
    }

    fn add_joint(
        &mut self,
        node: usize,
        joint: &JointNode,
        mut behind: Vec<sys::CUgraphNode>,
    ) -> Result<Vec<sys::CUgraphNode>, CudaError> {
        let group = joint.group as usize;
        let Some(end) = &self.communicators[group] else {
            let add = |copy: OwnCopy| match self.around {
                None => copy.add_node(self.card, self.exec.graph, &behind),
                Some(_) => {
                    let at = self.place(node, &behind);
                    launch::add_node(self.card, &at, &copy.call(), &self.post, node as u64 + 1, None)
                }
            };
            let nodes = copies_alone(&joint.body).into_iter().map(add).collect::<Result<Vec<_>, _>>()?;
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

    /// Tells what those behind the gate are behind.
    fn add_gate(
        &mut self,
        gate: u32,
        behind: Vec<sys::CUgraphNode>,
        way: Way,
    ) -> Result<Vec<sys::CUgraphNode>, CudaError> {
        if let Some(around) = &mut self.around {
            around.push((gate, way));
            return Ok(behind);
        }
        let gate = self.exec.add_gate(gate, &behind, way)?;
        let node = gate.node;
        self.gates.push(gate);
        // Whoever is behind a record needs no more than what is before it, and a chain that goes on beside its records is
        // cheaper to launch.
        Ok(if way == Way::Wait { vec![node] } else { behind })
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
