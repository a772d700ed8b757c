//! Kernels with their arguments, for streams and for nodes of graphs.

use std::{ffi::c_void, ptr};

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, Function, RawStream},
    fault::Post,
    kernels::THREADS,
    steps::Place,
    workspace::Workspace,
};
use crate::{DType, View};

/// One launch of a function of the sources.
pub(super) struct Call {
    pub(super) function: &'static str,
    pub(super) blocks: u32,
    /// Threads of a block, as the function expects them.
    pub(super) threads: u32,
    /// Bytes of shared memory that are asked for with the launch.
    pub(super) shared: u32,
    /// What the function needs to work in.
    pub(super) scratch: Option<Scratch>,
    /// As the function declares them behind the maps, without the [`Post`] at the end.
    pub(super) values: Vec<Value>,
    /// Apart, so that a call is small: it moves with every launch.
    pub(super) rare: Option<Box<Rare>>,
}

/// Arguments that few functions have.
#[derive(Default)]
pub(super) struct Rare {
    /// Matrices for the card's copy engine: the first arguments.
    pub(super) maps: Vec<sys::CUtensorMap>,
    /// One of more words than a [`Value`] has.
    pub(super) table: Option<Table>,
}

/// Memory of a call's own, and where among its values the address goes.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// An end of a copy: its address on the card, and the bytes from a row to the next.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) at: u64,
    pub(super) pitch: usize,
}

/// Words of an argument, and which one it is.
pub(super) struct Table {
    pub(super) at: usize,
    pub(super) words: Vec<u64>,
}

/// A call that is found and encoded once and may be launched often: on one card, whose memory it reaches.
pub(crate) struct Ready {
    function: Function,
    call: Call,
}

/// An argument: as many of the words as its type in the sources has.
#[derive(Clone, Copy)]
pub(super) struct Value([u64; 5]);

/// More blocks than run at once on any card add nothing: kernels go on from block to block by themselves.
const MOST_BLOCKS: usize = 8192;

impl Call {
    /// For a kernel with a thread for each of `elements`, or a loop over them.
    pub(super) fn over(function: &'static str, elements: usize, values: Vec<Value>) -> Call {
        Call::blocks(function, elements.div_ceil(THREADS as usize), values)
    }

    /// For a kernel with a warp for each of `rows` rows, or a loop over them.
    pub(super) fn rows(function: &'static str, rows: usize, values: Vec<Value>) -> Call {
        Call::blocks(function, rows.div_ceil(THREADS as usize / 32), values)
    }

    /// Copies `rows` rows of `bytes` bytes each, as any element has them: two at a time.
    pub(super) fn copy(to: Piece, from: Piece, rows: usize, bytes: usize) -> Call {
        let (cols, i16s) = (bytes / 2, 3);
        let mat = |piece: Piece| Value([piece.at, rows as u64, cols as u64, (piece.pitch / 2) as u64, i16s]);
        Call::over("cast", rows * cols, vec![mat(to), mat(from)])
    }

    /// For a kernel with a block for each of `blocks` rows or pieces, or a loop over them.
    pub(super) fn blocks(function: &'static str, blocks: usize, values: Vec<Value>) -> Call {
        let blocks = blocks.clamp(1, MOST_BLOCKS) as u32;
        Call { function, blocks, threads: THREADS, shared: 0, scratch: None, values, rare: None }
    }

    /// Bytes to work in; none: it needs no workspace at all.
    pub(super) fn scratch(&self) -> Option<usize> {
        self.scratch.map(|scratch| scratch.bytes)
    }
}

