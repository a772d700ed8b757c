//! Collectives that do not end: who has not come to them, and how everybody gets out.

use std::{collections::BTreeMap, sync::Arc};

use super::{CudaEngine, CudaError, clique::Lease, engine::stream_on_card};
use crate::{
    Error, PendingJoint,
    device::DeviceInner,
    joint::{Arrival, JointRef},
    meeting::MeetingInner,
    queue::StreamInner,
};

impl CudaEngine {
    /// Joint operations on their way on the cards, with the stream of each member and whether that has got there.
    fn on_their_way(&self) -> Vec<(Arc<StreamInner>, JointRef, bool)> {
        let streams = self.open_streams();
        let joints = streams.iter().flat_map(|stream| {
            let joints = stream_on_card(stream).joints();
            joints.into_iter().map(|(joint, reached)| (stream.clone(), joint, reached))
        });
        joints.collect()
    }

    /// What has been called by all members and has not ended. The members whose streams have not got there are missing.
    pub(crate) fn pending(&self) -> Vec<PendingJoint> {
        let mut pending: BTreeMap<(String, u64), PendingJoint> = BTreeMap::new();
        for (stream, joint, reached) in self.on_their_way() {
            let group = joint.body().meeting.name.to_string();
            let entry = pending.entry((group.clone(), joint.number())).or_insert_with(|| PendingJoint {
                group,
                seq: joint.number(),
                what: joint.asks(joint.index()),
                arrived: Vec::new(),
                missing: Vec::new(),
            });
            let list = if reached { &mut entry.arrived } else { &mut entry.missing };
            list.push(stream.device.rank);
        }
        let sorted = pending.into_values().map(|mut joint| {
            joint.arrived.sort_unstable();
            joint.missing.sort_unstable();
            joint
        });
        sorted.collect()
    }

    /// The peers of `rank` in calls on their way that it has not passed: they get what it did not compute.
    pub(crate) fn peers_of(&self, rank: u32) -> Vec<Arrival> {
        let on_their_way = self.on_their_way();
        let is_own = |stream: &StreamInner| stream.device.rank == rank;
        let own: Vec<(*const MeetingInner, u64)> =
            on_their_way.iter().filter(|(stream, ..)| is_own(stream)).map(|(_, joint, _)| place(joint)).collect();
        let peers =
            on_their_way.into_iter().filter(|(stream, joint, _)| !is_own(stream) && own.contains(&place(joint)));
        peers.map(|(stream, joint, _)| Arrival { stream, joint }).collect()
    }

    /// A host of `device` has waited long enough: the groups that it may wait for are called no more.
    pub(crate) fn stop_collectives(&self, device: &DeviceInner) {
        self.tell_launches(device);
        for (stream, joint, _) in self.on_their_way() {
            if std::ptr::eq(&*stream.device, device)
                && let Some(lease) = joint.body().meeting.on_card.get()
            {
                lease.give_up();
            }
        }
    }

    /// Tells where the oldest launches of `device` stand: in each, the last kernel of ours that began.
    fn tell_launches(&self, device: &DeviceInner) {
        let rank = device.rank;
        for stream in self.open_streams().iter().filter(|stream| std::ptr::eq(&*stream.device, device)) {
            let Some((launch, begun)) = stream_on_card(stream).oldest_launch() else { continue };
            let graph = &launch.exec.graph;
            let last = begun.map(|node| format!("{} at {}", graph.op(node).name, graph.op(node).site.as_str()));
            let (nodes, last) = (graph.nodes.len(), last.unwrap_or_else(|| "nothing".to_owned()));
            tracing::error!(rank, graph = graph.name, nodes, node = begun, last, "cuda.launch_stands_still");
        }
    }

    /// Fails the members of groups of which NCCL says that they cannot go on.
    pub(super) fn ask_collectives(&self) {
        for (lease, source) in self.cliques.failures() {
            lease.give_up();
            self.fail_members(&lease, &source);
        }
    }

    fn fail_members(&self, lease: &Arc<Lease>, source: &CudaError) {
        for (stream, joint, _) in self.on_their_way() {
            let body = joint.body();
            if body.meeting.on_card.get().is_some_and(|own| Arc::ptr_eq(own, lease)) {
                self.fail_joint(&stream.device, &joint, source);
            }
        }
    }

    /// The sticky error of a member whose collective failed.
    pub(super) fn fail_joint(&self, device: &DeviceInner, joint: &JointRef, source: &CudaError) {
        let body = joint.body();
        let error = Error::Collective {
            op: body.name(),
            site: body.site.as_str().to_owned(),
            group: body.meeting.name.to_string(),
            seq: joint.number(),
            rank: device.rank,
            source: source.clone(),
        };
        device.machine.fail(device, error);
    }
}

/// Which call of which group it is.
fn place(joint: &JointRef) -> (*const MeetingInner, u64) {
    (Arc::as_ptr(&joint.body().meeting), joint.number())
}
