//! Rests of masters, and moments, of what a rank owns.

use std::{ops::Range, sync::Arc};

use device::{
    Access, Args, DType, MemoryKind, Op, OpError, Reduce, Stream, View, bf16,
    ops::{AdamRun, AdamWRuns, Fill},
};
use pgroups::ParamClass;

use crate::{
    DdpError, Dispatch, Fragment, OptimizerConfig,
    core::{BucketViews, Core},
    why,
};

/// The optimizer's state for what a rank owns of a bucket, each `[numel]`.
#[derive(Clone, Copy, Debug)]
pub struct StateViews<'o> {
    /// f32 or bf16: the values that are stepped. f32 ones are the masters.
    pub values: &'o View,
    /// i16, where values are bf16: [`join_master`](device::ops::join_master) of both is the f32 master.
    pub rest: Option<&'o View>,
    /// f32: mean of the gradients.
    pub m: &'o View,
    /// f32: mean of their squares.
    pub v: &'o View,
}

/// The optimizer state of one model.
pub(super) struct Part {
    pub(super) core: Arc<Core>,
    /// Gradients change behind their reduction, so every bucket waits for the end of the step.
    pub(super) late: bool,
    /// By bucket group, then by bucket.
    groups: Vec<Vec<Owned>>,
}

/// What this rank owns of one bucket.
struct Owned {
    bucket: BucketViews,
    fragments: Vec<Fragment>,
    /// i16: what bf16 values lack of their f32 masters. f32 values are the masters themselves.
    rest: Option<View>,
    m: View,
    v: View,
    /// Where its first parameter begins.
    start: usize,
    /// Elements from there on, by optimizer group.
    runs: Vec<AdamRun>,
}

impl Part {
    pub(super) fn new(
        core: Arc<Core>,
        config: &OptimizerConfig,
        group_of: &impl Fn(&str) -> usize,
        late: bool,
        stream: &Stream,
    ) -> Result<Part, DdpError> {
        let mut of = Vec::new();
        for param in &core.params {
            let (group, groups) = (group_of(param.name()), config.groups.len());
            if group >= groups {
                return Err(DdpError::NoSuchGroup { param: param.name().to_owned(), group, groups });
            }
            of.push(group);
        }
        let device = stream.device();
        let mut groups = Vec::new();
        for group in &core.groups {
            let place = core.peers(group.class).reduce.place().0;
            let mut owned = Vec::new();
            for bucket in &group.buckets {
                let numel = bucket.own_values.numel();
                let alloc = |label, dtype| device.alloc(label, &[numel], dtype, MemoryKind::Optimizer);
                let is_narrow = bucket.own_values.dtype() == DType::Bf16;
                let fragments = core.plan.fragments(bucket.id, place);
                let start = fragments.first().map_or(0, |first| first.local.start);
                owned.push(Owned {
                    rest: is_narrow.then(|| alloc("rest", DType::I16)).transpose()?,
                    m: alloc("m", DType::F32)?,
                    v: alloc("v", DType::F32)?,
                    start,
                    runs: runs(&fragments, start, &of),
                    fragments,
                    bucket: bucket.clone(),
                });
            }
            groups.push(owned);
        }
        let part = Part { core, late, groups };
        for owned in part.owned() {
            for moment in [&owned.m, &owned.v] {
                stream.launch(Fill { y: moment, value: 0.0 }.op("ddp.moments")?)?;
            }
        }
        part.refresh(stream)?;
        Ok(part)
    }

    fn owned(&self) -> impl Iterator<Item = &Owned> {
        self.groups.iter().flatten()
    }