impl Value {
    /// `Mat`.
    pub(super) fn matrix(view: &View) -> Value {
        let kind = match view.dtype() {
            DType::F32 => 0,
            DType::Bf16 => 1,
            DType::I32 => 2,
            DType::I16 => 3,
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

    fn pointer(&self) -> *mut c_void {
        self.0.as_ptr().cast_mut().cast()
    }
}

/// Where the first element of a view is on its card.
pub(super) fn address(view: &View) -> u64 {
    view.card_address().expect("BUG: a card reaches for memory that it does not have")
}

/// The most arguments that a function has, the post included.
const MOST_ARGUMENTS: usize = 24;

/// Gives `take` pointers to all arguments, as the driver wants them: it copies what they point to and writes nothing
/// there. Nothing is allocated, because every launch comes here. `workspace` is there if the call needs something to
/// work in.
fn with_arguments<T>(
    call: &Call,
    post: &Post,
    operation: u64,
    workspace: Option<&Workspace>,
    take: impl FnOnce(*mut *mut c_void) -> T,
) -> T {
    let post = Value::words([post.card(), operation]);
    let scratch = call.scratch.map(|scratch| {
        let workspace = workspace.expect("BUG: a call without its workspace");
        (scratch.at, Value::words([workspace.scratch()]))
    });
    let mut pointers = [ptr::null_mut(); MOST_ARGUMENTS];
    let of_copies = call.rare.as_ref().map_or(&[][..], |rare| &rare.maps);
    let (maps, count) = (of_copies.len(), of_copies.len() + call.values.len());
    assert!(count < MOST_ARGUMENTS, "BUG: {} has {count} arguments", call.function);
    for (pointer, map) in pointers.iter_mut().zip(of_copies) {
        *pointer = ptr::from_ref(map).cast_mut().cast();
    }
    for (pointer, value) in pointers[maps..].iter_mut().zip(call.values.iter().chain([&post])) {
        *pointer = value.pointer();
    }
    if let Some((at, address)) = &scratch {
        pointers[maps + at] = address.pointer();
    }
    if let Some(Table { at, words }) = call.rare.as_ref().and_then(|rare| rare.table.as_ref()) {
        pointers[maps + at] = words.as_ptr().cast_mut().cast();
    }
    take(pointers.as_mut_ptr())
}

/// Queues `call` as a part of operation `operation` of whoever owns `post`. The context is current.
pub(super) fn launch(
    card: &Card,
    stream: RawStream,
    call: &Call,
    post: &Post,
    operation: u64,
    workspace: Option<&Workspace>,
) -> Result<(), CudaError> {
    queue(card, stream, (card.function(call)?, call), post, operation, workspace)
}

fn queue(
    card: &Card,
    stream: RawStream,
    (function, call): (Function, &Call),
    post: &Post,
    operation: u64,
    workspace: Option<&Workspace>,
) -> Result<(), CudaError> {
    let code = with_arguments(call, post, operation, workspace, |arguments| {
        let (blocks, threads, shared, none) = (call.blocks, call.threads, call.shared, ptr::null_mut());
        // SAFETY: the arguments are those that the function declares (`requests` and the sources go together; tests run
        // every function), each pointing to as many bytes as it has. The addresses in them are of live memory of this
        // card, which the submitted item keeps until the stream has passed it. The stream is of this card.
        unsafe { sys::cuLaunchKernel(function.0, blocks, 1, 1, threads, 1, 1, shared, stream.0, arguments, none) }
    });
    card.check("cuLaunchKernel", code)
}

impl Ready {
    pub(super) fn new(card: &Card, call: Call) -> Result<Ready, CudaError> {
        Ok(Ready { function: card.function(&call)?, call })
    }

    /// Bytes to work in; none: it needs no workspace at all.
    pub(super) fn scratch(&self) -> Option<usize> {
        self.call.scratch()
    }

    /// As [`launch`].
    pub(super) fn launch(
        &self,
        card: &Card,
        stream: RawStream,
        post: &Post,
        operation: u64,
        workspace: Option<&Workspace>,
    ) -> Result<(), CudaError> {
        queue(card, stream, (self.function, &self.call), post, operation, workspace)
    }
}

/// Adds `call` as a node; the same otherwise.
pub(super) fn add_node(
    card: &Card,
    at: &Place<'_>,
    call: &Call,
    post: &Post,
    operation: u64,
    workspace: Option<&Workspace>,
) -> Result<sys::CUgraphNode, CudaError> {
    let (function, mut node) = (card.function(call)?, ptr::null_mut());
    let code = with_arguments(call, post, operation, workspace, |arguments| {
        let params = sys::CUDA_KERNEL_NODE_PARAMS {
            func: function.0,
            gridDimX: call.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: call.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: call.shared,
            kernelParams: arguments,
            extra: ptr::null_mut(),
            kern: ptr::null_mut(),
            ctx: card.context(),
        };
        let (first, count) = (at.behind.as_ptr(), at.behind.len());
        // SAFETY: as in `launch`, but it is the graph that keeps the memory; `behind` are nodes of it.
        unsafe { sys::cuGraphAddKernelNode_v2(&mut node, at.graph, first, count, &params) }
    });
    card.check("cuGraphAddKernelNode", code)?;
    let attribute = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PRIORITY;
    let value = sys::CUlaunchAttributeValue { priority: at.priority.number() };
    // SAFETY: the node was just added; the value is of the kind that the attribute has.
    let code = unsafe { sys::cuGraphKernelNodeSetAttribute(node, attribute, &value) };
    card.check("cuGraphKernelNodeSetAttribute", code).map(|()| node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_rows_is_a_cast_between_equal_types_of_two_bytes() {
        let call = Call::copy(Piece { at: 1 << 20, pitch: 12 }, Piece { at: 1 << 30, pitch: 64 }, 5, 12);
        assert_eq!((call.function, call.blocks), ("cast", 1));
        assert_eq!(
            call.values.iter().map(|value| value.0).collect::<Vec<_>>(),
            [[1 << 20, 5, 6, 6, 3], [1 << 30, 5, 6, 32, 3]]
        );
    }
}
