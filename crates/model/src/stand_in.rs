//! Until the runtime half of `pgroups` is here.
#![allow(missing_docs)]

use std::{collections::HashMap, sync::Arc};

use device::{Stream, View};
use pgroups::PgError;

#[derive(Clone)]
pub struct Param(pub Arc<ParamCell>);

pub struct ParamCell {
    pub name: String,
    pub value: View,
    pub grad: View,
}

impl Param {
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

pub enum GradOut {
    Scratch(View),
    Main { grad: View, keep: View },
}

pub trait Weights {
    fn take(&mut self, p: &Param, on: &Stream) -> Result<View, PgError>;
    fn give_back(&mut self, p: &Param, on: &Stream) -> Result<(), PgError>;
    fn grad(&mut self, p: &Param, on: &Stream) -> Result<GradOut, PgError>;
    fn grad_done(&mut self, p: &Param, on: &Stream) -> Result<(), PgError>;
}

pub struct Plain {
    pub first: View,
    pub one: View,
    pub used: HashMap<String, usize>,
}

impl Weights for Plain {
    fn take(&mut self, p: &Param, _: &Stream) -> Result<View, PgError> {
        Ok(p.0.value.clone())
    }
    fn give_back(&mut self, _: &Param, _: &Stream) -> Result<(), PgError> {
        Ok(())
    }
    fn grad(&mut self, p: &Param, _: &Stream) -> Result<GradOut, PgError> {
        let uses = self.used.entry(p.name().into()).or_default();
        *uses += 1;
        let keep = if *uses == 1 { self.first.clone() } else { self.one.clone() };
        Ok(GradOut::Main { grad: p.0.grad.clone(), keep })
    }
    fn grad_done(&mut self, _: &Param, _: &Stream) -> Result<(), PgError> {
        Ok(())
    }
}
