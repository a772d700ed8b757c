use crate::{
    Op, View,
    ops::{
        CrossEntropy, Factor, IGNORE, Vocab, VocabFinish, VocabPartials, VocabRescale,
        trial::{
            Gaps, assert_close, assert_order_free, differences, few, poisoned_vector, random, refusal, run_checked,
            run_now, vector, wide,
        },
    },
    testing::{get, holding},
};

fn targets(rows: usize, vocab: usize) -> Vec<i32> {
    (0..rows).map(|i| if i % 4 == 1 { IGNORE } else { (i * 5 % vocab) as i32 }).collect()
}

fn losses(logits: &[f64], targets: &[i32], vocab: usize) -> Vec<f64> {
    let loss = |(row, target): (&[f64], &i32)| {
        if *target == IGNORE {
            return 0.0;
        }
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() - row[*target as usize]
    };
    logits.chunks(vocab).zip(targets).map(loss).collect()
}

fn logits(rows: usize, vocab: usize) -> Vec<f32> {
    random(1, rows * vocab).iter().map(|x| x * 6.0).collect()
}

const SIZES: [(usize, usize); 5] = [(1, 1), (3, 17), (6, 65), (2, 32), (9, 3)];

#[test]
fn losses_and_gradient_equal_formula_and_differences_apart_and_in_place() {
    let scalar = vector("scale", &[0.125]);
    for &(rows, vocab) in few(&SIZES) {
        for gaps in Gaps::BOTH {
            for scale in [Factor::Const(0.125), Factor::Device(&scalar)] {
                let (x, t) = (logits(rows, vocab), targets(rows, vocab));
                let xv = gaps.holding("logits", rows, vocab, &x);
                let tv = holding("targets", &[rows], &t);
                let want = losses(&wide(&x), &t, vocab);
                let want_d = differences(&wide(&x), |x| 0.125 * losses(x, &t, vocab).iter().sum::<f64>());
                let d = gaps.poisoned("dlogits", rows, vocab);
                for dlogits in [&d, &xv] {
                    let out = poisoned_vector("losses", rows);
                    let request = CrossEntropy { logits: &xv, targets: &tv, losses: &out, dlogits, scale };
                    run_checked(&request.op("t").unwrap());
                    assert_close(&out, &want, 1e-6);
                    assert_close(dlogits, &want_d, 3e-6);
                }
            }
        }
    }
}

#[test]
fn an_ignored_row_counts_nothing_even_if_it_is_nan() {
    let x = Gaps::None.holding("logits", 2, 3, &[f32::NAN, 1.0, 2.0, 0.0, 0.0, 0.0]);
    let t = holding("targets", &[2], &[IGNORE, 2]);
    let out = poisoned_vector("losses", 2);
    let scale = Factor::Const(1.0);
    run_checked(&CrossEntropy { logits: &x, targets: &t, losses: &out, dlogits: &x, scale }.op("t").unwrap());
    assert_eq!(get::<f32>(&out), [0.0, 3f32.ln()]);
    assert_eq!(get::<f32>(&x)[..3], [0.0; 3]);
}

#[test]
fn a_nan_logit_makes_the_loss_nan() {
    let x = Gaps::None.holding("logits", 1, 3, &[0.0, f32::NAN, 2.0]);
    let (t, out) = (holding("targets", &[1], &[0]), poisoned_vector("losses", 1));
    let scale = Factor::Const(1.0);
    run_checked(&CrossEntropy { logits: &x, targets: &t, losses: &out, dlogits: &x, scale }.op("t").unwrap());
    assert!(get::<f32>(&out)[0].is_nan());
}

#[test]
fn large_logits_do_not_overflow() {
    let x = Gaps::None.holding("logits", 1, 3, &[1e4, -1e4, 1e4]);
    let (t, out) = (holding("targets", &[1], &[0]), poisoned_vector("losses", 1));
    let scale = Factor::Const(1.0);
    run_checked(&CrossEntropy { logits: &x, targets: &t, losses: &out, dlogits: &x, scale }.op("t").unwrap());
    assert_eq!(get::<f32>(&out), [2f32.ln()]);
    assert_eq!(get::<f32>(&x), [-0.5, 0.0, 0.5]);
}

