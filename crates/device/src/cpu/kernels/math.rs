//! Element functions and sums that compilers turn into vector code: no branches, fixed lanes, a fixed order.

use std::f32::consts::LOG2_E;

use super::lanes::{Lanes, WIDTH, power};
use crate::{Element, bf16};

/// A floating-point element type; kernels compute in f32.
pub(super) trait Real: Element {
    fn load(self) -> f32;
    fn store(x: f32) -> Self;
    fn vector<V: Lanes>(x: &[Self; WIDTH]) -> V;
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

    #[inline(always)]
    fn vector<V: Lanes>(x: &[f32; WIDTH]) -> V {
        V::load(x)
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

    #[inline(always)]
    fn vector<V: Lanes>(x: &[bf16; WIDTH]) -> V {
        let mut all = [0.0; WIDTH];
        for i in 0..WIDTH {
            all[i] = x[i].load();
        }
        V::load(&all)
    }
}

/// exp(x) for x in −87..=87, at most 2.5 ulp from the true value; outside, its value at the nearer end. NaN stays NaN.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2, and exp(r) is a polynomial whose relative error oscillates within 1.1e-7
/// (coefficients by Remez exchange for the relative error, constant and linear term fixed at 1).
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    exp_unchecked(at_most(at_least(x, -87.0), 87.0))
}

// Adding 1.5·2²³ leaves the nearest whole number in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;
const LN2_HIGH: f32 = 0.693_145_75;
const LN2_LOW: f32 = 1.428_606_8e-6;
/// Of r⁵ first, down to 1.
const SERIES: [f32; 6] = [0.008_312_52, 0.041_890_157, 0.166_671_15, 0.499_992_3, 1.0, 1.0];

#[inline(always)]
fn exp_unchecked(x: f32) -> f32 {
    let t = x.mul_add(LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = SERIES[0];
    for c in &SERIES[1..] {
        p = p.mul_add(r, *c);
    }
    p * power(t)
}

/// exp for softmax, of arguments that are not over 87: 0 below −87. NaN stays NaN.
#[inline(always)]
pub(super) fn exp_or_zero<V: Lanes>(x: V) -> V {
    let t = x.mul_add(V::splat(LOG2_E), V::splat(ROUND));
    let n = t - V::splat(ROUND);
    let r = n.mul_add(V::splat(-LN2_LOW), n.mul_add(V::splat(-LN2_HIGH), x));
    let mut p = V::splat(SERIES[0]);
    for c in &SERIES[1..] {
        p = p.mul_add(r, V::splat(*c));
    }
    p.times_power(t).zero_where_below(x, -87.0)
}

/// The same of one number, to the same bits.
#[inline(always)]
pub(super) fn exp_or_zero_of(x: f32) -> f32 {
    let y = exp_unchecked(x);
    // Written so that a NaN takes the other branch.
    if x < -87.0 { 0.0 } else { y }
}

/// d = exp(x − shift), x being `from` or d itself; the sum of d.
#[inline(always)]
pub(super) fn exp_and_sum<V: Lanes>(d: &mut [f32], from: Option<&[f32]>, shift: f32) -> f32 {
    let mut sums = [V::splat(0.0); 2];
    let shifts = V::splat(shift);
    let whole = d.len() / (2 * WIDTH) * (2 * WIDTH);
    for at in (0..whole).step_by(2 * WIDTH) {
        for half in 0..2 {
            let d: &mut [f32; WIDTH] = d[at + half * WIDTH..].first_chunk_mut().expect("BUG: inside the whole part");
            let x = match from {
                Some(from) => from[at + half * WIDTH..].first_chunk().expect("BUG: as long as d"),
                None => &*d,
            };
            let e = exp_or_zero(V::load(x) - shifts);
            *d = e.to_array();
            sums[half] = sums[half] + e;
        }
    }
    for at in (whole..d.len()).step_by(WIDTH) {
        let part = at..(at + WIDTH).min(d.len());
        // Lanes past the end become exp(−∞) = 0 and add nothing.
        let x = V::load_first(from.map_or(&d[part.clone()], |from| &from[part.clone()]), f32::NEG_INFINITY);
        let e = exp_or_zero(x - shifts);
        e.store_first(&mut d[part]);
        sums[0] = sums[0] + e;
    }
    (sums[0] + sums[1]).sum()
}

/// The larger one; a NaN in `x` stays, which `f32::max` would drop.
#[inline(always)]
fn at_least(x: f32, low: f32) -> f32 {
    if x < low { low } else { x }
}

/// The smaller one; a NaN in `x` stays.
#[inline(always)]
fn at_most(x: f32, high: f32) -> f32 {
    if x > high { high } else { x }
}

/// 1 / (1 + exp(−x)) and its slope, neither with cancellation at either end.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> (f32, f32) {
    let e = exp(-x);
    let s = 1.0 / (1.0 + e);
    (s, e * s * s)
}

