//! Launches that meet: the members of a graph's collectives launch together, and so do all that these meet.
//!
//! A launch whose kernels wait on the card for those of another one must find that one on its way: what is queued
//! behind the first may hold up the second. So none of them goes to the card before all of them can.

use std::sync::Arc;

use crate::{
    joint::{Arrival, JointRef},
    launch::LaunchBody,
    queue::StreamInner,
};

/// Launches that have come up in their streams and wait for others.
#[derive(Default)]
pub(super) struct Gangs(Vec<Entry>);

pub(super) struct Entry {
    pub(super) launch: Arc<LaunchBody>,
    pub(super) stream: Arc<StreamInner>,
    /// Groups whose members have not all come.
    left: usize,
    /// Launches that it met in the others.
    met: Vec<Arc<LaunchBody>>,
}

impl Entry {
    /// Its first joint operation.
    pub(super) fn arrival(&self) -> Option<Arrival> {
        joints(&self.launch).next().map(|joint| Arrival { stream: self.stream.clone(), joint })
    }
}

/// What a meeting of launches leads to.
pub(super) enum Gang {
    /// Some of those that belong together wait for others.
    Incomplete,
    /// All that belong together.
    Complete(Vec<Entry>),
    /// One of them was given up before.
    Orphaned,
}

impl Gangs {
    pub(super) fn enter(&mut self, stream: &Arc<StreamInner>, launch: &Arc<LaunchBody>) {
        let left = launch.exec.graph.groups.len();
        self.0.push(Entry { launch: launch.clone(), stream: stream.clone(), left, met: Vec::new() });
    }

    fn find(&self, launch: &Arc<LaunchBody>) -> Option<usize> {
        self.0.iter().position(|entry| Arc::ptr_eq(&entry.launch, launch))
    }

    pub(super) fn has(&self, launch: &Arc<LaunchBody>) -> bool {
        self.find(launch).is_some()
    }

    /// All members of one group have come, with these launches.
    pub(super) fn meet(&mut self, arrivals: &[Arrival]) -> Gang {
        let launches: Vec<&Arc<LaunchBody>> = arrivals.iter().filter_map(launch_of).collect();
        let places: Option<Vec<usize>> = launches.iter().map(|launch| self.find(launch)).collect();
        let Some(places) = places else { return Gang::Orphaned };
        places.iter().for_each(|at| self.0[*at].left -= 1);
        if places.iter().all(|at| self.0[*at].left == 0 && self.0[*at].met.is_empty()) {
            // Their only group: there is nobody else.
            return Gang::Complete(self.take(places));
        }
        for at in places {
            let entry = &mut self.0[at];
            for launch in &launches {
                if !Arc::ptr_eq(launch, &entry.launch) && !entry.met.iter().any(|known| Arc::ptr_eq(known, launch)) {
                    entry.met.push(Arc::clone(launch));
                }
            }
        }
        let all = self.together(launches[0]);
        if all.iter().any(|at| self.0[*at].left > 0) { Gang::Incomplete } else { Gang::Complete(self.take(all)) }
    }

    /// Takes out `launch` and all that it has met. Nothing if somebody else did.
    pub(super) fn give_up(&mut self, launch: &Arc<LaunchBody>) -> Vec<Entry> {
        let all = self.together(launch);
        self.take(all)
    }

    /// Places of `launch` and of all that it has met, and that those have met.
    fn together(&self, launch: &Arc<LaunchBody>) -> Vec<usize> {
        let mut found: Vec<usize> = self.find(launch).into_iter().collect();
        let mut seen = 0;
        while let Some(&at) = found.get(seen) {
            seen += 1;
            for place in self.0[at].met.iter().filter_map(|launch| self.find(launch)) {
                if !found.contains(&place) {
                    found.push(place);
                }
            }
        }
        found
    }

    fn take(&mut self, mut places: Vec<usize>) -> Vec<Entry> {
        places.sort_unstable();
        // From behind, so that the places before stay.
        let mut taken: Vec<Entry> = places.into_iter().rev().map(|at| self.0.remove(at)).collect();
        taken.reverse();
        taken
    }
}

/// The launch that an arrival is a node of.
pub(super) fn launch_of(arrival: &Arrival) -> Option<&Arc<LaunchBody>> {
    match &arrival.joint {
        JointRef::Node(launch, _) => Some(launch),
        JointRef::Call(_) => None,
    }
}

/// Of each group of a launch the first joint operation: it comes for all.
pub(super) fn joints(launch: &Arc<LaunchBody>) -> impl Iterator<Item = JointRef> {
    launch.exec.graph.groups.iter().map(|calls| JointRef::Node(launch.clone(), calls[0]))
}
