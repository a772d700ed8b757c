//! Launches in progress: nodes go on as soon as those before them are done, whatever other branches wait for.

use std::rc::Rc;

use device::TraceNodeKind;

use super::{Blocked, PassedDropped, Run, Task, Visitor};
use crate::verify::{
    clock::{Epoch, Point, absorb},
    order::Step,
    program::{Gate, Item, Launched},
};

/// One launch.
pub(super) struct Running {
    launch: u32,
    base: Point,
    /// By node: nodes before it that are not done.
    behind: Vec<u32>,
    /// By node: what its start is behind, so far; then where it ended.
    points: Vec<Option<Point>>,
    /// By node: why it cannot go on.
    waits: Vec<Option<Blocked>>,
    left: usize,
}

impl Running {
    pub(super) fn blocked(&self) -> impl Iterator<Item = (u32, Blocked)> {
        (0..).zip(&self.waits).filter_map(|(node, why)| why.map(|why| (node, why)))
    }
}

impl<V: Visitor> Run<'_, '_, V> {
    /// Starts a launch, and ends it when it is entered again with all nodes done.
    pub(super) fn launch(&mut self, stream: u32, item: &Item, launch: u32) -> Result<(), Blocked> {
        let launched = &self.program.launches[launch as usize];
        let Some(running) = &self.streams[stream as usize].running else {
            if let Some(after) = launched.after {
                // One executable never overlaps itself.
                let reached = self.await_point(after, Task { stream, node: None })?;
                self.streams[stream as usize].point.join(&reached);
            }
            self.tick(stream);
            return self.start(stream, item, launch);
        };
        if running.left > 0 {
            return Err(self.some_wait(stream));
        }
        self.end(stream);
        Ok(())
    }

    fn start(&mut self, stream: u32, item: &Item, launch: u32) -> Result<(), Blocked> {
        let program = self.program;
        let launched = &program.launches[launch as usize];
        let shape = &program.shapes[launched.shape as usize];
        let count = launched.graph.nodes.len();
        let mut base = self.streams[stream as usize].point.clone();
        Rc::make_mut(&mut base.seen)[base.at.chain as usize] = base.at.tick;
        let running = Running {
            launch,
            base,
            behind: shape.behind.clone(),
            points: vec![None; count],
            waits: vec![None; count],
            left: count,
        };
        self.streams[stream as usize].running = Some(running);
        let first: Vec<u32> = (0..count as u32).filter(|&node| shape.behind[node as usize] == 0).collect();
        first.into_iter().for_each(|node| self.run_from(stream, item.event, node));
        let done = self.streams[stream as usize].running.as_ref().is_none_or(|running| running.left == 0);
        if done {
            self.end(stream);
            return Ok(());
        }
        Err(self.some_wait(stream))
    }

    /// What one of its nodes waits for.
    fn some_wait(&self, stream: u32) -> Blocked {
        let running = self.streams[stream as usize].running.as_ref();
        let why = running.and_then(|running| running.blocked().next());
        why.map(|(_, why)| why).expect("BUG: a launch that is not done and waits for nothing")
    }

    fn end(&mut self, stream: u32) {
        let program = self.program;
        let state = &mut self.streams[stream as usize];
        let running = state.running.take().expect("BUG: a launch ends once");
        let launched = &program.launches[running.launch as usize];
        let mut seen = (*running.base.seen).clone();
        for &last in &program.shapes[launched.shape as usize].last {
            absorb(&mut seen, running.points[last as usize].as_ref().expect("BUG: a node that is not done"));
        }
        state.point.seen = Rc::new(seen);
        self.tick(stream);
    }

    /// A node that waited can go on, and with the last one its stream.
    pub(super) fn enter_node(&mut self, stream: u32, node: u32) {
        let state = &mut self.streams[stream as usize];
        let Some(running) = &mut state.running else { return };
        running.waits[node as usize] = None;
        let event = self.program.streams[stream as usize].items[state.at].event;
        self.run_from(stream, event, node);
        if self.streams[stream as usize].running.as_ref().is_some_and(|running| running.left == 0) {
            self.ready.push_back(Task { stream, node: None });
        }
    }

