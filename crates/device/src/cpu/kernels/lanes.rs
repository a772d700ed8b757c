//! Sixteen f32 in registers, for sums: compilers vectorise loops over elements by themselves, but not reliably sums.

use std::ops::{Add, Mul, Sub};

/// Elements of a vector.
pub(super) const WIDTH: usize = 16;

/// A vector of [`WIDTH`] elements. Every implementation gives the same bits.
pub(super) trait Lanes: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    fn splat(x: f32) -> Self;
    fn load(x: &[f32; WIDTH]) -> Self;
    fn to_array(self) -> [f32; WIDTH];

    /// self · b + c, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// self · 2ⁿ, n being the whole number in the low bits of `t`'s mantissa.
    fn times_power(self, t: Self) -> Self;

    /// 0 in the lanes where `x` is below `low`.
    fn zero_where_below(self, x: Self, low: f32) -> Self;

    /// Each lane the larger of the two; a NaN in `other` is passed over.
    fn larger(self, other: Self) -> Self;

    /// Lanes i and i + 8 are added, then i and i + 4, and so on.
    fn sum(self) -> f32 {
        halve(self.to_array(), |a, b| a + b)
    }

    /// The largest lane, NaN passed over as by [`Lanes::larger`].
    fn largest(self) -> f32 {
        halve(self.to_array(), |a, b| if b > a { b } else { a })
    }

    /// The first `x.len()` lanes from `x`, at most [`WIDTH`], the others `rest`.
    #[inline(always)]
    fn load_first(x: &[f32], rest: f32) -> Self {
        let mut all = [rest; WIDTH];
        all[..x.len()].copy_from_slice(x);
        Self::load(&all)
    }

    /// The first lanes into the whole of `x`, at most [`WIDTH`] long.
    #[inline(always)]
    fn store_first(self, x: &mut [f32]) {
        x.copy_from_slice(&self.to_array()[..x.len()]);
    }

    /// Zero from lane `len` on.
    fn first(self, len: usize) -> Self {
        let mut all = self.to_array();
        all[len..].fill(0.0);
        Self::load(&all)
    }
}

