//! A plan with memory and events.

use std::sync::Arc;

use device::{Device, Event, MemoryKind, View};

use crate::{
    GtpError,
    plan::{ArenaSize, GtpPlan, PassPlan, Role, Slot},
    weight::Weight,
};

/// The plan of a kind of pass, its slots and what waits for them.
pub(crate) struct Attached {
    pub(crate) plan: Arc<PassPlan>,
    pub(crate) gathers: Vec<GatherSlot>,
    pub(crate) grads: Vec<GradSlot>,
}

pub(crate) struct GatherSlot {
    /// Flat: the whole weight, padding included.
    pub(crate) view: View,
    /// Behind the gather.
    pub(crate) gathered: Event,
    /// Behind the last use.
    pub(crate) used: Event,
}

pub(crate) struct GradSlot {
    /// Flat: the whole gradient, padding included.
    pub(crate) view: View,
    /// Behind what writes it.
    pub(crate) written: Event,
    /// Behind the reduce-scatter that reads it.
    pub(crate) reduced: Event,
    /// The same, told by the graph that has it to the one that writes next.
    pub(crate) gate: Event,
}

impl Attached {
    pub(crate) fn new(
        device: &Device,
        plan: &Arc<PassPlan>,
        weights: &[Weight],
        arenas: &Arenas,
    ) -> Result<Attached, GtpError> {
        let (kind, schedule) = (plan.kind(), plan.schedule());
        let event = |what: &str, at: usize, weight: usize| {
            device.event(&format!("gtp.{what}.{kind}.{at}.{}", weights[weight].param.name()))
        };
        let gather = |(i, gather): (usize, &crate::PlannedGather)| -> Result<GatherSlot, GtpError> {
            let weight = schedule.uses()[gather.uses[0].0].weight.0;
            Ok(GatherSlot {
                view: arenas.slot(Role::Gathers, &gather.slot)?,
                gathered: event("gathered", i, weight),
                used: event("used", i, weight),
            })
        };
        let grad = |(i, grad): (usize, &crate::PlannedGrad)| -> Result<GradSlot, GtpError> {
            let weight = schedule.grads()[i].weight.0;
            Ok(GradSlot {
                view: arenas.slot(Role::Grads, &grad.slot)?,
                written: event("grad", i, weight),
                reduced: event("reduced", i, weight),
                gate: event("reduced_gate", i, weight),
            })
        };
        Ok(Attached {
            gathers: plan.gathers().iter().enumerate().map(gather).collect::<Result<_, _>>()?,
            grads: plan.grads().iter().enumerate().map(grad).collect::<Result<_, _>>()?,
            plan: plan.clone(),
        })
    }

    /// Everything that somebody may wait for before it is recorded in a pass.
    pub(crate) fn events(&self) -> impl Iterator<Item = &Event> {
        let gathers = self.gathers.iter().flat_map(|slot| [&slot.gathered, &slot.used]);
        gathers.chain(self.grads.iter().flat_map(|slot| [&slot.written, &slot.reduced]))
    }
}

/// Memory of all slots: an arena for each role and element type, shared by all kinds of pass.
#[derive(Default)]
pub(crate) struct Arenas(Vec<(ArenaSize, View)>);

impl Arenas {
    /// Makes every arena as large as `plan` asks. Those that are large enough stay.
    pub(crate) fn grow(&mut self, device: &Device, plan: &GtpPlan) -> Result<(), GtpError> {
        for size in plan.arenas() {
            let known = self.0.iter().position(|(have, _)| have.role == size.role && have.dtype == size.dtype);
            if known.is_some_and(|at| self.0[at].0.numel >= size.numel) {
                continue;
            }
            let label = match size.role {
                Role::Gathers => "gtp.gathered",
                Role::Grads => "gtp.grads",
            };
            let view = device.alloc(label, &[size.numel], size.dtype, MemoryKind::Arena)?;
            match known {
                Some(at) => self.0[at] = (size, view),
                None => self.0.push((size, view)),
            }
        }
        Ok(())
    }

    fn slot(&self, role: Role, slot: &Slot) -> Result<View, GtpError> {
        let arena = self.0.iter().find(|(size, _)| size.role == role && size.dtype == slot.dtype);
        let (_, view) = arena.expect("BUG: an arena for every element type of the plan");
        Ok(view.flat(slot.range())?)
    }
}
