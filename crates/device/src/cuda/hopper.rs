//! Products of bf16 by our kernel for compute capability 9.0, with GELU or its slope: which ones it takes, and how it is
//! launched. The card's copy engine fetches and stores boxes of matrices, so these must lie as it wants them.

use std::ptr;

use cudarc::driver::sys;

use super::{
    CudaError,
    card::Card,
    launch::{Call, Rare, Value},
    product::{Adds, Follow, Product, ProductShape},
};
use crate::{
    DType,
    ops::{MatrixShape, Trans},
};

/// Rows and columns of c that a warp group of a block computes, and how much of the depth at once. This and what follows
/// are as `hopper_product.cu` has them.
const ROWS: u64 = 128;
const COLS: u64 = 192;
const DEPTH: u64 = 64;
/// Blocks of a cluster, by rows of c and by columns.
const CLUSTER_ROWS: u64 = 2;
const CLUSTER_COLS: u64 = 1;
/// Rows of what is fetched at once on the way out, for a warp group, and of what each of its four warps sends.
const PIECE_ROWS: u64 = 64;
const SENT_ROWS: u64 = PIECE_ROWS / 4;
/// Columns of every box: 128 bytes.
const BOX_COLS: u64 = 64;
/// Threads of a block.
const THREADS: u32 = 384;
/// Bytes of shared memory for a block: all that it can have.
const SHARED: u32 = 232_448;
/// Rows of clusters that are gone through together, column by column.
const GROUP: u64 = 8;

/// What the copy engine wants of addresses and of steps from row to row, in bytes, and how long those may be. It clips rows in
/// pieces as long: what is behind the last column of one that does not end with a piece would be written.
const ALIGN: u64 = 16;
const STEPS: u64 = 1 << 40;
/// Sizes that the kernel counts in 32 bits, with room for a tile behind the end.
const MOST: u64 = 1 << 31;

/// The function that computes products of `shape`, on cards that have it; none: the kernel does not take them.
pub(super) fn function(shape: &ProductShape) -> Option<&'static str> {
    let (function, aux, bias) = match (shape.follow, shape.trans) {
        (Follow::BiasGelu(bias, aux), Trans::Nt) => ("gelu_nt", aux, Some(bias)),
        (Follow::GeluSlope(aux), Trans::Nn) => ("slope_nn", aux, None),
        _ => return None,
    };
    let lies = |pitch: u64, align: u32| {
        pitch < STEPS / 2 && (pitch * 2).is_multiple_of(ALIGN) && u64::from(align).is_multiple_of(ALIGN)
    };
    let suits = |m: &MatrixShape| m.dtype == DType::Bf16 && lies(m.pitch, m.align);
    let suit = [&shape.a, &shape.b, &shape.d].into_iter().all(suits) && lies(aux.pitch, aux.align);
    let [rows, cols, depth] = sizes(shape);
    let clipped = [cols, depth].into_iter().all(|size| (size * 2).is_multiple_of(ALIGN));
    // Less than a tile is no work for it.
    let fits =
        rows >= ROWS && cols >= COLS && depth >= DEPTH && [rows, cols, depth].into_iter().all(|size| size < MOST);
    let takes = fits
        && suit
        && clipped
        && shape.adds == Adds::Nothing
        && bias.is_none_or(|bias| bias != DType::I32)
        && clusters(shape).saturating_mul(depth.div_ceil(DEPTH)) < MOST;
    takes.then_some(function)
}

/// Rows and columns of c, and the depth.
fn sizes(shape: &ProductShape) -> [u64; 3] {
    [shape.d.rows, shape.d.cols, shape.a.cols]
}

/// Tiles of clusters in c.
fn clusters(shape: &ProductShape) -> u64 {
    let [rows, cols, _] = sizes(shape);
    rows.div_ceil(ROWS * CLUSTER_ROWS) * cols.div_ceil(COLS * CLUSTER_COLS)
}

/// Blocks of a launch: no more than the card runs at once, each of which takes tiles in turn.
fn blocks(shape: &ProductShape, multiprocessors: u32) -> u32 {
    let size = CLUSTER_ROWS * CLUSTER_COLS;
    (clusters(shape).min(u64::from(multiprocessors) / size).max(1) * size) as u32
}

/// A matrix in boxes, as the copy engine takes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Boxes {
    rows: u64,
    cols: u64,
    /// Bytes from a row to the next.
    step: u64,
    /// Rows of a box; its columns are [`BOX_COLS`].
    box_rows: u64,
}

/// a, b, c, and the matrix that GELU or its slope is taken of.
fn boxes(shape: &ProductShape) -> [Boxes; 4] {
    let boxes = |m: &MatrixShape, box_rows| Boxes { rows: m.rows, cols: m.cols, step: m.pitch * 2, box_rows };
    let (aux, aux_rows) = match shape.follow {
        Follow::BiasGelu(_, aux) => (aux, SENT_ROWS),
        Follow::GeluSlope(aux) => (aux, PIECE_ROWS),
        _ => unreachable!("BUG: the kernel was given {shape}"),
    };
    // Blocks that share a tile fetch a part of it each.
    let of_b = if shape.trans == Trans::Nt { COLS } else { DEPTH } / CLUSTER_ROWS;
    let c = boxes(&shape.d, SENT_ROWS);
    let aux = Boxes { step: aux.pitch * 2, box_rows: aux_rows, ..c };
    [boxes(&shape.a, ROWS / CLUSTER_COLS), boxes(&shape.b, of_b), c, aux]
}