#[inline(always)]
fn halve(mut lanes: [f32; WIDTH], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = WIDTH / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = join(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// 2ⁿ, n being the whole number in the low bits of `t`'s mantissa.
#[inline(always)]
pub(super) fn power(t: f32) -> f32 {
    f32::from_bits((t.to_bits() << 23).wrapping_add(1.0_f32.to_bits()))
}

/// Without instructions that not every machine has.
#[derive(Clone, Copy)]
pub(super) struct Base([f32; WIDTH]);

impl Lanes for Base {
    #[inline(always)]
    fn splat(x: f32) -> Base {
        Base([x; WIDTH])
    }

    #[inline(always)]
    fn load(x: &[f32; WIDTH]) -> Base {
        Base(*x)
    }

    #[inline(always)]
    fn to_array(self) -> [f32; WIDTH] {
        self.0
    }

    #[inline(always)]
    fn mul_add(self, b: Base, c: Base) -> Base {
        Base(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }

    #[inline(always)]
    fn times_power(self, t: Base) -> Base {
        Base(std::array::from_fn(|i| self.0[i] * power(t.0[i])))
    }

    #[inline(always)]
    fn zero_where_below(self, x: Base, low: f32) -> Base {
        Base(std::array::from_fn(|i| if x.0[i] < low { 0.0 } else { self.0[i] }))
    }

    #[inline(always)]
    fn larger(self, other: Base) -> Base {
        Base(std::array::from_fn(|i| if other.0[i] > self.0[i] { other.0[i] } else { self.0[i] }))
    }
}

macro_rules! base_operator {
    ($trait:ident, $method:ident, $operator:tt) => {
        impl $trait for Base {
            type Output = Base;

            #[inline(always)]
            fn $method(self, other: Base) -> Base {
                Base(std::array::from_fn(|i| self.0[i] $operator other.0[i]))
            }
        }
    };
}
base_operator!(Add, add, +);
base_operator!(Sub, sub, -);
base_operator!(Mul, mul, *);

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use x86::{Avx2, Avx512};

/// Values of these types are only made in functions that `wide!` compiles with their features, after it has found
/// them on this machine; every SAFETY comment here rests on that.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use std::{
        arch::x86_64::*,
        ops::{Add, Mul, Sub},
    };

    use super::{Lanes, WIDTH};

    /// One register.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    /// Two registers.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256, __m256);

    macro_rules! operator {
        ($trait:ident, $method:ident, $wide:ident, $narrow:ident) => {
            impl $trait for Avx512 {
                type Output = Avx512;

                #[inline(always)]
                fn $method(self, other: Avx512) -> Avx512 {
                    // SAFETY: the machine has AVX-512 (see the module).
                    Avx512(unsafe { $wide(self.0, other.0) })
                }
            }

            impl $trait for Avx2 {
                type Output = Avx2;

                #[inline(always)]
                fn $method(self, other: Avx2) -> Avx2 {
                    // SAFETY: the machine has AVX2 (see the module).
                    unsafe { Avx2($narrow(self.0, other.0), $narrow(self.1, other.1)) }
                }
            }
        };
    }
    operator!(Add, add, _mm512_add_ps, _mm256_add_ps);
    operator!(Sub, sub, _mm512_sub_ps, _mm256_sub_ps);
    operator!(Mul, mul, _mm512_mul_ps, _mm256_mul_ps);

    impl Lanes for Avx512 {
        #[inline(always)]
        fn splat(x: f32) -> Avx512 {
            // SAFETY: the machine has AVX-512 (see the module).
            Avx512(unsafe { _mm512_set1_ps(x) })
        }

        #[inline(always)]
        fn load(x: &[f32; WIDTH]) -> Avx512 {
            // SAFETY: the machine has AVX-512 (see the module); the array is as long as the register.
            Avx512(unsafe { _mm512_loadu_ps(x.as_ptr()) })
        }

        #[inline(always)]
        fn to_array(self) -> [f32; WIDTH] {
            let mut all = [0.0; WIDTH];
            // SAFETY: the machine has AVX-512 (see the module); the array is as long as the register.
            unsafe { _mm512_storeu_ps(all.as_mut_ptr(), self.0) };
            all
        }

        #[inline(always)]
        fn mul_add(self, b: Avx512, c: Avx512) -> Avx512 {
            // SAFETY: the machine has AVX-512 (see the module).
            Avx512(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        fn times_power(self, t: Avx512) -> Avx512 {
            // SAFETY: the machine has AVX-512 (see the module).
            unsafe {
                let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(t.0));
                let power = _mm512_add_epi32(shifted, _mm512_castps_si512(_mm512_set1_ps(1.0)));
                Avx512(_mm512_mul_ps(self.0, _mm512_castsi512_ps(power)))
            }
        }

        #[inline(always)]
        fn zero_where_below(self, x: Avx512, low: f32) -> Avx512 {
            // SAFETY: the machine has AVX-512 (see the module).
            unsafe {
                let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_ps(low));
                Avx512(_mm512_maskz_mov_ps(keep, self.0))
            }
        }

        #[inline(always)]
        fn larger(self, other: Avx512) -> Avx512 {
            // SAFETY: the machine has AVX-512 (see the module). The second operand is the result if one is NaN.
            Avx512(unsafe { _mm512_max_ps(other.0, self.0) })
        }

        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: the machine has AVX-512 (see the module).
            unsafe { sum8(_mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0))) }
        }

        #[inline(always)]
        fn largest(self) -> f32 {
            // SAFETY: the machine has AVX-512 (see the module).
            unsafe { largest8(_mm256_max_ps(_mm512_extractf32x8_ps::<1>(self.0), _mm512_castps512_ps256(self.0))) }
        }

        #[inline(always)]
        fn load_first(x: &[f32], rest: f32) -> Avx512 {
            assert!(x.len() <= WIDTH, "at most one vector");
            let mask = ((1u32 << x.len()) - 1) as u16;
            // SAFETY: the machine has AVX-512 (see the module); only lanes inside the slice are read.
            Avx512(unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(rest), mask, x.as_ptr()) })
        }

        #[inline(always)]
        fn store_first(self, x: &mut [f32]) {
            assert!(x.len() <= WIDTH, "at most one vector");
            let mask = ((1u32 << x.len()) - 1) as u16;
            // SAFETY: the machine has AVX-512 (see the module); only lanes inside the slice are written.
            unsafe { _mm512_mask_storeu_ps(x.as_mut_ptr(), mask, self.0) };
        }
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(x: f32) -> Avx2 {
            // SAFETY: the machine has AVX2 (see the module).
            let x = unsafe { _mm256_set1_ps(x) };
            Avx2(x, x)
        }

        #[inline(always)]
        fn load(x: &[f32; WIDTH]) -> Avx2 {
            // SAFETY: the machine has AVX2 (see the module); the array is as long as both registers.
            unsafe { Avx2(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(WIDTH / 2))) }
        }

        #[inline(always)]
        fn to_array(self) -> [f32; WIDTH] {
            let mut all = [0.0; WIDTH];
            // SAFETY: the machine has AVX2 (see the module); the array is as long as both registers.
            unsafe {
                _mm256_storeu_ps(all.as_mut_ptr(), self.0);
                _mm256_storeu_ps(all.as_mut_ptr().add(WIDTH / 2), self.1);
            }
            all
        }

        #[inline(always)]
        fn mul_add(self, b: Avx2, c: Avx2) -> Avx2 {
            // SAFETY: the machine has AVX2 and FMA (see the module).
            unsafe { Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
        }

        #[inline(always)]
        fn times_power(self, t: Avx2) -> Avx2 {
            // SAFETY: the machine has AVX2 (see the module).
            let scaled = |x: __m256, t: __m256| unsafe {
                let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
                let power = _mm256_add_epi32(shifted, _mm256_castps_si256(_mm256_set1_ps(1.0)));
                _mm256_mul_ps(x, _mm256_castsi256_ps(power))
            };
            Avx2(scaled(self.0, t.0), scaled(self.1, t.1))
        }

        #[inline(always)]
        fn zero_where_below(self, x: Avx2, low: f32) -> Avx2 {
            // SAFETY: the machine has AVX2 (see the module).
            unsafe {
                let low = _mm256_set1_ps(low);
                let keep = |x: __m256| _mm256_cmp_ps::<_CMP_NLT_UQ>(x, low);
                Avx2(_mm256_and_ps(self.0, keep(x.0)), _mm256_and_ps(self.1, keep(x.1)))
            }
        }

        #[inline(always)]
        fn larger(self, other: Avx2) -> Avx2 {
            // SAFETY: the machine has AVX2 (see the module). The second operand is the result if one is NaN.
            unsafe { Avx2(_mm256_max_ps(other.0, self.0), _mm256_max_ps(other.1, self.1)) }
        }

        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: the machine has AVX2 (see the module).
            unsafe { sum8(_mm256_add_ps(self.0, self.1)) }
        }

        #[inline(always)]
        fn largest(self) -> f32 {
            // SAFETY: the machine has AVX2 (see the module).
            unsafe { largest8(_mm256_max_ps(self.1, self.0)) }
        }
    }

    /// # Safety
    /// The machine has AVX2.
    #[inline(always)]
    unsafe fn largest8(x: __m256) -> f32 {
        // SAFETY: as the caller promises. The second operand is the result if one is NaN.
        unsafe {
            let four = _mm_max_ps(_mm256_extractf128_ps::<1>(x), _mm256_castps256_ps128(x));
            let two = _mm_max_ps(_mm_movehl_ps(four, four), four);
            _mm_cvtss_f32(_mm_max_ss(_mm_shuffle_ps::<1>(two, two), two))
        }
    }

    /// # Safety
    /// The machine has AVX2.
    #[inline(always)]
    unsafe fn sum8(x: __m256) -> f32 {
        // SAFETY: as the caller promises.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::{math, math::exp_or_zero, wide::wide};

    wide! {
        /// Every operation once, with the widest vectors.
        fn widest(a: &[f32; WIDTH], b: &[f32; WIDTH], len: usize) -> Vec<f32> {
            all::<V>(a, b, len)
        }
    }

    #[inline(always)]
    fn all<V: Lanes>(a: &[f32; WIDTH], b: &[f32; WIDTH], len: usize) -> Vec<f32> {
        let (x, y) = (V::load(a), V::load(b));
        let mut vectors = vec![x + y, x - y, x * y, x.larger(y), V::splat(a[3]), x.first(len), x.mul_add(x, y)];
        vectors.extend([exp_or_zero(y), exp_or_zero(x * V::splat(100.0)), y.zero_where_below(x, 0.25)]);
        let mut out: Vec<f32> = vectors.into_iter().flat_map(V::to_array).collect();
        out.extend(V::load_first(&a[..len], 0.5).to_array());
        let mut part = vec![7.0; len];
        x.store_first(&mut part);
        out.extend(part);
        out.extend([x.sum(), (x * y).sum(), x.largest(), y.largest()]);
        out
    }

    #[test]
    fn vectors_of_exponentials_equal_single_ones() {
        let x: [f32; WIDTH] = std::array::from_fn(|i| -7.3 * i as f32);
        assert_eq!(exp_or_zero(Base::load(&x)).to_array(), x.map(math::exp_or_zero_of));
    }

    #[test]
    fn wide_and_plain_vectors_give_the_same_bits() {
        for seed in 0..if cfg!(miri) { 2 } else { 50 } {
            let values = crate::ops::trial::random(seed, 2 * WIDTH);
            let (a, b) = values.split_first_chunk::<WIDTH>().expect("long enough");
            let mut b: [f32; WIDTH] = b.try_into().expect("the other half");
            b[seed as usize % WIDTH] = f32::NAN;
            let bits = |x: Vec<f32>| x.iter().map(|x| if x.is_nan() { 1 } else { x.to_bits() }).collect::<Vec<_>>();
            let len = seed as usize % (WIDTH + 1);
            assert_eq!(bits(widest(a, &b, len)), bits(all::<Base>(a, &b, len)));
        }
    }
}
