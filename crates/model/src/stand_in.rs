//! Until the runtime half of `pgroups` is here.
#![allow(missing_docs)]

use std::{
    collections::HashSet,
    hash::{Hash, Hasher},
    sync::Arc,
};

use device::{Stream, View, ops::Accumulate};
use pgroups::PgError;

#[derive(Clone)]
pub struct Param(Arc<(String, View, View)>);

impl Param {
    pub fn new(name: &str, value: &View, grad: &View) -> Result<Param, PgError> {
        Ok(Param(Arc::new((name.into(), value.clone(), grad.clone()))))
    }
    pub fn name(&self) -> &str {
        &self.0.0
    }
    pub fn main_grad(&self) -> View {
        self.0.2.clone()
    }
}
impl PartialEq for Param {
    fn eq(&self, other: &Param) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
impl Eq for Param {}
impl Hash for Param {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    Forward,
    Backward,
    Recompute,
}

pub struct Turn(Pass);
impl Turn {
    pub fn eager(pass: Pass) -> Turn {
        Turn(pass)
    }
    pub fn read(&mut self, p: &Param, _: &Stream) -> Result<View, PgError> {
        Ok(p.0.1.clone())
    }
    pub fn done(&mut self, _: &Param, _: &Stream) -> Result<(), PgError> {
        Ok(())
    }
    pub fn landed(&mut self, _: &Param, _: &Stream) -> Result<(), PgError> {
        Ok(())
    }
    pub fn enter(&mut self, pass: Pass) -> Pass {
        std::mem::replace(&mut self.0, pass)
    }
}

#[derive(Clone, Debug)]
pub enum GradOut {
    Scratch(View),
    Main { grad: View, keep: Keep },
}
#[derive(Clone, Debug)]
pub enum Keep {
    All,
    Times(View),
}
impl GradOut {
    pub fn target(&self) -> (&View, Accumulate<'_>) {
        match self {
            GradOut::Scratch(grad) => (grad, Accumulate::Overwrite),
            GradOut::Main { grad, keep: Keep::All } => (grad, Accumulate::Add),
            GradOut::Main { grad, keep: Keep::Times(flag) } => (grad, Accumulate::Keep(flag)),
        }
    }
}

pub trait Weights {
    fn take(&mut self, p: &Param, on: &Stream) -> Result<View, PgError>;
    fn give_back(&mut self, p: &Param, on: &Stream) -> Result<(), PgError>;
    fn grad(&mut self, p: &Param, on: &Stream) -> Result<GradOut, PgError>;
    fn grad_done(&mut self, p: &Param, on: &Stream) -> Result<(), PgError>;
    fn enter(&mut self, pass: Pass) -> Pass;
}

pub struct Whole {
    turn: Turn,
    flag: View,
    had: HashSet<Param>,
}
impl Whole {
    pub fn keeping(turn: Turn, flag: &View) -> Whole {
        Whole { turn, flag: flag.clone(), had: HashSet::new() }
    }
}
impl Weights for Whole {
    fn take(&mut self, p: &Param, on: &Stream) -> Result<View, PgError> {
        self.turn.read(p, on)
    }
    fn give_back(&mut self, p: &Param, on: &Stream) -> Result<(), PgError> {
        self.turn.done(p, on)
    }
    fn grad(&mut self, p: &Param, _: &Stream) -> Result<GradOut, PgError> {
        let keep = if self.had.insert(p.clone()) { Keep::Times(self.flag.clone()) } else { Keep::All };
        Ok(GradOut::Main { grad: p.main_grad(), keep })
    }
    fn grad_done(&mut self, p: &Param, on: &Stream) -> Result<(), PgError> {
        self.turn.landed(p, on)
    }
    fn enter(&mut self, pass: Pass) -> Pass {
        self.turn.enter(pass)
    }
}