    pub(super) fn state(&self) -> impl Iterator<Item = StateViews<'_>> {
        self.owned().map(|owned| StateViews {
            values: &owned.bucket.own_values,
            rest: owned.rest.as_ref(),
            m: &owned.m,
            v: &owned.v,
        })
    }

    /// Without a rest, a value is its master: whatever has written the values, nothing of them is looked at here.
    pub(super) fn refresh(&self, stream: &Stream) -> Result<(), DdpError> {
        for rest in self.owned().filter_map(|owned| owned.rest.as_ref()) {
            stream.launch(Fill { y: rest, value: 0.0 }.op("ddp.rest")?)?;
        }
        Ok(())
    }

    /// Submits the update of a bucket group behind everything that reads or writes its values, and tells that it was
    /// written and its gradients read.
    pub(super) fn update(
        &self,
        group: usize,
        hyper: &View,
        skip: Option<&View>,
        config: &OptimizerConfig,
        stream: &Stream,
    ) -> Result<(), DdpError> {
        let this = &self.core.groups[group];
        this.gates.open_for_write(&this.written, stream)?;
        let decays: Vec<f64> = config.groups.iter().map(|group| group.weight_decay).collect();
        for owned in &self.groups[group] {
            let Some(last) = owned.runs.last() else { continue };
            let part = |view: &View| view.flat(owned.start..owned.start + last.end);
            let rest = owned.rest.as_ref().map(part).transpose()?;
            let update = AdamWRuns {
                param: &part(&owned.bucket.own_values)?,
                rest: rest.as_ref(),
                grad: &part(&owned.bucket.own_grads)?,
                m: &part(&owned.m)?,
                v: &part(&owned.v)?,
                scalars: hyper,
                skip,
                beta1: config.adam.beta1,
                beta2: config.adam.beta2,
                eps: config.adam.eps,
                decays: &decays,
                runs: &owned.runs,
            };
            stream.launch(update.op("ddp.update")?)?;
        }
        self.core.freed(this, stream)?;
        self.core.wrote(group, stream)
    }

    /// Where nothing overlaps, the step ends with all values gathered.
    pub(super) fn close(&self, stream: &Stream) -> Result<(), DdpError> {
        if self.core.config.dispatch == Dispatch::AtStep {
            for group in &self.core.groups {
                stream.wait(&group.gates.published, why::READ_AFTER_PUBLISH)?;
            }
        }
        Ok(())
    }

    /// The owned gradients that are counted in a norm, and those that another rank of the model counts; by class.
    pub(super) fn gradients(&self, class: ParamClass) -> Result<[Vec<View>; 2], DdpError> {
        let mut found = [Vec::new(), Vec::new()];
        for (group, owned) in self.core.groups.iter().zip(&self.groups).filter(|(group, _)| group.class == class) {
            debug_assert_eq!(group.buckets.len(), owned.len());
            for Owned { bucket, fragments, .. } in owned {
                let mut spans: Vec<(usize, Range<usize>)> = Vec::new();
                for fragment in fragments {
                    let (kind, range) = (usize::from(self.is_elsewhere(fragment)), &fragment.local);
                    match spans.last_mut() {
                        // The gap between them is zero.
                        Some((last, span)) if *last == kind => span.end = range.end,
                        _ => spans.push((kind, range.clone())),
                    }
                }
                for (kind, span) in spans {
                    found[kind].push(bucket.own_grads.flat(span)?);
                }
            }
        }
        Ok(found)
    }

    /// The owned gradients of each bucket, and the elements that no other rank of the model counts; padding is none.
    pub(super) fn counted(&self, class: ParamClass) -> Vec<(View, Vec<Range<usize>>)> {
        let groups = self.core.groups.iter().zip(&self.groups).filter(|(group, _)| group.class == class);
        let of_bucket = |owned: &Owned| {
            let counted = owned.fragments.iter().filter(|fragment| !self.is_elsewhere(fragment));
            (owned.bucket.own_grads.clone(), counted.map(|fragment| fragment.local.clone()).collect())
        };
        groups.flat_map(|(_, owned)| owned).map(of_bucket).collect()
    }

    /// Another rank of the model holds the same elements and counts them.
    fn is_elsewhere(&self, fragment: &Fragment) -> bool {
        let replica = self.core.replicas[fragment.param];
        replica.pipeline != 0 || replica.model != 0
    }

    /// See [`Optimizer::first_nonfinite`](crate::Optimizer::first_nonfinite).
    pub(super) fn first_nonfinite(&self, stream: &Stream) -> Result<Option<String>, DdpError> {
        let core = &self.core;
        let worst = stream.device().alloc("ddp.nonfinite", &[1], DType::I32, MemoryKind::Other)?;
        stream.wait(&core.finished, why::READ_GRADS_AFTER_REDUCE)?;
        stream.launch(Fill { y: &worst, value: 0.0 }.op("ddp.nonfinite")?)?;
        let params = core.params.len();
        for Owned { bucket, fragments, .. } in self.owned() {
            let places: Vec<(usize, Range<usize>)> = fragments.iter().map(|f| (f.param, f.local.clone())).collect();
            let accesses = vec![Access::read(&bucket.own_grads), Access::update(&worst)];
            // The first in declared order is the greatest here, so that one reduction finds it.
            let op = Op::host("find_nonfinite", "ddp.nonfinite", accesses, move |args| {
                let found = places.iter().filter(|(_, range)| has_nonfinite(args, range).unwrap_or(true));
                let first = found.map(|(param, _)| (params - param) as i32).max().unwrap_or(0);
                let worst = args.write::<i32>(1)?;
                worst[0] = worst[0].max(first);
                Ok(())
            });
            stream.launch(op)?;
        }
        for peers in std::iter::once(&core.dense).chain(&core.expert) {
            peers.norm.all_reduce(stream, &worst, Reduce::Max)?;
        }
        for group in &core.groups {
            core.freed(group, stream)?;
        }
        let worst = stream.download::<i32>(&worst)?.wait()?[0] as usize;
        Ok((worst > 0).then(|| core.params[params - worst].name().to_owned()))
    }
}

fn has_nonfinite(args: &Args<'_>, range: &Range<usize>) -> Result<bool, OpError> {
    Ok(match args.dtype(0)? {
        DType::Bf16 => args.read::<bf16>(0)?[range.clone()].iter().any(|x| !x.is_finite()),
        _ => args.read::<f32>(0)?[range.clone()].iter().any(|x| !x.is_finite()),
    })
}

/// Neighbours of one group become one run. The gap in front of a parameter, where everything is zero and stays so, belongs
/// to the run before.
fn runs(fragments: &[Fragment], start: usize, of: &[usize]) -> Vec<AdamRun> {
    let mut runs: Vec<AdamRun> = Vec::new();
    for fragment in fragments {
        let (begin, end, group) = (fragment.local.start - start, fragment.local.end - start, of[fragment.param]);
        match runs.last_mut() {
            Some(last) if last.group == group => last.end = end,
            last => {
                if let Some(last) = last {
                    last.end = begin;
                }
                runs.push(AdamRun { end, group });
            }
        }
    }
    runs
}
