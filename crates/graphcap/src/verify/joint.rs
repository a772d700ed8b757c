//! Calls of joint operations, matched over ranks.

use std::{collections::HashMap, sync::Arc};

use device::Label;

use super::hashing::FastMap;

/// Where a member calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) event: u32,
    pub(super) node: Option<u32>,
}

/// A joint operation as the trace has it.
pub(super) struct Call {
    pub(super) group: Label,
    /// Position in the group's sequence, and within a launch among the graph's calls.
    pub(super) seq: (u64, Option<u64>),
    pub(super) members: Arc<[u32]>,
    /// By member.
    pub(super) callers: Vec<Option<Caller>>,
    /// Members whose part of the trace begins behind it.
    pub(super) before_trace: Vec<bool>,
}

/// A group by number, how often its name was given anew, and the position.
type Key = (u32, u32, u64, Option<u64>);

/// All calls of a trace.
#[derive(Default)]
pub(super) struct Calls {
    pub(super) all: Vec<Call>,
    numbers: HashMap<Label, u32>,
    by_key: FastMap<Key, u32>,
    /// By rank and group: how often the name was given anew, and the last position.
    last: FastMap<(u32, u32), (u32, u64)>,
    /// By rank, group and how often its name was given anew: the first position.
    first: FastMap<(u32, u32, u32), u64>,
    /// By call: group, and how often its name was given anew.
    keys: Vec<(u32, u32)>,
}

impl Calls {
    /// Number of the call that `caller` of `rank` belongs to.
    pub(super) fn add(
        &mut self,
        rank: u32,
        group: &Label,
        members: &Arc<[u32]>,
        seq: (u64, Option<u64>),
        caller: Caller,
    ) -> u32 {
        let number = match self.numbers.get(group) {
            Some(number) => *number,
            None => {
                self.numbers.insert(group.clone(), self.numbers.len() as u32);
                self.numbers.len() as u32 - 1
            }
        };
        let last = self.last.entry((rank, number)).or_insert((0, seq.0));
        // The calls of one launch share a position.
        if seq.0 < last.1
            || (seq.0 == last.1
                && self.by_key.get(&(number, last.0, seq.0, seq.1)).is_some_and(|call| {
                    let call = &self.all[*call as usize];
                    place(&call.members, rank).is_some_and(|member| call.callers[member].is_some())
                }))
        {
            last.0 += 1;
        }
        last.1 = seq.0;
        let again = last.0;
        self.first.entry((rank, number, again)).or_insert(seq.0);
        let (all, keys) = (&mut self.all, &mut self.keys);
        let call = *self.by_key.entry((number, again, seq.0, seq.1)).or_insert_with(|| {
            let (callers, before_trace) = (vec![None; members.len()], vec![false; members.len()]);
            all.push(Call { group: group.clone(), seq, members: members.clone(), callers, before_trace });
            keys.push((number, again));
            all.len() as u32 - 1
        });
        let entry = &mut self.all[call as usize];
        if let Some(member) = place(&entry.members, rank) {
            entry.callers[member] = Some(caller);
        }
        call
    }

    /// Members whose first call in the trace comes later have called before it began.
    pub(super) fn close(&mut self) {
        for (call, (number, again)) in self.all.iter_mut().zip(&self.keys) {
            for (member, rank) in call.members.iter().enumerate() {
                let first = self.first.get(&(*rank, *number, *again));
                call.before_trace[member] =
                    call.callers[member].is_none() && first.is_some_and(|first| *first > call.seq.0);
            }
        }
    }
}

pub(super) fn place(members: &[u32], rank: u32) -> Option<usize> {
    members.iter().position(|member| *member == rank)
}

/// Whose data reaches whom in a joint operation.
pub(super) struct Flow {
    /// By member.
    pub(super) sources: Vec<bool>,
    /// By member.
    pub(super) consumers: Vec<bool>,
}

impl Flow {
    /// Of one call, out of what a member asks for (`broadcast(root 2) of 8 f32 + barrier`): one flow an exchange.
    pub(super) fn of(what: &str, members: usize) -> Vec<Flow> {
        what.split(" + ").map(|part| Flow::of_exchange(part, members)).collect()
    }

    fn of_exchange(what: &str, members: usize) -> Flow {
        let only = |one: usize| -> Vec<bool> { (0..members).map(|member| member == one).collect() };
        let root = what.strip_prefix("broadcast(root ").and_then(|rest| rest.split(')').next()?.parse().ok());
        let sources = match (root, what.starts_with("send_recv")) {
            (Some(root), _) => only(root),
            (None, true) => only(0),
            (None, false) => return Flow { sources: vec![true; members], consumers: vec![true; members] },
        };
        let consumers = sources.iter().map(|is_source| !is_source).collect();
        Flow { sources, consumers }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_root_or_a_sender_is_a_source_and_only_the_others_consume() {
        let flow = |what: &str| {
            let flows = Flow::of(what, 3);
            flows.into_iter().map(|f| (f.sources, f.consumers)).collect::<Vec<_>>()
        };
        assert_eq!(flow("all_gather of 8 f32"), [(vec![true; 3], vec![true; 3])]);
        assert_eq!(flow("broadcast(root 1) of 8 f32"), [(vec![false, true, false], vec![true, false, true])]);
        let both = flow("send_recv of 1 i32 + barrier");
        assert_eq!(both[0], (vec![true, false, false], vec![false, true, true]));
        assert_eq!(both[1], (vec![true; 3], vec![true; 3]));
    }

    #[test]
    fn a_group_whose_name_is_given_anew_is_another_group() {
        let mut calls = Calls::default();
        let members: Arc<[u32]> = vec![3, 1].into();
        let mut add =
            |rank, seq, event| calls.add(rank, &"g".into(), &members, (seq, None), Caller { event, node: None });
        let first = [add(1, 0, 0), add(3, 0, 1)];
        let again = [add(3, 0, 2), add(1, 0, 3)];
        assert_eq!(first[0], first[1]);
        assert_eq!(again[0], again[1]);
        assert_ne!(first[0], again[0]);
    }
}
