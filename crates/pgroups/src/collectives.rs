//! The collectives of a group, each one call on a stream.

use device::{Access, Error, Exchange, Launch, Op, Reduce, Stream, View, ops::Cast};

use crate::{
    error::PgError,
    group::{Group, Link},
    rank::GroupRank,
};

/// An exchange and what this member brings to it.
pub(crate) type Call = (Exchange, Vec<Access>);

/// Views are contiguous and of one element type: f32, bf16 (summed in f32) or i32 (no averages). Sums run in the
/// order of the members, so every member gets the same bits on every driver; on `cuda` NCCL adds in an order and a
/// precision of its own, and members still get the same bits. Nothing here waits: a call returns when it is queued, and
/// happens when every member's call has come up in its stream.
///
/// # Errors
/// Of every method: [`PgError::Refused`] for views that do not fit, with both sizes, and nothing is queued then;
/// [`PgError::Device`] when the device has failed. What the members ask for is compared when all have come, and a
/// difference is sticky on all of them ([`device::Error::Disagree`], with group, sequence number and what each
/// asked); so is a member that leaves ([`device::Error::PeerGone`]) or never comes ([`device::Error::Timeout`],
/// [`device::Error::Deadlock`]).
impl Group {
    /// Every member gets all shards, the first member's first. `shard` is `[k]`, `full` `[size() * k]`; a shard that
    /// lies in its own place of `full` is not copied.
    ///
    /// # Errors
    /// As all collectives.
    pub fn all_gather(&self, stream: &Stream, shard: &View, full: &View) -> Result<(), PgError> {
        self.submit(stream, all_gather(shard, full))
    }

    /// The member at place `i` gets the reduction of everybody's part `i`. `full` is `[size() * k]`, `shard` `[k]`,
    /// which may be this member's own part of `full`.
    ///
    /// # Errors
    /// As all collectives.
    pub fn reduce_scatter(&self, stream: &Stream, full: &View, shard: &View, reduce: Reduce) -> Result<(), PgError> {
        self.submit(stream, reduce_scatter(full, shard, reduce))
    }

    /// Every member's `data` becomes the reduction of all.
    ///
    /// # Errors
    /// As all collectives.
    pub fn all_reduce(&self, stream: &Stream, data: &View, reduce: Reduce) -> Result<(), PgError> {
        self.submit(stream, all_reduce(data, data, reduce))
    }

    /// As [`Group::all_reduce`], and `source` keeps its values.
    ///
    /// # Errors
    /// As all collectives.
    pub fn all_reduce_into(&self, stream: &Stream, source: &View, dest: &View, reduce: Reduce) -> Result<(), PgError> {
        self.submit(stream, all_reduce(source, dest, reduce))
    }

    /// Everybody's `data` becomes that of the member at `root`.
    ///
    /// # Errors
    /// As all collectives; [`PgError::NoSuchPeer`] for a place beyond the group.
    pub fn broadcast(&self, stream: &Stream, data: &View, root: GroupRank) -> Result<(), PgError> {
        self.check_place("broadcast", root)?;
        self.submit(stream, self.broadcast_call(data, root))
    }

    /// Part `j` of the member at place `i` becomes part `i` of the member at place `j`. Both are `[size() * k]`.
    ///
    /// # Errors
    /// As all collectives.
    pub fn all_to_all(&self, stream: &Stream, source: &View, dest: &View) -> Result<(), PgError> {
        self.submit(stream, all_to_all(source, dest))
    }

    /// No stream passes before all members' streams have come.
    ///
    /// # Errors
    /// As all collectives.
    pub fn barrier(&self, stream: &Stream) -> Result<(), PgError> {
        self.submit(stream, (Exchange::Barrier, Vec::new()))
    }

    /// Gives `data` to the member at `to`, which [receives](Group::recv) it. Sends from one member to another arrive
    /// in their order; they take no number of the group's sequence.
    ///
    /// The stream goes on when the receiver has the data, so two members that first send to each other on one stream
    /// each wait for ever (and are told so): send and receive on two streams.
    ///
    /// # Errors
    /// As all collectives; [`PgError::NoSuchPeer`] for this rank's own place or one beyond the group.
    pub fn send(&self, stream: &Stream, data: &View, to: GroupRank) -> Result<(), PgError> {
        self.check_peer("send", to)?;
        self.transfer(stream, Way::To(to), vec![Access::read(data)])
    }

    /// Takes into `data` what the member at `from` [sends](Group::send).
    ///
    /// # Errors
    /// As [`Group::send`].
    pub fn recv(&self, stream: &Stream, data: &View, from: GroupRank) -> Result<(), PgError> {
        self.check_peer("recv", from)?;
        self.transfer(stream, Way::From(from), vec![Access::write(data)])
    }

    fn submit(&self, stream: &Stream, (exchange, accesses): Call) -> Result<(), PgError> {
        let inner = &*self.0;
        let done = match &inner.link {
            Link::Local(channels) => stream.joint(&channels.all, exchange, &inner.site, accesses),
            Link::Planned => self.plan_only(stream, exchange, accesses),
            Link::Alone => self.copy_alone(stream, exchange, &accesses),
        };
        done.map_err(|error| self.refused(stream, exchange.name(), error))
    }

