//! Runs a program of streams in any order that its waits allow, and says of each operation what it is ordered behind.
//!
//! Streams have no choices: which of them moves first changes no order among operations. So one run proves something
//! about all runs, and a run that cannot end proves that none can.

mod joints; // calls of joint operations, when all members have come
mod running; // launches in progress

use std::collections::VecDeque;

pub(super) use self::joints::asked;
use self::{joints::Arrivals, running::Running};
use super::{
    clock::{Epoch, Point},
    program::{Item, ItemKind, PointId, Program},
};

/// An operation, as the run gets to it.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) event: u32,
    pub(super) node: Option<u32>,
    pub(super) stream: u32,
    /// What it is ordered behind, itself included.
    pub(super) point: &'a Point,
}

/// Who is told.
pub(super) trait Visitor {
    /// An operation or a member's call touches memory.
    fn touch(&mut self, step: Step<'_>);
    /// A note of a read, at its place in the stream.
    fn read(&mut self, step: Step<'_>);
}

/// A wait that was taken away, when the run has passed it.
pub(super) struct PassedDropped {
    /// Place in `Program::dropped`.
    pub(super) number: u32,
    /// What comes behind this would have been ordered.
    pub(super) at: Epoch,
}

/// Someone who cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Task {
    pub(super) stream: u32,
    /// In a launch.
    pub(super) node: Option<u32>,
}

/// Why a task cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// Until a point is reached.
    Point(PointId),
    /// Until the host has waited so often.
    Host(u32),
    /// Until the other members call.
    Call(u32),
}

enum PointState {
    Pending { tasks: Vec<Task>, hosts: Vec<u32> },
    Reached(Point),
}

struct StreamState {
    at: usize,
    point: Point,
    host_waits: u32,
    running: Option<Running>,
    blocked: Option<Blocked>,
}

struct HostState {
    done: u32,
    /// After so many waits, what the host is behind; no entry for none.
    behind: Vec<Point>,
    waiting: Vec<Task>,
}

/// A run in progress.
pub(super) struct Run<'p, 't, V> {
    pub(super) program: &'p Program<'t>,
    pub(super) visitor: V,
    streams: Vec<StreamState>,
    hosts: Vec<HostState>,
    points: Vec<PointState>,
    calls: Vec<Arrivals>,
    /// By chain.
    ticks: Vec<u32>,
    ready: VecDeque<Task>,
    pub(super) passed: Vec<PassedDropped>,
}

impl<'p, 't, V: Visitor> Run<'p, 't, V> {
    pub(super) fn new(program: &'p Program<'t>, visitor: V) -> Self {
        let chains = program.chains as usize;
        let start = |first_chain| StreamState {
            at: 0,
            point: Point::start(Epoch { chain: first_chain, tick: 0 }, chains),
            host_waits: 0,
            running: None,
            blocked: None,
        };
        let pending = || PointState::Pending { tasks: Vec::new(), hosts: Vec::new() };
        let calls = program.calls.all.iter().map(Arrivals::new);
        let mut run = Run {
            program,
            visitor,
            streams: program.streams.iter().map(|s| start(s.first_chain)).collect(),
            hosts: program.hosts.iter().map(|_| HostState { done: 0, behind: vec![], waiting: vec![] }).collect(),
            points: std::iter::repeat_with(pending).take(program.points as usize).collect(),
            calls: calls.collect(),
            ticks: vec![0; chains],
            ready: VecDeque::new(),
            passed: Vec::new(),
        };
        (0..program.hosts.len() as u32).for_each(|host| run.advance_host(host));
        run.ready.extend((0..program.streams.len() as u32).map(|stream| Task { stream, node: None }));
        run
    }

    /// Runs as far as anything can.
    pub(super) fn run(&mut self) {
        while let Some(task) = self.ready.pop_front() {
            match task.node {
                None => self.run_stream(task.stream),
                Some(node) => self.enter_node(task.stream, node),
            }
        }
    }

    /// All that could not go on, with the place in the trace.
    pub(super) fn blocked(&self) -> Vec<(Task, u32, Blocked)> {
        let mut found = Vec::new();
        for (stream, state) in (0..).zip(&self.streams) {
            let Some(item) = self.program.streams[stream as usize].items.get(state.at) else { continue };
            if let Some(running) = &state.running {
                let of = |(node, why): (u32, Blocked)| (Task { stream, node: Some(node) }, item.event, why);
                found.extend(running.blocked().map(of));
            } else if let Some(why) = state.blocked {
                found.push((Task { stream, node: None }, item.event, why));
            }
        }
        found
    }

