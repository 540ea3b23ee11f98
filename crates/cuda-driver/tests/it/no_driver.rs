//! Loading the driver on any machine gives a readable answer, never a panic.

use std::error::Error;

use cuda_driver::{CudaDriver, Driver, ErrorCode, Unavailable};

/// An error and its causes, as a program would print them.
fn report(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

fn library_is_installed() -> bool {
    // SAFETY: loading NVIDIA's library runs its initialisers, which may run anywhere.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

#[test]
fn loading_answers_on_every_machine() {
    let loaded = CudaDriver::load();
    if !library_is_installed() {
        let unavailable = loaded.err();
        assert_eq!(unavailable, Some(Unavailable::NoLibrary));
        let text = unavailable.map(|error| report(&error)).unwrap_or_default();
        assert_eq!(text, "no CUDA driver library (libcuda) was found");
        return;
    }
    match loaded {
        Ok(driver) => {
            assert_eq!(driver.name(), "cuda");
            assert!(driver.device_get_count().is_ok_and(|count| count > 0));
            assert!(driver.driver_get_version().is_ok_and(|version| version >= 11_000));
        }
        // The library was found, so it must be something that it answered, or lacks.
        Err(Unavailable::Init(error)) => {
            assert!(["cuInit", "cuDeviceGetCount", "cuDeviceGet"].contains(&error.call));
            assert_ne!(error.code, ErrorCode(0));
        }
        Err(Unavailable::MissingSymbol { symbol }) => assert!(symbol.starts_with("cu")),
        Err(other) => assert_eq!(other, Unavailable::NoDevice),
    }
}

#[test]
fn probing_agrees_with_loading_and_may_be_repeated() {
    let loaded = CudaDriver::load().map(|driver| driver.name());
    for _ in 0..3 {
        assert_eq!(CudaDriver::probe().map(|driver| driver.name()), loaded);
    }
}

#[test]
fn every_reason_reads_well() {
    let broken = cuda_driver::DriverError::new("cuInit", ErrorCode::STUB_LIBRARY);
    assert_eq!(
        report(&Unavailable::Init(broken)),
        "the CUDA driver could not be initialised: cuInit: CUDA_ERROR_STUB_LIBRARY (34)"
    );
    assert_eq!(
        report(&Unavailable::MissingSymbol { symbol: "cuMemMap" }),
        "the CUDA driver library lacks cuMemMap"
    );
    assert_eq!(report(&Unavailable::NoDevice), "the CUDA driver reports no device");
}