/// Shards with the all-reduces between them done by hand.
fn by_shards(x: &View, t: &View, cuts: &[usize], scale: Factor<'_>) -> (Vec<Vec<f32>>, Vec<View>) {
    let (rows, size) = (x.row_count(), x.cols());
    let ends = cuts.iter().copied().chain([size]);
    let ranges: Vec<_> = std::iter::once(0).chain(cuts.iter().copied()).zip(ends).collect();
    let parts: Vec<_> = ranges
        .iter()
        .map(|&(start, end)| {
            let logits = x.columns(start..end).unwrap();
            let [max, sum, target] = ["max", "sum", "target"].map(|label| poisoned_vector(label, rows));
            let vocab = Vocab { size, start };
            let request = VocabPartials { logits: &logits, targets: t, vocab, max: &max, sum: &sum, target: &target };
            run_checked(&request.op("t").unwrap());
            (logits, vocab, max, sum, target)
        })
        .collect();
    let all = |pick: &dyn Fn(usize) -> Vec<f32>, join: fn(f32, f32) -> f32| {
        let joined = (0..parts.len()).map(pick).reduce(|a, b| a.iter().zip(&b).map(|(a, b)| join(*a, *b)).collect());
        vector("all", &joined.unwrap())
    };
    let max = all(&|i| get(&parts[i].2), f32::max);
    for (_, _, local, sum, _) in &parts {
        run_checked(&VocabRescale { local, global: &max, sum }.op("t").unwrap());
    }
    let sum = all(&|i| get(&parts[i].3), |a, b| a + b);
    let target = all(&|i| get(&parts[i].4), |a, b| a + b);
    let finish = |(logits, vocab): (&View, Vocab)| {
        let losses = poisoned_vector("losses", rows);
        let request = VocabFinish {
            logits,
            targets: t,
            vocab,
            max: &max,
            sum: &sum,
            target: &target,
            losses: &losses,
            dlogits: logits,
            scale,
        };
        run_checked(&request.op("t").unwrap());
        get::<f32>(&losses)
    };
    let losses = parts.iter().map(|p| finish((&p.0, p.1))).collect();
    (losses, parts.into_iter().map(|p| p.0).collect())
}

#[test]
fn uneven_vocabulary_shards_give_the_whole_loss_and_gradient() {
    let scalar = vector("scale", &[0.125]);
    let (rows, vocab) = (9, 37);
    for scale in [Factor::Const(0.125), Factor::Device(&scalar)] {
        let (x, t) = (logits(rows, vocab), targets(rows, vocab));
        let xv = Gaps::Some.holding("logits", rows, vocab, &x);
        let tv = holding("targets", &[rows], &t);
        let (all_losses, _) = by_shards(&xv, &tv, &[1, 20], scale);
        let want = losses(&wide(&x), &t, vocab);
        for shard in &all_losses {
            assert_eq!(shard, &all_losses[0], "equal on every rank");
            assert_close(&vector("losses", shard), &want, 1e-6);
        }
        let want_d = differences(&wide(&x), |x| 0.125 * losses(x, &t, vocab).iter().sum::<f64>());
        assert_close(&xv, &want_d, 3e-6);
    }
}

#[test]
fn finishing_into_another_view_overwrites_poison() {
    let x = Gaps::None.holding("logits", 2, 4, &logits(2, 4));
    let t = holding("targets", &[2], &[3, IGNORE]);
    let vocab = Vocab { size: 8, start: 2 };
    let [max, sum, target] = [6.0, 9.0, 1.0].map(|v| vector("v", &[v, v]));
    let (out, d) = (poisoned_vector("losses", 2), Gaps::Some.poisoned("d", 2, 4));
    let (max, sum, target, scale) = (&max, &sum, &target, Factor::Const(2.0));
    let request = VocabFinish { logits: &x, targets: &t, vocab, max, sum, target, losses: &out, dlogits: &d, scale };
    run_checked(&request.op("t").unwrap());
    let mut want: Vec<f64> = wide(&logits(2, 4)).iter().map(|x| 2.0 * (x - 6.0).exp() / 9.0).collect();
    want[1] -= 2.0;
    want[4..].fill(0.0);
    assert_close(&d, &want, 1e-6);
    assert_close(&out, &[5.0 + 9f64.ln(), 0.0], 1e-6);
}

