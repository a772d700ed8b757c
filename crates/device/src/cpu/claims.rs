//! Which operations of a device run now, and what they touch.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::{Access, OpRef, device::DeviceInner, executable::Part, joint::JointRef, launch::LaunchBody, queue::OpAt};

/// What runs.
#[derive(Clone)]
pub(crate) enum Claim {
    Op(OpAt),
    Joint(JointRef),
    /// Operations of a launch, one behind the other.
    Part(Arc<LaunchBody>, u32),
}

impl Claim {
    pub(crate) fn accesses(&self) -> &[Access] {
        match self {
            Claim::Op(op) => &op.op().accesses,
            Claim::Joint(joint) => &joint.body().accesses,
            Claim::Part(launch, part) => match &launch.exec.parts[*part as usize] {
                Part::Ops { claims, .. } => claims,
                Part::Single(_) => &[],
            },
        }
    }

    /// The operation that is in conflict with one of `others`.
    pub(crate) fn op_ref(&self, device: &DeviceInner, others: &[Access]) -> OpRef {
        match self {
            Claim::Op(op) => device.op_ref(op),
            Claim::Joint(joint) => device.joint_ref(joint),
            Claim::Part(launch, part) => {
                let nodes = launch.exec.nodes(*part).iter();
                let mut ops = nodes.map(|node| OpAt::Node(launch.clone(), *node));
                let meets = |op: &OpAt| op.op().accesses.iter().any(|a| others.iter().any(|b| a.conflicts(b)));
                device.op_ref(&ops.find(meets).expect("BUG: a part in a conflict that none of its operations has"))
            }
        }
    }

    fn is(&self, other: &Claim) -> bool {
        match (self, other) {
            (Claim::Op(a @ OpAt::Eager(_)), Claim::Op(b @ OpAt::Eager(_))) => a.position() == b.position(),
            (Claim::Op(OpAt::Node(a, i)), Claim::Op(OpAt::Node(b, j))) => i == j && Arc::ptr_eq(a, b),
            (Claim::Joint(JointRef::Call(a)), Claim::Joint(JointRef::Call(b))) => Arc::ptr_eq(a, b),
            (Claim::Joint(JointRef::Node(a, i)), Claim::Joint(JointRef::Node(b, j))) => i == j && Arc::ptr_eq(a, b),
            (Claim::Part(a, i), Claim::Part(b, j)) => i == j && Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

/// An operation in conflict with another one that runs.
pub(crate) struct Conflict {
    pub(crate) first: Claim,
    pub(crate) label: String,
}

/// The claims of one device. All of its memory is claimed here, so two operations that run at the same time never
/// touch the same byte with a write among them; taking and giving back the lock also orders what they wrote.
#[derive(Default)]
pub(crate) struct Claims {
    running: Mutex<Vec<Claim>>,
}

impl Claims {
    fn lock(&self) -> MutexGuard<'_, Vec<Claim>> {
        self.running.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// Claims all accesses, or none.
    pub(crate) fn acquire(&self, claim: &Claim) -> Result<(), Conflict> {
        let mut running = self.lock();
        for first in running.iter() {
            for a in claim.accesses() {
                if first.accesses().iter().any(|b| a.conflicts(b)) {
                    return Err(Conflict { first: first.clone(), label: a.view.label().to_owned() });
                }
            }
        }
        running.push(claim.clone());
        Ok(())
    }

    pub(crate) fn release(&self, claim: &Claim) {
        let mut running = self.lock();
        let at = running.iter().position(|c| c.is(claim)).expect("BUG: released what was not claimed");
        running.swap_remove(at);
    }
}
