//! Memory for the parameters of one rank, laid out as a bucket plan says.

use std::ops::Range;

use device::{Access, Args, DType, MemoryKind, Op, OpError, Stream, View, bf16, ops::Fill};
use pgroups::{GlobalRank, InitStream, Layout, Param, ParamSpec, Rank, Seed, ShardMap};

use crate::{BucketPlan, Copies, DdpError, PlanConfig, PlannedParam, Stored};

/// A parameter as a model declares it.
#[derive(Clone, PartialEq, Debug)]
pub struct DeclaredParam {
    /// Name, class, placement, initial values.
    pub spec: ParamSpec,
    /// Element type of its values: f32 or bf16.
    pub stored: DType,
    /// Whether it is trained.
    pub training: Training,
    /// Whether other pipeline stages hold a copy.
    pub copies: Copies,
}

/// Whether a parameter is trained.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Training {
    /// It has a place in a bucket.
    #[default]
    Trained,
    /// It lies apart, and nobody reduces or steps it.
    Frozen,
}

impl DeclaredParam {
    /// A trained parameter that no other stage holds.
    #[must_use]
    pub fn new(spec: ParamSpec, stored: DType) -> DeclaredParam {
        DeclaredParam { spec, stored, training: Training::Trained, copies: Copies::None }
    }

    /// The part of its name that names its layer: up to the first component with a digit (`h.3` of `h.3.mlp.up`), else
    /// the first component.
    #[must_use]
    pub fn unit(&self) -> &str {
        let name = &self.spec.name;
        let mut end = name.find('.').unwrap_or(name.len());
        let mut start = 0;
        for component in name.split('.') {
            if component.contains(|c: char| c.is_ascii_digit()) {
                end = start + component.len();
                break;
            }
            start += component.len() + 1;
        }
        &name[..end]
    }

    /// What ranks compare: name, global sizes, element type, whether it is trained.
    pub(crate) fn describe(&self) -> String {
        let training = if self.training == Training::Trained { "trained" } else { "frozen" };
        format!("{} {:?} {} {training}", self.spec.name, self.spec.placement.global, self.stored)
    }
}

/// The parameters of one rank in flat buffers.
pub struct ParamBuffers {
    rank: GlobalRank,
    declared: Vec<DeclaredParam>,
    plan: BucketPlan,
    buffers: Vec<Flat>,
    trained: Vec<Held>,
    frozen: Vec<Held>,
    /// Trained and frozen, in declared order.
    all: Vec<Param>,
}

/// One buffer of a plan.
#[derive(Clone)]
pub(crate) struct Flat {
    pub(crate) values: View,
    pub(crate) grads: View,
}

/// A parameter that this rank holds a part of.
pub(crate) struct Held {
    pub(crate) param: Param,
    pub(crate) spec: ParamSpec,
    pub(crate) map: ShardMap,
    values: View,
}

impl ParamBuffers {
    /// Allocates this rank's part of each of `declared`, laid out under `config`. What the rank holds nothing of
    /// (another pipeline stage's) is left out. Nothing is written: [`ParamBuffers::fill`] does that.
    ///
    /// # Errors
    /// Those of [`BucketPlan::new`] and of the placements; the device's.
    pub fn allocate(
        rank: &Rank,
        layout: &Layout,
        declared: &[DeclaredParam],
        config: PlanConfig,
    ) -> Result<ParamBuffers, DdpError> {
        let plan = BucketPlan::new(planned(rank.global, layout, declared)?, config)?;
        ParamBuffers::with_plan(rank, layout, declared, plan)
    }

