//! When each use is gathered, and where gathered weights and weight gradients lie.

use std::{collections::BTreeMap, fmt, ops::Range, sync::Arc};

use device::DType;

use crate::{
    config::GtpConfig,
    schedule::{GatherIndex, GradIndex, PassKind, Schedule, UseIndex},
    slots::{Lifetime, SlotPlan},
};

/// What a plan needs to know of a sharded weight.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WeightPlan {
    /// Its name.
    pub name: String,
    /// Which of [`GtpConfig::axes`] cuts it.
    pub axis: usize,
    /// Elements when gathered, padding included.
    pub numel: usize,
    /// Shards that it is cut into.
    pub shards: usize,
    /// Element type of its values.
    pub value: DType,
    /// Element type of its gradients.
    pub grad: DType,
}

/// Elements of an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Element type: each has an arena of its own.
    pub dtype: DType,
    /// First element.
    pub offset: usize,
    /// Elements.
    pub numel: usize,
}

impl Slot {
    /// Its elements in the arena.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.numel
    }

    /// Both are in one arena and share an element.
    #[must_use]
    pub fn overlaps(&self, other: &Slot) -> bool {
        let (a, b) = (self.range(), other.range());
        self.dtype == other.dtype && a.start < b.end && b.start < a.end
    }
}

/// A gather and the uses that it serves: a weight that is still there when it would be gathered for another use stays
/// instead.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedGather {
    /// Its uses, in order: one at least.
    pub uses: Vec<UseIndex>,
    /// The use at whose begin it is issued: its own first one if nothing hides it.
    pub issued_at: UseIndex,
    /// Where the whole weight lies.
    pub slot: Slot,
    /// Gathers that had the slot last, of this pass or of the one before: this one waits until their uses have ended.
    pub after: Vec<GatherIndex>,
}

/// A weight gradient with its slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedGrad {
    /// Where it is written.
    pub slot: Slot,
    /// Gradients that had the slot last: it is written when they have been reduced.
    pub after: Vec<GradIndex>,
}

/// The plan of one kind of pass. Pure data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PassPlan {
    kind: PassKind,
    schedule: Schedule,
    gathers: Vec<PlannedGather>,
    /// By use: its gather, and the gathers that are issued when it begins.
    served: Vec<GatherIndex>,
    issues: Vec<Vec<GatherIndex>>,
    grads: Vec<PlannedGrad>,
    /// By element type: elements of the arenas.
    gather_numel: BTreeMap<&'static str, (DType, usize)>,
    grad_numel: BTreeMap<&'static str, (DType, usize)>,
}

impl PassPlan {
    /// Plans a kind of pass from its schedule.
    #[must_use]
    pub fn new(kind: PassKind, schedule: Schedule, weights: &[WeightPlan], config: &GtpConfig) -> PassPlan {
        let issued_at = issue_points(&schedule, weights, config);
        let last = schedule.steps().len().saturating_sub(1);
        let stays = stays(&schedule, &issued_at);
        let lives: Vec<(DType, Lifetime)> = stays
            .iter()
            .map(|uses| {
                let of = |u: usize| schedule.uses()[u];
                let first = uses[0];
                let weight = &weights[of(first).weight.0];
                // A use may end behind others that have begun inside it.
                let end = uses.iter().map(|u| of(*u).give_back).max().expect("BUG: a gather without a use");
                let life = (of(issued_at[first]).take, end.min(last));
                (weight.value, Lifetime { from: life.0, to: life.1, numel: weight.numel })
            })
            .collect();
        let behind = config.grads_behind.get();
        let all = schedule.grads();
        let grads: Vec<(DType, Lifetime)> = (0..all.len())
            .map(|i| {
                let weight = &weights[all[i].weight.0];
                // Its reduction hides behind the gradients that follow.
                let to = all.get(i + behind).map_or(last, |later| later.done.max(all[i].done).min(last));
                (weight.grad, Lifetime { from: all[i].open, to, numel: weight.numel })
            })
            .collect();
        let (gather_slots, gather_numel) = place(&lives);
        let (grad_slots, grad_numel) = place(&grads);
        let gather = |i: usize| PlannedGather {
            uses: stays[i].iter().copied().map(UseIndex).collect(),
            issued_at: UseIndex(issued_at[stays[i][0]]),
            slot: gather_slots[i],
            after: tenants_before(i, &lives, &gather_slots).into_iter().map(GatherIndex).collect(),
        };
        let gathers: Vec<PlannedGather> = (0..stays.len()).map(gather).collect();
        let mut served = vec![GatherIndex(0); schedule.uses().len()];
        let mut issues = vec![Vec::new(); schedule.uses().len()];
        for (i, gather) in gathers.iter().enumerate() {
            gather.uses.iter().for_each(|u| served[u.0] = GatherIndex(i));
            issues[gather.issued_at.0].push(GatherIndex(i));
        }
        let grads = (0..grads.len()).map(|i| PlannedGrad {
            slot: grad_slots[i],
            after: tenants_before(i, &grads, &grad_slots).into_iter().map(GradIndex).collect(),
        });
        let grads = grads.collect();
        PassPlan { kind, schedule, gathers, served, issues, grads, gather_numel, grad_numel }
    }

