//! Messages of refused calls: operation, object, numbers, and CUDA's name and number, in one line.

use std::error::Error;
use std::fmt::Debug;
use std::sync::Arc;

use cuda_driver::host_pages::{HostPages, HostRegion as _};
use cuda_driver::{
    AddressRange, Device, DeviceBuffer, ErrorCode, HostAllocFlags, HostRegisterFlags,
    PhysicalMemory, PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};

fn open() -> Device {
    Device::open(Arc::new(SimDriver::new(SimConfig::default()).unwrap()), 0).unwrap()
}

/// What `?` in `main` prints, which is also what `Display` says of an error without causes.
fn says<T: Debug, E: Error>(answer: Result<T, E>, line: &str) {
    let error = answer.expect_err(line);
    assert_eq!([format!("{error:?}"), error.to_string()], [line, line]);
}

#[test]
fn memory_that_cannot_be_had_is_told_from_none_asked_for() {
    let device = open();
    says(
        DeviceBuffer::alloc(&device, 1 << 60),
        "cuMemAlloc of 1.0 EiB on GPU 0: CUDA_ERROR_OUT_OF_MEMORY (2)",
    );
    says(
        DeviceBuffer::alloc(&device, 0),
        "cuMemAlloc of 0 bytes on GPU 0: CUDA_ERROR_INVALID_VALUE (1)",
    );
    says(
        PinnedBuffer::alloc(&device, 0, HostAllocFlags::CACHED),
        "cuMemHostAlloc of 0 bytes on GPU 0: CUDA_ERROR_INVALID_VALUE (1)",
    );
    says(
        PhysicalMemory::create(&device, (2 << 20) + 1),
        "cuMemCreate of 2.0 MiB (2097153 bytes) on GPU 0: CUDA_ERROR_INVALID_VALUE (1)",
    );
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let driver = Arc::new(SimDriver::new(SimConfig::default()).unwrap());
    says(Device::open(driver, 9), "cuDeviceGetName on GPU 9: CUDA_ERROR_INVALID_DEVICE (101)");
}

#[test]
fn a_range_outside_its_reservation_is_named() {
    let device = open();
    let range = AddressRange::reserve(&device, 2 << 20).unwrap();
    let line = format!(
        "cuMemUnmap of 2.0 MiB at {:#x} on GPU 0: CUDA_ERROR_INVALID_VALUE (1)",
        range.span(2 << 20, 0).unwrap().address()
    );
    says(range.unmap(2 << 20, 2 << 20), &line);
}

#[test]
fn memory_of_an_owner_that_is_gone_is_named() {
    let device = open();
    let stream = Stream::new(&device).unwrap();
    let memory = DeviceBuffer::alloc(&device, 64).unwrap();
    let span = memory.span();
    drop(memory);
    let address = span.address();
    says(
        stream.fill(span, 1),
        &format!("the owner of the 64 bytes of device memory at {address:#x} was dropped"),
    );
}

#[test]
fn a_device_that_refuses_to_close_names_the_call() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    drop(DeviceBuffer::alloc(&device, 64).unwrap());
    sim.fail_nth("cuMemFree", 1, ErrorCode::UNKNOWN);
    let refused = device.close().unwrap_err();
    assert_eq!(
        format!("{refused:?}"),
        "the device was closed, and a call of its clean-up was refused: \
         cuMemFree on GPU 0: CUDA_ERROR_UNKNOWN (999)"
    );
}

#[test]
fn host_memory_that_is_not_pinned_names_its_range() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    for call in ["cuMemHostRegister", "cuMemHostGetDevicePointer"] {
        sim.fail_nth(call, 1, ErrorCode::OUT_OF_MEMORY);
        let pages = HostPages::map(4096, false, None).unwrap();
        let address = pages.address();
        let refused = PinnedBuffer::register(&device, Box::new(pages), HostRegisterFlags::SHARED);
        assert_eq!(
            format!("{:?}", refused.unwrap_err()),
            format!(
                "host memory was not pinned where it is: \
                 {call} of 4.0 KiB at {address:#x} on GPU 0: CUDA_ERROR_OUT_OF_MEMORY (2)"
            )
        );
    }
}