/// The launch for a product that [`function`] takes.
pub(super) fn call(card: &Card, product: &Product) -> Result<Call, CudaError> {
    let shape = &product.shape;
    let function = function(shape).unwrap_or_else(|| panic!("BUG: the kernel was given {shape}"));
    let addresses = [product.a, product.b, product.d, product.aux];
    let maps = addresses.into_iter().zip(boxes(shape)).map(|(address, boxes)| map(card, address, &boxes));
    let [rows, cols, depth] = sizes(shape);
    let bias = match shape.follow {
        Follow::BiasGelu(dtype, _) => Value::words([product.bias, 1, cols, cols, u64::from(dtype == DType::Bf16)]),
        _ => Value::no_matrix(),
    };
    let values = vec![bias, Value::words([rows, cols, depth, GROUP])];
    let rare = Rare { maps: maps.collect::<Result<_, _>>()?, ..Rare::default() };
    Ok(Call {
        threads: THREADS,
        shared: SHARED,
        rare: Some(Box::new(rare)),
        ..Call::blocks(function, blocks(shape, card.multiprocessors) as usize, values)
    })
}

/// What is outside of the matrix reads as 0 and is not written.
fn map(card: &Card, address: u64, boxes: &Boxes) -> Result<sys::CUtensorMap, CudaError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let (sizes, box_sizes) = ([boxes.cols, boxes.rows], [BOX_COLS as u32, boxes.box_rows as u32]);
    // SAFETY: two dimensions, and as many sizes and strides of elements, one step between rows; writes one map, which is
    // aligned as its type is. Nothing is read at the address.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            ptr::with_exposed_provenance_mut(address as usize),
            sizes.as_ptr(),
            &boxes.step,
            box_sizes.as_ptr(),
            [1u32, 1].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    card.check("cuTensorMapEncodeTiled", code).map(|()| map)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        cuda::kernels,
        ops::{GemmFinish, GemmSpec},
    };

    #[test]
    fn sizes_are_here_as_in_the_source() {
        let text = kernels::HOPPER.text;
        let tile = [("PARTS", ROWS / PIECE_ROWS), ("COLS", COLS), ("DEPTH", DEPTH), ("LINE", BOX_COLS * 2)];
        let clusters = [("CLUSTER_ROWS", CLUSTER_ROWS), ("CLUSTER_COLS", CLUSTER_COLS)];
        for (name, value) in tile.into_iter().chain(clusters) {
            assert!(text.contains(&format!("#define {name} {value}\n")), "{name} is not {value}");
        }
        assert!(text.contains(&format!("#define PIECE ({PIECE_ROWS} * LINE)\n")));
        assert!(text.contains(&format!("static_assert(SHARED <= {SHARED},")));
        assert!(text.contains(&format!("__launch_bounds__({THREADS}, 1)")));
    }

    fn matrix(rows: u64, cols: u64) -> MatrixShape {
        MatrixShape { dtype: DType::Bf16, rows, cols, pitch: cols.next_multiple_of(8), align: 128 }
    }

    /// What the kernel is made for, by sizes of c and depth.
    fn products(m: u64, n: u64, k: u64) -> [(GemmSpec, Vec<MatrixShape>); 2] {
        let (a, c) = (matrix(m, k), matrix(m, n));
        let forward = vec![a, matrix(n, k), c, matrix(1, n), c];
        [
            (GemmSpec { trans: Trans::Nt, finish: GemmFinish::BiasGelu }, forward),
            (GemmSpec { trans: Trans::Nn, finish: GemmFinish::GeluBackward }, vec![a, matrix(k, n), c, c]),
        ]
    }

    fn shapes(m: u64, n: u64, k: u64) -> [ProductShape; 2] {
        products(m, n, k).map(|(spec, at)| ProductShape::whole(&spec, &at))
    }

    #[test]
    fn the_kernel_takes_gelu_behind_a_forward_product_and_its_slope_behind_a_backward_one() {
        assert_eq!(shapes(32768, 3072, 768).each_ref().map(function), [Some("gelu_nt"), Some("slope_nn")]);
        assert_eq!(shapes(ROWS, COLS, DEPTH).each_ref().map(function), [Some("gelu_nt"), Some("slope_nn")]);
        for ((spec, at), other) in products(512, 512, 512).into_iter().zip([Trans::Nn, Trans::Nt]) {
            let shape = |spec: &GemmSpec| function(&ProductShape::whole(spec, &at));
            assert!(shape(&spec).is_some());
            assert_eq!(shape(&GemmSpec { trans: other, ..spec }), None);
            assert_eq!(shape(&GemmSpec { finish: GemmFinish::Bias, ..spec }), None);
        }
        for (m, n, k) in [(ROWS - 1, COLS, DEPTH), (ROWS, COLS - 1, DEPTH), (ROWS, COLS, DEPTH - 1)] {
            assert_eq!(shapes(m, n, k).each_ref().map(function), [None, None], "less than a tile: {m} {n} {k}");
        }
        for (m, n, k) in [(512, 385, 512), (512, 396, 512), (512, 512, 65), (512, 512, 68)] {
            assert_eq!(
                shapes(m, n, k).each_ref().map(function),
                [None, None],
                "not clipped as it must be: {m} {n} {k}"
            );
        }
        for (m, n, k) in [(1 << 31, 256, 64), (1 << 30, 1 << 30, 64)] {
            assert_eq!(shapes(m, n, k).each_ref().map(function), [None, None], "beyond 32 bits: {m} {n} {k}");
        }
    }

    #[test]
    fn a_launch_has_whole_clusters_and_no_more_than_run_at_once() {
        let [shape, _] = shapes(32768, 3072, 768);
        assert_eq!(blocks(&shape, 132), 132);
        assert_eq!(blocks(&shape, 131), 130);
        let [shape, _] = shapes(257, 193, 64);
        assert_eq!(clusters(&shape), 4);
        assert_eq!(blocks(&shape, 132), 8);
        assert_eq!(blocks(&shape, 1), 2);
    }

    /// How matrices may lie: bytes that addresses are multiples of, and elements between rows.
    fn lies() -> impl Strategy<Value = Vec<(u32, u64)>> {
        let align = prop_oneof![3 => Just(16u32), 3 => Just(128u32), 1 => Just(2u32), 1 => Just(8u32)];
        let gap = prop_oneof![3 => Just(0u64), 3 => (0u64..9).prop_map(|gap| gap * 8), 1 => 0u64..70];
        prop::collection::vec((align, gap), 5)
    }

    fn size() -> impl Strategy<Value = u64> {
        prop_oneof![1 => 1u64..700, 4 => (1u64..88).prop_map(|size| size * 8), 2 => Just(32768u64), 1 => Just(1u64 << 31)]
    }

    proptest! {
        #[test]
        fn the_kernel_is_taken_only_where_the_copy_engine_can(
            m in size(), n in size(), k in size(), lies in lies(), slope: bool, wide in prop::option::weighted(0.1, 0usize..3),
        ) {
            let (spec, mut at) = products(m, n, k)[usize::from(slope)].clone();
            for (matrix, (align, gap)) in at.iter_mut().zip(&lies) {
                (matrix.pitch, matrix.align) = (matrix.pitch + gap, *align);
            }
            if let Some(wide) = wide {
                at[wide].dtype = DType::F32;
            }
            let shape = ProductShape::whole(&spec, &at);
            let matrices: Vec<_> = at.iter().enumerate().filter(|(i, _)| slope || *i != 3).map(|(_, m)| m).collect();
            let lie = matrices.iter().all(|m| {
                m.dtype == DType::Bf16 && m.pitch % 8 == 0 && m.align >= 16 && m.cols % 8 == 0
            });
            if function(&shape).is_none() {
                // What else may be in the way: a bias between addresses that it cannot be read from together with c.
                let aligned = slope || at[3].align >= 16;
                let sizes = m >= ROWS && n >= COLS && k >= DEPTH && [m, n, k].iter().all(|size| *size < MOST);
                let counted = clusters(&shape).saturating_mul(k.div_ceil(DEPTH)) < MOST;
                prop_assert!(!(lie && aligned && sizes && counted));
                return Ok(());
            }
            prop_assert!(lie && shape.is_allowed());
            for boxes in boxes(&shape) {
                // The driver's rules for tensor maps of two dimensions, swizzled by 128 bytes.
                prop_assert!(boxes.step % 16 == 0 && boxes.step < 1 << 40 && boxes.step >= boxes.cols * 2);
                prop_assert!((1..=1u64 << 32).contains(&boxes.rows) && (1..=1u64 << 32).contains(&boxes.cols));
                prop_assert!((1..=256).contains(&boxes.box_rows) && boxes.box_rows % 8 == 0);
                prop_assert!(BOX_COLS * 2 == 128);
            }
            // Whole tiles from whole boxes, and swizzled groups of eight rows stay together.
            let [a, b, c, other] = boxes(&shape);
            prop_assert_eq!(a.box_rows * CLUSTER_COLS, ROWS);
            prop_assert_eq!(b.box_rows * CLUSTER_ROWS, if slope { DEPTH } else { COLS });
            prop_assert_eq!((c.rows, c.cols, other.rows, other.cols), (m, n, m, n));
            prop_assert_eq!((c.box_rows, other.box_rows), (SENT_ROWS, if slope { PIECE_ROWS } else { SENT_ROWS }));
            prop_assert!(ROWS.is_multiple_of(PIECE_ROWS) && COLS.is_multiple_of(BOX_COLS));
        }
    }
}
