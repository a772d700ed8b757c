//! What can go wrong, one variant per cause.

use std::{error::Error as StdError, fmt, io, sync::Arc};

use device::DType;
use thiserror::Error;

use crate::{
    plan_error::PlanError,
    rank::{GlobalRank, GroupRank},
};

/// Everything this crate refuses.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum PgError {
    /// A layout, a plan or a placement that cannot be.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device refused or has failed. A failure is sticky: every later call on that device returns it.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// A rank's program returned an error, or its device failed behind it.
    #[error("rank {rank} failed")]
    RankFailed {
        /// The rank.
        rank: GlobalRank,
        /// Its error.
        #[source]
        source: Arc<dyn StdError + Send + Sync>,
    },
    /// A rank's program panicked.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// The rank.
        rank: GlobalRank,
        /// The panic's text.
        message: String,
    },
    /// The host gives no thread for a rank.
    #[error("rank {rank} got no thread")]
    NoThread {
        /// The rank.
        rank: GlobalRank,
        /// Why.
        #[source]
        source: Arc<io::Error>,
    },
    /// A layout for another number of ranks than run.
    #[error("rank {rank}: the layout is for a world of {layout} ranks, {world} run: start as many, or lay out fewer")]
    WorldSize {
        /// The rank.
        rank: GlobalRank,
        /// World size of the layout.
        layout: u32,
        /// Ranks that run.
        world: u32,
    },
    /// A plan that was made for another rank.
    #[error("rank {rank} builds the groups of rank {planned}: plan for the rank that builds")]
    PlanOfAnotherRank {
        /// The rank that builds.
        rank: GlobalRank,
        /// The rank of the plan.
        planned: GlobalRank,
    },
    /// Ranks that need different groups, or lay them out differently. No group was made.
    #[error(
        "ranks {rank} and {other} plan different groups, with the keys [{ours}] and [{theirs}]: give every rank the \
         same layout and the same needs"
    )]
    NeedsDiffer {
        /// This rank.
        rank: GlobalRank,
        /// Its keys.
        ours: String,
        /// The first rank that differs from it.
        other: GlobalRank,
        /// Its keys.
        theirs: String,
        /// Where the plans part.
        #[source]
        source: Box<PlanError>,
    },
    /// Groups without communicators on a driver that computes: their results would be wrong.
    #[error("groups that meet nobody on driver '{driver}': only the dry driver plans a rank alone; build them instead")]
    PlannedComputes {
        /// Name of the driver.
        driver: &'static str,
    },
    /// A collective whose views, types or sizes do not fit. Nothing was submitted.
    #[error("{op} on group '{group}' (rank {rank}, place {place} of {size}) is refused")]
    Refused {
        /// The collective.
        op: &'static str,
        /// The group.
        group: String,
        /// The caller.
        rank: GlobalRank,
        /// Its place in the group.
        place: GroupRank,
        /// Members of the group.
        size: u32,
        /// What does not fit, with both sizes or types.
        #[source]
        source: Box<device::Error>,
    },
    /// A peer that is not in the group, or is the caller.
    #[error("{op} on group '{group}': place {peer} is {why}; places are 0..{size}, the caller's is {place}")]
    NoSuchPeer {
        /// The operation.
        op: &'static str,
        /// The group.
        group: String,
        /// The place asked for.
        peer: GroupRank,
        /// The caller's place.
        place: GroupRank,
        /// Members of the group.
        size: u32,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A second communicator made twice.
    #[error("group '{group}' already has a second communicator '{label}': keep the first, or take another label")]
    SecondTwice {
        /// The group.
        group: String,
        /// The label.
        label: String,
    },
    /// A parameter is read whose last write has not been published: its values are old.
    #[error(
        "parameter '{param}' is at epoch {issued}, but epoch {written} was written: publish it before it is read \
         (whoever holds back the publication calls issue() first)"
    )]
    Stale {
        /// The parameter.
        param: String,
        /// Epoch of the last write.
        written: u64,
        /// Epoch of the last publication.
        issued: u64,
    },
    /// Ranks that hold the same elements have other values of them.
    #[error(
        "parameter '{param}': rank {other} has other values than rank {rank} of the same elements; so have replicas of \
         {differing} of {params} parameters: look for an update, a load or a reduction that one of them missed"
    )]
    ReplicasDiffer {
        /// The first parameter that differs.
        param: String,
        /// The first rank that holds those elements.
        rank: GlobalRank,
        /// The first one that differs from it.
        other: GlobalRank,
        /// Parameters that differ.
        differing: usize,
        /// Parameters that were compared.
        params: usize,
    },
    /// A rank was not given a parameter that it holds a part of.
    #[error("rank {rank} holds a part of parameter '{param}' and was not given it: pass all parameters of the rank")]
    ParamNotGiven {
        /// The parameter.
        param: String,
        /// The rank.
        rank: GlobalRank,
    },
    /// A parameter bound to memory that does not fit it.
    #[error(
        "parameter '{param}': its {what} is {have:?} {have_dtype} on rank {have_rank}, bound to {asked:?} \
         {asked_dtype} on rank {asked_rank}: shape, type and rank stay"
    )]
    Rebind {
        /// The parameter.
        param: String,
        /// Value or gradient.
        what: &'static str,
        /// Its sizes.
        have: Vec<usize>,
        /// Its element type.
        have_dtype: DType,
        /// Its rank.
        have_rank: u32,
        /// Sizes of the new memory.
        asked: Vec<usize>,
        /// Its element type.
        asked_dtype: DType,
        /// Its rank.
        asked_rank: u32,
    },
    /// A parameter's value and gradient that do not fit each other.
    #[error(
        "parameter '{param}': value {value:?} on rank {value_rank}, gradient {grad:?} on rank {grad_rank}: same sizes, same rank"
    )]
    GradShape {
        /// The parameter.
        param: String,
        /// Sizes of the value.
        value: Vec<usize>,
        /// Its rank.
        value_rank: u32,
        /// Sizes of the gradient.
        grad: Vec<usize>,
        /// Its rank.
        grad_rank: u32,
    },
    /// Parameters of a type that has no fractions.
    #[error("{what} of type {dtype}: f32 or bf16")]
    ParamType {
        /// Values or gradients.
        what: &'static str,
        /// The type.
        dtype: DType,
    },
    /// Two parameters of one name: they would get the same initial values.
    #[error("parameters {first} and {second} are both named '{param}': names are unique in a model")]
    ParamTwice {
        /// The name.
        param: String,
        /// Position of the first.
        first: usize,
        /// Position of the second.
        second: usize,
    },
    /// A publisher, a sink or a recorder outside this crate failed.
    #[error("{who} failed at parameter '{param}'")]
    Backend {
        /// Who.
        who: &'static str,
        /// The parameter.
        param: String,
        /// Its error.
        #[source]
        source: Arc<dyn StdError + Send + Sync>,
    },
}

