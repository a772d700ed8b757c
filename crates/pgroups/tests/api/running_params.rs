//! Parameters that have memory: where they lie, what they hold first, and that they are objects.

use device::{DType, Machine, MemoryKind, bf16};
use pgroups::{
    Axis, GlobalRank, Init, Param, ParamClass, ParamSet, ParamSpec, ParamTypes, PgError, Placement, PlanError, Rank,
    Seed, local,
};

use crate::planning_support::layout;
use crate::running_support::*;

fn spec(name: &str, placement: Placement, init: Init) -> ParamSpec {
    ParamSpec { name: name.into(), class: ParamClass::Dense, placement, init }
}

/// Cut in three ways, uneven, padded, whole, constant; one for the last pipeline stage only.
fn specs(stages: u32) -> Vec<ParamSpec> {
    let normal = Init::Normal { std: 0.02 };
    vec![
        spec("wte", Placement::whole([37, 6]).cut(0, Axis::TP, 1).cut(0, Axis::GTP, 4), normal),
        spec("fc1", Placement::whole([16, 10]).cut(1, Axis::TP, 0), Init::Uniform { low: -1.0, high: 1.0 }),
        spec("norm", Placement::whole([65]), Init::Constant(1.0)),
        spec("head", Placement::whole([4, 8]).cut(0, Axis::TP, 0).pin(Axis::PP, [stages - 1]), normal),
    ]
}

/// Every parameter of the model, whole, as bits, put together from all ranks' shards; and whether replicas agree.
fn whole_model(machine: &Machine, world: u32, text: &str, stages: u32, types: ParamTypes) -> Vec<Vec<u32>> {
    let layout = layout(world, text);
    let specs = specs(stages);
    let shards = local(machine, world, |rank| {
        let set = ParamSet::allocate(&rank, &layout, &specs, types)?;
        let stream = rank.device.stream("init")?;
        set.fill(&stream, Seed(11))?;
        let flat: Vec<u32> = match types.value {
            DType::Bf16 => get::<bf16>(&stream, set.values())?.iter().map(|v| u32::from(v.to_bits())).collect(),
            _ => get::<f32>(&stream, set.values())?.iter().map(|v| v.to_bits()).collect(),
        };
        let placed: Vec<_> = set.placed().iter().map(|p| (p.spec.name.clone(), p.range.clone())).collect();
        Ok::<_, PgError>(placed.into_iter().map(|(name, range)| (name, flat[range].to_vec())).collect::<Vec<_>>())
    });
    let shards = shards.unwrap();
    let one = |spec: &ParamSpec| {
        let map = spec.shard_map(&layout).unwrap();
        let mut whole: Vec<Option<u32>> = vec![None; map.global_shape().iter().product()];
        for (rank, held) in (0..).zip(&shards) {
            let Some(shard) = map.shard(GlobalRank(rank)) else { continue };
            let (_, values) = held.iter().find(|(name, _)| *name == spec.name).expect("the rank holds it");
            shard.each_run(&map, |global, local| {
                for (at, &value) in (global.start as usize..).zip(&values[local]) {
                    assert!(whole[at].is_none_or(|known| known == value), "replicas of {} differ", spec.name);
                    whole[at] = Some(value);
                }
            });
        }
        whole.into_iter().map(|value| value.expect("somebody holds it")).collect()
    };
    specs.iter().map(one).collect()
}

#[test]
fn initial_values_are_the_same_bits_in_every_layout() {
    for value in [DType::F32, DType::Bf16] {
        let types = ParamTypes { value, ..ParamTypes::default() };
        let want = whole_model(&cpu(2), 1, "dp=1", 1, types);
        assert!(want[0].iter().collect::<std::collections::HashSet<_>>().len() > 50, "values differ among each other");
        for (world, text, stages) in
            [(2, "tp=2", 1), (3, "gtp=3", 1), (4, "tp=2,gtp=2", 1), (4, "dp=2,pp=2", 2), (8, "tp=2,gtp=2,pp=2", 2)]
        {
            for machine in [cpu(2), Machine::sim(1)] {
                let got = whole_model(&machine, world, text, stages, types);
                assert_eq!(got, want, "{text} {value} on {}", machine.driver());
            }
        }
    }
}

