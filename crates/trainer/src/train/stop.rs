//! How a run is asked to end early, and how all ranks learn of it at the same step.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use device::{DType, Download, Error, MemoryKind, Reduce, Stream, View};
use pgroups::{Axis, Group, Key, Rank};
use signal_hook::{consts, flag};

use crate::TrainError;

/// Who asks a run to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signal {
    /// Ctrl-C at the terminal (SIGINT).
    Interrupt,
    /// SIGTERM, as schedulers and `kill` send it.
    Terminate,
}

impl Signal {
    const ALL: [Signal; 2] = [Signal::Interrupt, Signal::Terminate];

    /// Its number.
    pub fn number(self) -> i32 {
        match self {
            Signal::Interrupt => consts::SIGINT,
            Signal::Terminate => consts::SIGTERM,
        }
    }

    /// What a process ends with that a signal ended: 128 and the signal's number, 130 or 143.
    pub fn exit_code(self) -> u8 {
        128 + self.number() as u8
    }

    fn from_number(number: i32) -> Option<Signal> {
        Signal::ALL.into_iter().find(|signal| signal.number() == number)
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Signal::Interrupt => "Ctrl-C (SIGINT)",
            Signal::Terminate => "SIGTERM",
        })
    }
}

/// Where a request to end comes from.
#[derive(Clone, Debug, Default)]
pub enum StopSource {
    /// Nowhere: the run goes to its end.
    #[default]
    Never,
    /// This holds the number of the signal that came, 0 before. Any thread may set it.
    Flag(Arc<AtomicUsize>),
    /// One rank is asked when it is about to submit a step: the same moment in every run.
    AtStep {
        /// Rank.
        rank: u32,
        /// Step, from 1.
        step: u64,
        /// What it is told.
        signal: Signal,
    },
    /// One rank is asked when it is about to submit the evaluation behind a step: the same moment in every run.
    AtEvaluation {
        /// Rank.
        rank: u32,
        /// Step, from 1.
        step: u64,
        /// What it is told.
        signal: Signal,
    },
}

impl StopSource {
    /// Ctrl-C and SIGTERM of this process. The first one asks; a second one ends the process at once, as if nobody
    /// listened. For binaries: a library leaves the process's signals alone.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn signals() -> io::Result<StopSource> {
        let (number, again) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        for signal in Signal::ALL.map(Signal::number) {
            // In this order: the first signal must not find the flag that it sets itself.
            flag::register_conditional_default(signal, again.clone())?;
            flag::register(signal, again.clone())?;
            flag::register_usize(signal, number.clone(), signal as usize)?;
        }
        Ok(StopSource::Flag(number))
    }

    /// What `rank` knows when it is about to submit `step`, from 1.
    pub fn asked(&self, rank: u32, step: u64) -> Option<Signal> {
        match self {
            StopSource::Never => None,
            StopSource::Flag(number) => {
                i32::try_from(number.load(Ordering::Relaxed)).ok().and_then(Signal::from_number)
            }
            StopSource::AtStep { rank: of, step: at, signal } => (*of == rank && step >= *at).then_some(*signal),
            StopSource::AtEvaluation { rank: of, step: at, signal } => (*of == rank && step > *at).then_some(*signal),
        }
    }

    /// What `rank` knows when it is about to submit a pass of the evaluation behind `step`.
    pub fn asked_in_evaluation(&self, rank: u32, step: u64) -> Option<Signal> {
        match self {
            StopSource::AtEvaluation { rank: of, step: at, signal } => (*of == rank && step >= *at).then_some(*signal),
            StopSource::Never | StopSource::Flag(_) | StopSource::AtStep { .. } => self.asked(rank, step),
        }
    }
}

/// The largest signal number that any rank knows of, on every rank: one rank's signal ends all of them at the same
/// step, because all read the same number with the same step's loss.
pub(super) struct StopBit {
    /// i32 `[1]`.
    largest: View,
    everyone: Group,
}

