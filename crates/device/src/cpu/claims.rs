//! Which operations of a device run now, and what they touch.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::{Access, OpRef, device::DeviceInner, meeting::JointBody, stream::OpBody};

/// A running operation.
#[derive(Clone)]
pub(crate) enum Claim {
    Op(Arc<OpBody>),
    Joint(Arc<JointBody>),
}

impl Claim {
    pub(crate) fn accesses(&self) -> &[Access] {
        match self {
            Claim::Op(body) => &body.op.accesses,
            Claim::Joint(body) => &body.accesses,
        }
    }

    pub(crate) fn op_ref(&self, device: &DeviceInner) -> OpRef {
        match self {
            Claim::Op(body) => device.op_ref(&body.op, body.stream, body.seq),
            Claim::Joint(body) => device.op_ref_of(body.name(), body.site.as_str(), body.stream, body.seq),
        }
    }

    fn is(&self, other: &Claim) -> bool {
        match (self, other) {
            (Claim::Op(a), Claim::Op(b)) => Arc::ptr_eq(a, b),
            (Claim::Joint(a), Claim::Joint(b)) => Arc::ptr_eq(a, b),
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