    fn transfer(&self, stream: &Stream, way: Way, accesses: Vec<Access>) -> Result<(), PgError> {
        let inner = &*self.0;
        let done = match &inner.link {
            Link::Local(channels) => {
                let (meetings, peer) = match way {
                    Way::To(peer) => (&channels.to, peer),
                    Way::From(peer) => (&channels.from, peer),
                };
                let meeting = meetings[peer.index()].as_ref();
                let meeting = meeting.expect("BUG: a peer was checked, so its meeting was opened with the group");
                stream.joint(meeting, Exchange::SendRecv, &inner.site, accesses)
            }
            Link::Planned | Link::Alone => {
                let member = u32::from(matches!(way, Way::From(_)));
                let checked = Exchange::SendRecv.check(2, member, &inner.site, &accesses);
                checked.and_then(|()| stream.launch(self.planned_op(Exchange::SendRecv, accesses)))
            }
        };
        done.map_err(|error| self.refused(stream, way.name(), error))
    }

    /// Records the call as an operation of this rank, which must be checked like any other.
    pub(crate) fn plan_only(&self, stream: &Stream, exchange: Exchange, accesses: Vec<Access>) -> Result<(), Error> {
        self.check(exchange, &accesses)?;
        stream.launch(self.planned_op(exchange, apart(accesses)?))
    }

    fn planned_op(&self, exchange: Exchange, accesses: Vec<Access>) -> Op {
        let never = |_: &mut device::Args<'_>| unreachable!("BUG: a planned collective ran");
        Op::new(exchange.name(), self.0.site.clone(), accesses, Launch::Host(std::sync::Arc::new(never)))
    }

    /// With one member, every exchange is a copy, and nothing at all in place.
    pub(crate) fn copy_alone(&self, stream: &Stream, exchange: Exchange, accesses: &[Access]) -> Result<(), Error> {
        self.check(exchange, accesses)?;
        let owner = self.0.rank.global.0;
        if stream.rank() != owner {
            let what = format!("group '{}'", self.0.name);
            return Err(Error::Foreign { what, owner, used_by: stream.rank() });
        }
        let [source, dest] = accesses else { return Ok(()) };
        if source.view.overlaps(&dest.view) {
            return Ok(()); // checked: the very same bytes
        }
        let flat = |view: &View| view.flat(0..view.numel());
        stream.launch(Cast { x: &flat(&source.view)?, y: &flat(&dest.view)? }.op(&self.0.site)?)
    }

    fn check(&self, exchange: Exchange, accesses: &[Access]) -> Result<(), Error> {
        exchange.check(self.size(), self.0.place.0, &self.0.site, accesses)
    }

    pub(crate) fn broadcast_call(&self, data: &View, root: GroupRank) -> Call {
        let access = if root == self.0.place { Access::read(data) } else { Access::write(data) };
        (Exchange::Broadcast { root: root.0 }, vec![access])
    }

    pub(crate) fn check_place(&self, op: &'static str, peer: GroupRank) -> Result<(), PgError> {
        if peer.index() < self.0.members.len() { Ok(()) } else { Err(self.no_such_peer(op, peer, "beyond the group")) }
    }

    fn check_peer(&self, op: &'static str, peer: GroupRank) -> Result<(), PgError> {
        self.check_place(op, peer)?;
        if peer == self.0.place { Err(self.no_such_peer(op, peer, "the caller itself")) } else { Ok(()) }
    }

    fn no_such_peer(&self, op: &'static str, peer: GroupRank, why: &'static str) -> PgError {
        let (group, size) = (self.0.name.clone(), self.size());
        PgError::NoSuchPeer { op, group, peer, place: self.0.place, size, why }
    }

    /// A refused call says where; a device that has failed before says its failure.
    pub(crate) fn refused(&self, stream: &Stream, op: &'static str, source: Error) -> PgError {
        if stream.device().error().is_some() {
            return PgError::Device(source);
        }
        let (group, rank, size) = (self.0.name.clone(), self.0.rank.global, self.size());
        PgError::Refused { op, group, rank, place: self.0.place, size, source: Box::new(source) }
    }
}

/// A direction, and the peer at its other end.
#[derive(Clone, Copy)]
enum Way {
    To(GroupRank),
    From(GroupRank),
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::To(_) => "send",
            Way::From(_) => "recv",
        }
    }
}

pub(crate) fn all_gather(shard: &View, full: &View) -> Call {
    (Exchange::AllGather, vec![Access::read(shard), Access::write(full)])
}

pub(crate) fn reduce_scatter(full: &View, shard: &View, reduce: Reduce) -> Call {
    (Exchange::ReduceScatter(reduce), vec![Access::read(full), Access::write(shard)])
}

pub(crate) fn all_reduce(source: &View, dest: &View, reduce: Reduce) -> Call {
    let in_place = source.same_as(dest);
    let accesses = if in_place { vec![Access::update(dest)] } else { vec![Access::read(source), Access::write(dest)] };
    (Exchange::AllReduce(reduce), accesses)
}

pub(crate) fn all_to_all(source: &View, dest: &View) -> Call {
    (Exchange::AllToAll, vec![Access::read(source), Access::write(dest)])
}

/// The same bytes in accesses that do not meet: in place, the own part is updated and the rest of the larger view is
/// only read or only written.
pub(crate) fn apart(accesses: Vec<Access>) -> Result<Vec<Access>, Error> {
    let [a, b] = &accesses[..] else { return Ok(accesses) };
    if !a.view.overlaps(&b.view) {
        return Ok(accesses);
    }
    let (small, large) = if a.view.numel() <= b.view.numel() { (a, b) } else { (b, a) };
    let first = (small.view.region().start - large.view.region().start) / large.view.dtype().size_bytes();
    let parts = [0..first, first + small.view.numel()..large.view.numel()];
    let mut out = vec![Access::update(&small.view)];
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        out.push(Access { view: large.view.flat(part)?, mode: large.mode });
    }
    Ok(out)
}