    /// What a point is behind, if the run has reached it.
    pub(super) fn reached(&self, point: PointId) -> Option<&Point> {
        match &self.points[point as usize] {
            PointState::Reached(point) => Some(point),
            PointState::Pending { .. } => None,
        }
    }

    fn run_stream(&mut self, stream: u32) {
        let items: &'p [Item] = &self.program.streams[stream as usize].items;
        loop {
            let state = &mut self.streams[stream as usize];
            state.blocked = None;
            let Some(item) = items.get(state.at) else { return };
            if let Err(why) = self.run_item(stream, item) {
                self.streams[stream as usize].blocked = Some(why);
                return;
            }
            self.leave_item(stream, item);
        }
    }

    /// The item is done: whoever waits for it goes on.
    fn leave_item(&mut self, stream: u32, item: &Item) {
        self.streams[stream as usize].at += 1;
        if let Some(point) = item.point {
            let reached = self.streams[stream as usize].point.clone();
            self.reach(point, reached);
        }
    }

    fn run_item(&mut self, stream: u32, item: &Item) -> Result<(), Blocked> {
        self.follow_host(stream, item)?;
        match item.kind {
            ItemKind::Op => {
                self.tick(stream);
                self.touch(stream, item.event);
            }
            ItemKind::Record => {}
            ItemKind::Read => {
                let point = &self.streams[stream as usize].point;
                self.visitor.read(Step { event: item.event, node: None, stream, point });
            }
            ItemKind::Wait(on) => {
                let Some(on) = on else { return Ok(()) };
                let reached = self.await_point(on, Task { stream, node: None })?;
                if self.streams[stream as usize].point.join(&reached) {
                    self.tick(stream);
                }
            }
            ItemKind::Dropped(number) => {
                self.tick(stream);
                self.passed.push(PassedDropped { number, at: self.streams[stream as usize].point.at });
            }
            ItemKind::Joint(call) => self.call(stream, item, call)?,
            ItemKind::Launch(launch) => self.launch(stream, item, launch)?,
        }
        Ok(())
    }

    /// What the host has waited for before it submitted `item` comes before it.
    fn follow_host(&mut self, stream: u32, item: &Item) -> Result<(), Blocked> {
        if item.host_waits <= self.streams[stream as usize].host_waits {
            return Ok(());
        }
        let host = &mut self.hosts[self.program.streams[stream as usize].host as usize];
        if host.done < item.host_waits {
            host.waiting.push(Task { stream, node: None });
            return Err(Blocked::Host(item.host_waits));
        }
        let state = &mut self.streams[stream as usize];
        state.host_waits = item.host_waits;
        let behind = host.behind.get(item.host_waits as usize - 1).cloned();
        if let Some(behind) = behind {
            state.point.absorb(&behind);
            self.tick(stream);
        }
        Ok(())
    }

    fn advance_host(&mut self, host: u32) {
        let waits = &self.program.hosts[host as usize];
        loop {
            let state = &mut self.hosts[host as usize];
            let Some(next) = waits.get(state.done as usize) else { break };
            let chains = self.ticks.len();
            let last = state.behind.last().cloned();
            let mut behind = last.unwrap_or_else(|| Point::start(Epoch { chain: 0, tick: 0 }, chains));
            if let Some(next) = next {
                match &mut self.points[*next as usize] {
                    PointState::Pending { hosts, .. } => {
                        hosts.push(host);
                        break;
                    }
                    PointState::Reached(point) => {
                        behind.absorb(point);
                    }
                }
            }
            state.behind.push(behind);
            state.done += 1;
        }
        let waiting = std::mem::take(&mut self.hosts[host as usize].waiting);
        self.ready.extend(waiting);
    }

    fn await_point(&mut self, on: PointId, task: Task) -> Result<Point, Blocked> {
        match &mut self.points[on as usize] {
            PointState::Reached(point) => Ok(point.clone()),
            PointState::Pending { tasks, .. } => {
                tasks.push(task);
                Err(Blocked::Point(on))
            }
        }
    }

    fn reach(&mut self, id: PointId, point: Point) {
        let before = std::mem::replace(&mut self.points[id as usize], PointState::Reached(point));
        if let PointState::Pending { tasks, hosts } = before {
            self.ready.extend(tasks);
            hosts.into_iter().for_each(|host| self.advance_host(host));
        }
    }

    /// The next place on a stream's own chain.
    fn tick(&mut self, stream: u32) {
        let at = &mut self.streams[stream as usize].point.at;
        let tick = &mut self.ticks[at.chain as usize];
        *tick += 1;
        at.tick = *tick;
    }

    fn touch(&mut self, stream: u32, event: u32) {
        let point = &self.streams[stream as usize].point;
        self.visitor.touch(Step { event, node: None, stream, point });
    }
}