    /// Which kind of pass it is of.
    #[must_use]
    pub fn kind(&self) -> PassKind {
        self.kind
    }

    /// What the pass does.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// All gathers, in the order of their first uses.
    #[must_use]
    pub fn gathers(&self) -> &[PlannedGather] {
        &self.gathers
    }

    /// The gather that serves a use.
    #[must_use]
    pub fn gather_of(&self, taken: UseIndex) -> GatherIndex {
        self.served[taken.0]
    }

    /// Gathers that are issued when a use begins, in order.
    #[must_use]
    pub fn issues(&self, taken: UseIndex) -> &[GatherIndex] {
        &self.issues[taken.0]
    }

    /// By gradient.
    #[must_use]
    pub fn grads(&self) -> &[PlannedGrad] {
        &self.grads
    }

    /// Bytes of the slots of gathered weights.
    #[must_use]
    pub fn gather_bytes(&self) -> usize {
        bytes(&self.gather_numel)
    }

    /// Bytes of the slots of weight gradients.
    #[must_use]
    pub fn grad_bytes(&self) -> usize {
        bytes(&self.grad_numel)
    }
}

impl PassPlan {
    /// A line for each use.
    fn table(&self, weights: &[WeightPlan], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, taken) in self.schedule.uses().iter().enumerate() {
            let name = |at: UseIndex| &weights[self.schedule.uses()[at.0].weight.0].name;
            let gather = &self.gathers[self.served[i].0];
            let Slot { dtype, offset, numel } = gather.slot;
            let (offset, bytes) = (offset * dtype.size_bytes(), numel * dtype.size_bytes());
            write!(
                f,
                "\n  {i:>4} {:<9} {:<32} {bytes:>10} bytes at {offset:>10}, ",
                taken.pass.name(),
                name(UseIndex(i))
            )?;
            match (gather.uses[0].0, gather.issued_at.0) {
                (first, _) if first != i => write!(f, "stays from {first}")?,
                (_, at) if at == i => write!(f, "gathered in the open")?,
                (_, at) => write!(f, "gathered behind {at} ({})", name(UseIndex(at)))?,
            }
        }
        Ok(())
    }
}

fn bytes(numel: &BTreeMap<&'static str, (DType, usize)>) -> usize {
    numel.values().map(|(dtype, numel)| numel * dtype.size_bytes()).sum()
}

/// By use: the use at whose begin its gather is issued, as far ahead as uses and bytes of its axis allow.
fn issue_points(schedule: &Schedule, weights: &[WeightPlan], config: &GtpConfig) -> Vec<usize> {
    let uses = schedule.uses();
    let mut points: Vec<usize> = Vec::with_capacity(uses.len());
    for i in 0..uses.len() {
        let weight = &weights[uses[i].weight.0];
        let axis = &config.axes[weight.axis];
        let own = |u: usize| weights[uses[u].weight.0].axis == weight.axis;
        let size = |u: usize| weights[uses[u].weight.0].numel * weights[uses[u].weight.0].value.size_bytes();
        let (mut at, mut ahead) = (i, 0);
        for earlier in (0..i).rev() {
            // Ahead of the earlier use's begin: everything of the axis between it and this use.
            let bytes: usize = (earlier + 1..=i).filter(|u| own(*u)).map(size).sum();
            let too_many = ahead == axis.look_ahead;
            if too_many || axis.look_ahead_bytes.is_some_and(|limit| bytes > limit) {
                break;
            }
            // A use of another axis is a place to issue at as well; it counts for nobody's look-ahead but its own's.
            at = earlier;
            ahead += usize::from(own(earlier));
        }
        // Gathers of an axis are issued in the order of their uses.
        let floor = (0..i).rev().find(|u| own(*u)).map_or(0, |before| points[before]);
        points.push(at.max(floor));
    }
    points
}

