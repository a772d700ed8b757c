//! What a library queues, as a graph of its own. Small memory sets in it become kernels: a node that sets memory costs a
//! card several microseconds on either side, and more where branches meet, and libraries set a counter of four bytes in
//! front of most of their kernels.

use std::ptr;

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, RawStream},
    fault::Post,
    launch::{self, Call, Value},
    steps::Place,
};

/// What was queued in a stream while it captured.
pub(super) struct Captured(pub(super) sys::CUgraph);

/// Bytes up to which a kernel of one block sets memory as fast as it starts.
const FEW: usize = 4096;

type Nodes = Vec<sys::CUgraphNode>;

impl Captured {
    /// The context is current.
    pub(super) fn new(
        card: &Card,
        side: RawStream,
        queue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Captured, CudaError> {
        // So that calls of other threads neither break the capture nor are refused because of it.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is used by nobody else, and the capture ends below.
        card.check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(side.0, mode) })?;
        let queued = queue();
        let mut graph = ptr::null_mut();
        // SAFETY: this thread began the capture; writes one handle, null if the capture is broken.
        let ended = card.check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(side.0, &mut graph) });
        let captured = Captured(graph);
        queued.and(ended).map(|()| captured)
    }

    /// Puts a kernel in the place of every node that sets few bytes. They are a part of operation `operation` of whoever
    /// owns `post`.
    pub(super) fn replace_memsets(
        &self,
        card: &Card,
        at: &Place<'_>,
        post: &Post,
        operation: u64,
    ) -> Result<(), CudaError> {
        for node in self.nodes(card)? {
            let Some(call) = set_by_kernel(card, node)? else { continue };
            let (before, behind) = (neighbours(card, node, Side::Before)?, neighbours(card, node, Side::Behind)?);
            let at = Place { graph: self.0, behind: &before, ..*at };
            let set = launch::add_node(card, &at, &call, post, operation, None)?;
            if !behind.is_empty() {
                let from = vec![set; behind.len()];
                // SAFETY: both lists hold nodes of this graph, as many each; edges have no data.
                let code = unsafe {
                    let (from, to) = (from.as_ptr(), behind.as_ptr());
                    sys::cuGraphAddDependencies_v2(self.0, from, to, ptr::null(), behind.len())
                };
                card.check("cuGraphAddDependencies", code)?;
            }
            // SAFETY: a node of this graph, named nowhere else; its edges go with it.
            card.check("cuGraphDestroyNode", unsafe { sys::cuGraphDestroyNode(node) })?;
        }
        Ok(())
    }

    fn nodes(&self, card: &Card) -> Result<Nodes, CudaError> {
        let mut count = 0;
        // SAFETY: asked for no nodes, it writes their number.
        card.check("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(self.0, ptr::null_mut(), &mut count) })?;
        let mut nodes = vec![ptr::null_mut(); count];
        // SAFETY: there is room for as many as it told.
        card.check("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(self.0, nodes.as_mut_ptr(), &mut count) })?;
        Ok(nodes)
    }
}

/// The call that does what `node` does, if that sets few whole words.
fn set_by_kernel(card: &Card, node: sys::CUgraphNode) -> Result<Option<Call>, CudaError> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: a node of a live graph; writes its type.
    card.check("cuGraphNodeGetType", unsafe { sys::cuGraphNodeGetType(node, &mut kind) })?;
    if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET {
        return Ok(None);
    }
    let mut set = sys::CUDA_MEMSET_NODE_PARAMS { dst: 0, pitch: 0, value: 0, elementSize: 0, width: 0, height: 0 };
    // SAFETY: a node that sets memory; writes its parameters.
    card.check("cuGraphMemsetNodeGetParams", unsafe { sys::cuGraphMemsetNodeGetParams(node, &mut set) })?;
    Ok(words(&set).map(|(word, count)| {
        let row = Value::words([set.dst, 1, count as u64, count as u64, 2]);
        Call::over("fill", count, vec![row, Value::words([u64::from(word)])])
    }))
}

/// The word that a memory set writes, and how often; none where it is not one row of few whole words.
fn words(set: &sys::CUDA_MEMSET_NODE_PARAMS) -> Option<(u32, usize)> {
    let word = match set.elementSize {
        1 => (set.value & 0xFF) * 0x0101_0101,
        2 => (set.value & 0xFFFF) * 0x0001_0001,
        4 => set.value,
        _ => return None,
    };
    let bytes = set.width * set.elementSize as usize;
    let fits = set.height == 1 && bytes <= FEW && bytes.is_multiple_of(4) && set.dst.is_multiple_of(4);
    fits.then_some((word, bytes / 4))
}

#[derive(Clone, Copy)]
enum Side {
    Before,
    Behind,
}

fn neighbours(card: &Card, node: sys::CUgraphNode, side: Side) -> Result<Nodes, CudaError> {
    let ask = |nodes: *mut sys::CUgraphNode, edges: *mut sys::CUgraphEdgeData, count: &mut usize| {
        // SAFETY: a node of a live graph; writes at most `count` nodes and edges, or with no room their number.
        let code = unsafe {
            match side {
                Side::Before => sys::cuGraphNodeGetDependencies_v2(node, nodes, edges, count),
                Side::Behind => sys::cuGraphNodeGetDependentNodes_v2(node, nodes, edges, count),
            }
        };
        card.check("cuGraphNodeGetDependencies", code)
    };
    let mut count = 0;
    ask(ptr::null_mut(), ptr::null_mut(), &mut count)?;
    let plain = sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
    let (mut nodes, mut edges) = (vec![ptr::null_mut(); count], vec![plain; count]);
    if count > 0 {
        // What edges say is dropped: behind a memory set they say nothing, because it cannot tell more than its end.
        ask(nodes.as_mut_ptr(), edges.as_mut_ptr(), &mut count)?;
    }
    Ok(nodes)
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the capture, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_whole_words_in_a_row_are_set_by_a_kernel_and_nothing_else() {
        let set = |dst, value, element_size, width, height| {
            words(&sys::CUDA_MEMSET_NODE_PARAMS { dst, pitch: 0, value, elementSize: element_size, width, height })
        };
        assert_eq!(set(4096, 0, 4, 1, 1), Some((0, 1)));
        assert_eq!(set(4096, 0x1AB, 1, 8, 1), Some((0xABAB_ABAB, 2)));
        assert_eq!(set(4096, 0x1234, 2, 4, 1), Some((0x1234_1234, 2)));
        assert_eq!(set(4096, 0, 1, 6, 1), None);
        assert_eq!(set(4098, 0, 4, 1, 1), None);
        assert_eq!(set(4096, 0, 4, 1, 2), None);
        assert_eq!(set(4096, 0, 1, 8192, 1), None);
    }
}
