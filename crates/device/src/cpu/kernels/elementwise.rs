//! Fill, cast, scale, add.

use super::{lines, math::Real, wide::wide};
use crate::{
    Args, DType, OpError, bf16,
    ops::{AddSpec, AxpySpec, FillSpec, Place, ScaleSpec},
};

pub(super) fn fill(spec: &FillSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    match args.dtype(0)? {
        DType::F32 => lines::one(args.rows_mut(0)?, |y| y.fill(spec.value)),
        DType::Bf16 => lines::one(args.rows_mut(0)?, |y| y.fill(bf16::store(spec.value))),
        DType::I32 => lines::one(args.rows_mut(0)?, |y| y.fill(spec.value as i32)),
        DType::I16 => lines::one(args.rows_mut(0)?, |y| y.fill(spec.value as i16)),
    }
    Ok(())
}

pub(super) fn cast(args: &mut Args<'_>) -> Result<(), OpError> {
    match (args.dtype(0)?, args.dtype(1)?) {
        (DType::I32, _) => lines::two::<i32, i32>(args.rows_mut(0)?, args.rows(1)?, |y, x| y.copy_from_slice(x)),
        (DType::I16, _) => lines::two::<i16, i16>(args.rows_mut(0)?, args.rows(1)?, |y, x| y.copy_from_slice(x)),
        (DType::F32, DType::F32) => {
            lines::two::<f32, f32>(args.rows_mut(0)?, args.rows(1)?, |y, x| y.copy_from_slice(x));
        }
        (DType::Bf16, DType::Bf16) => {
            lines::two::<bf16, bf16>(args.rows_mut(0)?, args.rows(1)?, |y, x| y.copy_from_slice(x));
        }
        (DType::F32, _) => lines::two(args.rows_mut(0)?, args.rows(1)?, convert::<f32, bf16>),
        (DType::Bf16, _) => lines::two(args.rows_mut(0)?, args.rows(1)?, convert::<bf16, f32>),
    }
    Ok(())
}

wide! {
    pub(super) fn convert[Y: Real, X: Real](y: &mut [Y], x: &[X]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = Y::store(x.load());
        }
    }
}

pub(super) fn scale(spec: &ScaleSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    match args.dtype(0)? {
        DType::Bf16 => scale_as::<bf16>(spec, args),
        _ => scale_as::<f32>(spec, args),
    }
}

fn scale_as<T: Real>(spec: &ScaleSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let y = args.rows_mut::<T>(0)?;
    match spec.place {
        Place::InPlace => {
            let by = lines::factor(spec.by, args, 1)?;
            lines::one(y, |y| scale_in_place(y, by));
        }
        Place::Apart => {
            let by = lines::factor(spec.by, args, 2)?;
            lines::two(y, args.rows::<T>(1)?, |y, x| scale_apart(y, x, by));
        }
    }
    Ok(())
}

wide! {
    fn scale_in_place[T: Real](y: &mut [T], by: f32) {
        for y in y {
            *y = T::store(by * y.load());
        }
    }
}

wide! {
    fn scale_apart[T: Real](y: &mut [T], x: &[T], by: f32) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::store(by * x.load());
        }
    }
}

pub(super) fn add(spec: &AddSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    match args.dtype(0)? {
        DType::Bf16 => add_as::<bf16>(spec, args),
        _ => add_as::<f32>(spec, args),
    }
}

fn add_as<T: Real>(spec: &AddSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (y, b) = (args.rows_mut::<T>(0)?, args.rows::<T>(1)?);
    match spec.place {
        Place::InPlace => lines::two(y, b, |y, b| axpy_rows(y, b, 1.0)),
        Place::Apart => lines::three(y, args.rows::<T>(2)?, b, add_apart),
    }
    Ok(())
}

wide! {
    fn add_apart[T: Real](y: &mut [T], a: &[T], b: &[T]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = T::store(a.load() + b.load());
        }
    }
}

pub(super) fn axpy(spec: &AxpySpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let alpha = lines::factor(spec.by, args, 2)?;
    match (args.dtype(0)?, args.dtype(1)?) {
        (DType::Bf16, DType::Bf16) => axpy_as::<bf16, bf16>(args, alpha),
        (DType::Bf16, _) => axpy_as::<bf16, f32>(args, alpha),
        (_, DType::Bf16) => axpy_as::<f32, bf16>(args, alpha),
        _ => axpy_as::<f32, f32>(args, alpha),
    }
}

fn axpy_as<Y: Real, X: Real>(args: &mut Args<'_>, alpha: f32) -> Result<(), OpError> {
    lines::two(args.rows_mut::<Y>(0)?, args.rows::<X>(1)?, |y, x| axpy_rows(y, x, alpha));
    Ok(())
}

wide! {
    fn axpy_rows[Y: Real, X: Real](y: &mut [Y], x: &[X], alpha: f32) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = Y::store(alpha.mul_add(x.load(), y.load()));
        }
    }
}

#[cfg(test)]
mod tests;