/// Uses that one gather serves, in order: whoever would be gathered while the same weight is there waits for nothing.
fn stays(schedule: &Schedule, issued_at: &[usize]) -> Vec<Vec<usize>> {
    let uses = schedule.uses();
    let mut stays: Vec<Vec<usize>> = Vec::new();
    for (i, taken) in uses.iter().enumerate() {
        let issued = uses[issued_at[i]].take;
        let there = |stay: &&mut Vec<usize>| {
            let before = uses[stay[stay.len() - 1]];
            before.weight == taken.weight && before.give_back > issued
        };
        match stays.iter_mut().rev().find(there) {
            Some(stay) => stay.push(i),
            None => stays.push(vec![i]),
        }
    }
    stays
}

type Numels = BTreeMap<&'static str, (DType, usize)>;

/// Places buffers, an arena for each element type.
fn place(buffers: &[(DType, Lifetime)]) -> (Vec<Slot>, Numels) {
    let mut slots = vec![Slot { dtype: DType::F32, offset: 0, numel: 0 }; buffers.len()];
    let mut numels = Numels::new();
    for dtype in [DType::F32, DType::Bf16] {
        let of_type: Vec<usize> = (0..buffers.len()).filter(|i| buffers[*i].0 == dtype).collect();
        let lifetimes: Vec<Lifetime> = of_type.iter().map(|i| buffers[*i].1).collect();
        let plan = SlotPlan::lay_out(&lifetimes);
        for (i, offset) in of_type.iter().zip(&plan.offsets) {
            slots[*i] = Slot { dtype, offset: *offset, numel: buffers[*i].1.numel };
        }
        if plan.numel > 0 {
            let name = if dtype == DType::F32 { "f32" } else { "bf16" };
            numels.insert(name, (dtype, plan.numel));
        }
    }
    (slots, numels)
}

/// Who had the elements of buffer `i` last, going back from where its life begins, through this pass and then from the
/// end of the one before, until every element is accounted for.
fn tenants_before(i: usize, buffers: &[(DType, Lifetime)], slots: &[Slot]) -> Vec<usize> {
    let begin = buffers[i].1.from;
    let mut candidates: Vec<usize> = (0..buffers.len()).filter(|t| slots[*t].overlaps(&slots[i])).collect();
    // The latest first: those that ended in this pass, then those of the pass before, this buffer's own life included.
    let ended = |t: usize| buffers[t].1.to < begin && t != i;
    candidates.sort_by_key(|t| (!ended(*t), std::cmp::Reverse((buffers[*t].1.to, *t))));
    let mut open = vec![slots[i].range()];
    let mut found = Vec::new();
    for tenant in candidates {
        let held = slots[tenant].range();
        if !open.iter().any(|range| range.start < held.end && held.start < range.end) {
            continue;
        }
        found.push(tenant);
        open = open.into_iter().flat_map(|range| outside(&range, &held)).collect();
        if open.is_empty() {
            break;
        }
    }
    found
}

/// The parts of `range` outside `held`.
fn outside(range: &Range<usize>, held: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let before = range.start..held.start.clamp(range.start, range.end);
    let behind = held.end.clamp(range.start, range.end)..range.end;
    [before, behind].into_iter().filter(|part| part.start < part.end)
}

/// The plans of all kinds of pass. They take turns, so their slots share arenas, each as large as the largest asks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GtpPlan {
    pub(crate) weights: Vec<WeightPlan>,
    /// f32: where reductions arrive.
    pub(crate) arrivals: usize,
    pub(crate) passes: BTreeMap<PassKind, Arc<PassPlan>>,
}

impl GtpPlan {
    /// The weights, in declared order.
    #[must_use]
    pub fn weights(&self) -> &[WeightPlan] {
        &self.weights
    }

    /// The plan of a kind of pass.
    #[must_use]
    pub fn pass(&self, kind: PassKind) -> Option<&Arc<PassPlan>> {
        self.passes.get(&kind)
    }

    /// All of them.
    pub fn passes(&self) -> impl Iterator<Item = &Arc<PassPlan>> {
        self.passes.values()
    }

