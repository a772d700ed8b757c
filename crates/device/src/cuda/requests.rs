//! Which functions of the sources a kernel request becomes.

use super::{
    kernels::THREADS,
    launch::{Call, Value, address},
};
use crate::{
    Access, DType, Kernel, View,
    ops::{AdamWSpec, By, Old, Place, Skip, SquaredNorm, ValueError},
};

/// Whether there is code for `kernel` on a card. What there is takes all element types that the request takes.
pub(super) fn is_there(kernel: &Kernel) -> bool {
    matches!(
        kernel,
        Kernel::Fill(_)
            | Kernel::Cast(_)
            | Kernel::Scale(_)
            | Kernel::Add(_)
            | Kernel::Axpy(_)
            | Kernel::Gelu(_)
            | Kernel::GeluBackward(_)
            | Kernel::LayerNorm(_)
            | Kernel::LayerNormBackward(_)
            | Kernel::LayerNormGrad(_)
            | Kernel::BiasGrad(_)
            | Kernel::Embedding(_)
            | Kernel::EmbeddingGrad(_)
            | Kernel::PositionGrad(_)
            | Kernel::CrossEntropy(_)
            | Kernel::AdamW(_)
            | Kernel::AdvanceAdam(_)
            | Kernel::Sum(_)
            | Kernel::SquaredNorm(_)
            | Kernel::ClipFactor(_)
    )
}

/// What runs for `kernel`; its accesses are those of the request.
pub(super) fn call(kernel: &Kernel, accesses: &[Access]) -> Call {
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
        Kernel::LayerNorm(spec) => {
            let (r, sum) = if spec.residual { (mat(6), mat(7)) } else { (Value::no_matrix(), Value::no_matrix()) };
            let mut values: Vec<Value> = (0..6).map(mat).collect();
            values.extend([r, sum, Value::words([spec.residual.into()]), Value::words([spec.eps.to_bits().into()])]);
            Call::blocks("layer_norm", at(0).row_count(), values)
        }
        Kernel::LayerNormBackward(spec) => {
            let (how, past) = match spec.skip {
                Skip::None => (0, Value::no_matrix()),
                Skip::InPlace => (1, Value::no_matrix()),
                Skip::Apart => (2, mat(6)),
            };
            let mut values: Vec<Value> = (0..6).map(mat).collect();
            values.extend([past, Value::words([how])]);
            Call::blocks("layer_norm_backward", at(0).row_count(), values)
        }
        Kernel::LayerNormGrad(spec) => {
            let mut values: Vec<Value> = (0..6).map(mat).collect();
            values.push(keep(spec.old, accesses));
            Call::columns("layer_norm_grad", at(0).cols(), values)
        }
        Kernel::BiasGrad(spec) => {
            Call::columns("bias_grad", at(0).cols(), vec![mat(0), mat(1), keep(spec.old, accesses)])
        }
        _ => call_more(kernel, accesses),
    }
}

/// Tokens and optimizer.
fn call_more(kernel: &Kernel, accesses: &[Access]) -> Call {
    let at = |index: usize| &accesses[index].view;
    let mat = |index: usize| Value::matrix(at(index));
    match kernel {
        Kernel::Embedding(spec) => {
            let positions = spec.seq_len.map_or(Value::no_matrix(), |_| mat(3));
            let sizes = [spec.vocab.size, spec.vocab.start, spec.seq_len.unwrap_or(0)];
            let mut values = vec![mat(0), mat(1), mat(2), positions];
            values.extend(sizes.map(|size| Value::words([size as u64])));
            Call::over("embedding", at(2).numel(), values)
        }
        Kernel::EmbeddingGrad(spec) => {
            let mut values = vec![mat(0), mat(1), mat(2)];
            values.extend([spec.vocab.size, spec.vocab.start].map(|size| Value::words([size as u64])));
            values.push(keep(spec.old, accesses));
            Call::over("embedding_grad", at(1).cols(), values)
        }
        Kernel::PositionGrad(spec) => {
            let values = vec![mat(0), mat(1), Value::words([spec.seq_len as u64]), keep(spec.old, accesses)];
            Call::over("position_grad", at(1).numel(), values)
        }
        Kernel::CrossEntropy(spec) => {
            let logits = mat(if spec.place == Place::InPlace { 0 } else { 3 });
            let values = vec![mat(0), mat(1), mat(2), logits, factor(spec.scale, accesses)];
            Call::blocks("cross_entropy", at(0).row_count(), values)
        }
        Kernel::AdamW(spec) => adamw(spec, accesses),
        Kernel::AdvanceAdam(spec) => {
            let betas = [spec.beta1, spec.beta2, 0.0, 0.0].map(f64::to_bits);
            let skip = if spec.skip { address(at(2)) } else { 0 };
            let values = vec![mat(0), mat(1), Value::words([skip]), Value::words(betas)];
            Call::blocks("advance_adam", 1, values)
        }
        Kernel::Sum(spec) => Call::blocks("sum", 1, vec![mat(0), mat(1), factor(spec.by, accesses)]),
        Kernel::SquaredNorm(_) => {
            let piece = SquaredNorm::cut(at(0).numel()).range(0).len() as u64;
            let values = vec![mat(0), mat(1), Value::words([piece])];
            Call::blocks("squared_norm", at(1).numel(), values)
        }
        Kernel::ClipFactor(spec) => {
            let mut values: Vec<Value> = (0..4).map(mat).collect();
            values.push(Value::words([spec.limit.to_bits().into()]));
            Call::blocks("clip_factor", 1, values)
        }
        other => unreachable!("BUG: {other:?} was not refused"),
    }
}

fn adamw(spec: &AdamWSpec, accesses: &[Access]) -> Call {
    let at = |index: usize| &accesses[index].view;
    let mut values: Vec<Value> = (0..5).map(|index| Value::matrix(at(index))).collect();
    values.push(if spec.copy { Value::matrix(at(5)) } else { Value::no_matrix() });
    values.push(Value::words([spec.copy.into()]));
    values.push(Value::words([if spec.skip { address(at(5 + usize::from(spec.copy))) } else { 0 }]));
    values.push(Value::words([spec.beta1, spec.beta2, spec.eps, spec.weight_decay].map(f64::to_bits)));
    // A few elements a thread: each thread works out the factors of the step first.
    Call::blocks("adamw", at(0).numel().div_ceil(4 * THREADS as usize), values)
}

/// `value` as an element of `view`.
fn bits(view: &View, value: f32) -> u64 {
    match view.dtype() {
        DType::F32 => value.to_bits().into(),
        DType::Bf16 => half::bf16::from_f32(value).to_bits().into(),
        DType::I32 => u64::from(value as i32 as u32),
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
    match old {
        Old::Overwrite => Value::words([0, 0]),
        Old::Add => Value::words([1, 0]),
        Old::Keep => Value::words([2, address(last(accesses))]),
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
        Kernel::CrossEntropy(_) => ValueError::Target { id, position, vocab: accesses[0].view.cols() },
        other => unreachable!("BUG: {other:?} refuses no value"),
    }
}
