//! Causal attention and its gradients as graphs of the library. What a graph is made of decides whether the library
//! knows it as attention: the same sums in another order would be refused.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnDataType_t as Number, cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t as Reduction,
};

use super::{
    calls::Calls,
    graph::{Graph, Layout, Tensor},
};
use crate::cuda::{
    CudaError,
    fused::{FusedShape, Pass, Port, Sums},
};

const F32: Number = Number::CUDNN_DATA_FLOAT;
const BF16: Number = Number::CUDNN_DATA_BFLOAT16;

pub(super) fn graph(calls: &Arc<Calls>, shape: &FusedShape) -> Result<Graph, CudaError> {
    let mut graph = Graph::new(calls);
    match shape.pass {
        Pass::Forward => forward(&mut graph, shape)?,
        Pass::Backward(sums) => backward(&mut graph, shape, sums)?,
    }
    Ok(graph)
}

impl FusedShape {
    /// A tensor whose rows hold the columns of all heads.
    fn rows(&self, port: Port, heads: i64) -> Layout {
        let pitch = self.pitch(port);
        let sizes = [self.batch, heads, self.seq_len, self.head_dim];
        Layout { sizes, strides: [self.seq_len * pitch, self.head_dim, pitch, 1] }
    }

    fn queries(&self, port: Port) -> Layout {
        self.rows(port, self.heads)
    }

    fn keys(&self, port: Port) -> Layout {
        self.rows(port, self.kv_heads)
    }

    /// One for each query and key.
    fn scores(&self) -> Layout {
        Layout::packed([self.batch, self.heads, self.seq_len, self.seq_len])
    }

    /// One for each query.
    fn each(&self) -> Layout {
        Layout::packed([self.batch, self.heads, self.seq_len, 1])
    }

    /// One for each query and column of its head.
    fn full(&self) -> Layout {
        Layout::packed([self.batch, self.heads, self.seq_len, self.head_dim])
    }
}

fn forward(g: &mut Graph, shape: &FusedShape) -> Result<(), CudaError> {
    let q = g.memory(Port::Q, shape.queries(Port::Q), BF16)?;
    let k = g.memory(Port::K, shape.keys(Port::K).turned(), BF16)?;
    let v = g.memory(Port::V, shape.keys(Port::V), BF16)?;
    let o = g.memory(Port::O, shape.queries(Port::O), BF16)?;
    let lse = g.memory(Port::Lse, shape.each(), F32)?;
    let (scores, each) = (shape.scores(), shape.each());

    let scale = g.value(Port::Scale)?;
    let products = g.between(scores, F32)?;
    g.product(q, k, products)?;
    let scaled = g.map(Pointwise::CUDNN_POINTWISE_MUL, &[products, scale])?;
    let seen = g.causal(scaled)?;

    let most = g.between(each, F32)?;
    g.reduce(Reduction::CUDNN_REDUCE_TENSOR_MAX, seen, most)?;
    let below = g.map(Pointwise::CUDNN_POINTWISE_SUB, &[seen, most])?;
    let exp = g.map(Pointwise::CUDNN_POINTWISE_EXP, &[below])?;
    let sum = g.between(each, F32)?;
    g.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, exp, sum)?;
    let log = g.map(Pointwise::CUDNN_POINTWISE_LOG, &[sum])?;
    g.pointwise(Pointwise::CUDNN_POINTWISE_ADD, &[most, log], lse)?;
    let p = g.between(scores, BF16)?;
    g.pointwise(Pointwise::CUDNN_POINTWISE_DIV, &[exp, sum], p)?;
    g.product(p, v, o)?;
    Ok(())
}

fn backward(g: &mut Graph, shape: &FusedShape, sums: Sums) -> Result<(), CudaError> {
    let q = g.memory(Port::Q, shape.queries(Port::Q), BF16)?;
    let k = g.memory(Port::K, shape.keys(Port::K).turned(), BF16)?;
    let v = g.memory(Port::V, shape.keys(Port::V).turned(), BF16)?;
    let o = g.memory(Port::O, shape.queries(Port::O), BF16)?;
    let d_o = g.memory(Port::DO, shape.queries(Port::DO), BF16)?;
    let lse = g.memory(Port::Lse, shape.each(), F32)?;
    let dq = g.memory(Port::DQ, shape.queries(Port::DQ), BF16)?;
    let dk = g.memory(Port::DK, shape.keys(Port::DK), BF16)?;
    let dv = g.memory(Port::DV, shape.keys(Port::DV), BF16)?;
    let scores = shape.scores();

    // A factor of 1 in the place where the library looks for that of dropout.
    let by_column = g.between(shape.full(), F32)?;
    g.pointwise(Pointwise::CUDNN_POINTWISE_MUL, &[d_o, o], by_column)?;
    let by_row = g.between(shape.each(), F32)?;
    g.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, by_column, by_row)?;
    let one = g.value(Port::One)?;
    let row_sums = g.memory(Port::RowSums, shape.each(), F32)?;
    g.pointwise(Pointwise::CUDNN_POINTWISE_MUL, &[by_row, one], row_sums)?;

    let scale = g.value(Port::Scale)?;
    let products = g.between(scores, F32)?;
    g.product(q, k, products)?;
    let scaled = g.map(Pointwise::CUDNN_POINTWISE_MUL, &[products, scale])?;
    let below = g.map(Pointwise::CUDNN_POINTWISE_SUB, &[scaled, lse])?;
    let seen = g.causal(below)?;
    let p = g.map(Pointwise::CUDNN_POINTWISE_EXP, &[seen])?;
    key_gradient(g, shape, p, d_o, dv)?;

    let dp = g.between(scores, F32)?;
    g.product(d_o, v, dp)?;
    let above = g.map(Pointwise::CUDNN_POINTWISE_SUB, &[dp, row_sums])?;
    let slopes = g.map(Pointwise::CUDNN_POINTWISE_MUL, &[above, p])?;
    let ds = g.map(Pointwise::CUDNN_POINTWISE_MUL, &[slopes, scale])?;
    key_gradient(g, shape, ds, q, dk)?;

    let keys = g.between(shape.keys(Port::K), BF16)?;
    g.reshape(k, keys)?;
    match sums {
        Sums::AsTheyCome => {
            let dq_sums = g.memory(Port::DQSums, shape.full(), F32)?;
            g.product(ds, keys, dq_sums)?;
            g.pointwise(Pointwise::CUDNN_POINTWISE_IDENTITY, &[dq_sums], dq)?;
        }
        Sums::InOrder => drop(g.product(ds, keys, dq)?),
    }
    Ok(())
}

/// `scores`ᵀ · `queries` into a gradient of keys or values, summed over the query heads that share one.
fn key_gradient(
    g: &mut Graph,
    shape: &FusedShape,
    scores: Tensor,
    queries: Tensor,
    gradient: Tensor,
) -> Result<(), CudaError> {
    let turned = g.between(shape.scores().turned(), BF16)?;
    g.reshape(scores, turned)?;
    if shape.heads == shape.kv_heads {
        g.product(turned, queries, gradient)?;
        return Ok(());
    }
    let of_each = g.between(shape.full(), BF16)?;
    g.product(turned, queries, of_each)?;
    g.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, of_each, gradient)?;
    Ok(())
}
