//! Element functions and sums that compilers turn into vector code: no branches, fixed lanes, a fixed order.

use crate::{Element, bf16};

/// A floating-point element type; kernels compute in f32.
pub(super) trait Real: Element {
    fn load(self) -> f32;
    fn store(x: f32) -> Self;
}

impl Real for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(x: f32) -> f32 {
        x
    }
}

impl Real for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// To nearest, ties to even; NaN stays NaN.
    #[inline(always)]
    fn store(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        // The carry of a NaN's payload could make it infinite: keep its upper half and set the quiet bit.
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
    }
}

/// exp(x) for x ≤ 0: at most 1 ulp from the true value down to −87, then 0. NaN stays NaN.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2, then the series of exp(r) to r⁷, whose rest is under 6e-9 of the result.
#[inline(always)]
pub(super) fn exp_le0(x: f32) -> f32 {
    // Adding 1.5·2²³ leaves the nearest whole number in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    let t = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = 1.0 / 5040.0_f32;
    p = p.mul_add(r, 1.0 / 720.0);
    p = p.mul_add(r, 1.0 / 120.0);
    p = p.mul_add(r, 1.0 / 24.0);
    p = p.mul_add(r, 1.0 / 6.0);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r, 1.0);
    p = p.mul_add(r, 1.0);
    let power = f32::from_bits((t.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    // Written so that a NaN takes the first branch.
    if x < -87.0 { 0.0 } else { p * power }
}

/// 1 / (1 + exp(−x)) and its slope, neither with cancellation at either end.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> (f32, f32) {
    let e = exp_le0(-x.abs());
    let r = 1.0 / (1.0 + e);
    let small = e * r;
    (if x < 0.0 { small } else { r }, small * r)
}

/// √(8/π), and that times 0.044715: tanh(u) = 2·sigmoid(2u) − 1 saves GELU the tanh.
const GELU_A: f32 = 1.595_769_1;
const GELU_B: f32 = 0.071_354_814;

/// GELU, tanh form.
#[inline(always)]
pub(super) fn gelu(x: f32) -> f32 {
    let z = x * (x * x).mul_add(GELU_B, GELU_A);
    let y = x * sigmoid(z).0;
    // Far below zero x·0 is −0 and x = −∞ would be NaN.
    if x < -20.0 { 0.0 } else { y }
}

/// Its slope.
#[inline(always)]
pub(super) fn gelu_slope(x: f32) -> f32 {
    let xx = x * x;
    let z = x * xx.mul_add(GELU_B, GELU_A);
    let (s, slope) = sigmoid(z);
    let dz = xx.mul_add(3.0 * GELU_B, GELU_A);
    let d = (x * slope).mul_add(dz, s);
    if x < -20.0 {
        0.0
    } else if x > 20.0 {
        1.0
    } else {
        d
    }
}

/// Lanes of a sum: element `i` goes to lane `i % LANES`.
pub(super) const LANES: usize = 32;

/// Adds the lanes pairwise.
#[inline(always)]
pub(super) fn fold(mut lanes: [f32; LANES], add: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = add(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Folds `step(lane, element)` over a slice.
#[inline(always)]
pub(super) fn fold1(x: &[f32], start: f32, step: impl Fn(f32, f32) -> f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, v);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = step(*lane, v);
    }
    fold(lanes, join)
}

/// Σ x.
#[inline(always)]
pub(super) fn sum(x: &[f32]) -> f32 {
    fold1(x, 0.0, |a, v| a + v, |a, b| a + b)
}

/// The largest element; NaN is passed over, an empty slice has −∞.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    fold1(x, f32::NEG_INFINITY, larger, larger)
}

/// Σ (x − shift)².
#[inline(always)]
pub(super) fn sum_squares(x: &[f32], shift: f32) -> f32 {
    fold1(x, 0.0, |a, v| (v - shift).mul_add(v - shift, a), |a, b| a + b)
}

/// Σ x·y.
#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (mut xs, mut ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    for (x, y) in (&mut xs).zip(&mut ys) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(x).zip(y) {
            *lane = x.mul_add(y, *lane);
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(xs.remainder()).zip(ys.remainder()) {
        *lane = x.mul_add(y, *lane);
    }
    fold(lanes, |a, b| a + b)
}

/// Two sums of `term(j)` over 0..n at once.
#[inline(always)]
pub(super) fn sums2(n: usize, term: impl Fn(usize) -> (f32, f32)) -> (f32, f32) {
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    let whole = n / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        for l in 0..LANES {
            let (x, y) = term(at + l);
            a[l] += x;
            b[l] += y;
        }
    }
    for j in whole..n {
        let (x, y) = term(j);
        a[j - whole] += x;
        b[j - whole] += y;
    }
    (fold(a, |x, y| x + y), fold(b, |x, y| x + y))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, want: f64) -> f64 {
        let ulp = f64::from(f32::from_bits((want.abs() as f32).max(f32::MIN_POSITIVE).to_bits() + 1))
            - f64::from((want.abs() as f32).max(f32::MIN_POSITIVE));
        (f64::from(got) - want).abs() / ulp
    }

    fn worst(from: f32, to: f32, f: impl Fn(f32) -> f32, want: impl Fn(f64) -> f64) -> f64 {
        let n = if cfg!(miri) { 300 } else { 2_000_000 };
        (0..=n)
            .map(|i| from + (to - from) * (i as f32 / n as f32))
            .map(|x| ulps(f(x), want(f64::from(x))))
            .fold(0.0, f64::max)
    }

    fn gelu_f64(x: f64) -> f64 {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        // tanh cancels against 1 far below zero, so the reference goes through the exponential too.
        x / (1.0 + (-2.0 * u).exp())
    }

    #[test]
    fn exp_is_within_an_ulp_and_keeps_special_values() {
        let error = worst(-87.0, 0.0, exp_le0, f64::exp);
        assert!(error < 1.0, "{error} ulps");
        assert_eq!(exp_le0(0.0), 1.0);
        assert_eq!(exp_le0(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_le0(-1e30), 0.0);
        assert!(exp_le0(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_is_within_a_few_ulps_and_keeps_special_values() {
        let error = worst(-1.0, 20.0, gelu, gelu_f64);
        assert!(error < 6.0, "{error} ulps");
        // Far below zero the exponential magnifies the rounding of its argument; the value itself vanishes there.
        let error = worst(-6.0, -1.0, gelu, gelu_f64);
        assert!(error < 70.0, "{error} ulps");
        assert_eq!(gelu(f32::NEG_INFINITY), 0.0);
        assert_eq!(gelu(f32::INFINITY), f32::INFINITY);
        assert!(gelu(f32::NAN).is_nan());
        assert!(gelu_slope(f32::NAN).is_nan());
        assert_eq!(gelu_slope(1e30), 1.0);
        assert_eq!(gelu_slope(-1e30), 0.0);
    }

    #[test]
    fn rounding_to_bf16_is_to_nearest_even_over_all_kinds_of_values() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (got, want) = (bf16::store(x), bf16::from_f32(x));
                assert!(got == want || got.is_nan() && want.is_nan(), "{x}: {got} {want}");
            }
        }
    }

    #[test]
    fn sums_take_every_element_once_whatever_the_length() {
        for n in [0, 1, 3, 31, 32, 33, 65, 200] {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let want: f32 = x.iter().sum();
            assert_eq!(sum(&x), want);
            assert_eq!(dot(&x, &vec![1.0; n]), want);
            assert_eq!(max(&x), x.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