    /// Bytes of a rank: all slots, and where reductions arrive.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let arenas = self.arenas();
        let slots: usize = arenas.iter().map(|arena| arena.numel * arena.dtype.size_bytes()).sum();
        slots + self.arrivals * DType::F32.size_bytes()
    }

    /// A line: weights, bytes of their slots, gathers of each kind of pass and how many nothing hides.
    #[must_use]
    pub fn summary(&self) -> String {
        let mib = self.bytes() as f64 / f64::from(1 << 20);
        let pass = |pass: &Arc<PassPlan>| {
            let open = pass.gathers.iter().filter(|gather| gather.issued_at == gather.uses[0]).count();
            format!("{} {} ({open} in the open)", pass.kind, pass.gathers.len())
        };
        let passes: Vec<String> = self.passes.values().map(pass).collect();
        let weights = self.weights.len();
        format!("{weights} sharded weights, slots of {mib:.2} MiB; gathers of a pass: {}", passes.join(", "))
    }

    /// Elements by element type, of gathered weights and of weight gradients.
    pub(crate) fn arenas(&self) -> Vec<ArenaSize> {
        let mut sizes: Vec<ArenaSize> = Vec::new();
        for (role, numels) in self.passes.values().flat_map(|pass| {
            let gathers = pass.gather_numel.values().map(|numel| (Role::Gathers, *numel));
            gathers.chain(pass.grad_numel.values().map(|numel| (Role::Grads, *numel)))
        }) {
            let (dtype, numel) = numels;
            match sizes.iter_mut().find(|size| size.role == role && size.dtype == dtype) {
                Some(size) => size.numel = size.numel.max(numel),
                None => sizes.push(ArenaSize { role, dtype, numel }),
            }
        }
        sizes
    }
}

/// What an arena holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Gathers,
    Grads,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ArenaSize {
    pub(crate) role: Role,
    pub(crate) dtype: DType,
    pub(crate) numel: usize,
}

