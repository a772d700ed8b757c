//! Kernels with their arguments, for streams and for nodes of graphs.

use std::{ffi::c_void, ptr};

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, RawStream},
    fault::Post,
    kernels::THREADS,
};
use crate::{DType, View};

/// One launch of a function of the sources.
pub(super) struct Call {
    pub(super) function: &'static str,
    pub(super) blocks: u32,
    /// As the function declares them, without the [`Post`] at the end.
    pub(super) values: Vec<Value>,
}

/// An argument: as many of the words as its type in `common.cu` has.
#[derive(Clone, Copy)]
pub(super) struct Value([u64; 5]);

/// More blocks than run at once on any card add nothing: kernels go on from block to block by themselves.
const MOST_BLOCKS: usize = 8192;

impl Call {
    /// For a kernel with a thread for each of `elements`, or a loop over them.
    pub(super) fn over(function: &'static str, elements: usize, values: Vec<Value>) -> Call {
        Call::blocks(function, elements.div_ceil(THREADS as usize), values)
    }

    /// For a kernel with a block for each of `blocks` rows or pieces, or a loop over them.
    pub(super) fn blocks(function: &'static str, blocks: usize, values: Vec<Value>) -> Call {
        Call { function, blocks: blocks.clamp(1, MOST_BLOCKS) as u32, values }
    }

    /// For a kernel that takes 32 columns a block and has no loop over blocks.
    pub(super) fn columns(function: &'static str, columns: usize, values: Vec<Value>) -> Call {
        let blocks = u32::try_from(columns.div_ceil(32).max(1)).expect("BUG: more columns than a grid has blocks");
        Call { function, blocks, values }
    }
}

impl Value {
    /// `Mat`.
    pub(super) fn matrix(view: &View) -> Value {
        let kind = match view.dtype() {
            DType::F32 => 0,
            DType::Bf16 => 1,
            DType::I32 => 2,
        };
        let [rows, cols, pitch] = [view.row_count(), view.cols(), view.pitch()].map(|size| size as u64);
        Value([address(view), rows, cols, pitch, kind])
    }

    /// `Mat`, where there is no tensor: of no rows.
    pub(super) fn no_matrix() -> Value {
        Value([0; 5])
    }

    pub(super) fn words<const N: usize>(words: [u64; N]) -> Value {
        let mut all = [0; 5];
        all[..N].copy_from_slice(&words);
        Value(all)
    }
}

/// Where the first element of a view is on its card.
pub(super) fn address(view: &View) -> u64 {
    let backing = view.allocation().storage.as_ref().expect("BUG: a card's memory without storage");
    backing.card() + view.region().start as u64
}

/// Pointers to arguments, as the driver wants them; it copies what they point to.
fn pointers(values: &mut [Value]) -> Vec<*mut c_void> {
    values.iter_mut().map(|value| value.0.as_mut_ptr().cast()).collect()
}

fn with_post(call: &Call, post: &Post, operation: u64) -> Vec<Value> {
    let mut values = call.values.clone();
    values.push(Value::words([post.card(), operation]));
    values
}

/// Queues `call` as a part of operation `operation` of whoever owns `post`. The context is current.
pub(super) fn launch(
    card: &Card,
    stream: RawStream,
    call: &Call,
    post: &Post,
    operation: u64,
) -> Result<(), CudaError> {
    let (function, mut values) = (card.function(call.function), with_post(call, post, operation));
    let mut pointers = pointers(&mut values);
    // SAFETY: the arguments are those that the function declares (`requests` and the sources go together; tests run
    // every function), each pointing to as many bytes as it has. The addresses in them are of live memory of this card,
    // which the submitted item keeps until the stream has passed it. The stream is of this card.
    let code = unsafe {
        let (args, none) = (pointers.as_mut_ptr(), ptr::null_mut());
        sys::cuLaunchKernel(function.0, call.blocks, 1, 1, THREADS, 1, 1, 0, stream.0, args, none)
    };
    card.check("cuLaunchKernel", code)
}

/// Adds `call` as a node behind `behind`; the same otherwise.
pub(super) fn add_node(
    card: &Card,
    graph: sys::CUgraph,
    behind: &[sys::CUgraphNode],
    call: &Call,
    post: &Post,
    operation: u64,
) -> Result<sys::CUgraphNode, CudaError> {
    let (function, mut values) = (card.function(call.function), with_post(call, post, operation));
    let mut pointers = pointers(&mut values);
    let params = sys::CUDA_KERNEL_NODE_PARAMS {
        func: function.0,
        gridDimX: call.blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: THREADS,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: pointers.as_mut_ptr(),
        extra: ptr::null_mut(),
        kern: ptr::null_mut(),
        ctx: card.context(),
    };
    let mut node = ptr::null_mut();
    // SAFETY: as in `launch`, but it is the graph that keeps the memory; `behind` are nodes of `graph`.
    let code = unsafe { sys::cuGraphAddKernelNode_v2(&mut node, graph, behind.as_ptr(), behind.len(), &params) };
    card.check("cuGraphAddKernelNode", code).map(|()| node)
}