    /// Runs `node`, and all that can run behind it.
    fn run_from(&mut self, stream: u32, event: u32, node: u32) {
        let program = self.program;
        let mut todo = vec![node];
        while let Some(node) = todo.pop() {
            if let Err(why) = self.run_node(stream, event, node) {
                let running = self.streams[stream as usize].running.as_mut().expect("BUG: it runs");
                running.waits[node as usize] = Some(why);
                continue;
            }
            let running = self.streams[stream as usize].running.as_mut().expect("BUG: it runs");
            running.left -= 1;
            let launched = &program.launches[running.launch as usize];
            let ended = running.points[node as usize].clone().expect("BUG: it has just ended");
            for &next in program.shapes[launched.shape as usize].after[node as usize].iter().rev() {
                running.behind[next as usize] -= 1;
                let point = &mut running.points[next as usize];
                match point {
                    Some(point) => {
                        point.absorb(&ended);
                        point.at.tick = point.at.tick.max(point.seen[point.at.chain as usize]);
                    }
                    // The node gets a place of its own when it runs; until then this stands for what it is behind.
                    None => {
                        *point = Some(behind_only(
                            &ended,
                            program.shapes[launched.shape as usize].chain[next as usize]
                                + program.streams[stream as usize].first_chain,
                        ))
                    }
                }
                if running.behind[next as usize] == 0 {
                    todo.push(next);
                }
            }
            if let Some(point) = launched.points.get(&node) {
                self.reach(*point, ended);
            }
        }
    }

    fn run_node(&mut self, stream: u32, event: u32, node: u32) -> Result<(), Blocked> {
        let program = self.program;
        let running = self.streams[stream as usize].running.as_mut().expect("BUG: it runs");
        let launched = &program.launches[running.launch as usize];
        let chain =
            program.streams[stream as usize].first_chain + program.shapes[launched.shape as usize].chain[node as usize];
        let base = &running.base;
        let own = || Point { at: Epoch { chain, tick: base.seen[chain as usize] }, seen: base.seen.clone() };
        let mut point = running.points[node as usize].get_or_insert_with(own).clone();
        let task = Task { stream, node: Some(node) };
        let what = &launched.graph.nodes[node as usize].what;
        match launched.gates.get(&node) {
            Some(Gate::Wait(Some(on))) => {
                let reached = self.await_point(*on, task)?;
                point.absorb(&reached);
                self.move_to(&mut point);
                self.pass_dropped(launched, node, &point);
            }
            Some(Gate::Joint(call)) => {
                let call = *call;
                let before = point.clone();
                if !self.has_come(call, stream) {
                    self.move_to(&mut point);
                    self.visitor.touch(Step { event, node: Some(node), stream, point: &point });
                    // In front of the call: its end comes later than what it touches.
                    self.pass_dropped(launched, node, &point);
                }
                point.seen = self.meet(call, task, before)?;
                self.move_to(&mut point);
            }
            _ => {
                self.move_to(&mut point);
                self.pass_dropped(launched, node, &point);
                if matches!(what, TraceNodeKind::Op { .. } | TraceNodeKind::Joint { .. }) {
                    self.visitor.touch(Step { event, node: Some(node), stream, point: &point });
                }
            }
        }
        let running = self.streams[stream as usize].running.as_mut().expect("BUG: it runs");
        running.points[node as usize] = Some(point);
        Ok(())
    }

    /// The run is past the waits in front of `node` that were taken away.
    fn pass_dropped(&mut self, launched: &Launched<'_>, node: u32, point: &Point) {
        for (_, number) in launched.dropped.iter().filter(|(at, _)| *at == node) {
            self.passed.push(PassedDropped { number: *number, at: point.at });
        }
    }

    /// The next place on the chain.
    fn move_to(&mut self, point: &mut Point) {
        let tick = &mut self.ticks[point.at.chain as usize];
        *tick += 1;
        point.at.tick = *tick;
    }
}

/// Behind `ended`, without a place of its own on its chain yet.
fn behind_only(ended: &Point, chain: u32) -> Point {
    if ended.at.chain == chain {
        return ended.clone();
    }
    let mut seen = ended.seen.clone();
    Rc::make_mut(&mut seen)[ended.at.chain as usize] = ended.at.tick;
    Point { at: Epoch { chain, tick: seen[chain as usize] }, seen }
}
