//! Layouts of one to eight ranks, which share the card where there is one: replays against eager steps of the same
//! machine, and losses against those of the simulator.

use device::Machine;
use graphcap::{GateMode, Scope};
use pgroups::{Sequence, local};

use super::{
    program::{Arch, LAYERS, Program, VOCAB},
    seeds::{nothing, train},
    support::{Caught, captures, cards, cpu, sim},
    worker::Worker,
};

/// Tensor, shard and replica ranks.
const LAYOUTS: [[u32; 3]; 9] =
    [[1, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1], [1, 2, 2], [4, 1, 1], [1, 1, 8], [1, 4, 2], [2, 2, 2]];

/// Both architectures, the second with all split over tensor ranks that can be; it has two heads of keys.
fn programs([tp, gtp, dp]: [u32; 3]) -> Vec<Program> {
    // A sequence at least for each microbatch of each rank.
    let base = Program { batch: (2 * gtp * dp).max(8) as usize, ..Program::on(tp, gtp, dp) };
    let sequence = if tp > 1 { Sequence::Split } else { Sequence::Whole };
    let llama = (tp <= 2).then(|| Program { arch: Arch::Llama, sequence, ..base.clone() });
    [base].into_iter().chain(llama).collect()
}

fn trained(program: &Program, machine: &Machine) -> Vec<Vec<u32>> {
    train(program, machine, nothing).unwrap_or_else(|error| panic!("{program:?}: {}", error.chain()))
}

#[test]
fn graphs_give_the_bits_of_eager_steps_on_the_same_machine_in_layouts_of_one_to_eight_ranks() {
    // Hosts have tests of all ways to capture, in fewer layouts.
    let on_hosts = (sim(1), vec![(Scope::Microbatch, GateMode::InGraph)]);
    for (machine, captures) in [on_hosts].into_iter().chain(cards().into_iter().map(|card| (card, captures()))) {
        let programs = LAYOUTS.into_iter().flat_map(|sizes| programs(sizes).into_iter().map(move |own| (sizes, own)));
        for (at, (sizes, program)) in programs.enumerate() {
            let want = trained(&program, &machine);
            assert!(want.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()), "{program:?}");
            // All of them where all axes are, and by turns on other layouts.
            let picked = |way: usize| sizes == [2, 2, 2] || captures.len() == 1 || way % 3 == at % 3;
            for (_, &(scope, gates)) in captures.iter().enumerate().filter(|(way, _)| picked(*way)) {
                let captured = program.clone().captured(scope, gates);
                assert!(trained(&captured, &machine) == want, "{captured:?} on {}", machine.driver());
            }
        }
    }
}

/// The loss before any update, on every rank.
fn first_losses(program: &Program, machine: &Machine) -> Vec<f32> {
    let ran = local(machine, program.world(), |rank| -> Result<_, Caught> {
        let mut worker = Worker::new(&rank, program, "m")?;
        worker.evaluate()?;
        let losses = worker.losses()?;
        worker.finish()?;
        Ok(losses[0])
    });
    ran.unwrap_or_else(|error| panic!("{program:?}: {}", error.chain()))
}

/// Between a token and its loss lie at most nine operations a layer, an embedding, a norm, a product and the loss itself.
/// Each adds at most `VOCAB` values, the most of any sum here, in an order of the machine's: at most that many roundings
/// of half a unit on each side. Values are of the size of one behind every norm, and so is what a loss is made of.
#[test]
fn first_losses_are_those_of_the_simulator_up_to_the_roundings_of_a_forward_pass() {
    let bound = (9 * LAYERS + 4) as f32 * (VOCAB + 1) as f32 * f32::EPSILON;
    for machine in [cpu()].into_iter().chain(cards()) {
        for program in LAYOUTS.into_iter().flat_map(programs) {
            let (got, want) = (first_losses(&program, &machine), first_losses(&program, &sim(0)));
            for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
                let off = (got - want).abs();
                let here = machine.driver();
                assert!(
                    off <= bound * want.abs().max(1.0),
                    "{program:?}, rank {rank}, {here}: {got}, not {want}: {off:e}"
                );
            }
        }
    }
}
