//! Attention of bf16 through cuDNN: for each shape a plan is made once, and then only run.

mod attention; // both passes as graphs of operations
mod calls; // functions of the library
#[cfg(all(test, feature = "gpu-tests"))]
mod card_tests; // which attention it computes
mod descriptor; // what the library is told
mod graph; // operations, and how they run as one
mod handles; // one for each stream

use std::{
    collections::HashMap,
    ptr,
    sync::{Arc, Mutex},
};

use cudarc::cudnn::sys::{cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind};

pub use self::calls::find_cudnn;
use self::{
    calls::Calls,
    descriptor::{Address, Descriptor},
    graph::GraphPlan,
    handles::{Handle, Handles},
};
use super::{
    CudaError,
    card::{Card, RawStream, lock},
    fused::{Fused, FusedShape, Port},
    workspace::Workspace,
};

/// The library, opened for one card.
pub(super) struct Cudnn {
    calls: Arc<Calls>,
    handles: Handles,
    /// None: the library has no plan for it.
    plans: Mutex<HashMap<FusedShape, Option<Arc<FusedPlan>>>>,
}

/// How attention of one shape is computed.
pub(super) struct FusedPlan {
    graph: GraphPlan,
    /// Where in its scratch sums of gradients, sums of rows and what the library works in begin.
    parts: [usize; 3],
    /// Bytes to work in.
    pub(super) scratch: usize,
}

/// What a plan may work in, at most.
const MOST_SCRATCH: usize = 1 << 30;

impl Cudnn {
    /// The card's context is current.
    pub(super) fn open() -> Result<Cudnn, CudaError> {
        let calls = Calls::open()?;
        let handles = Handles::new(calls.clone());
        handles.put_back(handles.make()?);
        Ok(Cudnn { calls, handles, plans: Mutex::default() })
    }

    /// The plan for `shape`; none where the library has none, or one that works in too much. The card's context is
    /// current, and no stream of this thread captures.
    pub(super) fn plan(&self, card: &Card, shape: &FusedShape) -> Result<Option<Arc<FusedPlan>>, CudaError> {
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.get(shape) {
            return Ok(plan.clone());
        }
        let plan = match self.choose(card, shape) {
            Err(error) if error.is_unsupported() => {
                tracing::debug!(?shape, %error, "cuda.attention_refused");
                None
            }
            chosen => chosen?,
        };
        let plan = plan.filter(|plan| plan.scratch <= MOST_SCRATCH).map(Arc::new);
        plans.insert(*shape, plan.clone());
        Ok(plan)
    }

    fn choose(&self, card: &Card, shape: &FusedShape) -> Result<Option<FusedPlan>, CudaError> {
        let graph = attention::graph(&self.calls, shape)?;
        let plan = card.making(|| {
            let handle = self.handles.take(|| self.handles.make())?;
            let plan = graph.plan(handle.0);
            self.handles.put_back(handle);
            plan
        });
        Ok(plan?.map(|graph| {
            let [dq_sums, row_sums] = shape.sums();
            let (parts, scratch) = in_a_row([dq_sums, row_sums, graph.workspace]);
            FusedPlan { graph, parts, scratch }
        }))
    }

    /// What `stream` needs before it captures what is run in it. The context is current.
    pub(super) fn prepare(&self, card: &Card, stream: RawStream) -> Result<(), CudaError> {
        self.handle(card, stream).map(drop)
    }

    fn handle(&self, card: &Card, stream: RawStream) -> Result<Arc<Mutex<Handle>>, CudaError> {
        self.handles.of(stream, || card.making(|| self.handles.make()))
    }

    /// Queues `fused` in `stream`, which may be one that captures, if it was prepared. The context is current, the
    /// workspace is as large as the plan says and used by nothing that may run at the same time.
    pub(super) fn run(
        &self,
        card: &Card,
        fused: &Fused,
        plan: &FusedPlan,
        stream: RawStream,
        workspace: Option<&Workspace>,
    ) -> Result<(), CudaError> {
        let scratch = workspace.map_or(0, Workspace::scratch);
        let [dq_sums, row_sums, own] = plan.parts.map(|at| scratch + at as u64);
        let (scale, one, minus_infinity) = (fused.scale, 1.0f32, f32::NEG_INFINITY);
        let host = |value: &f32| ptr::from_ref(value).cast_mut().cast();
        let address = |port: &Port| {
            Address(match port {
                Port::Scale => host(&scale),
                Port::One => host(&one),
                Port::MinusInfinity => host(&minus_infinity),
                Port::DQSums => dq_sums as *mut _,
                Port::RowSums => row_sums as *mut _,
                port => fused.address(*port) as *mut _,
            })
        };
        let ports = &plan.graph.ports;
        let pack = Descriptor::new(&self.calls, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ports.iter().copied().map(graph::name).collect::<Vec<_>>())?
            .set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &ports.iter().map(address).collect::<Vec<_>>())?
            .set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[Address(own as *mut _)])?
            .finalize()?;
        let handle = self.handle(card, stream)?;
        let handle = lock(&handle);
        // SAFETY: nobody else uses the handle meanwhile; its stream is of the card whose context is current; the plan
        // describes the tensors at these addresses (`Fused`), which whoever submitted the operation keeps until the stream
        // has passed it; values on the host are read before the call returns.
        let code = unsafe { (self.calls.execute)(handle.0, plan.graph.plan.raw(), pack.raw()) };
        self.calls.check("cudnnBackendExecute", code)
    }

    /// `stream` is about to go, with nothing on its way in it; in `aside` nothing is ever held up. The context is current.
    pub(super) fn leave(&self, stream: RawStream, aside: RawStream) {
        self.handles.leave(stream, aside);
    }

    /// `stream` is about to go, and may never come to its end.
    pub(super) fn abandon(&self, stream: RawStream) {
        self.handles.abandon(stream);
    }

    /// Gives handles and plans back. The card's context is current, nothing is on its way, and nobody comes again.
    pub(super) fn close(&self) {
        lock(&self.plans).clear();
        self.handles.close();
    }
}

/// Where parts of these sizes begin, each at a multiple of what kernels like, and where the last ends.
fn in_a_row<const N: usize>(sizes: [usize; N]) -> ([usize; N], usize) {
    let mut end = 0usize;
    let begins = sizes.map(|bytes| {
        let begin = end.next_multiple_of(256);
        end = begin + bytes;
        begin
    });
    (begins, end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_scratch_share_no_byte_and_begin_where_kernels_like() {
        assert_eq!(in_a_row([1000, 4, 0]), ([0, 1024, 1280], 1280));
        assert_eq!(in_a_row([0, 4, 7]), ([0, 0, 256], 263));
    }
}
