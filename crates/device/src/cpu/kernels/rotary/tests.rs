use crate::{
    View,
    ops::{
        Rotary, RotaryTable, Turning,
        trial::{Gaps, assert_close, assert_order_free, differences, inner, random, refusal, run_checked, wide},
    },
};

fn table(positions: usize, head_dim: usize) -> View {
    let table = Gaps::None.poisoned("table", positions, head_dim);
    run_checked(&RotaryTable { table: &table, base: 10_000.0 }.op("t").unwrap());
    table
}

/// Pairs (i, i + d/2) as complex numbers times exp(i·angle).
fn turned(x: &[f64], heads: usize, d: usize, seq_len: usize, first: usize) -> Vec<f64> {
    let mut y = x.to_vec();
    for (row, y) in y.chunks_mut(heads * d).enumerate() {
        let position = (first + row % seq_len) as f64;
        for head in y.chunks_mut(d) {
            for i in 0..d / 2 {
                let angle = position * 10_000f64.powf(-2.0 * i as f64 / d as f64);
                let (a, b) = (head[i], head[i + d / 2]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + d / 2] = b * angle.cos() + a * angle.sin();
            }
        }
    }
    y
}

#[test]
fn turning_equals_complex_rotation_apart_in_place_and_from_a_later_position() {
    for (batch, seq_len, heads, d) in [(1, 1, 1, 2), (2, 3, 2, 6), (3, 5, 1, 8), (1, 17, 3, 32)] {
        for gaps in Gaps::BOTH {
            let (rows, cols) = (batch * seq_len, heads * d);
            let table = table(seq_len + 4, d);
            let x = random(1, rows * cols);
            let (xv, y) = (gaps.holding("x", rows, cols, &x), gaps.poisoned("y", rows, cols));
            let turning = Turning::Forward;
            run_checked(&Rotary { x: &xv, table: &table, seq_len, turning, y: &y }.op("t").unwrap());
            assert_close(&y, &turned(&wide(&x), heads, d, seq_len, 0), 1e-6);
            let later = table.rows(4..seq_len + 4).unwrap();
            run_checked(&Rotary { x: &xv, table: &later, seq_len, turning, y: &xv }.op("t").unwrap());
            assert_close(&xv, &turned(&wide(&x), heads, d, seq_len, 4), 1e-6);
        }
    }
}

#[test]
fn turning_back_is_the_gradient_and_the_inverse() {
    let (seq_len, heads, d) = (5, 2, 6);
    let (x, dy) = (random(1, 2 * seq_len * heads * d), random(2, 2 * seq_len * heads * d));
    let table = table(seq_len, d);
    let dv = Gaps::Some.holding("dy", 2 * seq_len, heads * d, &dy);
    let turning = Turning::Backward;
    run_checked(&Rotary { x: &dv, table: &table, seq_len, turning, y: &dv }.op("t").unwrap());
    let want = differences(&wide(&x), |x| inner(&turned(x, heads, d, seq_len, 0), &dy));
    assert_close(&dv, &want, 1e-6);
    let turning = Turning::Forward;
    run_checked(&Rotary { x: &dv, table: &table, seq_len, turning, y: &dv }.op("t").unwrap());
    assert_close(&dv, &wide(&dy), 1e-6);
}

#[test]
fn large_turns_are_cut_at_sequences_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    let table = table(250, 32);
    assert_order_free(|| {
        let x = Gaps::Some.holding("x", 2250, 320, &random(1, 2250 * 320));
        (Rotary { x: &x, table: &table, seq_len: 250, turning: Turning::Forward, y: &x }.op("t").unwrap(), vec![x])
    });
}

#[test]
fn wrong_sizes_are_told() {
    let (x, table) = (Gaps::None.poisoned("x", 6, 8), table(3, 6));
    let turning = Turning::Forward;
    let text = refusal(Rotary { x: &x, table: &table, seq_len: 3, turning, y: &x }.op("h0.q"));
    assert!(text.starts_with("rotary@h0.q: x is [6, 8] and table is [3, 6]; "), "{text}");
    let x = Gaps::None.poisoned("x", 6, 12);
    let text = refusal(Rotary { x: &x, table: &table, seq_len: 4, turning, y: &x }.op("t"));
    assert_eq!(text, "rotary@t: seq_len is 4, it must divide the number of rows");
    let text = refusal(Rotary { x: &x, table: &table, seq_len: 6, turning, y: &x }.op("t"));
    assert_eq!(text, "rotary@t: seq_len is 6, the table has fewer rows");
}
