//! Which attention the library computes, on a card. What it computes is held against its twins in the crate's tests.

use std::fs::File;

use crate::{
    DType, Device, Kernel, Launch, Machine, MemoryKind, Op, Options, View,
    cuda::{
        CudaOptions,
        card::Card,
        prepare::prepare,
        steps::{Launchable, settle},
    },
    ops::{Attention, AttentionBackward},
};

fn options(deterministic: bool) -> CudaOptions {
    let kernel_cache = Some(std::env::temp_dir().join("warpweft-test-kernels"));
    CudaOptions { kernel_cache, deterministic, ..CudaOptions::default() }
}

/// Both passes over columns of one tensor.
fn passes(device: &Device, sizes: [usize; 5], dtype: DType) -> [Op; 2] {
    let [batch, heads, kv_heads, seq_len, head_dim] = sizes;
    let (wide, narrow, rows) = (heads * head_dim, kv_heads * head_dim, batch * seq_len);
    let make = |dims: &[usize], dtype| device.alloc("t", dims, dtype, MemoryKind::Other).unwrap();
    let three = || {
        let all: View = make(&[rows, wide + 2 * narrow], dtype);
        let part = |begin: usize, cols: usize| all.columns(begin..begin + cols).unwrap();
        [part(0, wide), part(wide, narrow), part(wide + narrow, narrow)]
    };
    let ([q, k, v], [dq, dk, dv]) = (three(), three());
    let [o, d_o] = [(); 2].map(|()| make(&[rows, wide], dtype));
    let lse = make(&[batch, heads, seq_len], DType::F32);
    let (q, k, v, o, d_o, lse, scale) = (&q, &k, &v, &o, &d_o, &lse, 0.125);
    let (dq, dk, dv) = (&dq, &dk, &dv);
    let forward = Attention { q, k, v, o, lse, head_dim, seq_len, scale }.op("test").unwrap();
    let backward = AttentionBackward { q, k, v, o, d_o, lse, dq, dk, dv, head_dim, seq_len, scale }.op("test").unwrap();
    [forward, backward]
}

/// Whether the library computes each pass.
fn by_library(deterministic: bool, sizes: [usize; 5], dtype: DType) -> [bool; 2] {
    prepare().expect("the environment can be prepared");
    let turn = File::create(std::env::temp_dir().join("warpweft-test-card.lock")).unwrap();
    turn.lock().unwrap();
    let machine = Machine::cuda_with(options(deterministic), Options::default()).unwrap();
    let card = Card::open(0, &options(deterministic), &std::sync::Arc::default()).unwrap();
    card.bind().unwrap();
    passes(&machine.device(0).unwrap(), sizes, dtype).map(|op| {
        let Launch::Kernel(kernel) = &op.launch else { unreachable!("BUG: attention is a kernel") };
        let kernel: &Kernel = kernel;
        matches!(settle(&card, kernel, &op.accesses).unwrap()[..], [Launchable::Fused(..)])
    })
}

#[test]
fn heads_and_lengths_of_models_are_computed_by_the_library() {
    for sizes in [[8, 12, 12, 1024, 64], [2, 6, 6, 256, 64], [1, 32, 8, 512, 128], [2, 4, 2, 200, 96]] {
        assert!(by_library(true, sizes, DType::Bf16)[0], "{sizes:?}, forward");
        assert_eq!(by_library(false, sizes, DType::Bf16), [true; 2], "{sizes:?}");
    }
}

#[test]
fn what_is_not_bf16_or_in_pieces_of_eight_columns_is_computed_by_this_crate() {
    assert_eq!(by_library(true, [2, 2, 2, 128, 64], DType::F32), [false; 2]);
    assert_eq!(by_library(true, [2, 2, 2, 128, 36], DType::Bf16), [false; 2]);
    assert_eq!(by_library(true, [2, 2, 2, 1, 64], DType::Bf16), [false; 2]);
}
