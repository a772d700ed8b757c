//! What a joint operation becomes: calls of NCCL on a stream, or nodes of a graph that were captured from them.

use std::ptr;

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, RawStream},
    clique::{Clique, Seat, Turn},
    launch::{self, Call, Piece, Value, address},
    nccl::{self, Ends, Part, Type},
};
use crate::{Access, DType, Exchange, Mode, Reduce, View, joint::JointBody};

impl Clique {
    /// Queues one call of every member, each on its stream.
    pub(super) fn call_all(&self, _turn: &Turn<'_>, calls: &[(&JointBody, RawStream)]) -> Result<(), CudaError> {
        let seat = |body: &JointBody| &self.seats[body.member];
        let _begins = self.seats[0].card.beginnings.begin();
        calls.iter().try_for_each(|(body, stream)| {
            seat(body).card.bind()?;
            seat(body).wait_for_last_use(*stream)?;
            seat(body).order(body, *stream, Way::To)
        })?;
        nccl::group(|| calls.iter().try_for_each(|(body, stream)| seat(body).queue(body, *stream)))?;
        calls.iter().try_for_each(|(body, stream)| seat(body).order(body, *stream, Way::From))
    }

    /// One member's call as a graph of its own, for the caller to add to another one and to destroy.
    pub(super) fn capture(&self, _turn: &Turn<'_>, body: &JointBody) -> Result<CapturedCall, CudaError> {
        let seat = &self.seats[body.member];
        let (card, stream) = (&seat.card, seat.stream);
        card.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the seat's own stream, which nothing else is queued to; the capture ends below on every way out.
        card.check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.0, mode) })?;
        let queued = seat
            .order(body, stream, Way::To)
            .and_then(|()| nccl::group(|| seat.queue(body, stream)))
            .and_then(|()| seat.order(body, stream, Way::From));
        let mut graph = ptr::null_mut();
        card.bind()?;
        // SAFETY: ends what began above; writes one handle.
        let ended = card.check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream.0, &mut graph) });
        let captured = CapturedCall(graph);
        queued.and(ended).map(|()| captured)
    }
}

/// A graph that is destroyed when it has been copied into another one.
pub(super) struct CapturedCall(pub(super) sys::CUgraph);

impl Drop for CapturedCall {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by a capture, destroyed once; copies of it have what they need.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// Before and behind a call of which NaN is to be the greatest.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    To,
    From,
}

/// Whether an exchange is made of integers that stand for floats.
fn is_ordered(exchange: Exchange, dtype: DType) -> bool {
    exchange == Exchange::AllReduce(Reduce::Max) && dtype == DType::F32
}

impl Seat {
    /// Makes integers of the floats that a call compares, at its destination, or floats of them again.
    fn order(&self, body: &JointBody, stream: RawStream, way: Way) -> Result<(), CudaError> {
        self.card.bind()?;
        for i in 0..body.request.len() {
            let (exchange, accesses) = body.request.part(i, &body.accesses);
            let (Some(source), Some(dest)) = ends(accesses) else { continue };
            if !is_ordered(exchange, dest.dtype()) || dest.numel() == 0 {
                continue;
            }
            let (function, from) = if way == Way::To { ("to_ordered", source) } else { ("from_ordered", dest) };
            let values = Value::words([address(from), address(dest), dest.numel() as u64]);
            launch::launch(&self.card, stream, &Call::over(function, dest.numel(), vec![values]), &self.post, 1, None)?;
        }
        Ok(())
    }

    /// Queues this member's call. In a group of NCCL's.
    fn queue(&self, body: &JointBody, stream: RawStream) -> Result<(), CudaError> {
        let n = body.meeting.members.len();
        for i in 0..body.request.len() {
            let (exchange, accesses) = body.request.part(i, &body.accesses);
            // SAFETY: `check_exchange` made the sizes fit; whoever queues keeps the views until the stream, which is of
            // this member's card, has passed.
            unsafe { self.queue_one(exchange, accesses, n, body.member, stream)? };
        }
        Ok(())
    }

