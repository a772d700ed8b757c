//! Variables that CUDA and NCCL read once, before their first calls.

use super::CudaError;

/// Name and value: with few connections streams that nothing orders wait for each other.
const NEEDED: [(&str, &str); 1] = [("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// What groups of several ranks need besides. With lazy loading a kernel's first launch may wait for whatever runs, which
/// may be a collective that waits for the rank that launches; loading everything at once takes hundreds of MiB of the card.
/// The rest is NCCL's: ranks may share a card, which multicast over NVLink cannot; members are connected when a
/// communicator is made and graphs register no memory, so that a rank can make its graphs without the others.
const NEEDED_BY_GROUPS: [(&str, &str); 5] = [
    ("CUDA_MODULE_LOADING", "EAGER"),
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_RUNTIME_CONNECT", "0"),
    ("NCCL_GRAPH_REGISTER", "0"),
];

/// Set in the second start, which must not lead to a third.
const STARTED_AGAIN: &str = "WARPWEFT_CUDA_PREPARED";

/// Makes sure that CUDA and NCCL will find the variables that this driver needs, for any number of ranks. Call it first in
/// `main`: where one is missing, the program starts again with all of them set, in the same process, and does not return here.
///
/// Starting again, because threads may be reading the environment by the time anything of this crate runs, and changing
/// it under them is undefined. Harmless on a host without CUDA.
///
/// # Errors
/// [`CudaError::Restart`] when the program cannot be started again, [`CudaError::Environment`] when the variables were
/// lost on the way.
pub fn prepare() -> Result<(), CudaError> {
    prepare_for(u32::MAX)
}

/// [`prepare`] for a program of so many ranks: a single one leaves out what only groups need, and kernels load when they
/// first run, unless the environment says otherwise.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_for(ranks: u32) -> Result<(), CudaError> {
    let groups = if ranks > 1 { check_collectives() } else { Ok(()) };
    match check_environment().and(groups) {
        Ok(()) => Ok(()),
        Err(error) if std::env::var_os(STARTED_AGAIN).is_some() => Err(error),
        Err(CudaError::Environment { variable, .. }) => Err(start_again(variable, ranks > 1)),
        Err(error) => Err(error),
    }
}

#[cfg(unix)]
fn start_again(variable: &'static str, groups: bool) -> CudaError {
    use std::os::unix::process::CommandExt;
    let cause = match std::env::current_exe() {
        Ok(program) => {
            let mut command = std::process::Command::new(program);
            command.args(std::env::args_os().skip(1)).envs(NEEDED).env(STARTED_AGAIN, "1");
            if groups {
                command.envs(NEEDED_BY_GROUPS);
            }
            // Returns only if it fails.
            command.exec()
        }
        Err(cause) => cause,
    };
    CudaError::Restart { variable, cause: cause.to_string() }
}

#[cfg(not(unix))]
fn start_again(variable: &'static str, _groups: bool) -> CudaError {
    CudaError::Restart { variable, cause: "only done on unix; set it before the program starts".to_owned() }
}

/// The machine asks again, because whoever forgot [`prepare`] would find out by a program that hangs. What the driver
/// reads is the environment of the process, so there is nothing else to ask.
pub(super) fn check_environment() -> Result<(), CudaError> {
    check(&NEEDED, |name| std::env::var(name).ok())
}

/// As [`check_environment`], for groups of more than one rank.
pub(super) fn check_collectives() -> Result<(), CudaError> {
    check(&NEEDED_BY_GROUPS, |name| std::env::var(name).ok())
}

fn check(needed: &[(&'static str, &'static str)], look_up: impl Fn(&str) -> Option<String>) -> Result<(), CudaError> {
    for &(variable, need) in needed {
        let have = look_up(variable);
        if have.as_deref() != Some(need) {
            return Err(CudaError::Environment { variable, have, need });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_missing_or_different_is_named_with_what_it_must_be() {
        assert_eq!(check(&NEEDED, |name| NEEDED.iter().find(|n| n.0 == name).map(|n| n.1.to_owned())), Ok(()));
        let error = check(&NEEDED, |_| None).unwrap_err();
        let text = "CUDA_DEVICE_MAX_CONNECTIONS is None and must be 32; call device::cuda::prepare() first in main";
        assert_eq!(error.to_string(), text);
        let error =
            check(&NEEDED_BY_GROUPS, |name| (name == NEEDED_BY_GROUPS[0].0).then(|| "LAZY".to_owned())).unwrap_err();
        let have = Some("LAZY".to_owned());
        assert_eq!(error, CudaError::Environment { variable: "CUDA_MODULE_LOADING", have, need: "EAGER" });
        let error =
            check(&NEEDED_BY_GROUPS, |name| (name == NEEDED_BY_GROUPS[0].0).then(|| "EAGER".to_owned())).unwrap_err();
        assert_eq!(error, CudaError::Environment { variable: "NCCL_MULTI_RANK_GPU_ENABLE", have: None, need: "1" });
    }
}
