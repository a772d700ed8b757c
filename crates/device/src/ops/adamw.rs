//! AdamW on flat buffers; all that changes between steps lies on the device.

use std::sync::Arc;

use super::{
    Kernel, Work,
    activation::elements,
    check::Check,
    cut::{Cut, PIECE_BYTES},
};
use crate::{Access, DType, Error, Op, Site, View};

/// Layout of the optimizer's scalars: an f32 vector of [`Hyper::LEN`] on the device.
///
/// Cut single entries with [`View::flat`]: the learning rate is copied in by the host or a captured graph's input,
/// [`AdvanceAdam`] writes the corrections, [`ClipFactor`](super::ClipFactor) the clip factor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hyper;

impl Hyper {
    /// Learning rate.
    pub const LR: usize = 0;
    /// 1 − beta1ᵗ.
    pub const CORRECTION1: usize = 1;
    /// 1 − beta2ᵗ.
    pub const CORRECTION2: usize = 2;
    /// Gradients are multiplied by this: clip factor, loss scale. 1 where nothing is clipped.
    pub const CLIP: usize = 3;
    /// Entries.
    pub const LEN: usize = 4;

    /// One entry as a view of one element.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the view is shorter.
    pub fn entry(scalars: &View, index: usize) -> Result<View, Error> {
        scalars.flat(index..index + 1)
    }
}

/// Decoupled weight decay Adam:
/// g = clip·grad, m = β1·m + (1−β1)·g, v = β2·v + (1−β2)·g²,
/// param −= lr·decay·param, then param −= lr/c1 · m / (√v/√c2 + eps).
///
/// Decay is one setting for a whole buffer; [`AdamWRuns`] takes one of several. Settings are f64 so that 1 − β is exact
/// to f32: 0.999 as f32 would be off by a part in 10⁵ there.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<'a> {
    /// f32, or bf16 with a rest: the values, updated.
    pub param: &'a View,
    /// i16, same sizes, updated: what bf16 values lack of their f32 masters, as [`split_master`] takes them apart. The
    /// step is that of the masters. 0 makes the values themselves the masters.
    ///
    /// [`split_master`]: super::split_master
    pub rest: Option<&'a View>,
    /// f32 or bf16, same sizes.
    pub grad: &'a View,
    /// f32, same sizes, updated.
    pub m: &'a View,
    /// f32, same sizes, updated.
    pub v: &'a View,
    /// f32 `[Hyper::LEN]`, contiguous.
    pub scalars: &'a View,
    /// i32, one element: anything but 0 and param, rest, m and v stay as they are, to the bit.
    pub skip: Option<&'a View>,
    /// In 0..1.
    pub beta1: f64,
    /// In 0..1.
    pub beta2: f64,
    /// Over 0.
    pub eps: f64,
    /// Not negative.
    pub weight_decay: f64,
}

impl AdamW<'_> {
    /// Accesses: param, m, v, grad, scalars, rest, skip.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let all = AdamWRuns {
            param: self.param,
            rest: self.rest,
            grad: self.grad,
            m: self.m,
            v: self.v,
            scalars: self.scalars,
            skip: self.skip,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            decays: &[self.weight_decay],
            runs: &[AdamRun { end: self.param.numel(), group: 0 }],
        };
        all.op(site)
    }
}

/// Elements of a buffer that belong to one group: from the end of the run before, or from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdamRun {
    /// The element behind the last.
    pub end: usize,
    /// Its place among the groups.
    pub group: usize,
}

/// [`AdamW`] on a buffer whose elements belong to several groups, each with a decay and scalars of its own, in one pass:
/// the bits of one [`AdamW`] for each run.
#[derive(Clone, Copy, Debug)]
pub struct AdamWRuns<'a> {
    /// As [`AdamW::param`]; contiguous, like all others, if there are several runs.
    pub param: &'a View,
    /// As [`AdamW::rest`].
    pub rest: Option<&'a View>,
    /// As [`AdamW::grad`].
    pub grad: &'a View,
    /// As [`AdamW::m`].
    pub m: &'a View,
    /// As [`AdamW::v`].
    pub v: &'a View,
    /// f32 `[groups, Hyper::LEN]`, contiguous.
    pub scalars: &'a View,
    /// As [`AdamW::skip`].
    pub skip: Option<&'a View>,
    /// In 0..1.
    pub beta1: f64,
    /// In 0..1.
    pub beta2: f64,
    /// Over 0.
    pub eps: f64,
    /// Weight decay of each group, none negative.
    pub decays: &'a [f64],
    /// In order; the last one ends where param does.
    pub runs: &'a [AdamRun],
}

