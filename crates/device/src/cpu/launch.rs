//! Runs launches of graphs on the workers: each part by one worker, branches side by side.

use std::sync::{Arc, atomic::Ordering};

use super::{
    Claim,
    engine::Pool,
    exec::{self, race},
};
use crate::{
    executable::{ExecInner, Part},
    graph::NodeKind,
    joint::{Arrival, JointRef},
    launch::LaunchBody,
    queue::{Lane, OpAt, PartAt, Stage, StreamInner, Waiter},
};

/// Parts that this worker runs next: what costs nothing first, then operations, of which it keeps one part.
#[derive(Default)]
struct Todo {
    /// Gates and joint operations.
    quick: Vec<(u32, Stage)>,
    ops: Option<u32>,
}

/// How a part was left.
#[derive(PartialEq, Eq)]
enum Left {
    Finished,
    /// With a mark, or in a meeting.
    Parked,
}

impl Pool {
    /// Begins `launch` on the stream that this worker runs. True when it has ended; otherwise whoever ends it gives
    /// the stream back.
    pub(super) fn launch(&self, stream: &Arc<StreamInner>, launch: &Arc<LaunchBody>) -> bool {
        let mut todo = Todo::default();
        let flow = &launch.exec.flow;
        flow.begin().iter().for_each(|part| self.add(stream, launch, &mut todo, *part));
        let over = self.run_parts(stream, launch, todo);
        debug_assert!(!over, "BUG: a launch ended while it was held");
        let over = flow.let_go();
        if over {
            self.finish(launch);
        }
        over
    }

    /// Goes on with a part that waited.
    pub(super) fn resume_part(&self, at: PartAt) {
        let PartAt { launch, stream, part, stage } = at;
        let mut todo = Todo::default();
        match launch.exec.parts[part as usize] {
            Part::Ops { .. } => todo.ops = Some(part),
            Part::Single(_) => todo.quick.push((part, stage)),
        }
        if self.run_parts(&stream, &launch, todo) {
            self.finish(&launch);
            // Nothing of the launch is left when the stream goes on.
            drop(launch);
            self.ready.push(Waiter::Stream(stream));
        }
    }

    fn finish(&self, launch: &LaunchBody) {
        launch.finish().into_iter().for_each(|waiter| self.ready.push(waiter));
    }

    /// Another part may run: this worker keeps it, or leaves it to whoever is idle.
    fn add(&self, stream: &Arc<StreamInner>, launch: &Arc<LaunchBody>, todo: &mut Todo, part: u32) {
        match launch.exec.parts[part as usize] {
            Part::Single(_) => todo.quick.push((part, Stage::Begin)),
            Part::Ops { .. } if todo.ops.is_none() => todo.ops = Some(part),
            Part::Ops { .. } => self.leave(stream, launch, part),
        }
    }

    fn leave(&self, stream: &Arc<StreamInner>, launch: &Arc<LaunchBody>, part: u32) {
        let (launch, stream, stage) = (launch.clone(), stream.clone(), Stage::Begin);
        self.ready.push(Waiter::Part(PartAt { launch, stream, part, stage }));
    }

    /// Runs what is to do and what becomes ready by it. True if the launch is over.
    fn run_parts(&self, stream: &Arc<StreamInner>, launch: &Arc<LaunchBody>, mut todo: Todo) -> bool {
        let mut over = false;
        loop {
            let (part, left) = if let Some((part, stage)) = todo.quick.pop() {
                (part, self.run_single(stream, launch, &mut todo, part, stage))
            } else if let Some(part) = todo.ops.take() {
                self.run_ops(stream, launch, part);
                (part, Left::Finished)
            } else {
                return over;
            };
            if left == Left::Finished {
                over |= launch.exec.flow.finish(part, |next| self.add(stream, launch, &mut todo, next));
            }
        }
    }

    fn run_single(
        &self,
        stream: &Arc<StreamInner>,
        launch: &Arc<LaunchBody>,
        todo: &mut Todo,
        part: u32,
        stage: Stage,
    ) -> Left {
        if stage == Stage::Met {
            return Left::Finished;
        }
        let Part::Single(node) = launch.exec.parts[part as usize] else { unreachable!("BUG: operations are no gate") };
        let at = |stage| Waiter::Part(PartAt { launch: launch.clone(), stream: stream.clone(), part, stage });
        match launch.exec.graph.nodes[node as usize].kind {
            NodeKind::Wait(gate, _) => {
                if launch.gate(gate).is_some_and(|mark| mark.park(at(Stage::Begin)).is_ok()) {
                    return Left::Parked;
                }
                launch.start(1);
            }
            NodeKind::Record(gate) => {
                launch.start(1);
                let mark = launch.gate(gate).expect("BUG: a record without a mark");
                mark.complete().into_iter().for_each(|waiter| self.ready.push(waiter));
            }
            NodeKind::Joint(_) => {
                // The exchange may run here, and somebody idle need not wait for it.
                if let Some(ops) = todo.ops.take() {
                    self.leave(stream, launch, ops);
                }
                let joint = JointRef::Node(launch.clone(), node);
                if !self.arrive(Arrival { stream: stream.clone(), joint }) {
                    return Left::Parked;
                }
            }
            NodeKind::Op(_) => unreachable!("BUG: an operation is never single"),
        }
        Left::Finished
    }

    /// Runs operations one behind the other under one claim. Those behind a failure are skipped.
    fn run_ops(&self, stream: &StreamInner, launch: &Arc<LaunchBody>, part: u32) {
        let device = &stream.device;
        let nodes = launch.exec.nodes(part);
        launch.start(nodes.len());
        if device.failed() {
            return;
        }
        let claim = Claim::Part(launch.clone(), part);
        if let Err(conflict) = device.claims.acquire(&claim) {
            device.machine.fail(device, race(device, &conflict, &claim));
            return;
        }
        for node in nodes {
            let start = device.machine.tracer.now();
            let op = OpAt::Node(launch.clone(), *node);
            let ran = exec::run_claimed(device, &op, self, true, || {
                if start > 0 {
                    let end = device.machine.tracer.now();
                    exec::trace_run(device, op.position(), op.op().name, start, end);
                }
            });
            if !ran {
                break;
            }
            device.machine.progress.fetch_add(1, Ordering::Relaxed);
        }
        device.claims.release(&claim);
    }

    /// The stream was dropped in a launch: what has begun is waited for, the rest is thrown away.
    pub(super) fn end_launch(&self, stream: &StreamInner, lane: &mut Lane) {
        let Some(launch) = lane.launch.clone() else { return };
        // They are in no meeting any more, so they cannot happen while the others are told that they did not.
        let withdrawn = withdraw(&launch.exec, &launch);
        let unstarted = launch.unstarted();
        if unstarted > 0 {
            // What is queued stays behind the launch: its marks complete when the stream goes on, skipping.
            lane.batch.append(&mut stream.inbox.drain());
            stream.throw_away(&lane.batch[lane.at..], unstarted);
        }
        for arrival in &withdrawn {
            arrival.begin();
            stream.device.machine.engine.resume(arrival);
        }
    }
}

/// Takes the launch's joint operations that wait for others out of their meetings.
fn withdraw(exec: &ExecInner, launch: &Arc<LaunchBody>) -> Vec<Arrival> {
    let joints = exec.graph.groups.iter().flatten();
    joints.filter_map(|node| JointRef::Node(launch.clone(), *node).withdraw()).collect()
}
