//! Kernels of bf16 on a card: each gives what the same kernel of f32 gives on the same values, rounded once. Where those of
//! f32 add up in f64 and make exponentials by themselves, and those of bf16 do not, what is rounded may differ by as much.

use device::{ops::*, *};

use super::{
    card_bench::{Bench, LIES, Lie, SHAPES, Tensor, values},
    drivers::{card_turn, cuda},
};

/// Of values of about 1, or of the largest if that is more: sums of eight f32 are off by 3 units of 2^-24, an exponential by
/// the card's instruction by 2^-22.
const SLACK: f32 = 1.0 / (1 << 21) as f32;

/// For what has the same bits before it is rounded.
const EXACT: f32 = 0.0;

/// What `trial` leaves in f32 from values that bf16 holds is within the slack beside it of what it leaves in bf16, before that
/// is rounded.
#[track_caller]
fn rounded(trial: impl Fn(&Bench, DType) -> Vec<(Tensor, f32)>) {
    let _turn = card_turn();
    let machine = cuda().machine();
    let run = |dtype| {
        let b = Bench::new(&machine);
        let outputs = trial(&b, dtype);
        outputs.iter().map(|(tensor, slack)| (tensor.view.dtype(), *slack, bits_of(&b, tensor))).collect::<Vec<_>>()
    };
    let (wide, narrow) = (run(DType::F32), run(DType::Bf16));
    assert_eq!(wide.len(), narrow.len());
    for (i, ((_, slack, wide), (dtype, _, narrow))) in wide.into_iter().zip(narrow).enumerate() {
        let wide: Vec<f32> = wide.into_iter().map(f32::from_bits).collect();
        let apart = slack * wide.iter().fold(1.0f32, |most, x| most.max(x.abs()));
        let of = |bits: u32| match dtype {
            DType::Bf16 => bf16::from_bits(bits as u16).to_f32(),
            _ => f32::from_bits(bits),
        };
        let round = |x: f32| if dtype == DType::Bf16 { bf16::from_f32(x).to_f32() } else { x };
        let is_right = |(&want, &have): (&f32, &u32)| {
            let have = of(have);
            let near = || slack > EXACT && (round(want - apart)..=round(want + apart)).contains(&have);
            have.to_bits() == round(want).to_bits() || near()
        };
        let differs = wide.iter().zip(&narrow).position(|pair| !is_right(pair));
        assert!(
            differs.is_none(),
            "output {i} differs at {differs:?}: {:?}",
            differs.map(|at| (wide[at], of(narrow[at])))
        );
    }
}

fn bits_of(b: &Bench, tensor: &Tensor) -> Vec<u32> {
    match tensor.view.dtype() {
        DType::Bf16 => b.get::<bf16>(&tensor.view).into_iter().map(|x| x.to_bits().into()).collect(),
        _ => b.get::<f32>(&tensor.view).into_iter().map(f32::to_bits).collect(),
    }
}

/// Values of a tensor that bf16 holds.
fn given(seed: u64, shape: &[usize]) -> Vec<f32> {
    values(DType::Bf16, seed, shape.iter().product())
}

fn shapes() -> impl Iterator<Item = (&'static [usize], Lie)> {
    SHAPES[1..].iter().copied().flat_map(|shape| LIES.map(|lie| (shape, lie)))
}

#[test]
fn layer_norm_of_bf16_is_that_of_f32_rounded() {
    rounded(|b, dtype| {
        let mut outputs = Vec::new();
        for (shape, lie) in shapes() {
            let (cols, count) = (*shape.last().unwrap(), shape.iter().rev().skip(1).product::<usize>());
            let make = |seed| b.holding(shape, dtype, lie, &given(seed, shape));
            let made = || b.tensor(shape, dtype, lie);
            let (x, r, dy, y, sum, dx) = (make(1), make(2), make(3), made(), made(), make(4));
            let [weight, bias] = [5, 6].map(|seed| b.holding(&[cols], dtype, Lie::Whole, &given(seed, &[cols])).view);
            let [mean, rstd] = [0; 2].map(|_| b.tensor(&[count], DType::F32, Lie::Whole));
            let [dweight, dbias, apart] = [0; 3].map(|_| b.tensor(&[cols], DType::F32, Lie::Whole));
            let residual = Some(Residual { r: &r.view, sum: &sum.view });
            let (m, s) = (&mean.view, &rstd.view);
            let (weight, bias) = (&weight, &bias);
            b.run(LayerNorm { x: &x.view, residual, weight, bias, y: &y.view, mean: m, rstd: s, eps: 1e-5 }.op("test"));
            let (dy, x, skip) = (&dy.view, &x.view, Some(&dx.view));
            b.run(LayerNormBackward { dy, x, weight, mean: m, rstd: s, skip, dx: &dx.view, sums: None }.op("test"));
            let into = Accumulate::Overwrite;
            let (dw, db) = (&dweight.view, &dbias.view);
            b.run(LayerNormGrad { dy, x, mean: m, rstd: s, dweight: dw, dbias: db, into }.op("test"));
            b.run(BiasGrad { dy, dbias: &apart.view, into }.op("test"));
            outputs.extend([y, dx, mean, rstd, dweight].map(|near| (near, SLACK)));
            outputs.extend([sum, dbias, apart].map(|exact| (exact, EXACT)));
        }
        outputs
    });
}

