//! The parameters of one rank in one allocation per kind.

use std::{collections::HashMap, ops::Range};

use device::{Access, DType, MemoryKind, Op, OpError, Stream, View, bf16, ops::Fill};

use crate::{
    error::PgError,
    init::{InitStream, Seed},
    layout::Layout,
    local::Rank,
    param::{Param, check_type},
    placement::ParamSpec,
    rank::GlobalRank,
    shard_map::ShardMap,
};

/// Element types of a set's buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParamTypes {
    /// Of the values: f32 or bf16.
    pub value: DType,
    /// Of the gradients: f32 or bf16.
    pub grad: DType,
}

impl Default for ParamTypes {
    /// Both f32.
    fn default() -> ParamTypes {
        ParamTypes { value: DType::F32, grad: DType::F32 }
    }
}

/// Parameters that lie one behind the other in one flat buffer of values and one of gradients, each from a multiple
/// of [`ParamSet::ALIGN`] elements on, so that whole buffers can be reduced, stepped and gathered.
pub struct ParamSet {
    rank: GlobalRank,
    params: Vec<Param>,
    values: View,
    grads: View,
    placed: Vec<Placed>,
}

/// Where one parameter of a set lies.
#[derive(Clone, Debug)]
pub struct Placed {
    /// What was asked for.
    pub spec: ParamSpec,
    /// How its global tensor lies over the ranks.
    pub map: ShardMap,
    /// Its elements in the flat buffers.
    pub range: Range<usize>,
    /// Up to the next one's start: the gap behind it is always zero.
    pub slot: Range<usize>,
}

impl ParamSet {
    /// Elements that starts are multiples of: 256 bytes of f32, 128 of bf16.
    pub const ALIGN: usize = 64;

    /// Allocates this rank's part of each of `specs`, in their order. What the rank holds nothing of (another pipeline
    /// stage's) is left out. Nothing is written: [`ParamSet::fill`] does that.
    ///
    /// # Errors
    /// [`PgError::ParamTwice`], [`PgError::ParamType`]; those of the placements; the device's.
    pub fn allocate(rank: &Rank, layout: &Layout, specs: &[ParamSpec], types: ParamTypes) -> Result<ParamSet, PgError> {
        check_type("values", types.value)?;
        check_type("gradients", types.grad)?;
        check_names(specs)?;
        let mut placed = Vec::new();
        let mut start = 0;
        for spec in specs {
            let map = spec.shard_map(layout)?;
            if map.shard(rank.global).is_none() {
                continue;
            }
            let numel: usize = map.local_shape().iter().product();
            let end = (start + numel).next_multiple_of(Self::ALIGN);
            placed.push(Placed { spec: spec.clone(), map, range: start..start + numel, slot: start..end });
            start = end;
        }
        let device = &rank.device;
        let values = device.alloc("params", &[start], types.value, MemoryKind::Param)?;
        let grads = device.alloc("grads", &[start], types.grad, MemoryKind::Grad)?;
        let param = |p: &Placed| -> Result<Param, PgError> {
            let shape = p.map.local_shape();
            let part = |flat: &View| flat.flat(p.range.clone())?.reshape(shape);
            Param::new(&p.spec.name, &part(&values)?, &part(&grads)?)
        };
        let params = placed.iter().map(param).collect::<Result<_, _>>()?;
        Ok(ParamSet { rank: rank.global, params, values, grads, placed })
    }

    /// Submits the initial values under `seed`, zeros in padding and gaps, and zeros for all gradients. An element has
    /// the same bits in every layout.
    ///
    /// # Errors
    /// The device's.
    pub fn fill(&self, stream: &Stream, seed: Seed) -> Result<(), PgError> {
        for placed in &self.placed {
            let slot = self.values.flat(placed.slot.clone())?;
            let (map, numel, rank) = (placed.map.clone(), placed.range.len(), self.rank);
            let init = placed.spec.init_stream(seed);
            let fill = move |args: &mut device::Args<'_>| match args.dtype(0)? {
                DType::Bf16 => fill_bf16(&init, &map, rank, numel, args.write(0)?),
                _ => fill_f32(&init, &map, rank, numel, args.write(0)?),
            };
            stream.launch(Op::host("init", placed.spec.name.clone(), vec![Access::write(&slot)], fill))?;
        }
        Ok(stream.launch(Fill { y: &self.grads, value: 0.0 }.op("grads")?)?)
    }

    /// Parameters this rank holds, in declared order.
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Where each of them lies, in the same order.
    #[must_use]
    pub fn placed(&self) -> &[Placed] {
        &self.placed
    }

    /// The parameter of a name; none if this rank does not hold it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|param| param.name() == name)
    }

    /// All values, `[numel]`: for whoever writes them. Readers go through a [`Turn`](crate::Turn).
    #[must_use]
    pub fn values(&self) -> &View {
        &self.values
    }

    /// All gradients, `[numel]`.
    #[must_use]
    pub fn grads(&self) -> &View {
        &self.grads
    }
}

fn check_names(specs: &[ParamSpec]) -> Result<(), PgError> {
    let mut seen = HashMap::new();
    for (second, spec) in specs.iter().enumerate() {
        if let Some(first) = seen.insert(&spec.name, second) {
            return Err(PgError::ParamTwice { param: spec.name.clone(), first, second });
        }
    }
    Ok(())
}

fn fill_f32(init: &InitStream, map: &ShardMap, rank: GlobalRank, numel: usize, out: &mut [f32]) -> Result<(), OpError> {
    let (own, gap) = out.split_at_mut(numel);
    gap.fill(0.0);
    Ok(init.fill_shard(map, rank, own)?)
}

/// Rounded from the f32 values, so that both types start from the same model.
fn fill_bf16(
    init: &InitStream,
    map: &ShardMap,
    rank: GlobalRank,
    numel: usize,
    out: &mut [bf16],
) -> Result<(), OpError> {
    let mut wide = vec![0.0; out.len()];
    fill_f32(init, map, rank, numel, &mut wide)?;
    out.iter_mut().zip(wide).for_each(|(out, value)| *out = bf16::from_f32(value));
    Ok(())
}
