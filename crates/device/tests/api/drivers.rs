//! The drivers under test. A claim is a function of a [`Driver`]; `conformance!` makes a test of it for each.

use std::time::Duration;

use device::{Fresh, Machine, Options};

/// Longer than any claim takes, so that a hang ends as an error. It is what a machine waits at most: whoever took less has
/// not waited for what never comes, however busy the host.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// What says how many seconds a machine waits where a tool makes everything slower, as `bench/gpu/sanitize.py` does.
const PATIENCE: &str = "WARPWEFT_TEST_TIMEOUT_S";

fn patience() -> Duration {
    let seconds =
        std::env::var(PATIENCE).ok().map(|word| word.parse().expect("whole seconds in WARPWEFT_TEST_TIMEOUT_S"));
    seconds.map_or(LIMIT, Duration::from_secs)
}

/// For claims in which somebody never comes.
pub(crate) const SHORT: Duration = Duration::from_millis(150);

/// Opens machines of one kind.
pub(crate) struct Driver {
    open: Box<dyn Fn(Options) -> Machine>,
}

impl Driver {
    pub(crate) fn new(open: impl Fn(Options) -> Machine + 'static) -> Driver {
        Driver { open: Box::new(open) }
    }

    /// Fresh memory is poisoned, so that a read before the first write shows.
    pub(crate) fn machine(&self) -> Machine {
        self.limited(patience())
    }

    pub(crate) fn limited(&self, timeout: Duration) -> Machine {
        (self.open)(Options { timeout, fresh: Fresh::Poisoned })
    }
}

pub(crate) fn cpu(workers: usize) -> Driver {
    Driver::new(move |options| Machine::cpu_with(workers, options).unwrap())
}

pub(crate) fn sim(seed: u64) -> Driver {
    Driver::new(move |options| Machine::sim_with(seed, options))
}

pub(crate) fn dry() -> Driver {
    Driver::new(|_| Machine::dry())
}

/// A claim under several seeds.
pub(crate) fn on_seeds(claim: fn(&Driver)) {
    (0..6).for_each(|seed| claim(&sim(seed)));
}

/// A card, if the tests were built for one.
#[cfg(feature = "gpu-tests")]
pub(crate) fn cuda() -> Driver {
    cuda_with(device::cuda::CudaOptions::default())
}

/// The same, with settings.
#[cfg(feature = "gpu-tests")]
pub(crate) fn cuda_with(cuda: device::cuda::CudaOptions) -> Driver {
    Driver::new(move |options| crate::cards::cards(cuda.clone(), options).remove(0))
}

/// The right to the card. Closing a context, and giving memory back, wait for all streams of a process, also for those
/// that another test holds; so one test after the other uses it.
#[cfg(feature = "gpu-tests")]
pub(crate) fn card_turn() -> std::fs::File {
    let turn = std::fs::File::create(std::env::temp_dir().join("warpweft-test-card.lock")).unwrap();
    turn.lock().unwrap();
    turn
}

/// A claim on a card, whose context stays open between the claim's machines.
#[cfg(feature = "gpu-tests")]
pub(crate) fn on_card(claim: fn(&Driver)) {
    let _turn = card_turn();
    let driver = cuda();
    let _context = driver.machine();
    claim(&driver);
}

/// Makes each claim a test of each driver. `every` claims need no values, `computing` claims do, `blocking` claims
/// have operations that wait for each other, which takes real threads. What `cuda` does not promise, because it finds
/// no races, takes back what waits for other ranks only, and leaves sums to NCCL, is claimed `on_hosts`.
macro_rules! conformance {
    ($kind:ident: $($claim:ident),+ $(,)? $(; $($rest:tt)+)?) => {
        mod $kind {
            conformance!(@ $kind $($claim),+);
        }
        $(conformance! { $($rest)+ })?
    };
    (@ every $($claim:ident),+) => {
        conformance!(@ every_on_hosts $($claim),+);
        conformance!(@ cuda $($claim),+);
    };
    (@ computing $($claim:ident),+) => {
        conformance!(@ computing_on_hosts $($claim),+);
        conformance!(@ cuda $($claim),+);
    };
    (@ blocking $($claim:ident),+) => {
        conformance!(@ blocking_on_hosts $($claim),+);
        conformance!(@ cuda $($claim),+);
    };
    (@ every_on_hosts $($claim:ident),+) => {
        conformance!(@ computing_on_hosts $($claim),+);
        conformance!(@ driver dry, |claim: fn(&_)| claim(&crate::api::drivers::dry()), $($claim),+);
    };
    (@ computing_on_hosts $($claim:ident),+) => {
        conformance!(@ driver cpu_1, |claim: fn(&_)| claim(&crate::api::drivers::cpu(1)), $($claim),+);
        conformance!(@ blocking_on_hosts $($claim),+);
        conformance!(@ driver sim, crate::api::drivers::on_seeds, $($claim),+);
    };
    (@ blocking_on_hosts $($claim:ident),+) => {
        conformance!(@ driver cpu_2, |claim: fn(&_)| claim(&crate::api::drivers::cpu(2)), $($claim),+);
        conformance!(@ driver cpu_4, |claim: fn(&_)| claim(&crate::api::drivers::cpu(4)), $($claim),+);
    };
    (@ cuda $($claim:ident),+) => {
        #[cfg(feature = "gpu-tests")]
        conformance!(@ driver cuda, crate::api::drivers::on_card, $($claim),+);
    };
    (@ driver $driver:ident, $run:expr, $($claim:ident),+) => {
        mod $driver {
            $(#[test]
            fn $claim() {
                ($run)(super::super::$claim);
            })+
        }
    };
}
