//! Numbers that the driver uses again: an object that may have been destroyed is never destroyed a
//! second time, because its number may be another object's.

use std::any::Any;
use std::sync::Arc;

use cuda_driver::{
    AddressRange, CloseError, Device, DeviceBuffer, DeviceError, DriverError, ErrorCode, Event,
    HostAllocFlags, KernelArgs, LaunchConfig, Module, PhysicalMemory, PinnedBuffer, Stream,
};
use cuda_sim::{LeakReport, SimConfig, SimDriver};

use crate::common::kernel;
use crate::reusing::Reusing;

const BYTES: u64 = 4096;

type Make = fn(&Device) -> Result<Box<dyn Any>, DeviceError>;

fn boxed<T: Any>(made: Result<T, DeviceError>) -> Result<Box<dyn Any>, DeviceError> {
    made.map(|made| Box::new(made) as Box<dyn Any>)
}

fn module(device: &Device) -> Module {
    Module::load(device, kernel::PTX).unwrap()
}

fn prepared(device: &Device) -> Result<Box<dyn Any>, DeviceError> {
    let kernel = module(device).kernel(kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(0u64).arg(1u32).arg(4u32);
    // SAFETY: the kernel's three parameters.
    boxed(unsafe { kernel.prepare(&LaunchConfig::linear(1, 4), &args) })
}

/// What ends each kind of object, and what makes one.
const KINDS: [(&str, Make); 7] = [
    ("cuStreamDestroy", |device| boxed(Stream::new(device))),
    ("cuEventDestroy", |device| boxed(Event::new(device))),
    ("cuModuleUnload", |device| boxed(Ok(module(device)))),
    ("cuGraphExecDestroy", prepared),
    ("cuMemFree", |device| boxed(DeviceBuffer::alloc(device, BYTES))),
    ("cuMemFreeHost", |device| boxed(PinnedBuffer::alloc(device, BYTES, HostAllocFlags::CACHED))),
    ("cuMemRelease", |device| {
        boxed(PhysicalMemory::create(device, PhysicalMemory::granularity(device)?))
    }),
];

fn machine() -> (Arc<Reusing>, SimDriver, Device) {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let driver = Arc::new(Reusing::new(Arc::new(sim.clone())));
    let device = Device::open(driver.clone(), 0).unwrap();
    (driver, sim, device)
}

#[test]
fn an_object_that_may_be_gone_is_not_destroyed_again_under_a_number_given_out_anew() {
    // Codes that the driver may answer of earlier work.
    for code in [ErrorCode::UNKNOWN, ErrorCode::INVALID_VALUE, ErrorCode::NOT_PERMITTED] {
        for (call, make) in KINDS {
            let (driver, sim, device) = machine();
            let old = make(&device).unwrap();
            driver.fail(call, code);
            drop(old);
            // Memory and modules are freed here, where the answer shows; other objects by the drop.
            let freed = device.free_retired();
            let waits = ["cuMemFree", "cuMemFreeHost", "cuModuleUnload"].contains(&call);
            assert_eq!(freed.is_err(), waits, "{call}: {freed:?}");
            let new = make(&device).unwrap();
            // Whatever would end an object once more is asked to, while the new one lives.
            device.free_retired().unwrap();
            assert_eq!(driver.again(), (1, vec![]), "{call} {code}");
            // Its owner's drop ends the new object: the one end that the number has seen.
            drop(new);
            device.free_retired().unwrap();
            assert_eq!(driver.again().1.len(), 1, "{call} {code}");
            drop((driver, sim));
        }
    }
}

#[test]
fn a_graph_that_may_be_gone_is_not_destroyed_again() {
    let (driver, _sim, device) = machine();
    driver.fail("cuGraphDestroy", ErrorCode::UNKNOWN);
    let _prepared = prepared(&device).unwrap();
    assert_eq!(driver.again(), (0, vec![]));
}

#[test]
fn a_context_that_may_be_released_is_not_released_for_another_owner() {
    let (driver, sim, device) = machine();
    let twin = Device::open(driver.clone(), 0).unwrap();
    let stream = Stream::new(&twin).unwrap();
    driver.fail("cuDevicePrimaryCtxRelease", ErrorCode::UNKNOWN);
    let closed = device.close();
    assert!(matches!(closed, Err(CloseError::Refused(error)) if error.code == ErrorCode::UNKNOWN));
    // A second release would be the twin's, and end the context under its stream.
    stream.synchronize().unwrap();
    drop(stream);
    twin.close().unwrap();
    assert_eq!(sim.check_leaks(), LeakReport::default());
    assert_eq!(sim.findings(), []);
}

#[test]
fn what_was_given_up_is_reported_when_the_device_is_closed() {
    let (driver, _sim, device) = machine();
    for (call, code) in [("cuEventDestroy", ErrorCode::UNKNOWN), ("cuStreamDestroy", ErrorCode(1))]
    {
        let made = (Stream::new(&device).unwrap(), Event::new(&device).unwrap());
        driver.fail(call, code);
        drop(made);
        assert_eq!((device.alive().retired, device.free_retired()), (0, Ok(0)), "{call}");
    }
    let Err(CloseError::Refused(first)) = device.close() else { panic!("nothing was refused") };
    assert_eq!(first, DriverError::new("cuEventDestroy", ErrorCode::UNKNOWN));
}

#[test]
fn addresses_and_memory_that_a_drop_left_are_reported_when_the_device_is_closed() {
    for call in ["cuMemAddressFree", "cuMemRelease"] {
        let (_driver, sim, device) = machine();
        let page = PhysicalMemory::granularity(&device).unwrap();
        let made = (
            AddressRange::reserve(&device, page).unwrap(),
            PhysicalMemory::create(&device, page).unwrap(),
        );
        sim.fail_nth(call, 1, ErrorCode::UNKNOWN);
        drop(made);
        assert_eq!((device.alive().retired, device.free_retired()), (0, Ok(0)), "{call}");
        let Err(CloseError::Refused(first)) = device.close() else { panic!("{call} was refused") };
        assert_eq!(first, DriverError::new(call, ErrorCode::UNKNOWN));
    }
}

#[test]
fn a_release_that_may_have_been_made_hands_no_memory_back() {
    let (driver, sim, device) = machine();
    let page = PhysicalMemory::granularity(&device).unwrap();
    let create = || PhysicalMemory::create(&device, page).unwrap();
    let old = create();
    driver.fail("cuMemRelease", ErrorCode::UNKNOWN);
    let refused = old.release().unwrap_err();
    assert_eq!(refused.bytes, page);
    let new = create();
    assert!(refused.memory.is_none());
    drop(refused);
    assert_eq!(driver.again(), (1, vec![]));
    drop(new);
    // Where the call did nothing for certain the memory comes back, and its drop releases it.
    let old = create();
    sim.fail_nth("cuMemRelease", 1, ErrorCode::OUT_OF_MEMORY);
    let refused = old.release().unwrap_err();
    assert!(refused.memory.is_some());
    let handles = sim.check_leaks().physical_handles;
    drop(refused);
    assert_eq!(sim.check_leaks().physical_handles, handles - 1);
}
