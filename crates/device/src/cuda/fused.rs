//! Attention as cuDNN takes it: what it is, apart from how it is computed.

use super::launch::address;
use crate::{Access, DType, View, ops::AttentionSpec};

/// Causal attention of bf16, or its gradients.
#[derive(Clone, Debug)]
pub(super) struct Fused {
    pub(super) shape: FusedShape,
    pub(super) scale: f32,
    /// Where each tensor of the request is.
    addresses: Vec<(Port, u64)>,
}

/// All that the choice of a plan depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct FusedShape {
    pub(super) pass: Pass,
    pub(super) batch: i64,
    pub(super) heads: i64,
    pub(super) kv_heads: i64,
    pub(super) seq_len: i64,
    pub(super) head_dim: i64,
    /// Elements from a row to the next, by [`Port`].
    pitches: [i64; PORTS],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Pass {
    Forward,
    Backward(Sums),
}

/// How contributions to a gradient of queries are added up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Sums {
    /// Into memory as they come: the last bits differ from run to run.
    AsTheyCome,
    /// In one order, from gradients of scores that are kept: memory grows with the square of a sequence.
    InOrder,
}

/// What goes into a graph of the library and what comes out of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Port {
    Q,
    K,
    V,
    O,
    Lse,
    DO,
    DQ,
    DK,
    DV,
    /// Gradients of queries in f32, as they add up.
    DQSums,
    /// For each query the product of o and its gradient.
    RowSums,
    /// Numbers that are passed with a launch.
    Scale,
    One,
    MinusInfinity,
}

/// Those that are tensors of a request.
const PORTS: usize = Port::DV as usize + 1;

const FORWARD: [Port; 5] = [Port::Q, Port::K, Port::V, Port::O, Port::Lse];
const BACKWARD: [Port; 9] = [Port::Q, Port::K, Port::V, Port::O, Port::DO, Port::Lse, Port::DQ, Port::DK, Port::DV];

impl Fused {
    /// None where the library's rules for tensors do not hold.
    pub(super) fn forward(spec: &AttentionSpec, accesses: &[Access]) -> Option<Fused> {
        Fused::new(Pass::Forward, &FORWARD, spec, accesses)
    }

    /// As [`Fused::forward`].
    pub(super) fn backward(sums: Sums, spec: &AttentionSpec, accesses: &[Access]) -> Option<Fused> {
        Fused::new(Pass::Backward(sums), &BACKWARD, spec, accesses)
    }

    fn new(pass: Pass, ports: &[Port], spec: &AttentionSpec, accesses: &[Access]) -> Option<Fused> {
        let matrices = ports.iter().zip(accesses).filter(|(port, _)| **port != Port::Lse);
        let allowed = spec.seq_len > 1 && spec.head_dim.is_multiple_of(8) && spec.scale > 0.0;
        if !allowed || !matrices.clone().all(|(_, access)| suits(&access.view)) {
            return None;
        }
        let (q, k) = (&accesses[0].view, &accesses[1].view);
        let (heads, kv_heads) = spec.heads(q.cols(), k.cols());
        let mut pitches = [0; PORTS];
        matrices.for_each(|(port, access)| pitches[*port as usize] = access.view.pitch() as i64);
        let shape = FusedShape {
            pass,
            batch: (q.row_count() / spec.seq_len) as i64,
            heads: heads as i64,
            kv_heads: kv_heads as i64,
            seq_len: spec.seq_len as i64,
            head_dim: spec.head_dim as i64,
            pitches,
        };
        let addresses = ports.iter().zip(accesses).map(|(port, access)| (*port, address(&access.view))).collect();
        Some(Fused { shape, scale: spec.scale, addresses })
    }

    /// Where a tensor of the request is.
    pub(super) fn address(&self, port: Port) -> u64 {
        let found = self.addresses.iter().find(|(own, _)| *own == port);
        found.unwrap_or_else(|| panic!("BUG: {port:?} is no tensor of this request")).1
    }
}

/// Rows and heads begin at multiples of 16 bytes.
fn suits(view: &View) -> bool {
    view.dtype() == DType::Bf16
        && view.numel() > 0
        && view.pitch().is_multiple_of(8)
        && address(view).is_multiple_of(16)
}

impl FusedShape {
    pub(super) fn pitch(&self, port: Port) -> i64 {
        self.pitches[port as usize]
    }

    /// Bytes of [`Port::DQSums`] and [`Port::RowSums`].
    pub(super) fn sums(&self) -> [usize; 2] {
        let rows = (self.batch * self.heads * self.seq_len) as usize * size_of::<f32>();
        match self.pass {
            Pass::Forward => [0, 0],
            Pass::Backward(Sums::AsTheyCome) => [rows * self.head_dim as usize, rows],
            Pass::Backward(Sums::InOrder) => [0, rows],
        }
    }
}
