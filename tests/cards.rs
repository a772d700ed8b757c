//! The first card, for tests. The tests of every crate that has a column for it include this file by its path.

use device::{Machine, Options, cuda::CudaOptions};

/// The first card, if the tests were built for one; they then run one after the other (`--test-threads=1`).
#[cfg(feature = "gpu-tests")]
pub(crate) fn cards(cuda: CudaOptions, options: Options) -> Vec<Machine> {
    // Tests have no `main` of ours: the first one that comes here starts all of them again.
    device::cuda::prepare().expect("the environment can be prepared");
    let kernel_cache = Some(std::env::temp_dir().join("warpweft-test-kernels"));
    let machine = Machine::cuda_with(CudaOptions { kernel_cache, ..cuda }, options);
    vec![machine.unwrap_or_else(|error| panic!("{}", error.chain()))]
}

#[cfg(not(feature = "gpu-tests"))]
pub(crate) fn cards(_: CudaOptions, _: Options) -> Vec<Machine> {
    Vec::new()
}