/// √(8/π), and that times 0.044715: tanh(u) = 2·sigmoid(2u) − 1 saves GELU the tanh.
const GELU_A: f32 = 1.595_769;
const GELU_B: f32 = 0.071_354_814;

/// GELU, tanh form. Within 5 ulp from −1 up; below, the exponential magnifies the rounding of its argument.
#[inline(always)]
pub(super) fn gelu(x: f32) -> f32 {
    // Beyond −20 the result is 0 to f32, and −∞·0 would be NaN.
    let x = at_least(x, -20.0);
    let z = x * (x * x).mul_add(-GELU_B, -GELU_A);
    x / (1.0 + exp(z))
}

/// Its slope.
#[inline(always)]
pub(super) fn gelu_slope(x: f32) -> f32 {
    // Beyond ±20 the slope is 0 or 1 to f32, and ∞·0 would be NaN.
    let x = at_most(at_least(x, -20.0), 20.0);
    let xx = x * x;
    let e = exp(x * xx.mul_add(-GELU_B, -GELU_A));
    let s = 1.0 / (1.0 + e);
    (x * (e * s)).mul_add(xx.mul_add(3.0 * GELU_B, GELU_A), 1.0) * s
}

/// Σ x.
#[inline(always)]
pub(super) fn sum<V: Lanes>(x: &[f32]) -> f32 {
    sums::<V, _, 1, 1>([x], |[x]| [x])[0]
}

/// The largest element; NaN is passed over, an empty slice has −∞.
#[inline(always)]
pub(super) fn max<V: Lanes>(x: &[f32]) -> f32 {
    let mut largest = [V::splat(f32::NEG_INFINITY); 2];
    let (pairs, rest) = x.as_chunks::<{ 2 * WIDTH }>();
    for pair in pairs {
        let (low, high) = halves(pair);
        largest = [largest[0].larger(V::load(low)), largest[1].larger(V::load(high))];
    }
    for rest in rest.chunks(WIDTH) {
        largest[0] = largest[0].larger(V::load_first(rest, f32::NEG_INFINITY));
    }
    largest[0].larger(largest[1]).largest()
}

#[inline(always)]
fn halves<T>(pair: &[T; 2 * WIDTH]) -> (&[T; WIDTH], &[T; WIDTH]) {
    let (low, high) = pair.split_at(WIDTH);
    (low.try_into().expect("BUG: half a pair"), high.try_into().expect("BUG: half a pair"))
}

/// Σ of `S` terms at once over the elements of `N` slices of one length: two vectors of lanes, added at the end.
#[inline(always)]
pub(super) fn sums<V: Lanes, T: Real, const N: usize, const S: usize>(
    x: [&[T]; N],
    term: impl Fn([V; N]) -> [V; S],
) -> [f32; S] {
    let mut lanes = [[V::splat(0.0); S]; 2];
    let len = x[0].len();
    let whole = len / (2 * WIDTH) * (2 * WIDTH);
    for at in (0..whole).step_by(2 * WIDTH) {
        for half in 0..2 {
            let terms = term(vectors(&x, at + half * WIDTH));
            for s in 0..S {
                lanes[half][s] = lanes[half][s] + terms[s];
            }
        }
    }
    for at in (whole..len).step_by(WIDTH) {
        let count = WIDTH.min(len - at);
        let terms = term(padded(&x, at));
        for s in 0..S {
            // The padding's terms need not be zero.
            lanes[0][s] = lanes[0][s] + terms[s].first(count);
        }
    }
    let mut sums = [0.0; S];
    for s in 0..S {
        sums[s] = (lanes[0][s] + lanes[1][s]).sum();
    }
    sums
}

