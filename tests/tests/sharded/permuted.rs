//! Groups that are neither contiguous nor in order, in a collection and on a layout made by hand.

use device::View;
use pgroups::{GlobalRank, Key, LayoutConfig, ProcessGroups, ShardMap, WorldPart, local};

use super::{
    program::{Optimizing, Program},
    support::{Caught, cards, cpu, sim},
    worker::Worker,
};

/// Of a rank: the flat gradient buffer, NaN where another rank has it, and the losses of its microbatches.
type Reduced = Option<(Vec<f32>, Vec<f32>)>;

/// Reduced gradients of the second step; both steps are of the same samples at the same values.
fn gradients(program: &Program, machine: &device::Machine) -> (Vec<(String, Vec<f32>)>, f64) {
    let ranks = local(machine, program.world(), |rank| -> Result<Reduced, Caught> {
        if !program.covers(rank.global) {
            ProcessGroups::build(&rank, &program.plan(), &program.needs())?;
            return Ok(None);
        }
        let mut worker = Worker::new(&rank, program, "m")?;
        worker.passes(0)?;
        worker.losses()?;
        worker.passes(0)?;
        let losses = worker.losses()?;
        worker.ddp.read_grads(&worker.compute)?;
        let plan = worker.ddp.plan().clone();
        let place = worker.ddp.replicas(pgroups::ParamClass::Dense).place().0;
        let mut flat = vec![f32::NAN; plan.buffers()[0].numel()];
        let grads: Vec<View> = worker.ddp.buckets().map(|bucket| bucket.own_grads).collect();
        for (id, view) in plan.groups().iter().flatten().zip(&grads) {
            let values = worker.compute.download::<f32>(view)?.wait()?;
            let start = plan.buffers()[id.buffer].shard(id.bucket, place).start;
            flat[start..start + values.len()].copy_from_slice(&values);
        }
        // By parameter, as it lies on the rank.
        let own = (0..plan.params().len()).flat_map(|i| flat[plan.slot(i).range.clone()].to_vec());
        Ok(Some((own.collect(), losses)))
    })
    .unwrap();
    let losses: Vec<f32> = ranks.iter().flatten().flat_map(|(_, losses)| losses.clone()).collect();
    let loss = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / losses.len() as f64;
    (together(program, &ranks), loss)
}

/// Whole gradients: all who have an element agree to the bit, and somebody has it.
fn together(program: &Program, ranks: &[Reduced]) -> Vec<(String, Vec<f32>)> {
    let (layout, specs) = (program.plan(), program.gpt().unwrap().specs());
    let maps: Vec<ShardMap> = specs.iter().map(|spec| spec.shard_map(&layout).unwrap()).collect();
    let mut first = 0;
    let mut all = Vec::new();
    for (spec, map) in specs.iter().zip(&maps) {
        let numel = map.local_shape().iter().product::<usize>();
        let mut whole = vec![f32::NAN; spec.placement.global.iter().product()];
        for (rank, (flat, _)) in (0..).zip(ranks).filter_map(|(rank, held)| Some((rank, held.as_ref()?))) {
            map.shard(GlobalRank(rank)).expect("on the grid").each_run(map, |global, at| {
                let local = &flat[first + at.start..first + at.end];
                for (own, value) in whole[global.start as usize..global.end as usize].iter_mut().zip(local) {
                    assert!(own.is_nan() || value.is_nan() || own.to_bits() == value.to_bits(), "{}", spec.name);
                    *own = if value.is_nan() { *own } else { *value };
                }
            });
        }
        assert!(whole.iter().all(|value| !value.is_nan()), "{}: nobody has some elements", spec.name);
        all.push((spec.name.clone(), whole));
        first += numel;
    }
    all
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |max, v| max.max(v.abs()))
}

fn assert_close(got: &[(String, Vec<f32>)], want: &[(String, Vec<f32>)]) {
    let floor = 2e-7 * want.iter().map(|(_, grad)| largest(grad)).fold(0.0, f32::max);
    for ((name, a), (wanted, b)) in got.iter().zip(want) {
        assert_eq!((name, a.len()), (wanted, b.len()));
        let off = a.iter().zip(b).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(off <= (2e-6 * largest(b)).max(floor), "{name} differs by {off} of {}", largest(b));
    }
}

/// Ranks 1 to 8 of nine; replicas are the fastest axis, and every list that only sums is in an order of its own.
fn by_hand() -> Program {
    let lists = |lists: &[&[u32]]| lists.iter().map(|list| list.to_vec()).collect::<Vec<_>>();
    let part = WorldPart::From { offset: GlobalRank(1), ranks: None };
    let program = Program::on(2, 2, 2);
    let order = "dp-gtp-tp".to_owned();
    Program {
        layout: LayoutConfig { world_size: Some(9), part, order, ..program.layout.clone() },
        custom: vec![
            (Key::DP_CP, lists(&[&[2, 1], &[4, 3], &[6, 5], &[8, 7]])),
            (Key::DP_CP_GTP, lists(&[&[3, 1, 4, 2], &[7, 5, 8, 6]])),
            (Key::MP, lists(&[&[7, 1, 5, 3], &[2, 8, 4, 6]])),
        ],
        ..program
    }
}

#[test]
fn permuted_groups_of_a_part_of_the_world_give_the_gradients_of_one_rank() {
    let (want, loss) = gradients(&Program { microbatches: 1, ..Program::on(1, 1, 1) }, &sim(0));
    assert!(want.iter().all(|(_, grad)| largest(grad) > 0.0));
    for machine in [sim(1), sim(2), cpu()].into_iter().chain(cards()) {
        let (got, mean) = gradients(&by_hand(), &machine);
        assert!((mean - loss).abs() <= 2e-6 * loss, "{mean} and {loss}");
        assert_close(&got, &want);
    }
}

#[test]
fn shards_whose_group_has_them_in_another_order_than_the_layout_are_refused_by_name() {
    let program = Program::on(1, 2, 2);
    let program = Program { custom: vec![(Key::GTP, vec![vec![1, 0], vec![2, 3]])], ..program };
    let refused = local(&sim(1), 4, |rank| Worker::new(&rank, &program, "m").map(drop)).unwrap_err();
    let text = format!("{refused:?}");
    assert!(text.contains("GroupOrder"), "{text}");
}

#[test]
fn replicas_in_an_order_that_leaves_peers_with_other_shards_are_refused_by_name() {
    let program = by_hand();
    let lists = vec![vec![2, 1], vec![3, 4], vec![6, 5], vec![8, 7]];
    let custom = [vec![(Key::DP_CP, lists)], program.custom[1..].to_vec()].concat();
    let refused = |optimizing: Optimizing| {
        let program = Program { custom: custom.clone(), optimizing, ..program.clone() };
        local(&sim(1), program.world(), |rank| match program.covers(rank.global) {
            true => {
                // Kept until all that it has submitted is done.
                let worker = Worker::new(&rank, &program, "m")?;
                rank.device.synchronize()?;
                drop(worker);
                Ok(())
            }
            false => Ok::<_, Caught>(ProcessGroups::build(&rank, &program.plan(), &program.needs()).map(drop)?),
        })
    };
    let text = format!("{:?}", refused(Optimizing::Distributed).unwrap_err());
    assert!(text.contains("OtherShard") && text.contains("other_place"), "{text}");
    // Where every rank has all of them the order does not matter.
    refused(Optimizing::Everywhere).unwrap();
}
