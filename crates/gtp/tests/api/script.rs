//! Passes that are made of single calls, with operations that tell what they have read.

use std::collections::BTreeMap;

use device::{Access, Op, Stream, View, ops::Accumulate};
use pgroups::{GradOut, Param, Pass, Weights};

use crate::api::rig::Caught;

/// One call of a pass, with the operation that comes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Act {
    /// Takes a weight, and reads it.
    Take(usize),
    /// Reads it once more, and gives it back.
    Back(usize),
    /// Asks for the gradient of a weight, and writes it: something that depends on the last read.
    Grad(usize),
    /// Adds to the gradient, and says that it is done.
    Done(usize),
    /// What follows belongs to this part of the pass.
    Enter(Pass),
    /// What follows is submitted to this stream.
    On(usize),
}

/// Forward through the weights of `order`, then back: use and gradient.
pub(crate) fn there_and_back(order: &[usize]) -> Vec<Act> {
    let mut acts = forward(order);
    acts.push(Act::Enter(Pass::Backward));
    acts.extend(order.iter().rev().flat_map(|&w| [Act::Take(w), Act::Back(w), Act::Grad(w), Act::Done(w)]));
    acts
}

pub(crate) fn forward(order: &[usize]) -> Vec<Act> {
    order.iter().flat_map(|&w| [Act::Take(w), Act::Back(w)]).collect()
}

/// All that acts need.
#[derive(Clone)]
pub(crate) struct Script {
    pub(crate) params: Vec<Param>,
    pub(crate) streams: [Stream; 2],
    pub(crate) logs: [View; 2],
    /// Whose samples it has.
    pub(crate) peer: u32,
}

impl Script {
    pub(crate) fn play(&self, weights: &mut dyn Weights, acts: &[Act]) -> Result<(), Caught> {
        let mut on = 0;
        let mut values: BTreeMap<usize, Vec<View>> = BTreeMap::new();
        let mut grads: BTreeMap<usize, GradOut> = BTreeMap::new();
        for act in acts {
            let stream = &self.streams[on];
            match *act {
                Act::On(next) => on = next,
                Act::Enter(pass) => drop(weights.enter(pass)),
                Act::Take(w) => {
                    let value = weights.take(&self.params[w], stream)?;
                    self.read(on, &value)?;
                    values.entry(w).or_default().push(value);
                }
                Act::Back(w) => {
                    let value = values.get_mut(&w).and_then(Vec::pop).expect("taken");
                    self.read(on, &value)?;
                    weights.give_back(&self.params[w], stream)?;
                }
                Act::Grad(w) => {
                    let grad = weights.grad(&self.params[w], stream)?;
                    self.write(on, w, &grad)?;
                    grads.insert(w, grad);
                }
                Act::Done(w) => {
                    self.add_more(on, w, &grads.remove(&w).expect("asked for"))?;
                    weights.grad_done(&self.params[w], stream)?;
                }
            }
        }
        Ok(())
    }

    /// All that [`Act::Grad`] and [`Act::Done`] do with a gradient that has been asked for.
    pub(crate) fn finish_grad(&self, weights: &mut dyn Weights, weight: usize, grad: &GradOut) -> Result<(), Caught> {
        self.write(0, weight, grad)?;
        self.add_more(0, weight, grad)?;
        Ok(weights.grad_done(&self.params[weight], &self.streams[0])?)
    }

    /// The gradient is written up to the end.
    fn add_more(&self, on: usize, weight: usize, grad: &GradOut) -> Result<(), Caught> {
        let (view, _) = grad.target();
        let more = Op::host("wgrad more", format!("w{weight}"), vec![Access::update(view)], |args| {
            args.write::<f32>(0)?.iter_mut().for_each(|g| *g += 0.25);
            Ok(())
        });
        Ok(self.streams[on].launch(more)?)
    }

    /// Logs a sum of the elements, each times a number of its own.
    fn read(&self, on: usize, value: &View) -> Result<(), Caught> {
        let accesses = vec![Access::read(value), Access::update(&self.logs[on])];
        let op = Op::host("use", value.label().to_owned(), accesses, |args| {
            let weighed = |(i, x): (usize, &f32)| x * (1 + i % 13) as f32;
            let sum: f32 = args.read::<f32>(0)?.iter().enumerate().map(weighed).sum();
            let log = args.write::<f32>(1)?;
            log[0] += 1.0;
            let at = log[0] as usize;
            log[at] = sum;
            Ok(())
        });
        Ok(self.streams[on].launch(op)?)
    }

    /// A gradient of this rank's samples that depends on the last value read.
    fn write(&self, on: usize, weight: usize, grad: &GradOut) -> Result<(), Caught> {
        let (view, into) = grad.target();
        let mut accesses = vec![Access::update(view), Access::read(&self.logs[on])];
        if let Accumulate::Keep(flag) = into {
            accesses.push(Access::read(flag));
        }
        let (overwrite, peer) = (matches!(into, Accumulate::Overwrite), self.peer as usize);
        let op = Op::host("wgrad", format!("w{weight}"), accesses, move |args| {
            let kept = if args.len() > 2 { args.read::<f32>(2)?[0] } else { 1.0 };
            let kept = if overwrite { 0.0 } else { kept };
            let log = args.read::<f32>(1)?;
            let last = log[log[0] as usize];
            let value = |e: usize| ((e * 3 + peer * 5 + weight * 2) % 17) as f32 / 16.0 + 0.125 * last;
            let keep = |old: f32| if kept == 0.0 { 0.0 } else { kept * old };
            args.write::<f32>(0)?.iter_mut().enumerate().for_each(|(e, g)| *g = keep(*g) + value(e));
            Ok(())
        });
        Ok(self.streams[on].launch(op)?)
    }
}
