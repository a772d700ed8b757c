//! One function body, compiled for several instruction sets and picked when it is called.

/// Defines a function whose body runs with the widest vectors of this machine; `V` in it is [`Lanes`] of that width.
///
/// Bodies use explicit multiply-adds, and [`Lanes`] for sums, so all versions give the same bits.
/// Type parameters are written in brackets: `fn name[T: Real](x: &[T])`.
///
/// [`Lanes`]: super::lanes::Lanes
macro_rules! wide {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $([$($param:ident: $bound:ident),+])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($param: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)]
            fn body <V: $crate::cpu::kernels::lanes::Lanes, $($($param: $bound),+)?> ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(all(target_arch = "x86_64", not(miri)))]
            {
                use $crate::cpu::kernels::{lanes::{Avx2, Avx512}, wide::{Vectors, vectors}};

                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512 $(<$($param: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                    body::<Avx512, $($($param),+)?>($($arg),*)
                }

                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2 $(<$($param: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                    body::<Avx2, $($($param),+)?>($($arg),*)
                }

                match vectors() {
                    // SAFETY: `vectors` has just found every feature that `avx512` is compiled with.
                    Vectors::Avx512 => return unsafe { avx512 $(::<$($param),+>)? ($($arg),*) },
                    // SAFETY: `vectors` has just found every feature that `avx2` is compiled with.
                    Vectors::Avx2 => return unsafe { avx2 $(::<$($param),+>)? ($($arg),*) },
                    Vectors::Base => {}
                }
            }
            body::<$crate::cpu::kernels::lanes::Base, $($($param),+)?>($($arg),*)
        }
    };
}
pub(super) use wide;

/// Instruction sets that bodies are compiled for.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) enum Vectors {
    Avx512,
    Avx2,
    Base,
}

/// What this machine has; the standard library keeps the answer, so this is a few loads.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(crate) fn vectors() -> Vectors {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if avx512 {
        Vectors::Avx512
    } else if avx2 {
        Vectors::Avx2
    } else {
        Vectors::Base
    }
}
