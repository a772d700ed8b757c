//! What a kernel request becomes: functions of the sources with their arguments, and calls of libraries.

mod attention;
mod columns;
mod norms;
mod products;
mod tokens;
mod training;

use super::{
    fused::Sums,
    launch::{Call, Value, address},
    steps::{Step, Steps},
};
use crate::{
    Access, DType, Kernel, View,
    ops::{By, Old, Place, Turning, ValueError},
};

/// Whether there is code for `kernel` on a card. What there is takes all element types that the request takes.
pub(super) fn is_there(kernel: &Kernel) -> bool {
    match kernel {
        Kernel::Attention(spec) | Kernel::AttentionBackward(spec) => attention::is_there(spec),
        _ => true,
    }
}

/// What runs for `kernel`, one behind the other; its accesses are those of the request. A library that adds up
/// gradients does it as `sums` says.
pub(super) fn steps(kernel: &Kernel, accesses: &[Access], sums: Sums) -> Steps {
    let several = match kernel {
        Kernel::Gemm(spec) => vec![products::gemm(spec, accesses)],
        Kernel::Attention(spec) => attention::forward(spec, accesses),
        Kernel::AttentionBackward(spec) => attention::backward(sums, spec, accesses),
        Kernel::LayerNormGrad(spec) => calls(columns::layer_norm_grad(spec, accesses)),
        Kernel::RmsNormGrad(spec) => calls(columns::rms_norm_grad(spec, accesses)),
        Kernel::BiasGrad(spec) => calls(columns::bias_grad(spec, accesses)),
        Kernel::BiasGrads(spec) => calls(columns::bias_grads(spec, accesses)),
        Kernel::EmbeddingGrad(spec) => calls(tokens::embedding_grad(spec, accesses)),
        Kernel::AdamW(spec) => calls(training::adamw(spec, accesses)),
        _ => return Steps::One(call(kernel, accesses)),
    };
    Steps::Several(several)
}

fn calls(calls: Vec<Call>) -> Vec<Step> {
    calls.into_iter().map(Step::Call).collect()
}

/// Of a kernel that is one function.
fn call(kernel: &Kernel, accesses: &[Access]) -> Call {
    let at = |index: usize| &accesses[index].view;
    let mat = |index: usize| Value::matrix(at(index));
    // Where the first input is the output, it has no access of its own.
    let input = |place: Place, index: usize| mat(if place == Place::InPlace { 0 } else { index });
    let elements = at(0).numel();
    match kernel {
        Kernel::Fill(spec) => Call::over("fill", elements, vec![mat(0), Value::words([bits(at(0), spec.value)])]),
        Kernel::Cast(_) => Call::over("cast", elements, vec![mat(0), mat(1)]),
        Kernel::Scale(spec) => {
            Call::over("scale", elements, vec![mat(0), input(spec.place, 1), factor(spec.by, accesses)])
        }
        Kernel::Add(spec) => Call::over("add", elements, vec![mat(0), input(spec.place, 2), mat(1)]),
        Kernel::Axpy(spec) => Call::over("axpy", elements, vec![mat(0), mat(1), factor(spec.by, accesses)]),
        Kernel::Gelu(spec) => Call::over("gelu", elements, vec![mat(0), input(spec.place, 1)]),
        Kernel::GeluBackward(spec) => Call::over("gelu_backward", elements, vec![mat(0), mat(1), input(spec.place, 2)]),
        Kernel::SwiGlu(_) => Call::over("swiglu", elements, (0..3).map(mat).collect()),
        Kernel::SwiGluBackward(_) => Call::over("swiglu_backward", elements, (0..5).map(mat).collect()),
        Kernel::RotaryTable(spec) => {
            Call::over("rotary_table", elements / 2, vec![mat(0), Value::words([spec.base.to_bits()])])
        }
        Kernel::Rotary(spec) => {
            let back = u64::from(spec.turning == Turning::Backward);
            let mut values = vec![mat(0), mat(1), input(spec.place, 2)];
            values.extend([spec.seq_len as u64, back].map(|word| Value::words([word])));
            Call::over("rotary", elements / 2, values)
        }
        Kernel::LayerNorm(spec) => norms::layer_norm(spec, accesses),
        Kernel::LayerNormBackward(spec) => norms::layer_norm_backward(spec, accesses),
        Kernel::RmsNorm(spec) => norms::rms_norm(spec, accesses),
        Kernel::RmsNormBackward(spec) => norms::rms_norm_backward(spec, accesses),
        Kernel::Embedding(_)
        | Kernel::PositionGrad(_)
        | Kernel::CrossEntropy(_)
        | Kernel::VocabPartials(_)
        | Kernel::VocabRescale(_)
        | Kernel::VocabFinish(_) => tokens::call(kernel, accesses),
        _ => training::call(kernel, accesses),
    }
}

/// `value` as an element of `view`.
fn bits(view: &View, value: f32) -> u64 {
    match view.dtype() {
        DType::F32 => value.to_bits().into(),
        DType::Bf16 => half::bf16::from_f32(value).to_bits().into(),
        DType::I32 => u64::from(value as i32 as u32),
        DType::I16 => u64::from(value as i16 as u16),
    }
}

/// `Factor`: the scalar is the last access.
fn factor(by: By, accesses: &[Access]) -> Value {
    match by {
        By::Const(value) => Value::words([0, value.to_bits().into()]),
        By::Device => Value::words([address(last(accesses)), 0]),
    }
}

/// `Keep`: the scalar is the last access.
fn keep(old: Old, accesses: &[Access]) -> Value {
    keep_at(old, accesses, accesses.len() - 1)
}

/// `Keep`: the scalar, if there is one, is access `at`.
fn keep_at(old: Old, accesses: &[Access], at: usize) -> Value {
    match old {
        Old::Overwrite => Value::words([0, 0]),
        Old::Add => Value::words([1, 0]),
        Old::Keep => Value::words([2, address(&accesses[at].view)]),
    }
}

fn last(accesses: &[Access]) -> &View {
    &accesses.last().expect("BUG: a kernel without accesses").view
}

/// What a kernel that refused `id` at `position` fails with.
pub(super) fn refused(kernel: &Kernel, accesses: &[Access], position: usize, id: i32) -> ValueError {
    match kernel {
        Kernel::Embedding(spec) => ValueError::Id { id, position, vocab: spec.vocab.size },
        Kernel::EmbeddingGrad(spec) => ValueError::Id { id, position, vocab: spec.vocab.size },
        Kernel::VocabPartials(spec) => ValueError::Target { id, position, vocab: spec.vocab.size },
        Kernel::VocabFinish(spec) => ValueError::Target { id, position, vocab: spec.vocab.size },
        Kernel::CrossEntropy(_) => ValueError::Target { id, position, vocab: accesses[0].view.cols() },
        other => unreachable!("BUG: {other:?} refuses no value"),
    }
}