#[test]
fn a_set_lies_in_declared_order_from_multiples_of_the_alignment_on() {
    let machine = Machine::dry();
    let layout = layout(4, "tp=2,pp=2");
    let of = |rank| {
        let rank = Rank::alone(&machine, GlobalRank(rank), 4).unwrap();
        ParamSet::allocate(&rank, &layout, &specs(2), ParamTypes { value: DType::Bf16, grad: DType::F32 }).unwrap()
    };
    let (first, last) = (of(0), of(2));
    let names = |set: &ParamSet| set.params().iter().map(|p| p.name().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&first), ["wte", "fc1", "norm"], "the head is on the last stage");
    assert_eq!(names(&last), ["wte", "fc1", "norm", "head"]);
    let ranges: Vec<_> = last.placed().iter().map(|p| (p.range.clone(), p.slot.clone())).collect();
    // tp leaves 19 of 37 rows, which the alignment of gtp pads to 20; 16 x 5; 65; 2 x 8.
    assert_eq!(ranges, [(0..120, 0..128), (128..208, 128..256), (256..321, 256..384), (384..400, 384..448)]);
    assert_eq!((last.values().numel(), last.grads().numel()), (448, 448));
    assert_eq!((last.values().dtype(), last.grads().dtype()), (DType::Bf16, DType::F32));
    for (param, placed) in last.params().iter().zip(last.placed()) {
        assert_eq!(param.shape().dims(), placed.map.local_shape());
        assert_eq!(param.address().allocation, last.values().allocation_id());
        assert_eq!(param.address().region.start, placed.range.start * 2);
        assert_eq!(param.main_grad().region().start, placed.range.start * 4);
        assert_eq!((param.numel(), param.dtype()), (placed.range.len(), DType::Bf16));
    }
    assert!(last.get("head").is_some_and(|p| *p == last.params()[3]) && first.get("head").is_none());
}

#[test]
fn padding_gaps_and_gradients_begin_at_zero() {
    let poisoned = device::Options { fresh: device::Fresh::Poisoned, ..waiting(30) };
    for value in [DType::F32, DType::Bf16] {
        let machine = Machine::cpu_with(2, poisoned.clone()).unwrap();
        local(&machine, 4, |rank| {
            let types = ParamTypes { value, ..ParamTypes::default() };
            let set = ParamSet::allocate(&rank, &layout(4, "tp=2,gtp=2"), &specs(1), types)?;
            let stream = rank.device.stream("init")?;
            set.fill(&stream, Seed(3))?;
            let values: Vec<f32> = match value {
                DType::Bf16 => get::<bf16>(&stream, set.values())?.into_iter().map(Real::wide).collect(),
                _ => get::<f32>(&stream, set.values())?,
            };
            assert!(values.iter().all(|v| v.is_finite()));
            for placed in set.placed() {
                let gap = &values[placed.range.end..placed.slot.end];
                assert!(gap.iter().all(|v| *v == 0.0), "{}", placed.spec.name);
            }
            // Of 37 rows, tp place 1 has 18 in 24 padded ones, of which gtp place 1 holds the last 12.
            let wte = &values[set.placed()[0].range.clone()];
            if rank.global.0 == 3 {
                assert!(wte[6 * 6..].iter().all(|v| *v == 0.0) && wte[..6 * 6].iter().all(|v| *v != 0.0));
            }
            assert!(get::<f32>(&stream, set.grads())?.iter().all(|g| *g == 0.0));
            Ok::<_, PgError>(())
        })
        .unwrap();
    }
}

