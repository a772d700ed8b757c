//! Kernels of the `cuda` driver, on hosts without a card.

use device::{
    cuda::{Arch, CudaError, CudaOptions, compile_kernels},
    *,
};

#[test]
#[ignore = "needs libnvrtc, which `.ci/run kernels` brings"]
fn kernels_compile_for_every_architecture() {
    for (major, minor) in [(8, 0), (9, 0), (10, 0)] {
        let compiled =
            compile_kernels(Arch { major, minor }).unwrap_or_else(|error| panic!("sm_{major}{minor}: {error}"));
        let functions: usize = compiled.iter().map(|source| source.functions.len()).sum();
        assert!(compiled.len() >= 4 && functions >= 20, "{} sources, {functions} functions", compiled.len());
        let own = compiled.iter().any(|source| source.file == "hopper_product.cu");
        assert_eq!(own, (major, minor) == (9, 0), "the kernel for compute capability 9.0, on sm_{major}{minor}");
        for source in &compiled {
            assert!(source.image.starts_with(b"\x7fELF"), "{} of sm_{major}{minor} is no object file", source.file);
            let text = String::from_utf8_lossy(&source.image);
            let missing: Vec<_> = source.functions.iter().filter(|name| !text.contains(**name)).collect();
            assert!(missing.is_empty(), "{}: {missing:?} are not in the object file", source.file);
        }
    }
}

#[test]
fn a_host_without_cuda_is_told_what_is_missing_and_others_open_a_machine() {
    match Machine::cuda_with(CudaOptions::default(), Options::default()) {
        Ok(machine) => assert_eq!(machine.driver(), "cuda"),
        Err(Error::Cuda { source, .. }) => {
            let text = source.to_string();
            match source {
                CudaError::Missing { library, .. } => {
                    assert!(text.contains(library) && text.contains("install"), "{text}")
                }
                CudaError::Environment { variable, .. } => {
                    assert!(text.contains(variable) && text.contains("prepare"), "{text}");
                }
                // A host with the libraries and no card, or with a driver of another time.
                CudaError::OldDriver { .. } | CudaError::NoCard { .. } | CudaError::Call { .. } => {}
                other => panic!("{other}"),
            }
        }
        Err(other) => panic!("{other}"),
    }
}
