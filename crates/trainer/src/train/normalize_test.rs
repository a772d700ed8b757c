//! Gradients of the whole model under both normalisations, however a batch is cut and however its tokens are masked.

use data::Microbatch;
use device::{Machine, Options, cuda::CudaOptions, ops::IGNORE};

use super::rank::RankRun;
use crate::{Config, TrainError, cards::cards};

const SEQ_LEN: usize = 9;

/// Sequences with their targets, no two alike.
fn sequences(count: usize) -> Vec<(Vec<i32>, Vec<i32>)> {
    let token = |sequence: usize, at: usize| ((sequence * 31 + at * at * 7 + at) % 251) as i32;
    let inputs = |s| (0..SEQ_LEN).map(|at| token(s, at)).collect();
    let targets = |s| (0..SEQ_LEN).map(|at| token(s, at + 1)).collect();
    (0..count).map(|s| (inputs(s), targets(s))).collect()
}

fn machines() -> Vec<Machine> {
    [Machine::sim(4)].into_iter().chain(cards(CudaOptions::default(), Options::default())).collect()
}

/// Loss and raw gradients, parameter by parameter, on every rank, of one step over `sequences` on `dp` ranks in
/// microbatches of `micro`.
fn step(
    machine: &Machine,
    kind: &str,
    [dp, micro]: [usize; 2],
    sequences: &[(Vec<i32>, Vec<i32>)],
) -> Vec<(f32, Vec<Vec<f32>>)> {
    let text = format!(
        "[model]\nlayers = 2\ndim = 24\nheads = 3\nseq_len = {SEQ_LEN}\n[layout]\ndp = {dp}\n\
         [train]\nsteps = 1\nglobal_batch = {}\nmicro_batch = {micro}\nloss_normalization = \"{kind}\"\n\
         [data]\npath = \"none\"\n",
        sequences.len()
    );
    let config = Config::parse::<&str>(&text, "test".as_ref(), "".as_ref(), &[]).expect("a valid configuration");
    let ranks = pgroups::local(machine, dp as u32, |rank| -> Result<_, TrainError> {
        let mut run = RankRun::build(&rank, &config, None)?;
        let own = &sequences[rank.global.0 as usize * sequences.len() / dp..][..sequences.len() / dp];
        let joined = |part: &[(Vec<i32>, Vec<i32>)]| -> (Vec<i32>, Vec<i32>) {
            (part.iter().flat_map(|s| s.0.clone()).collect(), part.iter().flat_map(|s| s.1.clone()).collect())
        };
        let parts: Vec<_> = own.chunks_exact(micro).map(joined).collect();
        let parts: Vec<_> = parts.iter().map(|(inputs, targets)| Microbatch { inputs, targets }).collect();
        run.step(&parts, 1e-3)?;
        run.parallel.read_grads(&run.stream)?;
        let loss = run.stream.download::<f32>(&run.loss)?.wait()?[0];
        let grad = |param: &pgroups::Param| Ok(run.stream.download::<f32>(&param.main_grad())?.wait()?);
        let grads: Result<Vec<Vec<f32>>, TrainError> = run.parallel.buffers.params().iter().map(grad).collect();
        run.meet()?;
        Ok((loss, grads?))
    });
    ranks.expect("the step")
}

/// Differences that the order of f32 sums explains: 2e-6 of a tensor's largest element, with a floor of 2e-7 of the
/// model's largest.
fn assert_same(got: &(f32, Vec<Vec<f32>>), want: &(f32, Vec<Vec<f32>>), what: &str) {
    assert!((got.0 - want.0).abs() <= 2e-6 * want.0.abs(), "{what}: losses {} and {}", got.0, want.0);
    let largest = |values: &[f32]| values.iter().fold(0f32, |max, v| max.max(v.abs()));
    let floor = 2e-7 * want.1.iter().map(|grad| largest(grad)).fold(0.0, f32::max);
    for (at, (a, b)) in got.1.iter().zip(&want.1).enumerate() {
        let off = a.iter().zip(b).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(off <= (2e-6 * largest(b)).max(floor), "{what}: parameter {at} differs by {off} of {}", largest(b));
    }
}

#[test]
fn a_batch_of_eight_has_one_gradient_however_it_is_cut_into_microbatches() {
    let batch = sequences(8);
    for (machine, kind) in machines().iter().flat_map(|machine| ["mean", "token"].map(|kind| (machine, kind))) {
        let [whole] = &step(machine, kind, [1, 8], &batch)[..] else { panic!("one rank") };
        for (micro, dp) in [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)] {
            for rank in step(machine, kind, [dp, micro], &batch) {
                let here = machine.driver();
                assert_same(&rank, whole, &format!("{kind}, {micro} at a time on {dp} ranks, {here}"));
            }
        }
    }
}

#[test]
fn without_ignored_targets_both_normalisations_are_the_same_mean() {
    let batch = sequences(4);
    let machine = Machine::sim(4);
    let [token, mean] = ["token", "mean"].map(|kind| step(&machine, kind, [2, 1], &batch));
    assert_same(&token[0], &mean[0], "token and mean");
}

/// Rank 0 of two keeps one token that counts, rank 1 all of its own but one sequence's.
fn unequally_masked() -> Vec<(Vec<i32>, Vec<i32>)> {
    let mut batch = sequences(4);
    batch[0].1[1..].fill(IGNORE);
    batch[1].1.fill(IGNORE);
    batch[3].1[..4].fill(IGNORE);
    batch
}

#[test]
fn unequal_masks_do_not_change_what_a_token_weighs() {
    let batch = unequally_masked();
    for machine in machines() {
        let [alone] = &step(&machine, "token", [1, 4], &batch)[..] else { panic!("one rank") };
        for (micro, dp) in [(1, 1), (2, 2), (1, 2), (1, 4)] {
            for rank in step(&machine, "token", [dp, micro], &batch) {
                assert_same(&rank, alone, &format!("{micro} at a time on {dp} ranks, {}", machine.driver()));
            }
        }
        // The mean of means is another objective here, and says so.
        let mean = &step(&machine, "mean", [2, 2], &batch)[0];
        assert!((mean.0 - alone.0).abs() > 1e-4 * alone.0, "losses {} and {}", mean.0, alone.0);
    }
}

#[test]
fn ranks_without_a_token_that_counts_add_zero() {
    let mut batch = sequences(4);
    batch[2].1.fill(IGNORE);
    batch[3].1.fill(IGNORE);
    let mut nothing = batch.clone();
    nothing.iter_mut().for_each(|sequence| sequence.1.fill(IGNORE));
    for machine in machines() {
        let [half] = &step(&machine, "token", [1, 2], &batch[..2])[..] else { panic!("one rank") };
        for rank in step(&machine, "token", [2, 2], &batch) {
            assert_same(&rank, half, "a masked rank beside it");
        }
        for kind in ["mean", "token"] {
            for (loss, grads) in step(&machine, kind, [2, 1], &nothing) {
                assert_eq!(loss, 0.0);
                assert!(grads.iter().flatten().all(|g| *g == 0.0), "{kind} on {}", machine.driver());
            }
        }
    }
}
