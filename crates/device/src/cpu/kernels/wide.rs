//! One function body, compiled for several instruction sets and picked when it is called.

/// Defines a function whose body runs with the widest vectors of this machine.
///
/// Bodies use fixed numbers of lanes and explicit multiply-adds only, so all versions give the same bits.
/// Type parameters are written in brackets: `fn name[T: Real](x: &[T])`.
macro_rules! wide {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $([$($param:ident: $bound:ident),+])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($param: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body $(<$($param: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(all(target_arch = "x86_64", not(miri)))]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512 $(<$($param: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2 $(<$($param: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

                match $crate::cpu::kernels::wide::vectors() {
                    // SAFETY: `vectors` has just found every feature that `avx512` is compiled with.
                    $crate::cpu::kernels::wide::Vectors::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: `vectors` has just found every feature that `avx2` is compiled with.
                    $crate::cpu::kernels::wide::Vectors::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::cpu::kernels::wide::Vectors::Base => {}
                }
            }
            body($($arg),*)
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
