//! What the layers of `training` compute.

use device::{Access, Op, View, ops::Accumulate};
use pgroups::GradOut;

/// Elements of every activation.
pub(super) const WIDTH: usize = 24;

pub(super) fn forward(x: &View, w: &View, y: &View, site: String) -> Op {
    let accesses = vec![Access::read(x), Access::read(w), Access::write(y)];
    Op::host("forward", site, accesses, |args| {
        let (x, w, y) = (args.read::<f32>(0)?, args.read::<f32>(1)?, args.write::<f32>(2)?);
        (0..WIDTH).for_each(|k| y[k] = x[k] * w[7 * k % w.len()] + 0.01 * x[(k + 1) % WIDTH]);
        Ok(())
    })
}

pub(super) fn loss(y: &View, dy: &View) -> Op {
    Op::host("loss", "loss", vec![Access::read(y), Access::write(dy)], |args| {
        let (y, dy) = (args.read::<f32>(0)?, args.write::<f32>(1)?);
        (0..WIDTH).for_each(|k| dy[k] = y[k] - 0.1 * k as f32);
        Ok(())
    })
}

pub(super) fn dgrad(dy: &View, w: &View, dx: &View, site: String) -> Op {
    let accesses = vec![Access::read(dy), Access::read(w), Access::write(dx)];
    Op::host("dgrad", site, accesses, |args| {
        let (dy, w, dx) = (args.read::<f32>(0)?, args.read::<f32>(1)?, args.write::<f32>(2)?);
        (0..WIDTH).for_each(|k| dx[k] = dy[k] * w[7 * k % w.len()]);
        Ok(())
    })
}

pub(super) fn wgrad(x: &View, dy: &View, grad: &GradOut, site: String) -> Op {
    let (into, how) = grad.target();
    let (mut accesses, keeps) = (vec![Access::update(into), Access::read(x), Access::read(dy)], flag_of(how));
    accesses.extend(keeps.map(Access::read));
    Op::host("wgrad", site, accesses, move |args| {
        let keep = if args.len() > 3 { args.read::<f32>(3)?[0] } else { 1.0 };
        let (x, dy, grad) = (args.read::<f32>(1)?, args.read::<f32>(2)?, args.write::<f32>(0)?);
        let numel = grad.len();
        grad.iter_mut().for_each(|g| *g = if keep == 0.0 { 0.0 } else { keep * *g });
        (0..WIDTH).for_each(|k| grad[7 * k % numel] += x[k] * dy[k]);
        Ok(())
    })
}

pub(super) fn early(grad: &GradOut, value: f32) -> Op {
    let (into, how) = grad.target();
    let (mut accesses, keeps) = (vec![Access::update(into)], flag_of(how));
    accesses.extend(keeps.map(Access::read));
    Op::host("early", "early", accesses, move |args| {
        let keep = if args.len() > 1 { args.read::<f32>(1)?[0] } else { 1.0 };
        args.write::<f32>(0)?.iter_mut().for_each(|g| *g = if keep == 0.0 { value } else { keep * *g + value });
        Ok(())
    })
}

fn flag_of(how: Accumulate<'_>) -> Option<&View> {
    match how {
        Accumulate::Keep(flag) => Some(flag),
        Accumulate::Add => None,
        Accumulate::Overwrite => panic!("nobody gives scratch here"),
    }
}
