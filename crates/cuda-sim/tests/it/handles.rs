//! The handles of `cuda-driver` on a simulated device leave no objects behind.

use std::sync::Arc;

use cuda_driver::{
    AccessDesc, AddressRange, Device, DeviceError, ErrorCode, Event, PhysicalMemory, Stream,
};
use cuda_sim::{FindingKind, Pace, RaceCheck, SimConfig, SimDriver};

fn open() -> (SimDriver, Device) {
    let races = RaceCheck::Report;
    let sim = SimDriver::new(SimConfig { races, ..SimConfig::default() }).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    (sim, device)
}

#[test]
fn a_fault_poisons_the_handle_and_clean_up_still_finishes() {
    let (sim, device) = open();
    sim.set_pace(Pace::Slowest);
    let stream = Stream::new(&device).unwrap();
    let page = PhysicalMemory::granularity(&device).unwrap();
    let range = AddressRange::reserve(&device, page).unwrap();
    let memory = PhysicalMemory::create(&device, page).unwrap();
    range.map(0, &memory).unwrap();
    range.set_access(0, page, &[AccessDesc { device: 0 }]).unwrap();
    stream.fill(range.span(0, page).unwrap(), 1).unwrap();
    // The unmap is not ordered after the fill, which has not run.
    range.unmap(0, page).unwrap();
    let DeviceError::Driver(error) = stream.synchronize().unwrap_err() else {
        panic!("the first error comes from the driver")
    };
    assert_eq!(error.code, ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(device.poison(), Some(error));
    // Later operations fail at once, without a call of the driver, which would return the same
    // error.
    let calls = sim.calls();
    assert_eq!(stream.synchronize(), Err(DeviceError::Poisoned { first: error }));
    assert_eq!(sim.calls(), calls);
    drop((memory, range, stream, device));
    let kinds: Vec<_> = sim.findings().iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [FindingKind::IllegalAccess, FindingKind::Race]);
    assert!(sim.check_leaks().is_clean());
}

#[test]
fn handles_of_another_driver_are_refused() {
    // Two machines with the same seed give out the same numbers, so a handle of the other machine
    // would be valid here.
    let [ours, theirs] = [(); 2].map(|()| {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        Device::open(Arc::new(sim), 0).unwrap()
    });
    let page = PhysicalMemory::granularity(&ours).unwrap();
    let range = AddressRange::reserve(&ours, page).unwrap();
    let [mine, foreign] =
        [&ours, &theirs].map(|device| PhysicalMemory::create(device, page).unwrap());
    let refused = |answer: Result<(), DeviceError>| answer.unwrap_err().driver_error();
    let error = refused(range.map(0, &foreign));
    assert_eq!((error.call, error.code), ("cuMemMap", ErrorCode::INVALID_VALUE));

    let streams = [&ours, &theirs].map(|device| Stream::new(device).unwrap());
    let events = [&ours, &theirs].map(|device| Event::with_timing(device).unwrap());
    assert_eq!(events[0].raw(), events[1].raw());
    for (event, stream) in events.iter().zip(&streams) {
        event.record(stream).unwrap();
        event.synchronize().unwrap();
    }
    let elapsed = events[0].elapsed_ms_since(&events[1]).map(|_| ());
    for answer in [streams[0].wait(&events[1]), events[0].record(&streams[1]), elapsed] {
        assert_eq!(refused(answer).code, ErrorCode::INVALID_HANDLE);
    }
    range.map(0, &mine).unwrap();
    range.unmap(0, page).unwrap();
    assert_eq!(mine.leak(), foreign.leak(), "the foreign handle was valid here");
}

#[test]
fn a_release_that_did_nothing_gives_the_memory_back() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    let page = PhysicalMemory::granularity(&device).unwrap();
    let memory = PhysicalMemory::create(&device, page).unwrap();
    sim.fail_nth("cuMemRelease", 1, ErrorCode::OUT_OF_MEMORY);
    let refused = memory.release().unwrap_err();
    assert_eq!(refused.source.driver_error().code, ErrorCode::OUT_OF_MEMORY);
    assert_eq!(sim.check_leaks().physical_handles, 1);
    refused.memory.unwrap().release().unwrap();
    assert_eq!(sim.check_leaks().physical_handles, 0);
    let made = sim.calls()["cuMemRelease"];

    let handle = PhysicalMemory::create(&device, page).unwrap().leak();
    assert_eq!((sim.check_leaks().physical_handles, sim.calls()["cuMemRelease"]), (1, made));
    // SAFETY: the handle is live, since it was leaked.
    device.run(|driver| unsafe { driver.mem_release(handle) }).unwrap();
}
