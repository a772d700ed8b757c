//! What is launched for a request: kernels of ours and calls of libraries, one behind the other.

use std::{ptr, sync::Arc};

use cudarc::driver::sys;

use super::{
    CudaError,
    blaslt::{Plan, Planned},
    captured::Captured,
    card::{Card, Priority, Products, RawStream},
    cudnn::FusedPlan,
    fault::Post,
    fused::Fused,
    hopper,
    launch::{self, Call, Ready},
    product::{Adds, Product, ProductShape},
    requests,
    workspace::Workspace,
};
use crate::{Access, Kernel};

/// What a request becomes before it is known what the libraries can do.
pub(super) enum Step {
    Call(Call),
    /// A product by the library, or by our kernel for compute capability 9.0, with what follows it; and what is done
    /// where neither is to compute it.
    Product {
        product: Box<Product>,
        then: Option<Call>,
        otherwise: Box<Step>,
    },
    /// Attention by cuDNN, and what is done where it has no plan.
    Fused {
        fused: Box<Fused>,
        otherwise: Vec<Call>,
    },
}

/// All steps of a request.
pub(super) enum Steps {
    /// Most are one call, for which nothing need be allocated.
    One(Call),
    Several(Vec<Step>),
}

/// A step that is settled.
pub(super) enum Launchable {
    Call(Call),
    Product(Box<Product>, Arc<Plan>),
    Fused(Box<Fused>, Arc<FusedPlan>),
}

/// What runs for `kernel` on this card. Algorithms are chosen here, once for each shape. The context is current.
pub(super) fn settle(card: &Card, kernel: &Kernel, accesses: &[Access]) -> Result<Vec<Launchable>, CudaError> {
    let mut settled = Vec::with_capacity(2);
    each(card, kernel, accesses, &mut |step| {
        settled.push(step);
        Ok(())
    })?;
    Ok(settled)
}

/// What runs for `kernel` whenever it is asked for; none if a library may have a part in it, which is chosen anew each
/// time: measuring products changes what is chosen.
pub(super) fn ready(card: &Card, kernel: &Kernel, accesses: &[Access]) -> Result<Option<Vec<Ready>>, CudaError> {
    let calls = match requests::steps(kernel, accesses, card.sums()) {
        Steps::One(call) => vec![call],
        Steps::Several(steps) => {
            let own = |step| if let Step::Call(call) = step { Some(call) } else { None };
            match steps.into_iter().map(own).collect() {
                Some(calls) => calls,
                None => return Ok(None),
            }
        }
    };
    calls.into_iter().map(|call| Ready::new(card, call)).collect::<Result<Vec<_>, _>>().map(Some)
}

/// As [`settle`], one after the other to `take`.
fn each(
    card: &Card,
    kernel: &Kernel,
    accesses: &[Access],
    take: &mut dyn FnMut(Launchable) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    match requests::steps(kernel, accesses, card.sums()) {
        Steps::One(call) => take(Launchable::Call(call)),
        Steps::Several(steps) => settle_each(card, steps, take),
    }
}

/// As [`each`], of steps that are several.
pub(super) fn settle_each(
    card: &Card,
    steps: Vec<Step>,
    take: &mut dyn FnMut(Launchable) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    steps.into_iter().try_for_each(|step| settle_one(card, step, take))
}

fn settle_one(
    card: &Card,
    step: Step,
    take: &mut dyn FnMut(Launchable) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    match step {
        Step::Call(call) => take(Launchable::Call(call)),
        Step::Product { product, then, otherwise } => {
            let planned = match planned(card, &product.shape)? {
                Planned::Library(plan) => Launchable::Product(product, plan),
                Planned::Hopper => Launchable::Call(hopper::call(card, &product)?),
                Planned::Otherwise => return settle_one(card, *otherwise, take),
            };
            take(planned)?;
            then.into_iter().try_for_each(|call| take(Launchable::Call(call)))
        }
        Step::Fused { fused, otherwise } => {
            match card.cudnn().map(|cudnn| cudnn.plan(card, &fused.shape)).transpose()?.flatten() {
                Some(plan) => take(Launchable::Fused(fused, plan)),
                None => otherwise.into_iter().try_for_each(|call| take(Launchable::Call(call))),
            }
        }
    }
}

fn planned(card: &Card, shape: &ProductShape) -> Result<Planned, CudaError> {
    if card.products == Products::Hopper && card.multiplies(shape) {
        return Ok(Planned::Hopper);
    }
    match card.products()?.filter(|_| shape.is_allowed()) {
        Some(blas) => blas.plan(shape),
        None => Ok(Planned::Otherwise),
    }
}

impl Launchable {
    /// Bytes to work in; none: it needs no workspace at all.
    pub(super) fn scratch(&self) -> Option<usize> {
        match self {
            Launchable::Call(call) => call.scratch(),
            Launchable::Product(product, plan) => {
                (plan.workspace > 0 || product.shape.adds == Adds::PartOfC).then_some(plan.workspace)
            }
            Launchable::Fused(_, plan) => (plan.scratch > 0).then_some(plan.scratch),
        }
    }

    /// Queues it as a part of operation `operation` of whoever owns `post`. The context is current.
    pub(super) fn launch(
        &self,
        card: &Card,
        stream: RawStream,
        post: &Post,
        operation: u64,
        workspace: Option<&Workspace>,
    ) -> Result<(), CudaError> {
        match self {
            Launchable::Call(call) => launch::launch(card, stream, call, post, operation, workspace),
            Launchable::Product(product, plan) => {
                let blas = card.products()?.expect("BUG: a plan without the library");
                blas.run(product, plan, stream, workspace)
            }
            Launchable::Fused(fused, plan) => {
                let cudnn = card.cudnn().expect("BUG: a plan without the library");
                cudnn.run(card, fused, plan, stream, workspace)
            }
        }
    }

    /// Adds it as a node; the same otherwise. What a library launches is its own matter, so it is captured into a graph
    /// by itself, which becomes the node.
    pub(super) fn add_node(
        &self,
        card: &Card,
        at: &Place<'_>,
        post: &Post,
        operation: u64,
        workspace: Option<&Workspace>,
    ) -> Result<sys::CUgraphNode, CudaError> {
        if let Launchable::Call(call) = self {
            return launch::add_node(card, at, call, post, operation, workspace);
        }
        if let Launchable::Fused(..) = self {
            card.cudnn().expect("BUG: a plan without the library").prepare(card, at.side)?;
        }
        let child = Captured::new(card, at.side, || self.launch(card, at.side, post, operation, workspace))?;
        child.replace_memsets(card, at, post, operation)?;
        let (mut node, first, count) = (ptr::null_mut(), at.behind.as_ptr(), at.behind.len());
        // SAFETY: `behind` are nodes of the graph; the child is copied.
        let code = unsafe { sys::cuGraphAddChildGraphNode(&mut node, at.graph, first, count, child.0) };
        card.check("cuGraphAddChildGraphNode", code).map(|()| node)
    }
}

/// Where a node goes.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) graph: sys::CUgraph,
    /// Nodes of it that come first.
    pub(super) behind: &'a [sys::CUgraphNode],
    /// Captures what is not known as a node. Of the same priority.
    pub(super) side: RawStream,
    pub(super) priority: Priority,
}