impl fmt::Display for GtpPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        write!(f, "{} sharded weights, slots of {:.2} MiB", self.weights.len(), mib(self.bytes()))?;
        for pass in self.passes.values() {
            let (gathers, grads) = (mib(pass.gather_bytes()), mib(pass.grad_bytes()));
            write!(f, "\npass '{}': gathered weights {gathers:.2} MiB, weight gradients {grads:.2} MiB", pass.kind)?;
            pass.table(&self.weights, f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use pgroups::{Axis, ParamClass, Pass};
    use proptest::prelude::*;

    use super::*;
    use crate::{
        config::ShardAxis,
        schedule::{Step, WeightIndex},
        slots::ALIGN,
    };

    fn config(look_ahead: usize, bytes: Option<usize>) -> GtpConfig {
        let axis = ShardAxis { look_ahead, look_ahead_bytes: bytes, ..ShardAxis::new(ParamClass::Dense, Axis::GTP) };
        GtpConfig { axes: vec![axis], ..GtpConfig::default() }
    }

    fn weights(numels: &[usize]) -> Vec<WeightPlan> {
        let weight = |(i, numel): (usize, &usize)| WeightPlan {
            name: format!("w{i}"),
            axis: 0,
            numel: *numel,
            shards: 2,
            value: DType::F32,
            grad: DType::F32,
        };
        numels.iter().enumerate().map(weight).collect()
    }

    /// Forward through a chain, then backward: input gradient, weight gradient.
    fn chain(count: usize) -> Schedule {
        let forward =
            (0..count).flat_map(|w| [Step::Take(WeightIndex(w), Pass::Forward), Step::GiveBack(WeightIndex(w))]);
        let backward = (0..count).rev().flat_map(|w| {
            let w = WeightIndex(w);
            [Step::Take(w, Pass::Backward), Step::GiveBack(w), Step::Grad(w), Step::GradDone(w)]
        });
        forward.chain(backward).collect()
    }

    #[test]
    fn every_gather_but_the_first_is_issued_as_far_ahead_as_asked() {
        let numels = [64, 128, 64, 128];
        let points = |look_ahead| -> Vec<usize> {
            let plan = PassPlan::new(PassKind::TRAIN, chain(4), &weights(&numels), &config(look_ahead, None));
            plan.gathers().iter().map(|gather| gather.issued_at.0).collect()
        };
        assert_eq!(points(0), [0, 1, 2, 3, 4, 5, 6, 7]);
        // The last weight of forward is there when backward begins.
        assert_eq!(points(1), [0, 0, 1, 2, 4, 5, 6]);
        assert_eq!(points(2), [0, 0, 0, 1, 3, 4, 5]);
    }

    #[test]
    fn a_weight_that_is_still_there_is_not_gathered_again() {
        let plan = PassPlan::new(PassKind::TRAIN, chain(3), &weights(&[64; 3]), &config(1, None));
        let served: Vec<usize> = (0..6).map(|u| plan.gather_of(UseIndex(u)).0).collect();
        assert_eq!(served, [0, 1, 2, 2, 3, 4]);
        let none = PassPlan::new(PassKind::TRAIN, chain(3), &weights(&[64; 3]), &config(0, None));
        assert_eq!(none.gathers().len(), 6, "without look-ahead each use has its own");
    }

    #[test]
    fn bytes_bound_the_look_ahead_and_a_weight_that_is_larger_alone_is_gathered_in_the_open() {
        let plan = PassPlan::new(PassKind::TRAIN, chain(4), &weights(&[64, 64, 512, 64]), &config(8, Some(4 * 128)));
        let points: Vec<usize> = plan.gathers().iter().map(|gather| gather.issued_at.0).collect();
        // Uses 0 1 2 3 3 2 1 0: the third is too large.
        assert_eq!(points, [0, 0, 2, 2, 5, 5, 5]);
    }

    #[test]
    fn each_gather_is_issued_once_and_ahead_of_its_uses() {
        let plan = PassPlan::new(PassKind::TRAIN, chain(5), &weights(&[64; 5]), &config(2, None));
        let mut issued: Vec<usize> = (0..10).flat_map(|u| plan.issues(UseIndex(u))).map(|g| g.0).collect();
        issued.sort_unstable();
        assert_eq!(issued, (0..plan.gathers().len()).collect::<Vec<_>>());
        assert!(plan.gathers().iter().all(|gather| gather.issued_at <= gather.uses[0]));
    }

    /// The reference's scheme: a buffer for each shape and parity, where a weight's parity differs from its
    /// predecessor's of the same shape; forward and backward apart where both are under way at the turn; two gradient
    /// slots for each shape and one for the head.
    fn ticket_and_parity(numels: &[usize]) -> usize {
        let mut buffers: Vec<(usize, usize)> = Vec::new();
        let mut parity = 0;
        for (i, numel) in numels.iter().enumerate() {
            parity = if i > 0 && numels[i - 1] == *numel { 1 - parity } else { 0 };
            if !buffers.contains(&(*numel, parity)) {
                buffers.push((*numel, parity));
            }
        }
        let gathers: usize = buffers.iter().map(|(numel, _)| numel).sum();
        let mut shapes: Vec<usize> = numels[..numels.len() - 1].to_vec();
        let head = numels[numels.len() - 1];
        shapes.sort_unstable();
        let ring = |numel: usize| shapes.iter().filter(|s| **s == numel).count().min(2) * numel;
        let mut distinct = shapes.clone();
        distinct.dedup();
        gathers + distinct.into_iter().map(ring).sum::<usize>() + head
    }

    proptest! {
        #[test]
        fn slots_take_no_more_than_tickets_and_parity(sizes in prop::collection::vec(1usize..4, 2..9)) {
            let numels: Vec<usize> = sizes.iter().map(|s| s * ALIGN).collect();
            let plan = PassPlan::new(PassKind::TRAIN, chain(numels.len()), &weights(&numels), &config(1, None));
            let ours = (plan.gather_bytes() + plan.grad_bytes()) / 4;
            prop_assert!(ours <= ticket_and_parity(&numels), "{ours} > {} for {numels:?}", ticket_and_parity(&numels));
        }

        #[test]
        fn whoever_had_a_slot_last_is_waited_for(
            sizes in prop::collection::vec(1usize..4, 2..8),
            look_ahead in 0usize..4,
            behind in 1usize..3,
        ) {
            let numels: Vec<usize> = sizes.iter().map(|s| s * ALIGN).collect();
            let behind = NonZeroUsize::new(behind).unwrap();
            let config = GtpConfig { grads_behind: behind, ..config(look_ahead, None) };
            let plan = PassPlan::new(PassKind::TRAIN, chain(numels.len()), &weights(&numels), &config);
            // Two passes, element by element: the last tenant before each gather is among those that it waits for.
            let numel = plan.gather_bytes() / 4;
            let mut tenant: Vec<Option<usize>> = vec![None; numel];
            for pass in 0..2 {
                for i in 0..plan.schedule().uses().len() {
                    for issued in plan.issues(UseIndex(i)) {
                        let gather = &plan.gathers()[issued.0];
                        for element in gather.slot.range() {
                            if let Some(before) = tenant[element].replace(issued.0) {
                                prop_assert!(gather.after.contains(&GatherIndex(before)), "pass {pass} {issued:?}");
                            }
                        }
                    }
                    // What is used is what was gathered for it.
                    let gather = plan.gather_of(UseIndex(i)).0;
                    prop_assert!(plan.gathers()[gather].slot.range().all(|e| tenant[e] == Some(gather)), "use {i}");
                }
            }
        }
    }
}
