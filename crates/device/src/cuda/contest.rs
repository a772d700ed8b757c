//! The fastest of several ways, by their times.

/// Which one it is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Winner {
    pub(super) at: usize,
    /// What it takes, and what the first one does that runs at all; in seconds.
    pub(super) time: f64,
    pub(super) first: f64,
}

/// Launches of each way, for all of them together and then for the best in turn: the first to run is favoured by clocks
/// that have not come down yet, and one launch by chance.
const ROUNDS: usize = 3;
const LAST_ROUNDS: usize = 7;
/// Of a way's time: what others may take longer before they are not tried again.
const HOPELESS: f64 = 1.5;
/// Ways that get into the second part.
const FINALISTS: usize = 3;
/// What a way must gain over an earlier one to be taken: less is chance, and the choice should be the same next time.
const GAIN: f64 = 0.02;

/// The fastest of `count` ways, the earlier one where two are as fast. `time` runs one of them and says how long it took,
/// or that it cannot run. None: none can.
pub(super) fn fastest<E>(
    count: usize,
    mut time: impl FnMut(usize) -> Result<Option<f64>, E>,
) -> Result<Option<Winner>, E> {
    let mut times = vec![Vec::new(); count];
    let mut best = f64::INFINITY;
    for (way, times) in times.iter_mut().enumerate() {
        // Not counted: what is done once is done now.
        if time(way)?.is_none() {
            continue;
        }
        for _ in 0..ROUNDS {
            times.extend(time(way)?);
            if times.first().is_some_and(|first| *first > best * HOPELESS) {
                break;
            }
        }
        best = best.min(median(times).unwrap_or(f64::INFINITY));
    }
    let mut order: Vec<usize> = (0..count).filter(|way| !times[*way].is_empty()).collect();
    let Some(&first) = order.first() else { return Ok(None) };
    order.sort_by(|a, b| median(&times[*a]).partial_cmp(&median(&times[*b])).expect("BUG: a time is no number"));
    order.truncate(FINALISTS);
    if !order.contains(&first) {
        order.push(first);
    }
    order.sort_unstable();
    let mut last = vec![Vec::new(); order.len()];
    for round in 0..if order.len() > 1 { LAST_ROUNDS } else { 1 } {
        // None is always behind the same other one.
        for turn in 0..order.len() {
            let at = (round + turn) % order.len();
            last[at].extend(time(order[at])?);
        }
    }
    let mut ranked = order.iter().zip(&last).filter_map(|(way, times)| Some((*way, median(times)?)));
    let Some((at, first)) = ranked.next() else { return Ok(None) };
    let winner = Winner { at, time: first, first };
    Ok(Some(ranked.fold(
        winner,
        |best, (at, time)| {
            if time < best.time * (1.0 - GAIN) { Winner { at, time, first } } else { best }
        },
    )))
}

fn median(times: &[f64]) -> Option<f64> {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that gives every way its time, and makes noise of a few tenths of a percent.
    fn choose(ways: &[Option<f64>]) -> Option<Winner> {
        let mut noise = 0u32;
        let time = |way: usize| {
            noise = (noise * 7 + 3) % 11;
            Ok::<_, ()>(ways[way].map(|time| time * (1.0 + f64::from(noise) / 4000.0)))
        };
        fastest(ways.len(), time).unwrap()
    }

    #[test]
    fn the_fastest_way_wins_wherever_it_stands() {
        for at in 0..6 {
            let mut ways = [Some(2.0), Some(1.5), Some(9.0), Some(1.2), Some(1.8), Some(1.4)];
            ways[at] = Some(1.0);
            assert_eq!(choose(&ways).unwrap().at, at);
        }
    }

    #[test]
    fn of_ways_that_are_as_fast_the_earlier_one_wins() {
        assert_eq!(choose(&[Some(1.0); 8]).unwrap().at, 0);
        assert_eq!(choose(&[Some(1.5), Some(1.0), Some(0.99)]).unwrap().at, 1);
    }

    #[test]
    fn ways_that_cannot_run_do_not_win() {
        let winner = choose(&[None, Some(2.0), None, Some(1.0)]).unwrap();
        assert_eq!(winner.at, 3);
        assert!(winner.first > 1.9 && winner.time < 1.1, "{winner:?}");
        assert_eq!(choose(&[None, None]), None);
        assert_eq!(choose(&[]), None);
    }

    #[test]
    fn one_launch_that_seems_fast_does_not_win() {
        let mut calls = 0;
        let time = |way: usize| {
            calls += 1;
            // The first counted launch of way 1 runs beside nothing.
            Ok::<_, ()>(Some(if way == 1 && calls == 6 { 0.5 } else { 1.0 + way as f64 / 10.0 }))
        };
        assert_eq!(fastest(3, time).unwrap().unwrap().at, 0);
    }

    #[test]
    fn a_way_that_is_hopeless_is_not_tried_again() {
        let mut slow = 0;
        let time = |way: usize| {
            slow += usize::from(way == 1);
            Ok::<_, ()>(Some([1.0, 10.0, 1.1, 1.2, 1.3][way]))
        };
        assert_eq!(fastest(5, time).unwrap().unwrap().at, 0);
        assert_eq!(slow, 2);
    }

    #[test]
    fn a_failure_of_the_clock_ends_the_contest() {
        assert_eq!(fastest(2, |way| if way == 1 { Err("lost") } else { Ok(Some(1.0)) }), Err("lost"));
    }
}
