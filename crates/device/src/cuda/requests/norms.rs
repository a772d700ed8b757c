//! Norms, forward and backward: which of their functions.

use crate::{
    Access, DType, View,
    cuda::{
        kernels::{STAGES, THREADS},
        launch::{Call, Value, address},
    },
    ops::{LayerNormBackwardSpec, LayerNormSpec, RmsNormBackwardSpec, RmsNormSpec, stretch},
};

/// One that takes everything, and those of one kind that hold their rows.
struct Functions {
    any: &'static str,
    f32: &'static str,
    bf16: &'static str,
}

/// As `norm.cu` has them: columns of the widest rows that are held, and those of a lane's run.
const WIDEST: usize = 8192;
const RUN: usize = 8;

impl Functions {
    /// Whole runs at addresses that take them at once.
    fn of<'v>(&self, mut values: impl Iterator<Item = &'v View>) -> &'static str {
        let mut dtype = DType::F32;
        let suits = |view: &View| {
            dtype = view.dtype();
            let rows = view.row_count() == 1 || view.pitch().is_multiple_of(RUN);
            rows && view.cols().is_multiple_of(RUN) && view.cols() <= WIDEST && address(view).is_multiple_of(16)
        };
        match (values.all(suits), dtype) {
            (false, _) => self.any,
            (true, DType::Bf16) => self.bf16,
            (true, _) => self.f32,
        }
    }
}

/// Blocks of a forward pass: each has several rows, so that the next is loaded while one is worked on.
const BLOCKS: usize = 1056;

fn forward(functions: &Functions, rows: usize, values: &[&View], arguments: Vec<Value>) -> Call {
    let call = Call::rows(functions.of(values.iter().copied()), rows, arguments);
    Call { blocks: call.blocks.min(BLOCKS as u32), ..call }
}

/// Accesses `which`, and of a residual the two from `from` on.
fn values<'a>(accesses: &'a [Access], which: &[usize], from: usize, residual: bool) -> Vec<&'a View> {
    let more = if residual { from..from + 2 } else { 0..0 };
    which.iter().copied().chain(more).map(|at| &accesses[at].view).collect()
}

pub(super) fn layer_norm(spec: &LayerNormSpec, accesses: &[Access]) -> Call {
    let functions = Functions { any: "layer_norm", f32: "layer_norm_f32", bf16: "layer_norm_bf16" };
    let arguments = matrices(accesses, 6).chain(residual(spec.residual, accesses, 6)).chain([eps(spec.eps)]);
    let values = values(accesses, &[0, 1, 2, 3], 6, spec.residual);
    forward(&functions, accesses[0].view.row_count(), &values, arguments.collect())
}

pub(super) fn rms_norm(spec: &RmsNormSpec, accesses: &[Access]) -> Call {
    let functions = Functions { any: "rms_norm", f32: "rms_norm_f32", bf16: "rms_norm_bf16" };
    let arguments = matrices(accesses, 4).chain(residual(spec.residual, accesses, 4)).chain([eps(spec.eps)]);
    let values = values(accesses, &[0, 1, 2], 4, spec.residual);
    forward(&functions, accesses[0].view.row_count(), &values, arguments.collect())
}

fn matrices(accesses: &[Access], count: usize) -> impl Iterator<Item = Value> {
    accesses[..count].iter().map(|access| Value::matrix(&access.view))
}

fn eps(eps: f32) -> Value {
    Value::words([eps.to_bits().into()])
}

/// What a norm adds first, and where the sum goes; accesses `from` and behind.
fn residual(is_there: bool, accesses: &[Access], from: usize) -> [Value; 3] {
    let mat = |index: usize| if is_there { Value::matrix(&accesses[index].view) } else { Value::no_matrix() };
    [mat(from), mat(from + 1), Value::words([is_there.into()])]
}

/// A block for each stretch of rows. `dx` is the access of dx; accesses up to it are arguments, then come what is past the
/// norm, `sums` sums and how many rows a stretch has.
fn backward(functions: &Functions, dx: usize, sums: usize, spec: LayerNormBackwardSpec, accesses: &[Access]) -> Call {
    let view = |at: usize| &accesses[at].view;
    let mat = |at: Option<usize>| at.map_or_else(Value::no_matrix, |at| Value::matrix(view(at)));
    let (rows, past, behind) = (view(0).row_count(), spec.skip.past(dx), spec.skip.behind(dx));
    let step = spec.stretch.unwrap_or_else(|| stretch(rows));
    let mut arguments: Vec<Value> = matrices(accesses, dx + 1).collect();
    arguments.push(mat(past));
    arguments.extend((behind..behind + sums).map(|at| mat(spec.stretch.map(|_| at))));
    arguments.push(Value::words([step as u64]));
    let wide = [0, 1, 2, dx].into_iter().chain(past).map(view);
    let function = functions.of(wide);
    let matrices = 2 + past.iter().len();
    let shared = if function == functions.any { 0 } else { staged(view(dx).dtype(), view(dx).cols(), matrices) };
    Call { shared, ..Call::blocks(function, rows.div_ceil(step), arguments) }
}

/// Bytes of the stages of a backward pass: rows of so many matrices, spread over a block's threads. When a stretch is over,
/// the teams' sums lie there.
fn staged(dtype: DType, cols: usize, matrices: usize) -> u32 {
    let runs = cols.div_ceil(warps(cols) * 32 * RUN).max(1);
    let stages = if dtype == DType::Bf16 { STAGES } else { 1 };
    (stages * matrices * runs * RUN * dtype.size_bytes() * THREADS as usize) as u32
}

/// Of a team, as `team.cu` has it.
fn warps(cols: usize) -> usize {
    if cols <= 768 {
        1
    } else if cols <= 1536 {
        2
    } else if cols <= 3072 {
        4
    } else {
        8
    }
}

pub(super) fn layer_norm_backward(spec: &LayerNormBackwardSpec, accesses: &[Access]) -> Call {
    let functions =
        Functions { any: "layer_norm_backward", f32: "layer_norm_backward_f32", bf16: "layer_norm_backward_bf16" };
    backward(&functions, 5, 2, *spec, accesses)
}

pub(super) fn rms_norm_backward(spec: &RmsNormBackwardSpec, accesses: &[Access]) -> Call {
    let functions =
        Functions { any: "rms_norm_backward", f32: "rms_norm_backward_f32", bf16: "rms_norm_backward_bf16" };
    let RmsNormBackwardSpec { skip, stretch } = *spec;
    backward(&functions, 4, 1, LayerNormBackwardSpec { skip, stretch }, accesses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_of_the_fewest_matrices_hold_the_sums_of_all_teams_at_every_width() {
        for dtype in [DType::F32, DType::Bf16] {
            for cols in (RUN..=WIDEST).step_by(RUN) {
                let teams = THREADS as usize / 32 / warps(cols);
                let (room, sums) = (staged(dtype, cols, 2) as usize, 2 * teams * cols * DType::F32.size_bytes());
                assert!(sums <= room, "{dtype:?}, {cols} columns: sums take {sums} bytes of {room}");
            }
        }
    }
}
