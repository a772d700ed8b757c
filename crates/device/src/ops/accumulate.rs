//! What an operation does with what its output holds, and where its factors come from.

use crate::{Access, Error, View, ops::check::Check};

/// What a gradient does with what its buffer holds.
#[derive(Clone, Copy, Debug)]
pub enum Accumulate<'a> {
    /// Overwrites it; nothing is read.
    Overwrite,
    /// Adds to it.
    Add,
    /// Multiplies it by this f32 scalar first. 0 overwrites whatever is there, NaN too: a gradient's first
    /// microbatch needs no zeroing, and a captured graph reads the flag anew at every replay.
    Keep(&'a View),
}

impl Accumulate<'_> {
    /// Checks the scalar, appends the output's access and then the scalar's.
    pub(crate) fn push(self, check: &Check, out: &View, accesses: &mut Vec<Access>) -> Result<Old, Error> {
        match self {
            Accumulate::Overwrite => accesses.push(Access::write(out)),
            _ => accesses.push(Access::update(out)),
        }
        self.push_scalar(check, accesses)
    }

    /// Appends the scalar's access, if there is one.
    pub(crate) fn push_scalar(self, check: &Check, accesses: &mut Vec<Access>) -> Result<Old, Error> {
        match self {
            Accumulate::Overwrite => Ok(Old::Overwrite),
            Accumulate::Add => Ok(Old::Add),
            Accumulate::Keep(keep) => {
                check.scalars(&[("keep", keep)])?;
                accesses.push(Access::read(keep));
                Ok(Old::Keep)
            }
        }
    }

    /// The access of one of several outputs.
    pub(crate) fn output(self, out: &View) -> Access {
        match self {
            Accumulate::Overwrite => Access::write(out),
            _ => Access::update(out),
        }
    }
}

/// [`Accumulate`] as a kernel's setting; the scalar is its last access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) enum Old {
    Overwrite,
    Add,
    Keep,
}

/// A factor: known when the operation is made, or read from the device when it runs.
#[derive(Clone, Copy, Debug)]
pub enum Factor<'a> {
    /// A constant.
    Const(f32),
    /// An f32 scalar.
    Device(&'a View),
}

impl Factor<'_> {
    /// Checks the scalar and appends its access, if there is one.
    pub(crate) fn push(self, check: &Check, accesses: &mut Vec<Access>) -> Result<By, Error> {
        match self {
            Factor::Const(value) => Ok(By::Const(value)),
            Factor::Device(scalar) => {
                check.scalars(&[("factor", scalar)])?;
                accesses.push(Access::read(scalar));
                Ok(By::Device)
            }
        }
    }
}

/// [`Factor`] as a kernel's setting; the scalar is its last access.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum By {
    Const(f32),
    Device,
}
