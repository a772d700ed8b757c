//! Several collectives of a group as one.

use device::{Error, Exchange, Reduce, Stream, View};

use crate::{
    collectives::{self, Call},
    error::PgError,
    group::{Group, Link},
    rank::GroupRank,
};

/// Collectives of one group that are submitted together and happen as one joint operation.
///
/// They take one number of the group's sequence and one meeting of its members, whatever their number, types and
/// sizes. Either all are queued or, if one is refused, none. The stream passes when all are done; among themselves
/// they have no order, so one that writes what another touches is refused. Values are those of single calls, bit for
/// bit. All members submit the same list in the same order.
#[must_use = "nothing happens before submit()"]
pub struct Batch<'g> {
    group: &'g Group,
    calls: Vec<Call>,
}

impl Group {
    /// An empty batch.
    pub fn batch(&self) -> Batch<'_> {
        Batch { group: self, calls: Vec::new() }
    }
}

impl Batch<'_> {
    /// Adds a [`Group::all_gather`].
    pub fn all_gather(self, shard: &View, full: &View) -> Self {
        self.with(collectives::all_gather(shard, full))
    }

    /// Adds a [`Group::reduce_scatter`].
    pub fn reduce_scatter(self, full: &View, shard: &View, reduce: Reduce) -> Self {
        self.with(collectives::reduce_scatter(full, shard, reduce))
    }

    /// Adds a [`Group::all_reduce`].
    pub fn all_reduce(self, data: &View, reduce: Reduce) -> Self {
        self.with(collectives::all_reduce(data, data, reduce))
    }

    /// Adds a [`Group::broadcast`].
    pub fn broadcast(self, data: &View, root: GroupRank) -> Self {
        let call = self.group.broadcast_call(data, root);
        self.with(call)
    }

    /// Adds a [`Group::all_to_all`].
    pub fn all_to_all(self, source: &View, dest: &View) -> Self {
        self.with(collectives::all_to_all(source, dest))
    }

    fn with(mut self, call: Call) -> Self {
        self.calls.push(call);
        self
    }

    /// Collectives in it.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Nothing is in it; submitting does nothing.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Submits all of them.
    ///
    /// # Errors
    /// As all collectives; also [`PgError::Refused`] if one of them writes what another touches.
    pub fn submit(self, stream: &Stream) -> Result<(), PgError> {
        let (group, inner) = (self.group, &*self.group.0);
        let done = match &inner.link {
            Link::Local(channels) => stream.joint_all(&channels.all, &inner.site, self.calls),
            Link::Planned => self.one_by_one(|call| group.plan_only(stream, call.0, call.1)),
            Link::Alone => self.one_by_one(|call| group.copy_alone(stream, call.0, &call.1)),
        };
        done.map_err(|error| group.refused(stream, "coalesced", error))
    }

    fn one_by_one(self, submit: impl Fn(Call) -> Result<(), Error>) -> Result<(), Error> {
        let group = self.group;
        Exchange::check_all(&self.calls, group.size(), group.place().0, &group.0.site)?;
        self.calls.into_iter().try_for_each(submit)
    }
}