impl PgError {
    /// The failure of a publisher, a sink or a recorder of another crate.
    pub fn backend(who: &'static str, param: &str, source: impl Into<Box<dyn StdError + Send + Sync>>) -> PgError {
        PgError::Backend { who, param: param.to_owned(), source: Arc::from(source.into()) }
    }

    /// The first error of type `T` among this one and its causes, those inside `Device` and `Plan` and behind any `Arc`
    /// or `Box` included. Another crate's error that passes itself off as its cause (a transparent one) hides it.
    #[must_use]
    pub fn cause<T: StdError + 'static>(&self) -> Option<&T> {
        let mut next: Option<&(dyn StdError + 'static)> = Some(self);
        while let Some(error) = next {
            let error = opened(error);
            if let Some(found) = error.downcast_ref().or_else(|| held::<T>(error)) {
                return Some(found);
            }
            // Both pass themselves off as their cause.
            let inside: Option<&(dyn StdError + 'static)> = match error.downcast_ref() {
                Some(PgError::Device(inner)) => Some(inner),
                Some(PgError::Plan(inner)) => Some(inner),
                _ => None,
            };
            if let Some(found) = inside.and_then(|inner| inner.downcast_ref()) {
                return Some(found);
            }
            next = error.source();
        }
        None
    }

    /// The message with all causes behind it, as one line.
    #[must_use]
    pub fn chain(&self) -> String {
        Chain(self).to_string()
    }
}

/// What a shared or boxed error holds; any other as it is. They are errors of types of their own, whose source is
/// already the next one.
fn opened<'e>(mut error: &'e (dyn StdError + 'static)) -> &'e (dyn StdError + 'static) {
    while let Some(inner) = error
        .downcast_ref::<Arc<dyn StdError + Send + Sync>>()
        .map(|shared| &**shared as &(dyn StdError + 'static))
        .or_else(|| held::<PgError>(error).map(|inner| inner as _))
        .or_else(|| held::<PlanError>(error).map(|inner| inner as _))
        .or_else(|| held::<device::Error>(error).map(|inner| inner as _))
    {
        error = inner;
    }
    error
}

/// The `T` in a shared or a boxed one.
fn held<'e, T: StdError + 'static>(error: &'e (dyn StdError + 'static)) -> Option<&'e T> {
    let shared = error.downcast_ref::<Arc<T>>().map(|shared| &**shared);
    shared.or_else(|| error.downcast_ref::<Box<T>>().map(|boxed| &**boxed))
}

#[cfg(test)]
#[test]
fn errors_stay_below_the_size_that_lints_refuse() {
    assert!(size_of::<PgError>() < 192, "{}", size_of::<PgError>());
}

/// An error and its causes on one line.
pub(crate) struct Chain<'e>(pub(crate) &'e (dyn StdError + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.0, f)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
