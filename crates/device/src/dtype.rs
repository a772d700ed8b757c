//! Element types that device memory can hold.

use std::fmt;

pub use half::bf16;

/// What one element of a [`View`](crate::View) is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// The upper half of an `F32`, 2 bytes.
    Bf16,
    /// Two's complement, 4 bytes: token ids, flags, counters.
    I32,
    /// Two's complement, 2 bytes: lower halves of f32 masters, see [`split_master`](crate::ops::split_master).
    I16,
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::I16 => 2,
        }
    }

    /// A type of whole numbers.
    pub(crate) const fn is_whole(self) -> bool {
        matches!(self, DType::I32 | DType::I16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I16 => "i16",
        })
    }
}

/// A Rust type with the layout of a [`DType`]. Sealed: every bit pattern of an implementor is a valid value.
pub trait Element: sealed::Sealed + Copy + Send + Sync + fmt::Debug + PartialEq + 'static {
    /// The element type that this Rust type is.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for i16 {
    const DTYPE: DType = DType::I16;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
    impl Sealed for i16 {}
    impl Sealed for half::bf16 {}
}