impl StopBit {
    /// Every rank there is, whatever it computes.
    pub(super) fn key() -> Key {
        Key::over([Axis::TP, Axis::GTP, Axis::CP, Axis::DP, Axis::PP])
    }

    pub(super) fn alloc(rank: &Rank, everyone: &Group) -> Result<StopBit, TrainError> {
        let largest = rank.device.alloc("stop", &[1], DType::I32, MemoryKind::Other)?;
        Ok(StopBit { largest, everyone: everyone.clone() })
    }

    /// Once a step, on all ranks.
    pub(super) fn submit(&self, stream: &Stream, asked: Option<Signal>) -> Result<(), TrainError> {
        stream.upload(&self.largest, vec![asked.map_or(0, Signal::number)])?;
        Ok(self.everyone.all_reduce(stream, &self.largest, Reduce::Max)?)
    }

    /// The ranks that it goes round.
    pub(super) fn everyone(&self) -> &Group {
        &self.everyone
    }

    /// What the last submitted step found.
    pub(super) fn download(&self, stream: &Stream) -> Result<Asked, Error> {
        stream.download(&self.largest).map(Asked)
    }
}

/// The answer of a [`StopBit`] on its way to the host.
pub(super) struct Asked(Download<i32>);

impl Asked {
    pub(super) fn wait(self) -> Result<Option<Signal>, Error> {
        Ok(Signal::from_number(self.0.wait()?[0]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Machine;
    use pgroups::{Layout, LayoutConfig, Needs, ProcessGroups};

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(Signal::ALL.map(Signal::exit_code), [130, 143]);
        assert_eq!(Signal::from_number(0), None);
    }

    #[test]
    fn one_ranks_signal_reaches_every_rank_and_the_larger_of_two_wins() {
        let mut layout = LayoutConfig::parse("tp=2,dp=2,pp=2").unwrap();
        layout.world_size = Some(8);
        let layout = Layout::new(&layout).unwrap();
        let known = |asked: [Option<Signal>; 8]| {
            pgroups::local(&Machine::sim(3), 8, |rank| -> Result<_, TrainError> {
                let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([StopBit::key()]))?;
                let stop = StopBit::alloc(&rank, groups.get(&StopBit::key(), "stop")?)?;
                let stream = rank.device.stream("compute")?;
                stop.submit(&stream, asked[rank.global.0 as usize])?;
                Ok(stop.download(&stream)?.wait()?)
            })
            .unwrap()
        };
        let (int, term) = (Signal::Interrupt, Signal::Terminate);
        assert_eq!(known([None; 8]), [None; 8]);
        let mut asked = [None; 8];
        asked[5] = Some(int);
        assert_eq!(known(asked), [Some(int); 8]);
        asked[2] = Some(term);
        assert_eq!(known(asked), [Some(term); 8]);
    }

    #[test]
    fn a_flag_is_read_as_the_signal_whose_number_it_holds() {
        let flag = Arc::new(AtomicUsize::new(0));
        let source = StopSource::Flag(flag.clone());
        assert_eq!(source.asked(0, 1), None);
        flag.store(consts::SIGTERM as usize, Ordering::Relaxed);
        assert_eq!(source.asked(3, 7), Some(Signal::Terminate));
        let at = StopSource::AtStep { rank: 1, step: 4, signal: Signal::Interrupt };
        let asked = [(0, 9), (1, 3), (1, 4), (1, 5)].map(|(rank, step)| at.asked(rank, step));
        assert_eq!(asked, [None, None, Some(Signal::Interrupt), Some(Signal::Interrupt)]);
        let at = StopSource::AtEvaluation { rank: 1, step: 4, signal: Signal::Interrupt };
        assert_eq!([at.asked(1, 4), at.asked(1, 5)], [None, Some(Signal::Interrupt)]);
        let asked = [(0, 9), (1, 3), (1, 4)].map(|(rank, step)| at.asked_in_evaluation(rank, step));
        assert_eq!(asked, [None, None, Some(Signal::Interrupt)]);
    }
}