#[test]
fn sets_that_cannot_be_are_refused_by_name() {
    let machine = Machine::dry();
    let rank = Rank::alone(&machine, GlobalRank(0), 2).unwrap();
    let allocate = |specs: &[ParamSpec], types| ParamSet::allocate(&rank, &layout(2, "tp=2"), specs, types).map(|_| ());
    let of = |name| spec(name, Placement::whole([4]), Init::Constant(0.0));
    let twice = allocate(&[of("a"), of("b"), of("a")], ParamTypes::default()).unwrap_err();
    assert!(matches!(&twice, PgError::ParamTwice { param, first: 0, second: 2 } if param == "a"), "{twice}");
    let types = ParamTypes { grad: DType::I32, ..ParamTypes::default() };
    let ids = allocate(&[of("a")], types).unwrap_err().to_string();
    assert_eq!(ids, "gradients of type i32: f32 or bf16");
    let uneven = spec("a", Placement::whole([5]).cut(0, Axis::TP, 0), Init::Constant(0.0));
    let uneven = allocate(&[uneven], ParamTypes::default()).unwrap_err();
    assert!(matches!(uneven, PgError::Plan(PlanError::Uneven { .. })), "{uneven}");
    assert!(allocate(&[], ParamTypes::default()).is_ok());
}

#[test]
fn a_parameter_is_an_object_and_not_a_name() {
    let machine = Machine::dry();
    let device = machine.device(0).unwrap();
    let view = |dtype| device.alloc("w", &[2, 3], dtype, MemoryKind::Param).unwrap();
    let (value, grad) = (view(DType::Bf16), view(DType::F32));
    let one = Param::new("w", &value, &grad).unwrap();
    let other = Param::new("w", &value, &grad).unwrap();
    assert!(one == one.clone() && one != other);
    assert!(one.id() == one.clone().id() && one.id() != other.id());
    let weak = one.downgrade();
    assert!(weak.upgrade().is_some_and(|again| again == one));
    drop(one);
    assert!(weak.upgrade().is_none());
}

#[test]
fn rebinding_is_explicit_counted_and_keeps_sizes() {
    let machine = Machine::dry();
    let device = machine.device(0).unwrap();
    let view = |shape: &[usize], dtype| device.alloc("w", shape, dtype, MemoryKind::Param).unwrap();
    let (value, grad) = (view(&[2, 3], DType::F32), view(&[2, 3], DType::F32));
    let param = Param::new("wte", &value, &grad).unwrap();
    let before = param.address();
    assert_eq!((before.generation, before.allocation), (0, value.allocation_id()));
    let moved = view(&[2, 3], DType::F32);
    assert_eq!(param.rebind(&moved, &grad).unwrap(), 1);
    assert_eq!((param.address().generation, param.address().allocation), (1, moved.allocation_id()));
    assert_ne!(param.address(), before);
    // Back at the old address it is still not what it was: what was written in between is lost.
    assert_eq!(param.rebind(&value, &grad).unwrap(), 2);
    for (value, grad, what) in [
        (view(&[3, 2], DType::F32), grad.clone(), "value"),
        (view(&[2, 3], DType::Bf16), grad.clone(), "value"),
        (value.clone(), view(&[6], DType::F32), "gradient"),
        (machine.device(1).unwrap().alloc("w", &[2, 3], DType::F32, MemoryKind::Param).unwrap(), grad, "value"),
    ] {
        let error = param.rebind(&value, &grad).unwrap_err();
        assert!(matches!(&error, PgError::Rebind { what: told, .. } if *told == what), "{error}");
        assert!(error.to_string().contains("'wte'"), "{error}");
    }
    assert_eq!(param.address().generation, 2);
    let error = Param::new("wte", &value, &view(&[2], DType::F32)).unwrap_err();
    assert!(matches!(error, PgError::GradShape { .. }), "{error}");
    for dtype in [DType::I32, DType::I16] {
        let error = Param::new("ids", &view(&[2], dtype), &view(&[2], DType::F32)).unwrap_err();
        assert!(matches!(error, PgError::ParamType { dtype: told, .. } if told == dtype), "{error}");
    }
}
