//! Which parts of a graph may run: one counter a part, no locks. Nothing here knows what a part is, so loom can try
//! every interleaving of it.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

/// Parts that run behind each other, run after run. Between [`Flow::begin`] and the call that tells the end, every
/// part is handed out exactly once, when all that it is behind has finished. Runs never overlap: whoever begins one
/// has seen the end of the run before.
pub(crate) struct Flow {
    /// Parts behind part `i` are `to[from[i]..from[i + 1]]`.
    from: Vec<u32>,
    to: Vec<u32>,
    /// By part: how many it is behind.
    needs: Vec<u32>,
    /// By part: how many of those have not finished. Back at `needs` when the part is handed out.
    pending: Vec<AtomicU32>,
    /// Behind nothing.
    roots: Vec<u32>,
    /// Parts that have not finished, and one for whoever began the run.
    left: AtomicU32,
}

impl Flow {
    /// `behind[i]` are the distinct parts that part `i` is directly behind.
    pub(crate) fn new(behind: &[Vec<u32>]) -> Flow {
        let mut after: Vec<Vec<u32>> = vec![Vec::new(); behind.len()];
        for (part, list) in behind.iter().enumerate() {
            list.iter().for_each(|before| after[*before as usize].push(part as u32));
        }
        let mut from = vec![0];
        from.extend(after.iter().scan(0, |sum, list| {
            *sum += list.len() as u32;
            Some(*sum)
        }));
        let needs: Vec<u32> = behind.iter().map(|list| list.len() as u32).collect();
        Flow {
            from,
            to: after.concat(),
            pending: needs.iter().map(|n| AtomicU32::new(*n)).collect(),
            roots: (0..behind.len() as u32).filter(|part| needs[*part as usize] == 0).collect(),
            needs,
            left: AtomicU32::new(0),
        }
    }

    /// The parts that may run at once. The caller hands them out, then calls [`Flow::let_go`].
    pub(crate) fn begin(&self) -> &[u32] {
        self.left.store(self.needs.len() as u32 + 1, Ordering::Relaxed);
        &self.roots
    }

    /// `part` has finished: gives to `ready` what may run now. True if the run is over.
    #[must_use]
    pub(crate) fn finish(&self, part: u32, mut ready: impl FnMut(u32)) -> bool {
        let part = part as usize;
        for after in &self.to[self.from[part] as usize..self.from[part + 1] as usize] {
            let i = *after as usize;
            if self.pending[i].fetch_sub(1, Ordering::AcqRel) == 1 {
                // Nobody counts it again before the next run, which begins behind the end of this one.
                self.pending[i].store(self.needs[i], Ordering::Relaxed);
                ready(*after);
            }
        }
        self.let_go()
    }

    /// Gives up the hold that [`Flow::begin`] gave. True if the run is over.
    #[must_use]
    pub(crate) fn let_go(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every part is behind some earlier ones.
    fn graphs() -> impl Strategy<Value = Vec<Vec<u32>>> {
        prop::collection::vec(prop::collection::vec(0u32..1000, 0..4), 0..40).prop_map(|lists| {
            let pick = |(i, list): (usize, Vec<u32>)| {
                let mut behind: Vec<u32> = list.iter().filter(|_| i > 0).map(|at| at % i as u32).collect();
                behind.sort_unstable();
                behind.dedup();
                behind
            };
            lists.into_iter().enumerate().map(pick).collect()
        })
    }

    proptest! {
        #[test]
        fn every_part_is_handed_out_once_a_run_and_behind_what_it_needs(behind in graphs(), picks in any::<u64>()) {
            let flow = Flow::new(&behind);
            for run in 0..3u64 {
                let mut ready = flow.begin().to_vec();
                prop_assert_eq!(flow.let_go(), behind.is_empty());
                let (mut done, mut over) = (Vec::new(), behind.is_empty());
                while !ready.is_empty() {
                    prop_assert!(!over);
                    let part = ready.swap_remove(((picks >> (done.len() % 60)) + run) as usize % ready.len());
                    prop_assert!(behind[part as usize].iter().all(|b| done.contains(b)));
                    prop_assert!(!done.contains(&part));
                    done.push(part);
                    over = flow.finish(part, |next| ready.push(next));
                }
                prop_assert!(over);
                prop_assert_eq!(done.len(), behind.len());
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{
        sync::{Arc, Mutex, atomic::AtomicUsize},
        thread,
    };

    use super::*;

    /// Runs part after part from `first` on; the rest goes to `queue`. Counts itself when it saw the end.
    fn work(flow: &Flow, queue: &Mutex<Vec<u32>>, ran: &Mutex<Vec<u32>>, ends: &AtomicUsize) {
        loop {
            let Some(part) = queue.lock().unwrap().pop() else { return };
            ran.lock().unwrap().push(part);
            if flow.finish(part, |next| queue.lock().unwrap().push(next)) {
                ends.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    #[test]
    fn loom_a_join_is_handed_out_once_and_one_worker_sees_the_end_of_every_run() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            // Two branches, and a part behind both.
            let flow = Arc::new(Flow::new(&[vec![], vec![], vec![0, 1]]));
            for _ in 0..2 {
                let queue = Arc::new(Mutex::new(flow.begin().to_vec()));
                let (ran, ends) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
                let other = thread::spawn({
                    let (flow, queue, ran, ends) = (flow.clone(), queue.clone(), ran.clone(), ends.clone());
                    move || work(&flow, &queue, &ran, &ends)
                });
                work(&flow, &queue, &ran, &ends);
                let end = flow.let_go();
                other.join().unwrap();
                let ran = ran.lock().unwrap().clone();
                assert_eq!((ran.len(), ran[2]), (3, 2));
                assert_eq!(ends.load(Ordering::Relaxed) + usize::from(end), 1);
            }
        });
    }
}
