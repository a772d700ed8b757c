//! Chains of sharded weights compute what whole ones do.

use device::Machine;
use pgroups::{Pass, Turn, Whole};

use crate::api::rig::{Caught, Chain, Rig, machines, on_all, options, train};

/// What every rank's gradient shards and outputs are if every weight is whole on one rank: gradients of all ranks'
/// samples averaged, cut as the chain cuts them.
fn whole(chain: &Chain, passes: usize) -> Vec<(Vec<f32>, Vec<f32>)> {
    let single = Chain { gtp: 1, alignment: 0, ..chain.clone() };
    let machine = Machine::cpu_with(1, options()).unwrap();
    let of = |peer: u32| -> (Vec<f32>, Vec<f32>) {
        // The samples of rank `peer`.
        let run = |rig: Rig| -> Result<_, Caught> {
            let value = |i: usize| ((i * 7 + peer as usize * 5) % 11) as f32 / 8.0 - 0.5;
            rig.compute.upload(&rig.x[0], (0..rig.x[0].numel()).map(value).collect::<Vec<_>>())?;
            let last = rig.dx.len() - 1;
            rig.compute.upload(&rig.dx[last], (0..rig.dx[last].numel()).map(|i| value(i + 3)).collect::<Vec<_>>())?;
            for _ in 0..passes {
                let mut weights = Whole::new(Turn::eager(Pass::Forward));
                train(&mut weights, &rig.params, &rig.compute, &rig.x, &rig.dx, &rig.all())?;
            }
            Ok((rig.grads()?, rig.output()?))
        };
        on_all(&machine, &single, run).unwrap().remove(0)
    };
    let peers: Vec<_> = (0..chain.gtp).map(of).collect();
    let grads: Vec<f32> =
        (0..peers[0].0.len()).map(|i| peers.iter().map(|p| p.0[i]).sum::<f32>() / chain.gtp as f32).collect();
    let (mut flat, mut shards) = (grads.as_slice(), vec![Vec::new(); chain.gtp as usize]);
    for dims in chain.dims.windows(2) {
        let (rows, cols) = (dims[1], dims[0]);
        let (weight, rest) = flat.split_at((rows * cols).next_multiple_of(64));
        flat = rest;
        let (each, _) = pgroups::padded_cut(rows, chain.gtp, chain.alignment).unwrap();
        for (place, shard) in shards.iter_mut().enumerate() {
            let mut own = vec![0.0; (each * cols).next_multiple_of(64)];
            let from = (place * each).min(rows) * cols;
            let to = ((place + 1) * each).min(rows) * cols;
            own[..to - from].copy_from_slice(&weight[from..to]);
            shard.extend(own);
        }
    }
    shards.into_iter().zip(peers).map(|(shard, (_, output))| (shard, output)).collect()
}

fn close(a: &[f32], b: &[f32]) -> bool {
    let largest = b.iter().fold(0f32, |m, x| m.max(x.abs()));
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 2e-6 * largest)
}

#[test]
fn chains_of_any_size_and_look_ahead_give_the_gradients_of_whole_weights() {
    let machines = machines();
    // 10 rows over 4 with alignment 2: padding, and a rank without a row in some weights.
    for (gtp, dims, alignment) in [(2, vec![8, 6, 10, 4], 1), (3, vec![4, 7, 5], 2), (4, vec![6, 10, 3, 10], 2)] {
        for look_ahead in [0, 1, 3] {
            let chain = Chain { alignment, look_ahead, ..Chain::new(gtp, &dims) };
            let want = whole(&chain, 3);
            for machine in &machines {
                let got = on_all(machine, &chain, |mut rig| {
                    let all = rig.all();
                    (0..3).try_for_each(|_| rig.pass(&all))?;
                    Ok((rig.grads()?, rig.output()?, rig.gtp.counters()))
                });
                for ((got, output, counters), (want, want_output)) in got.unwrap().iter().zip(&want) {
                    assert!(close(got, want), "{chain:?} on {}: {got:?} {want:?}", machine.driver());
                    assert!(close(output, want_output));
                    assert_eq!((counters.plans, counters.deviations, counters.repaired), (1, 0, 0));
                }
            }
        }
    }
}