    /// As [`ParamBuffers::allocate`], with a plan that is there already.
    ///
    /// # Errors
    /// [`DdpError::LayoutDiffers`] if the plan was made for other parameters;
    /// [`DdpError::NotStorable`] for element types that no device has; the device's.
    pub fn with_plan(
        rank: &Rank,
        layout: &Layout,
        declared: &[DeclaredParam],
        plan: BucketPlan,
    ) -> Result<ParamBuffers, DdpError> {
        BucketPlan::new(planned(rank.global, layout, declared)?, *plan.config())?.agrees_with(&plan)?;
        let device = &rank.device;
        let mut buffers = Vec::new();
        for buffer in plan.buffers() {
            let (key, size) = (buffer.key(), [buffer.numel()]);
            let stored = dtype_of(key.stored)?;
            let label = |what: &str| format!("{what}.{}.{stored}", key.class);
            let values = device.alloc(&label("values"), &size, stored, MemoryKind::Param)?;
            let grads = device.alloc(&label("grads"), &size, key.grad, MemoryKind::Grad)?;
            buffers.push(Flat { values, grads });
        }
        let mut this = ParamBuffers {
            rank: rank.global,
            declared: declared.to_vec(),
            buffers,
            trained: Vec::new(),
            frozen: Vec::new(),
            all: Vec::new(),
            plan,
        };
        for d in declared {
            let map = d.spec.shard_map(layout).map_err(pgroups::PgError::from)?;
            if map.shard(rank.global).is_none() {
                continue;
            }
            let (values, grads) = match d.training {
                Training::Trained => this.cut(this.trained.len())?,
                Training::Frozen => {
                    let size = [map.local_shape().iter().product()];
                    let alloc = |kind| device.alloc(&d.spec.name, &size, d.stored, kind);
                    (alloc(MemoryKind::Param)?, alloc(MemoryKind::Grad)?)
                }
            };
            let shape = map.local_shape();
            let param = Param::new(&d.spec.name, &values.reshape(shape)?, &grads.reshape(shape)?)?;
            this.all.push(param.clone());
            let held = Held { param, spec: d.spec.clone(), map, values };
            match d.training {
                Training::Trained => this.trained.push(held),
                Training::Frozen => this.frozen.push(held),
            }
        }
        Ok(this)
    }

    /// Value and gradient of the trained parameter `index`.
    fn cut(&self, index: usize) -> Result<(View, View), DdpError> {
        let range: Range<usize> = self.plan.slot(index).range.clone();
        let flat = &self.buffers[self.plan.home(index).buffer];
        Ok((flat.values.flat(range.clone())?, flat.grads.flat(range)?))
    }

    /// Submits the initial values under `seed`, and zeros for padding, gaps and all gradients. An element has the same
    /// bits in every layout.
    ///
    /// # Errors
    /// The device's.
    pub fn fill(&self, stream: &Stream, seed: Seed) -> Result<(), DdpError> {
        for flat in &self.buffers {
            for view in [&flat.values, &flat.grads] {
                stream.launch(Fill { y: view, value: 0.0 }.op("ddp.init")?)?;
            }
        }
        for held in self.trained.iter().chain(&self.frozen) {
            let (map, rank, init) = (held.map.clone(), self.rank, held.spec.init_stream(seed));
            let fill = move |args: &mut Args<'_>| match args.dtype(0)? {
                DType::Bf16 => fill_bf16(&init, &map, rank, args.write(0)?),
                _ => Ok(init.fill_shard(&map, rank, args.write(0)?)?),
            };
            let site = held.spec.name.clone();
            stream.launch(Op::host("init", site, vec![Access::write(&held.values)], fill))?;
        }
        Ok(())
    }

    /// All parameters this rank holds, in declared order.
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.all
    }

    /// The parameter of a name; none if this rank does not hold it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Param> {
        self.all.iter().find(|param| param.name() == name)
    }

    /// The plan. Its parameters are the trained ones that this rank holds.
    #[must_use]
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// What was declared, on all ranks.
    #[must_use]
    pub fn declared(&self) -> &[DeclaredParam] {
        &self.declared
    }

    pub(crate) fn trained(&self) -> &[Held] {
        &self.trained
    }

    pub(crate) fn flats(&self) -> &[Flat] {
        &self.buffers
    }

    pub(crate) fn rank(&self) -> GlobalRank {
        self.rank
    }
}

fn planned(rank: GlobalRank, layout: &Layout, declared: &[DeclaredParam]) -> Result<Vec<PlannedParam>, DdpError> {
    let mut planned = Vec::new();
    for d in declared.iter().filter(|d| d.training == Training::Trained) {
        let map = d.spec.shard_map(layout).map_err(pgroups::PgError::from)?;
        if map.shard(rank).is_some() {
            planned.push(PlannedParam {
                name: d.spec.name.clone(),
                numel: map.local_shape().iter().product(),
                stored: d.stored.into(),
                class: d.spec.class,
                copies: d.copies,
                unit: d.unit().to_owned(),
            });
        }
    }
    Ok(planned)
}

fn dtype_of(stored: Stored) -> Result<DType, DdpError> {
    match stored {
        Stored::F32 => Ok(DType::F32),
        Stored::Bf16 => Ok(DType::Bf16),
        Stored::OneByte => Err(DdpError::NotStorable { stored }),
    }
}

/// Rounded from the f32 values, so that both types start from the same model.
fn fill_bf16(init: &InitStream, map: &ShardMap, rank: GlobalRank, out: &mut [bf16]) -> Result<(), OpError> {
    let mut wide = vec![0.0; out.len()];
    init.fill_shard(map, rank, &mut wide)?;
    out.iter_mut().zip(wide).for_each(|(out, value)| *out = bf16::from_f32(value));
    Ok(())
}
