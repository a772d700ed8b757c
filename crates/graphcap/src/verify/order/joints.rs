//! Calls of joint operations: members come, and when all are there each goes on behind what its data is behind.

use std::rc::Rc;

use device::{TraceEvent, TraceNodeKind};

use super::{Blocked, Run, Task, Visitor};
use crate::verify::{
    clock::{Point, absorb},
    joint::{Call, Flow, place},
    program::{Item, Program},
};

/// Who has come to a call.
pub(super) struct Arrivals {
    /// By member: who waits, and what its call is behind.
    came: Vec<Option<(Task, Point)>>,
    missing: usize,
    /// By member, when all have come: what its end is behind, its own call apart.
    ends: Option<Vec<Rc<Vec<u32>>>>,
}

impl Arrivals {
    pub(super) fn new(call: &Call) -> Arrivals {
        let missing = call.before_trace.iter().filter(|before| !**before).count();
        Arrivals { came: vec![None; call.members.len()], missing, ends: None }
    }
}

/// What a member asks for.
pub(in crate::verify) fn asked<'t>(program: &Program<'t>, call: &Call, member: usize) -> Option<&'t str> {
    let caller = call.callers[member]?;
    match (&program.trace.events[caller.event as usize], caller.node) {
        (TraceEvent::Joint { what, .. }, None) => Some(what),
        (TraceEvent::Launch { graph, .. }, Some(node)) => match &graph.nodes[node as usize].what {
            TraceNodeKind::Joint { what, .. } => Some(what),
            _ => None,
        },
        _ => None,
    }
}

impl<V: Visitor> Run<'_, '_, V> {
    /// A stream's own call. It is entered once to come, and once more when all have.
    pub(super) fn call(&mut self, stream: u32, item: &Item, call: u32) -> Result<(), Blocked> {
        let before = self.streams[stream as usize].point.clone();
        let task = Task { stream, node: None };
        if !self.has_come(call, stream) {
            self.tick(stream);
            self.touch(stream, item.event);
        }
        let end = self.meet(call, task, before)?;
        let state = &mut self.streams[stream as usize];
        state.point.seen = end;
        self.tick(stream);
        Ok(())
    }

    pub(super) fn has_come(&self, call: u32, stream: u32) -> bool {
        let rank = self.program.streams[stream as usize].rank;
        let members = &self.program.calls.all[call as usize].members;
        place(members, rank).is_some_and(|member| self.calls[call as usize].came[member].is_some())
    }

    /// `task` calls, behind `before`. What its end is behind, when all members have come.
    pub(super) fn meet(&mut self, call: u32, task: Task, before: Point) -> Result<Rc<Vec<u32>>, Blocked> {
        let rank = self.program.streams[task.stream as usize].rank;
        let known = &self.program.calls.all[call as usize];
        // A rank that is no member meets nobody; there is no such call on a machine.
        let Some(member) = place(&known.members, rank) else { return Ok(before.seen) };
        let arrivals = &mut self.calls[call as usize];
        if let Some(ends) = &arrivals.ends {
            return Ok(ends[member].clone());
        }
        if arrivals.came[member].is_none() {
            arrivals.came[member] = Some((task, before));
            arrivals.missing -= 1;
        }
        if arrivals.missing > 0 {
            return Err(Blocked::Call(call));
        }
        let what = (0..known.members.len()).find_map(|member| asked(self.program, known, member));
        let ends = ends(&arrivals.came, what.unwrap_or_default());
        let end = ends[member].clone();
        arrivals.ends = Some(ends);
        let others = arrivals.came.iter().flatten().map(|(other, _)| *other).filter(|other| *other != task);
        self.ready.extend(others);
        Ok(end)
    }
}

/// By member: what its end is behind. All sources of what it receives, and what its own call was behind.
fn ends(came: &[Option<(Task, Point)>], what: &str) -> Vec<Rc<Vec<u32>>> {
    let own = |member: usize| came[member].as_ref().map(|(_, point)| point.seen.clone()).unwrap_or_default();
    let mut ends: Vec<Rc<Vec<u32>>> = (0..came.len()).map(own).collect();
    for flow in Flow::of(what, came.len()) {
        let mut data: Option<Vec<u32>> = None;
        for (_, point) in
            came.iter().zip(&flow.sources).filter(|(_, is_source)| **is_source).filter_map(|(c, _)| c.as_ref())
        {
            absorb(data.get_or_insert_with(|| vec![0; point.seen.len()]), point);
        }
        let Some(data) = data.map(Rc::new) else { continue };
        for (member, end) in ends.iter_mut().enumerate().filter(|(member, _)| flow.consumers[*member]) {
            if flow.sources[member] && Rc::ptr_eq(end, &own(member)) {
                // What a source is behind is in the data.
                *end = data.clone();
            } else {
                let end = Rc::make_mut(end);
                end.iter_mut().zip(data.iter()).for_each(|(own, others)| *own = (*own).max(*others));
            }
        }
    }
    ends
}