impl AdamWRuns<'_> {
    /// Accesses: param, m, v, grad, scalars, rest, skip.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("adamw", site);
        let (param, stored) = (("param", self.param), if self.rest.is_some() { DType::Bf16 } else { DType::F32 });
        check.dtype(stored, &[param])?;
        check.dtype(DType::F32, &[("m", self.m), ("v", self.v), ("scalars", self.scalars)])?;
        check.real(&[("grad", self.grad)])?;
        check.same_sizes(&[param, ("m", self.m), ("v", self.v), ("grad", self.grad)])?;
        check_hyper(&check, self.scalars, self.decays.len())?;
        check_betas(&check, self.beta1, self.beta2)?;
        check.setting(self.eps > 0.0, "eps", self.eps, "it must be over 0")?;
        for &decay in self.decays {
            check.setting(decay >= 0.0, "weight_decay", decay, "it must not be negative")?;
        }
        self.check_runs(&check)?;
        let mut accesses = [self.param, self.m, self.v].map(Access::update).to_vec();
        accesses.extend([self.grad, self.scalars].map(Access::read));
        if let Some(rest) = self.rest {
            check.dtype(DType::I16, &[("rest", rest)])?;
            check.same_sizes(&[param, ("rest", rest)])?;
            accesses.push(Access::update(rest));
        }
        push_skip(&check, self.skip, &mut accesses)?;
        let spec = AdamWSpec {
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            decays: self.decays.into(),
            runs: self.runs.into(),
            rest: self.rest.is_some(),
            skip: self.skip.is_some(),
        };
        Ok(check.launch(accesses, Kernel::AdamW(spec)))
    }

    fn check_runs(&self, check: &Check) -> Result<(), Error> {
        let numel = self.param.numel();
        let last = self.runs.last().map_or(0, |run| run.end);
        check.setting(last == numel, "runs", last as f64, "the last one must end where param does")?;
        let back = self.runs.windows(2).find(|pair| pair[1].end < pair[0].end);
        let end = back.map_or(0, |pair| pair[1].end);
        check.setting(back.is_none(), "runs", end as f64, "a run must not end before the one in front of it")?;
        let stray = self.runs.iter().find(|run| run.group >= self.decays.len());
        let group = stray.map_or(0, |run| run.group);
        check.setting(
            stray.is_none(),
            "runs",
            group as f64,
            "there is no such group: decays has one entry for each",
        )?;
        if self.runs.len() > 1 {
            let param = ("param", self.param);
            check.contiguous(&[param, ("m", self.m), ("v", self.v), ("grad", self.grad)])?;
            check.contiguous(&self.rest.map(|rest| ("rest", rest)).into_iter().collect::<Vec<_>>())?;
            let holds = self.param.row_count() == 1;
            check.shapes(holds, param, param, "with several runs it must be a vector")?;
        }
        Ok(())
    }
}

fn check_hyper(check: &Check, scalars: &View, groups: usize) -> Result<(), Error> {
    let (scalars, holds) = (("scalars", scalars), scalars.numel() == groups * Hyper::LEN);
    check.shapes(holds, scalars, scalars, "it must have Hyper::LEN elements for each group")?;
    check.contiguous(&[scalars])
}

fn check_betas(check: &Check, beta1: f64, beta2: f64) -> Result<(), Error> {
    for (name, beta) in [("beta1", beta1), ("beta2", beta2)] {
        check.setting((0.0..1.0).contains(&beta), name, beta, "it must be at least 0 and under 1")?;
    }
    Ok(())
}

fn push_skip(check: &Check, skip: Option<&View>, accesses: &mut Vec<Access>) -> Result<(), Error> {
    let Some(skip) = skip else { return Ok(()) };
    check.dtype(DType::I32, &[("skip", skip)])?;
    check.single(&[("skip", skip)])?;
    accesses.push(Access::read(skip));
    Ok(())
}

/// Settings of [`Kernel::AdamW`].
#[derive(Clone, PartialEq, Debug)]
pub struct AdamWSpec {
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) eps: f64,
    pub(crate) decays: Arc<[f64]>,
    pub(crate) runs: Arc<[AdamRun]>,
    pub(crate) rest: bool,
    pub(crate) skip: bool,
}

/// Bytes that a step of one element moves.
const STEP_BYTES: usize = 28;

impl AdamWSpec {
    fn cut(&self, accesses: &[Access]) -> Cut {
        match self.runs.len() {
            0 | 1 => elements(accesses, STEP_BYTES),
            _ => Cut::cols(accesses[0].view.numel(), STEP_BYTES, PIECE_BYTES),
        }
    }
}

impl Work for AdamWSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let tensors: &[usize] = if self.rest { &[0, 1, 2, 3, 5] } else { &[0, 1, 2, 3] };
        let cut = self.cut(accesses);
        let mut tiles = cut.accesses(accesses, tensors, tile);
        if self.runs.len() > 1 {
            // Gradients from the first one on, so that a piece can tell which elements are its own.
            let grad = accesses[3].view.columns(0..cut.range(tile).end);
            tiles[3].view = grad.expect("BUG: a piece lies inside its view");
        }
        tiles
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        15 * accesses[0].view.numel() as u64
    }
}

/// Counts a step on the device and writes its bias corrections, unless the step is skipped.
///
/// Computed in f64 from the settings, so that they agree with corrections computed on a host to the last bit.
#[derive(Clone, Copy, Debug)]
pub struct AdvanceAdam<'a> {
    /// i32, one element, updated: steps taken.
    pub step: &'a View,
    /// f32 `[Hyper::LEN]`, contiguous, updated: only the corrections change.
    pub scalars: &'a View,
    /// i32, one element: anything but 0 and nothing changes.
    pub skip: Option<&'a View>,
    /// In 0..1.
    pub beta1: f64,
    /// In 0..1.
    pub beta2: f64,
}

impl AdvanceAdam<'_> {
    /// Accesses: step, scalars, skip.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("advance_adam", site);
        check.dtype(DType::I32, &[("step", self.step)])?;
        check.single(&[("step", self.step)])?;
        check.dtype(DType::F32, &[("scalars", self.scalars)])?;
        check_hyper(&check, self.scalars, 1)?;
        check_betas(&check, self.beta1, self.beta2)?;
        let mut accesses = vec![Access::update(self.step), Access::update(self.scalars)];
        push_skip(&check, self.skip, &mut accesses)?;
        let spec = AdvanceAdamSpec { beta1: self.beta1, beta2: self.beta2, skip: self.skip.is_some() };
        Ok(check.launch(accesses, Kernel::AdvanceAdam(spec)))
    }
}

/// Settings of [`Kernel::AdvanceAdam`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdvanceAdamSpec {
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) skip: bool,
}

impl Work for AdvanceAdamSpec {
    fn flops(&self, _accesses: &[Access]) -> u64 {
        4
    }
}