/// Elements `at..at + WIDTH` of each slice. A loop, because closures of array methods do not always inline.
#[inline(always)]
pub(super) fn vectors<V: Lanes, T: Real, const N: usize>(x: &[&[T]; N], at: usize) -> [V; N] {
    let mut all = [V::splat(0.0); N];
    for n in 0..N {
        all[n] = T::vector(x[n][at..].first_chunk().expect("BUG: slices of one length"));
    }
    all
}

/// Elements from `at` on, at most a vector of them, and zeros behind.
#[inline(always)]
pub(super) fn padded<V: Lanes, T: Real, const N: usize>(x: &[&[T]; N], at: usize) -> [V; N] {
    let mut all = [V::splat(0.0); N];
    for n in 0..N {
        let mut padded = [0.0; WIDTH];
        padded.iter_mut().zip(&x[n][at..]).for_each(|(p, x)| *p = x.load());
        all[n] = V::load(&padded);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{super::lanes::Base, *};

    fn ulps(got: f32, want: f64) -> f64 {
        let ulp = f64::from(f32::from_bits((want.abs() as f32).max(f32::MIN_POSITIVE).to_bits() + 1))
            - f64::from((want.abs() as f32).max(f32::MIN_POSITIVE));
        (f64::from(got) - want).abs() / ulp
    }

    fn worst(from: f32, to: f32, f: impl Fn(f32) -> f32, want: impl Fn(f64) -> f64) -> f64 {
        let n = if cfg!(miri) { 100 } else { 2_000_000 };
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
    fn exp_is_within_a_few_ulps_and_keeps_special_values() {
        let error = worst(-87.0, 87.0, exp, f64::exp);
        assert!(error < 2.5, "{error} ulps");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp_or_zero_of(-1.5), exp(-1.5));
        assert_eq!(exp_or_zero_of(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_or_zero_of(-1e30), 0.0);
        assert!(exp(f32::INFINITY).is_finite() && exp(f32::NEG_INFINITY) > 0.0);
        assert!(exp(f32::NAN).is_nan() && exp_or_zero_of(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_is_within_a_few_ulps_and_keeps_special_values() {
        let error = worst(-1.0, 20.0, gelu, gelu_f64);
        assert!(error < 5.0, "{error} ulps");
        // Far below zero the exponential magnifies the rounding of its argument; the value itself vanishes there.
        let error = worst(-6.0, -1.0, gelu, gelu_f64);
        assert!(error < 70.0, "{error} ulps");
        assert!(gelu(f32::NEG_INFINITY).abs() < 1e-30);
        assert_eq!(gelu(f32::INFINITY), f32::INFINITY);
        assert!(gelu(f32::NAN).is_nan());
        assert!(gelu_slope(f32::NAN).is_nan());
        assert_eq!(gelu_slope(f32::INFINITY), 1.0);
        assert!(gelu_slope(f32::NEG_INFINITY).abs() < 1e-30);
    }

    #[test]
    fn the_slope_of_gelu_far_from_zero_is_that_of_the_formula() {
        let slope = |x: f64| {
            let s = 1.0 / (1.0 + (-f64::from(GELU_A) * x - f64::from(GELU_B) * x.powi(3)).exp());
            s + x * s * (1.0 - s) * (f64::from(GELU_A) + 3.0 * f64::from(GELU_B) * x * x)
        };
        // Where the exponential leaves f32, where arguments are cut off, and beyond.
        for x in [9.5f32, 10.0, 10.05, 10.07, 10.5, 11.0, 16.0, 19.9, 20.0, 20.5, 30.0, 100.0, 1e4] {
            for x in [x, -x] {
                let (got, want) = (gelu_slope(x), slope(f64::from(x)));
                assert!((f64::from(got) - want).abs() < 1e-30 + 1e-6 * want.abs().min(1.0), "at {x}: {got} {want}");
            }
        }
    }

    #[test]
    fn rounding_to_bf16_is_to_nearest_even_over_all_kinds_of_values() {
        for high in (0..=u16::MAX).step_by(if cfg!(miri) { 811 } else { 1 }) {
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
            assert_eq!(sum::<Base>(&x), want);
            let ones = vec![1.0; n];
            let got = sums::<Base, _, 2, 2>([&x, &ones], |[a, b]| [a, a * b + Base::splat(1.0)]);
            assert_eq!(got, [want, want + n as f32]);
            assert_eq!(max::<Base>(&x), x.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
