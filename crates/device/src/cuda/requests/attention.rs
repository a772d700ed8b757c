//! Attention: by the library where it takes it, else which of our functions, and how much shared memory a block has.

use crate::{
    Access, DType, View,
    cuda::{
        blaslt::WORKSPACE,
        fused::{Fused, Sums},
        launch::{Call, Scratch, Value, address},
        steps::Step,
    },
    ops::AttentionSpec,
};

/// Columns of a head that some function takes.
const WIDEST: usize = 256;

pub(super) fn is_there(spec: &AttentionSpec) -> bool {
    spec.head_dim <= WIDEST
}

/// What depends on the width of a head.
struct Width {
    forward: &'static str,
    keys: &'static str,
    queries: &'static str,
    /// Queries, and keys, of a tile.
    side: usize,
}

const WIDTHS: [(usize, Width); 3] = [
    (64, Width { forward: "attention_64", keys: "attention_keys_64", queries: "attention_queries_64", side: 64 }),
    (128, Width { forward: "attention_128", keys: "attention_keys_128", queries: "attention_queries_128", side: 64 }),
    (256, Width { forward: "attention_256", keys: "attention_keys_256", queries: "attention_queries_256", side: 32 }),
];

impl Width {
    fn of(spec: &AttentionSpec) -> &'static Width {
        let fits = WIDTHS.iter().find(|(widest, _)| spec.head_dim <= *widest);
        &fits.expect("BUG: heads this wide were not refused").1
    }

    /// Bytes of `rows` tiles as wide as a head, `scores` tiles of scores, and two words for each query.
    fn shared(&self, head_dim: usize, rows: usize, scores: usize, words: usize) -> u32 {
        let side = self.side;
        let words = rows * side * (head_dim + 1) + scores * side * (side + 1) + words * side;
        (words * size_of::<f32>()) as u32
    }

    /// Tiles of `rows` rows in sequences, for each of `heads`.
    fn tiles(&self, spec: &AttentionSpec, rows: usize, heads: usize) -> usize {
        rows / spec.seq_len * heads * spec.seq_len.div_ceil(self.side)
    }
}

fn settings(spec: &AttentionSpec) -> Value {
    Value::words([spec.seq_len as u64, spec.head_dim as u64, spec.scale.to_bits().into()])
}

fn values(accesses: &[Access], which: &[usize], spec: &AttentionSpec) -> Vec<Value> {
    which.iter().map(|at| Value::matrix(&accesses[*at].view)).chain([settings(spec)]).collect()
}

pub(super) fn forward(spec: &AttentionSpec, accesses: &[Access]) -> Vec<Step> {
    fused_or(Fused::forward(spec, accesses), vec![own_forward(spec, accesses)])
}

/// As [`forward`]; the library adds up gradients of queries as `sums` says.
pub(super) fn backward(sums: Sums, spec: &AttentionSpec, accesses: &[Access]) -> Vec<Step> {
    fused_or(Fused::backward(sums, spec, accesses), own_backward(spec, accesses).into())
}

fn fused_or(fused: Option<Fused>, otherwise: Vec<Call>) -> Vec<Step> {
    match fused {
        Some(fused) => vec![Step::Fused { fused: Box::new(fused), otherwise }],
        None => otherwise.into_iter().map(Step::Call).collect(),
    }
}

fn own_forward(spec: &AttentionSpec, accesses: &[Access]) -> Call {
    let (q, k) = (&accesses[0].view, &accesses[1].view);
    let (width, (heads, _)) = (Width::of(spec), spec.heads(q.cols(), k.cols()));
    let values = values(accesses, &[0, 1, 2, 3, 4], spec);
    if suits_flash(spec, accesses, &[4], heads) {
        let call = Call::blocks("flash", flash_tiles(spec, q.row_count(), heads), values);
        return Call { shared: flash_shared(1), ..call };
    }
    let call = Call::blocks(width.forward, width.tiles(spec, q.row_count(), heads), values);
    Call { shared: width.shared(spec.head_dim, 2, 1, 0), ..call }
}

/// Each element is written by one block, so sums have an order.
fn own_backward(spec: &AttentionSpec, accesses: &[Access]) -> [Call; 2] {
    let (q, k) = (&accesses[0].view, &accesses[1].view);
    let (width, (heads, kv_heads)) = (Width::of(spec), spec.heads(q.cols(), k.cols()));
    if suits_flash(spec, accesses, &[5], heads) {
        return flash_backward(spec, accesses);
    }
    let values = |outputs: &[usize]| values(accesses, &[&[0, 1, 2, 3, 4, 5], outputs].concat(), spec);
    let keys = Call::blocks(width.keys, width.tiles(spec, q.row_count(), kv_heads), values(&[7, 8]));
    let queries = Call::blocks(width.queries, width.tiles(spec, q.row_count(), heads), values(&[6]));
    [
        Call { shared: width.shared(spec.head_dim, 4, 2, 2), ..keys },
        Call { shared: width.shared(spec.head_dim, 4, 1, 2), ..queries },
    ]
}

/// As `flash.cu` has them: columns of a head, rows that a block owns, and rows that pass by.
const FLASH: usize = 64;
const OWN: usize = 128;
const PASSING: usize = 64;

/// Whether everything but the accesses `vectors` is as the functions for tensor cores take it.
fn suits_flash(spec: &AttentionSpec, accesses: &[Access], vectors: &[usize], heads: usize) -> bool {
    let suits =
        |view: &View| view.dtype() == DType::Bf16 && view.pitch().is_multiple_of(8) && address(view).is_multiple_of(16);
    let mut matrices = accesses.iter().enumerate().filter(|(at, _)| !vectors.contains(at));
    spec.head_dim == FLASH
        && spec.scale > 0.0
        && deltas(accesses, heads) <= WORKSPACE
        && matrices.all(|(_, access)| suits(&access.view))
}

/// Bytes of a sum for each row and head.
fn deltas(accesses: &[Access], heads: usize) -> usize {
    accesses[0].view.row_count() * heads * size_of::<f32>()
}

/// Bytes of `own` tiles of a block's own rows and of two kinds of rows that pass by, two of each.
fn flash_shared(own: usize) -> u32 {
    ((own * OWN + 4 * PASSING) * FLASH * 2) as u32
}

fn flash_tiles(spec: &AttentionSpec, rows: usize, heads: usize) -> usize {
    rows / spec.seq_len * heads * spec.seq_len.div_ceil(OWN)
}

/// The gradient of q, which leaves sums for those of k and v.
fn flash_backward(spec: &AttentionSpec, accesses: &[Access]) -> [Call; 2] {
    let (rows, k) = (accesses[0].view.row_count(), &accesses[1].view);
    let (heads, kv_heads) = spec.heads(accesses[0].view.cols(), k.cols());
    let call = |function, heads: usize, which: &[usize], bytes| {
        let mut values = values(accesses, which, spec);
        let scratch = Some(Scratch { at: values.len(), bytes });
        values.push(Value::words([0]));
        Call { shared: flash_shared(2), scratch, ..Call::blocks(function, flash_tiles(spec, rows, heads), values) }
    };
    let bytes = deltas(accesses, heads);
    [
        call("flash_queries", heads, &[0, 1, 2, 3, 4, 5, 6], bytes),
        call("flash_keys", kv_heads, &[0, 1, 2, 4, 5, 7, 8], bytes),
    ]
}
