//! What goes wrong between ranks that share a card: an error that names it, never a hang.

use std::{
    thread,
    time::{Duration, Instant},
};

use device::{Error, Op, Reduce, cuda::CudaError};
use pgroups::{PgError, local};

use crate::{running_cards_support::*, running_support::*};

/// One rank's stream does not get to the call that all have submitted in time: the card waits, and its hosts do not. It comes
/// later, and the card is as good as before.
#[test]
fn a_member_whose_stream_does_not_come_on_the_card_is_named_and_nobody_hangs() {
    let limit = Duration::from_millis(500);
    for replayed in [false, true] {
        let card = card_with(None, limit);
        let begin = Instant::now();
        let error = local(&card.machine, 3, |rank| {
            let group = group_of(&rank, &custom("mine", &[&[2, 0, 1]]), "mine")?;
            let stream = rank.device.stream("compute")?;
            let data = put(&stream, "data", vec![1f32; 8]);
            group.all_reduce(&stream, &data, Reduce::Sum)?;
            stream.synchronize()?;
            // Before anybody is late: to make a graph is to ask for memory, and the card gives it when its streams move.
            let graph = if replayed {
                let captured = rank.device.stream("captured")?;
                captured.begin_capture("step")?;
                group.all_reduce(&captured, &data, Reduce::Sum)?;
                Some(captured.end_capture()?.instantiate()?)
            } else {
                None
            };
            if rank.global.0 == 1 {
                let late = move |_: &mut device::Args<'_>| {
                    thread::sleep(limit * 6);
                    Ok(())
                };
                stream.launch(Op::host("late", "h3", Vec::new(), late))?;
            }
            match &graph {
                Some(graph) => stream.launch_graph(graph)?,
                None => group.all_reduce(&stream, &data, Reduce::Sum)?,
            }
            stream.synchronize()?;
            Ok::<_, PgError>(())
        });
        let error = error.expect_err("nobody got through");
        let Some(Error::Timeout { pending, .. }) = error.cause::<Error>() else { panic!("{}", error.chain()) };
        let call = pending.0.iter().find(|call| call.seq == 1).unwrap_or_else(|| panic!("{pending}"));
        assert_eq!((&call.arrived[..], &call.missing[..]), (&[0, 2][..], &[1][..]), "{pending}");
        assert!(call.group.starts_with("mine[0]") && call.what.starts_with("all_reduce(Sum) of 8 f32"), "{pending}");
        assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
        drop(card);
        let sums = card_with(None, Duration::from_secs(20)).run(
            3,
            |rank, group| {
                let stream = rank.device.stream("compute")?;
                let data = put(&stream, "data", vec![1f32; 8]);
                group.all_reduce(&stream, &data, Reduce::Sum)?;
                Ok(get::<f32>(&stream, &data)?)
            },
            &[2, 0, 1],
        );
        assert_eq!(sums, [[3f32; 8]; 3], "behind the late member, replayed: {replayed}");
    }
}

#[test]
fn more_blocks_than_a_card_runs_at_once_are_refused_with_the_numbers() {
    let card = card_with(Some(70), Duration::from_secs(20));
    let error = local(&card.machine, 2, |rank| group_of(&rank, &custom("mine", &[&[0, 1]]), "mine").map(drop));
    let error = error.expect_err("140 blocks fit");
    match error.cause::<CudaError>() {
        Some(CudaError::Crowded { taken: 0, members: 2, ctas: 70, multiprocessors, spare: 8, .. }) => {
            assert!(*multiprocessors < 148, "this card has room");
        }
        _ => panic!("{}", error.chain()),
    }
    assert!(error.chain().contains("all_gather@pgroups.agree on group 'build@0..2#0', #0, rank"), "{}", error.chain());
}

#[test]
fn groups_beyond_what_a_card_runs_at_once_are_refused_and_fit_again_when_others_are_gone() {
    // Two members of 40 blocks each: one group fits, a second does not.
    let card = card_with(Some(40), Duration::from_secs(20));
    let sum = |second: bool| {
        local(&card.machine, 2, |rank| {
            let group = group_of(&rank, &custom("mine", &[&[0, 1]]), "mine")?;
            let stream = rank.device.stream("compute")?;
            let data = put(&stream, "data", vec![1f32; 8]);
            group.all_reduce(&stream, &data, Reduce::Sum)?;
            if second {
                group.second("more")?.all_reduce(&stream, &data, Reduce::Sum)?;
            }
            Ok::<_, PgError>(get::<f32>(&stream, &data)?)
        })
    };
    for _ in 0..3 {
        let error = sum(true).expect_err("160 blocks fit");
        assert!(matches!(error.cause::<CudaError>(), Some(CudaError::Crowded { taken: 80, .. })), "{}", error.chain());
        assert_eq!(sum(false).unwrap_or_else(|error| panic!("{}", error.chain())), [[2f32; 8]; 2]);
    }
}

/// What follows was submitted before it failed.
#[test]
fn a_rank_that_fails_on_a_card_is_named_to_all_who_had_called_with_it() {
    let card = card();
    let error = local(&card.machine, 4, |rank| {
        let group = group_of(&rank, &custom("mine", &[&[1, 0, 3, 2]]), "mine")?;
        let stream = rank.device.stream("compute")?;
        let data = put(&stream, "data", vec![1f32; 8]);
        for step in 0..10 {
            if (step, rank.global.0) == (4, 2) {
                stream.launch(Op::host("fail", "h7", Vec::new(), |_| {
                    thread::sleep(Duration::from_millis(50));
                    Err("no luck".into())
                }))?;
            }
            group.all_reduce(&stream, &data, Reduce::Sum)?;
        }
        let waited = stream.synchronize();
        let told = waited.as_ref().expect_err("values of a rank that failed").is_echo();
        assert_eq!(told, rank.global.0 != 2, "{waited:?}");
        Ok::<_, PgError>(waited?)
    });
    let error = error.expect_err("a rank failed");
    assert!(matches!(error, PgError::RankFailed { rank, .. } if rank.0 == 2), "{}", error.chain());
}