#[test]
fn gelu_of_bf16_is_that_of_f32_rounded() {
    rounded(|b, dtype| {
        let mut outputs = Vec::new();
        for (shape, lie) in shapes() {
            let make = |seed| b.holding(shape, dtype, lie, &given(seed, shape));
            let (x, dy, y) = (make(1), make(2), b.tensor(shape, dtype, lie));
            b.run(Gelu { x: &x.view, y: &y.view }.op("test"));
            b.run(GeluBackward { dy: &dy.view, x: &x.view, dx: &dy.view }.op("test"));
            outputs.extend([y, dy].map(|exact| (exact, EXACT)));
        }
        outputs
    });
}

#[test]
fn embeddings_of_bf16_are_those_of_f32_rounded() {
    rounded(|b, dtype| {
        let mut outputs = Vec::new();
        for (cols, lie) in [1, 37, 300].into_iter().flat_map(|cols| LIES.map(|lie| (cols, lie))) {
            let ids = b.ids(&[3, 0, 3, 8, 5, 3, 10, 1, 0, 10]);
            let vocab = Vocab { size: 11, start: 2 };
            let make = |rows, seed| b.holding(&[rows, cols], dtype, lie, &given(seed, &[rows, cols]));
            let (table, positions, dy, y) = (make(6, 1), make(6, 2), make(10, 3), b.tensor(&[10, cols], dtype, lie));
            let positions = Some(Positions { table: &positions.view, seq_len: 5 });
            b.run(Embedding { ids: &ids, table: &table.view, vocab, positions, y: &y.view }.op("test"));
            let [dtable, dpositions] = [0; 2].map(|_| b.tensor(&[6, cols], DType::F32, lie));
            let (dy, into) = (&dy.view, Accumulate::Overwrite);
            b.run(EmbeddingGrad { ids: &ids, dy, vocab, dtable: &dtable.view, into }.op("test"));
            b.run(PositionGrad { dy, seq_len: 5, dtable: &dpositions.view, into }.op("test"));
            outputs.extend([y, dtable, dpositions].map(|exact| (exact, EXACT)));
        }
        outputs
    });
}

#[test]
fn the_loss_of_bf16_is_that_of_f32_and_its_gradient_is_rounded() {
    rounded(|b, dtype| {
        let mut outputs = Vec::new();
        // Of the fourth, shared memory holds a row of bf16 and none of f32.
        let sizes = [(1, 2), (5, 257), (3, 5003), (2, 30_011), (2500, 24)];
        for (rows, cols, lie) in sizes.into_iter().flat_map(|(r, c)| LIES.map(|lie| (r, c, lie))) {
            let make = || b.holding(&[rows, cols], dtype, lie, &given(1, &[rows, cols]));
            let targets: Vec<i32> = (0..rows).map(|i| if i == 2 { IGNORE } else { (i * 7919 % cols) as i32 }).collect();
            let (targets, own, losses) = (b.ids(&targets), make(), b.tensor(&[rows], DType::F32, Lie::Whole));
            let (logits, scale) = (&own.view, Factor::Const(0.125));
            let whole = CrossEntropy { logits, targets: &targets, losses: &losses.view, dlogits: logits, scale };
            b.run(whole.op("test"));
            let shard = make();
            let [max, sum, target] = [0; 3].map(|_| b.tensor(&[rows], DType::F32, Lie::Whole));
            let vocab = Vocab { size: cols, start: 0 };
            let (logits, m, s, t) = (&shard.view, &max.view, &sum.view, &target.view);
            b.run(VocabPartials { logits, targets: &targets, vocab, max: m, sum: s, target: t }.op("test"));
            outputs.extend([own, losses, sum].map(|near| (near, SLACK)));
            outputs.extend([max, target].map(|exact| (exact, EXACT)));
        }
        outputs
    });
}