    /// # Safety
    /// The views are of this seat's card, fit `exchange` and live until the stream, of the same card, has passed.
    unsafe fn queue_one(
        &self,
        exchange: Exchange,
        accesses: &[Access],
        n: usize,
        member: usize,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let comm = self.comm;
        let (source, dest) = ends(accesses);
        let elements = source.or(dest).map_or(0, View::numel);
        if elements == 0 {
            // Nothing moves, and still nobody passes before all have come.
            let (at, dtype) = (self.word.address(), Type::of(DType::I32));
            // SAFETY: the seat's own memory.
            return unsafe { comm.all_reduce(Ends { from: at, to: at, count: 1, dtype }, Reduce::Max, stream) };
        }
        let any = source.or(dest).expect("BUG: elements without a view");
        let (dtype, size) = (Type::of(any.dtype()), any.dtype().size_bytes());
        let (from, to) = (address(source.unwrap_or(any)), address(dest.unwrap_or(any)));
        let whole = |count| Ends { from, to, count, dtype };
        // SAFETY: the caller's promise.
        unsafe {
            match exchange {
                Exchange::Barrier => unreachable!("BUG: a barrier with elements"),
                Exchange::AllGather => comm.all_gather(whole(elements), stream),
                Exchange::ReduceScatter(op) => comm.reduce_scatter(whole(elements / n), op, stream),
                Exchange::AllReduce(op) if is_ordered(exchange, any.dtype()) => {
                    // `order` has put them there.
                    let dtype = Type::of(DType::I32);
                    comm.all_reduce(Ends { from: to, to, count: elements, dtype }, op, stream)
                }
                Exchange::AllReduce(op) => comm.all_reduce(whole(elements), op, stream),
                Exchange::Broadcast { root } => comm.broadcast(whole(elements), root, stream),
                Exchange::AllToAll => {
                    let part = Part { count: elements / n, dtype };
                    (0..n).try_for_each(|peer| {
                        let at = (peer * part.count * size) as u64;
                        comm.send(from + at, part, peer, stream)?;
                        comm.recv(to + at, part, peer, stream)
                    })
                }
                Exchange::SendRecv => {
                    let part = Part { count: elements, dtype };
                    if member == 0 { comm.send(from, part, 1, stream) } else { comm.recv(to, part, 0, stream) }
                }
            }
        }
    }
}

/// What is read and what is written.
fn ends(accesses: &[Access]) -> (Option<&View>, Option<&View>) {
    let source = accesses.iter().find(|access| access.mode != Mode::Write);
    let dest = accesses.iter().find(|access| access.mode != Mode::Read);
    (source.map(|access| &access.view), dest.map(|access| &access.view))
}

/// A copy that a group of one makes.
#[derive(Clone, Copy)]
pub(super) struct OwnCopy {
    from: u64,
    to: u64,
    bytes: usize,
}

/// With one member every exchange is a copy, and nothing at all in place.
pub(super) fn copies_alone(body: &JointBody) -> Vec<OwnCopy> {
    let one = |i: usize| {
        let (source, dest) = ends(body.request.part(i, &body.accesses).1);
        let (source, dest) = (source?, dest?);
        let copy = OwnCopy { from: address(source), to: address(dest), bytes: source.bytes() };
        (copy.from != copy.to && copy.bytes > 0).then_some(copy)
    };
    (0..body.request.len()).filter_map(one).collect()
}

impl OwnCopy {
    pub(super) fn queue(self, card: &Card, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: both ends are memory of this card, which whoever queued the operation keeps.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(self.to, self.from, self.bytes, stream.0) };
        card.check("cuMemcpyDtoDAsync", code)
    }

    /// As a kernel.
    pub(super) fn call(self) -> Call {
        let end = |at| Piece { at, pitch: self.bytes };
        Call::copy(end(self.to), end(self.from), 1, self.bytes)
    }

    pub(super) fn add_node(
        self,
        card: &Card,
        graph: sys::CUgraph,
        behind: &[sys::CUgraphNode],
    ) -> Result<sys::CUgraphNode, CudaError> {
        let memory = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let params = sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: memory,
            srcHost: ptr::null(),
            srcDevice: self.from,
            srcArray: ptr::null_mut(),
            reserved0: ptr::null_mut(),
            srcPitch: self.bytes,
            srcHeight: 1,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: memory,
            dstHost: ptr::null_mut(),
            dstDevice: self.to,
            dstArray: ptr::null_mut(),
            reserved1: ptr::null_mut(),
            dstPitch: self.bytes,
            dstHeight: 1,
            WidthInBytes: self.bytes,
            Height: 1,
            Depth: 1,
        };
        let mut node = ptr::null_mut();
        let (first, count) = (behind.as_ptr(), behind.len());
        // SAFETY: `behind` are nodes of `graph`, which keeps both ends.
        let code = unsafe { sys::cuGraphAddMemcpyNode(&mut node, graph, first, count, &params, card.context()) };
        card.check("cuGraphAddMemcpyNode", code).map(|()| node)
    }
}
