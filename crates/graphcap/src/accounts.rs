//! Host accounts around a captured step: put back after the capture, and added to at each replay.

use std::{
    any::Any,
    sync::{Arc, Weak},
};

use device::Stream;
use pgroups::HostState;

use crate::GraphError;

type Saved = Box<dyn Any + Send + Sync>;

/// The accounts of a graph, with what a replay adds to each. Held weakly: a graph keeps no backend alive.
#[derive(Default)]
pub(crate) struct Accounts(Vec<(Weak<dyn HostState>, Saved)>);

impl Accounts {
    /// Upgraded for the time of a replay.
    pub(crate) fn hold(&self, graph: &str) -> Result<Held<'_>, GraphError> {
        let held = self.0.iter().map(|(account, effects)| Some((account.upgrade()?, effects)));
        let held: Option<Vec<_>> = held.collect();
        held.map(Held).ok_or_else(|| GraphError::AccountGone { graph: graph.to_owned() })
    }
}

/// The accounts of a replay.
pub(crate) struct Held<'a>(Vec<(Arc<dyn HostState>, &'a Saved)>);

impl Held<'_> {
    /// Orders `stream` behind everything that is under way: inside the graph nothing waits for what is outside.
    pub(crate) fn join(&self, stream: &Stream) -> Result<(), GraphError> {
        Ok(self.0.iter().try_for_each(|(account, _)| account.join(stream))?)
    }

    /// Tells a trace what the launch that follows on `stream` does.
    pub(crate) fn announce(&self, stream: &Stream) {
        self.0.iter().for_each(|(account, effects)| account.announce(&***effects, stream));
    }

    /// Adds what the graph does, behind its launch on `stream`.
    pub(crate) fn apply(&self, stream: &Stream) -> Result<(), GraphError> {
        self.0.iter().try_for_each(|(account, effects)| {
            account.add(&***effects, stream);
            account.mark(stream)
        })?;
        Ok(())
    }
}

/// Accounts while a step is captured.
pub(crate) struct Open<'a> {
    accounts: &'a [Arc<dyn HostState>],
    before: Vec<Saved>,
    origin: &'a Stream,
}

impl<'a> Open<'a> {
    /// Before the capture begins: everything that is under way ends in `origin`.
    pub(crate) fn begin(accounts: &'a [Arc<dyn HostState>], origin: &'a Stream) -> Result<Open<'a>, GraphError> {
        accounts.iter().try_for_each(|account| account.join(origin))?;
        Ok(Open { accounts, before: accounts.iter().map(|account| account.save()).collect(), origin })
    }

    /// First in the capture: what captured code waits for, it finds in the capture.
    pub(crate) fn enter(&self) -> Result<(), GraphError> {
        self.accounts.iter().for_each(|account| account.begin_step());
        Ok(self.accounts.iter().try_for_each(|account| account.mark(self.origin))?)
    }

    /// Last in the capture: every stream ends in the origin.
    pub(crate) fn leave(&self) -> Result<(), GraphError> {
        Ok(self.accounts.iter().try_for_each(|account| account.join(self.origin))?)
    }

    /// Behind the capture, also a failed one: the accounts are what they were.
    pub(crate) fn end(self) -> Result<Accounts, GraphError> {
        let effects: Vec<_> = self.accounts.iter().zip(&self.before).map(|(a, before)| a.since(&**before)).collect();
        for (account, before) in self.accounts.iter().zip(&self.before) {
            account.restore(&**before);
        }
        self.accounts.iter().try_for_each(|account| account.mark(self.origin))?;
        Ok(Accounts(self.accounts.iter().map(Arc::downgrade).zip(effects).collect()))
    }
}