#[test]
fn a_target_outside_the_vocabulary_is_told_with_its_position() {
    let (rows, vocab) = if cfg!(miri) { (12, 9) } else { (3000, 190) };
    let x = Gaps::None.holding("logits", rows, vocab, &logits(rows, vocab));
    let out = poisoned_vector("losses", rows);
    for bad in [-2, vocab as i32] {
        let mut t = targets(rows, vocab);
        t[rows - 4] = bad;
        let t = holding("targets", &[rows], &t);
        let want = format!("target {bad} at position {} is outside the vocabulary 0..{vocab}; -1 is ignored", rows - 4);
        let scale = Factor::Const(1.0);
        let op = CrossEntropy { logits: &x, targets: &t, losses: &out, dlogits: &x, scale }.op("t").unwrap();
        assert_eq!(run_now(&op).unwrap_err().to_string(), want);
    }
}

#[test]
fn large_logits_are_cut_along_rows_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    let (rows, vocab) = (1500, 357);
    let (x, t) = (logits(rows, vocab), holding("targets", &[rows], &targets(rows, vocab)));
    let scalar = vector("scale", &[0.125]);
    let views = || {
        let x = Gaps::Some.holding("logits", rows, vocab, &x);
        (x, [0, 1, 2].map(|_| poisoned_vector("v", rows)))
    };
    assert_order_free(|| {
        let (x, [losses, ..]) = views();
        let scale = Factor::Device(&scalar);
        let op: Op = CrossEntropy { logits: &x, targets: &t, losses: &losses, dlogits: &x, scale }.op("t").unwrap();
        (op, vec![x, losses])
    });
    assert_order_free(|| {
        let (x, [losses, ..]) = views();
        let (d, scale) = (Gaps::None.poisoned("d", rows, vocab), Factor::Const(0.1));
        let request = CrossEntropy { logits: &x, targets: &t, losses: &losses, dlogits: &d, scale };
        (request.op("t").unwrap(), vec![d, losses])
    });
    assert_order_free(|| {
        let (x, [max, sum, target]) = views();
        let vocab = Vocab { size: 1000, start: 100 };
        let request = VocabPartials { logits: &x, targets: &t, vocab, max: &max, sum: &sum, target: &target };
        (request.op("t").unwrap(), vec![max, sum, target])
    });
    assert_order_free(|| {
        let (x, [losses, ..]) = views();
        let [max, sum, target] = [9.0, 20.0, 1.0].map(|v| vector("v", &vec![v; rows]));
        let vocab = Vocab { size: 1000, start: 100 };
        let (max, sum, target, scale) = (&max, &sum, &target, Factor::Device(&scalar));
        let request =
            VocabFinish { logits: &x, targets: &t, vocab, max, sum, target, losses: &losses, dlogits: &x, scale };
        (request.op("t").unwrap(), vec![x, losses])
    });
}

#[test]
fn wrong_sizes_are_told_with_both_shapes() {
    let (x, d) = (Gaps::None.poisoned("x", 3, 4), Gaps::None.poisoned("d", 3, 5));
    let (t, out) = (holding("t", &[3], &[0; 3]), poisoned_vector("losses", 2));
    let scale = Factor::Const(1.0);
    let text = refusal(CrossEntropy { logits: &x, targets: &t, losses: &out, dlogits: &x, scale }.op("loss"));
    assert!(text.starts_with("cross_entropy@loss: logits is [3, 4] and losses is [2]; "), "{text}");
    let out = poisoned_vector("losses", 3);
    let text = refusal(CrossEntropy { logits: &x, targets: &t, losses: &out, dlogits: &d, scale }.op("t"));
    assert!(text.contains("logits is [3, 4] and dlogits is [3, 5]"), "{text}");
    let vocab = Vocab { size: 10, start: 7 };
    let text = refusal(VocabPartials { logits: &x, targets: &t, vocab, max: &out, sum: &out, target: &out }.op("t"));
    assert_eq!(text, "vocab_partials@t: vocab.start is 7, the shard's columns must end inside vocab.size");
}
