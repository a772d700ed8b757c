//! Ranks that hold the same elements compare them; ranks that hold others do not.

use device::{DType, Machine, Stream, bf16};
use pgroups::{
    Axis, GlobalRank, Group, Init, Key, ParamClass, ParamSet, ParamSpec, ParamTypes, PgError, Placement, ProcessGroups,
    Replicas, Seed, local,
};

use crate::planning_support::layout;
use crate::running_support::*;

/// Cut over both axes with padding, over one, over none.
fn specs() -> Vec<ParamSpec> {
    let spec = |name: &str, placement| ParamSpec {
        name: name.into(),
        class: ParamClass::Dense,
        placement,
        init: Init::Normal { std: 1.0 },
    };
    vec![
        spec("weight", Placement::whole([14, 3]).cut(0, Axis::TP, 0).cut(0, Axis::GTP, 2)),
        spec("bias", Placement::whole([8]).cut(0, Axis::TP, 0)),
        spec("norm", Placement::whole([5])),
    ]
}

/// tp fastest, then gtp, then dp: rank 5 is the second tensor rank of the first shard of the second replica.
const LAYOUT: &str = "tp=2,gtp=2,dp=2";

/// Everyone, in an order of its own: which of two ranks is told first follows from it.
const EVERYONE: &[u32] = &[0, 2, 1, 3, 6, 4, 5, 7];

fn overwrite(stream: &Stream, set: &ParamSet, at: usize) -> Result<(), PgError> {
    let element = set.values().flat(at..at + 1)?;
    match set.values().dtype() {
        DType::Bf16 => stream.upload(&element, vec![bf16::from_f32(77.0)])?,
        _ => stream.upload(&element, vec![77f32])?,
    }
    Ok(())
}

/// What every rank is told when one rank has another value at an element of a parameter, or nobody has.
fn told(machine: &Machine, value: DType, changed: Option<(u32, &str, usize)>) -> Vec<Result<(), PgError>> {
    let layout = layout(8, LAYOUT);
    let compared = local(machine, 8, |rank| {
        let needs = custom("everyone", &[EVERYONE]);
        let groups = ProcessGroups::build(&rank, &layout, &needs)?;
        let everyone: Group = groups.get(&Key::named("everyone").unwrap(), "a test")?.clone();
        let set = ParamSet::allocate(&rank, &layout, &specs(), ParamTypes { value, ..ParamTypes::default() })?;
        let stream = rank.device.stream("compute")?;
        set.fill(&stream, Seed(3))?;
        if let Some((who, name, element)) = changed
            && who == rank.global.0
        {
            let placed = set.placed().iter().find(|placed| placed.spec.name == name).expect("the rank holds it");
            overwrite(&stream, &set, placed.range.start + element)?;
        }
        let compared = Replicas::new(&layout, &specs())?.compare(&everyone, &stream, set.params());
        stream.synchronize()?;
        Ok::<_, PgError>(compared)
    });
    compared.unwrap()
}

#[test]
fn ranks_that_hold_the_same_elements_are_compared_and_no_others() {
    for value in [DType::F32, DType::Bf16] {
        for machine in [cpu(2), Machine::sim(1)] {
            let equal = told(&machine, value, None);
            assert!(equal.iter().all(Result::is_ok), "shards differ from each other, replicas do not: {equal:?}");
            for (changed, param, pair) in [
                // Of a shard the other replica has a copy, of a tensor rank's part the other shards too.
                ((5, "weight", 1), "weight", (5, 1)),
                ((0, "weight", 11), "weight", (0, 4)),
                ((2, "bias", 0), "bias", (0, 2)),
                ((3, "norm", 4), "norm", (0, 3)),
            ] {
                for result in told(&machine, value, Some(changed)) {
                    let Err(PgError::ReplicasDiffer { param: of, rank, other, differing, params }) = result else {
                        panic!("{changed:?}: {result:?}")
                    };
                    let ranks = [rank, other].map(|rank| rank.0);
                    assert_eq!((of.as_str(), differing, params), (param, 1, 3), "{changed:?}");
                    assert!(ranks == [pair.0, pair.1] || ranks == [pair.1, pair.0], "{changed:?}: {ranks:?}");
                }
            }
        }
    }
}

#[test]
fn padding_is_no_part_of_what_is_compared() {
    // The last shard of seven rows has three, and one of padding.
    let results = told(&cpu(2), DType::F32, Some((2, "weight", 10)));
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let results = told(&cpu(2), DType::F32, Some((2, "weight", 8)));
    assert!(results.iter().all(Result::is_err), "the row before it counts");
}

#[test]
fn all_parameters_of_a_rank_are_wanted() {
    let layout = layout(8, LAYOUT);
    let refused = local(&cpu(2), 8, |rank| {
        let groups = ProcessGroups::build(&rank, &layout, &custom("everyone", &[EVERYONE]))?;
        let everyone = groups.get(&Key::named("everyone").unwrap(), "a test")?;
        let set = ParamSet::allocate(&rank, &layout, &specs(), ParamTypes::default())?;
        let stream = rank.device.stream("compute")?;
        set.fill(&stream, Seed(3))?;
        let given = if rank.global.0 == 6 { &set.params()[..1] } else { set.params() };
        Replicas::new(&layout, &specs())?.compare(everyone, &stream, given)
    });
    let PgError::RankFailed { rank, source } = refused.unwrap_err() else { panic!("rank 6 fails first") };
    assert_eq!(rank, GlobalRank(6));
    assert_eq!(
        source.to_string(),
        "rank 6 holds a part of parameter 'bias' and was not given it: pass all parameters of the rank"
    );
}

#[test]
fn on_dry_there_is_nothing_to_compare() {
    assert!(told(&Machine::dry(), DType::F32, None).iter().all(Result::is_ok));
}
