//! Pinned memory from the driver, from pages of our own and from regions of the host program:
//! granted options, refusals, and the moment when regions are freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cuda_driver::host_pages::{HostMemory, HostPagesOptions, HostRegion, MemoryNode, PinError};
use cuda_driver::{
    Device, DeviceBuffer, ErrorCode, HostAllocFlags, HostRegisterFlags, KernelArgs, LaunchConfig,
    Module, PinnedBuffer, Stream,
};
use cuda_sim::{FindingKind, LeakReport, SimConfig, SimDriver};

use crate::common::kernel;

const PAGES: HostMemory =
    HostMemory::Pages(HostPagesOptions { huge: true, node: MemoryNode::BesideDevice });
const PAGE: u64 = 4096;

fn machine() -> (SimDriver, Device) {
    let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    (sim, device)
}

/// Memory of the program, and how many such are alive.
#[derive(Debug)]
struct Own {
    memory: cuda_driver::host_pages::HostPages,
    alive: Arc<AtomicUsize>,
}

impl Own {
    fn new(bytes: u64, alive: &Arc<AtomicUsize>) -> Box<Self> {
        alive.fetch_add(1, Ordering::Relaxed);
        let memory = cuda_driver::host_pages::HostPages::map(bytes, false, None).unwrap();
        Box::new(Self { memory, alive: alive.clone() })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: the memory is mapped, zeroed and not moved until this is dropped, and nobody else uses it.
unsafe impl HostRegion for Own {
    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

/// Sends a pattern through `buffer` to the device and back.
fn travels(device: &Device, buffer: &mut PinnedBuffer) {
    let stream = Stream::new(device).unwrap();
    let (memory, bytes) = (DeviceBuffer::alloc(device, buffer.bytes()).unwrap(), buffer.bytes());
    let data: Vec<u8> = (0..bytes).map(|i| (i * 7 + (i >> 8)) as u8).collect();
    buffer.write_at(0, &data).unwrap();
    stream.copy_to_device(memory.span(), buffer, 0).unwrap();
    stream.synchronize().unwrap();
    buffer.write_at(0, &vec![0; bytes as usize]).unwrap();
    stream.copy_to_host(buffer, 0, memory.span()).unwrap();
    stream.synchronize().unwrap();
    let mut back = vec![0; bytes as usize];
    buffer.read_at(0, &mut back).unwrap();
    assert!(back == data);
}

#[test]
fn memory_of_every_origin_is_pinned_used_and_given_back() {
    let (sim, device) = machine();
    let ordinary = HostPagesOptions { huge: false, node: MemoryNode::Any };
    let far = HostPagesOptions { huge: true, node: MemoryNode::Number(1023) };
    let origins = [
        HostMemory::Driver(HostAllocFlags::CACHED),
        PAGES,
        HostMemory::Pages(ordinary),
        HostMemory::Pages(far),
    ];
    for memory in origins {
        for bytes in [1, PAGE, 5000, 3 << 20] {
            let mut buffer = PinnedBuffer::pin(&device, bytes, memory).unwrap();
            assert_eq!(buffer.bytes(), bytes);
            assert!(buffer.pinned_bytes() >= bytes);
            assert_eq!(buffer.pages().is_some(), matches!(memory, HostMemory::Pages(_)));
            assert!(
                buffer.write_at(bytes, &[1]).is_err(),
                "the rest of the page is not the buffer"
            );
            travels(&device, &mut buffer);
            drop(buffer);
            device.free_retired().unwrap();
            assert_eq!(sim.pinned_bytes(), 0);
        }
    }
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
}

#[test]
fn a_refusal_at_any_step_leaves_nothing() {
    for call in ["cuMemHostRegister", "cuMemHostGetDevicePointer"] {
        let (sim, device) = machine();
        sim.fail_nth(call, 1, ErrorCode::OUT_OF_MEMORY);
        let refused = PinnedBuffer::pin(&device, 2 * PAGE, PAGES).map(drop).unwrap_err();
        assert!(refused.is_out_of_memory(), "{call}: {refused:?}");
        assert!(matches!(refused, PinError::Device(_)));
        assert_eq!(sim.pinned_bytes(), 0, "{call}");
        PinnedBuffer::pin(&device, 2 * PAGE, PAGES).unwrap();
    }
    let (sim, device) = machine();
    let refused = PinnedBuffer::pin(&device, 1 << 60, PAGES).map(drop).unwrap_err();
    let PinError::Refused { bytes, .. } = refused else { panic!("{refused:?}") };
    assert!(refused.is_out_of_memory());
    assert_eq!((bytes, sim.pinned_bytes()), (1 << 60, 0));
}

#[test]
fn a_driver_that_registers_nothing_allocates() {
    for code in [ErrorCode::NOT_SUPPORTED, ErrorCode::NOT_PERMITTED] {
        let (sim, device) = machine();
        sim.fail_nth("cuMemHostRegister", 1, code);
        let mut buffer = PinnedBuffer::pin(&device, 5000, PAGES).unwrap();
        assert_eq!((buffer.pages(), buffer.pinned_bytes(), sim.pinned_bytes()), (None, 5000, 5000));
        travels(&device, &mut buffer);
    }
}

#[test]
fn a_region_is_handed_back_when_it_is_refused() {
    let (sim, device) = machine();
    let alive = Arc::new(AtomicUsize::new(0));
    for call in ["cuMemHostRegister", "cuMemHostGetDevicePointer"] {
        sim.fail_nth(call, 1, ErrorCode::OUT_OF_MEMORY);
        let region = Own::new(2 * PAGE, &alive);
        let address = region.address();
        let flags = HostRegisterFlags::SHARED;
        let refused = PinnedBuffer::register(&device, region, flags).map(drop).unwrap_err();
        assert_eq!(refused.source.driver_error().code, ErrorCode::OUT_OF_MEMORY);
        assert_eq!(
            (refused.region.as_ref().unwrap().address(), alive.load(Ordering::Relaxed)),
            (address, 1)
        );
        assert_eq!(sim.pinned_bytes(), 0, "{call}");
        drop(refused);
        assert_eq!(alive.load(Ordering::Relaxed), 0);
    }
    assert_eq!(sim.check_leaks(), LeakReport::default());
}

#[test]
fn a_region_that_stays_registered_is_not_handed_back() {
    let (sim, device) = machine();
    let alive = Arc::new(AtomicUsize::new(0));
    let flags = HostRegisterFlags::SHARED;
    sim.fail_nth("cuMemHostGetDevicePointer", 1, ErrorCode::UNKNOWN);
    sim.fail_nth("cuMemHostUnregister", 1, ErrorCode::UNKNOWN);
    let refused = PinnedBuffer::register(&device, Own::new(PAGE, &alive), flags).map(drop);
    let refused = refused.unwrap_err();
    // Unmapped while it is registered, its pages would stay pinned under what is mapped there next.
    assert!(refused.region.is_none(), "{refused:?}");
    assert_eq!((alive.load(Ordering::Relaxed), device.alive().retired), (1, 1));
    assert_eq!(device.free_retired(), Ok(1));
    assert_eq!((alive.load(Ordering::Relaxed), sim.pinned_bytes()), (0, 0));
    // The same for pages of our own.
    sim.fail_nth("cuMemHostGetDevicePointer", 1, ErrorCode::UNKNOWN);
    sim.fail_nth("cuMemHostUnregister", 1, ErrorCode::UNKNOWN);
    assert!(PinnedBuffer::pin(&device, PAGE, PAGES).is_err());
    assert_eq!(device.free_retired(), Ok(1));
    assert_eq!(sim.check_leaks(), LeakReport::default());
}

#[test]
fn a_region_outlives_the_work_that_uses_it() {
    let (sim, device) = machine();
    let alive = Arc::new(AtomicUsize::new(0));
    let stream = Stream::new(&device).unwrap();
    let memory = DeviceBuffer::alloc(&device, PAGE).unwrap();
    let region = Own::new(PAGE, &alive);
    let mut buffer = PinnedBuffer::register(&device, region, HostRegisterFlags::SHARED).unwrap();
    assert_eq!((buffer.bytes(), buffer.pages()), (PAGE, None));
    buffer.write_at(0, &[5; PAGE as usize]).unwrap();
    sim.hold(stream.raw());
    stream.copy_to_device(memory.span(), &buffer, 0).unwrap();
    drop(buffer);
    assert_eq!(alive.load(Ordering::Relaxed), 1, "a drop waits for nothing and frees nothing");
    sim.release_hold(stream.raw());
    // The copy has not run: unregistering waits for it.
    assert_eq!(device.free_retired(), Ok(1));
    assert_eq!((alive.load(Ordering::Relaxed), sim.pinned_bytes()), (0, 0));
    let mut arrived = [0; PAGE as usize];
    stream.download(&mut arrived, memory.span()).unwrap();
    assert_eq!(arrived, [5; PAGE as usize]);
}

#[test]
fn a_region_that_cannot_be_unregistered_is_never_let_go_of() {
    let (sim, device) = machine();
    let alive = Arc::new(AtomicUsize::new(0));
    let region = Own::new(PAGE, &alive);
    drop(PinnedBuffer::register(&device, region, HostRegisterFlags::SHARED).unwrap());
    for nth in 1..=2 {
        sim.fail_nth("cuMemHostUnregister", nth, ErrorCode::UNKNOWN);
    }
    assert!(device.free_retired().is_err());
    assert_eq!(alive.load(Ordering::Relaxed), 1, "the device may still use it");
    assert_eq!(device.free_retired(), Ok(0), "tried twice");
}

#[test]
fn closing_one_of_two_devices_on_a_context_keeps_the_others_copies_waited_for() {
    let (sim, device) = machine();
    let twin = Device::open(device.driver().clone(), 0).unwrap();
    let far = Device::open(device.driver().clone(), 1).unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let (stream, memory) = (Stream::new(&twin).unwrap(), DeviceBuffer::alloc(&twin, PAGE).unwrap());
    let mut buffer =
        PinnedBuffer::register(&far, Own::new(PAGE, &alive), HostRegisterFlags::SHARED).unwrap();
    buffer.write_at(0, &[5; PAGE as usize]).unwrap();
    stream.copy_to_device(memory.span(), &buffer, 0).unwrap();
    device.close().unwrap();
    drop(buffer);
    // The copy has not run. It is of the twin's context, which was not closed.
    assert_eq!(far.free_retired(), Ok(1));
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    let mut arrived = [0; PAGE as usize];
    stream.download(&mut arrived, memory.span()).unwrap();
    assert_eq!(arrived, [5; PAGE as usize]);
    assert_eq!(sim.findings(), []);
}

#[test]
fn a_lost_device_lets_go_of_its_regions() {
    let (sim, device) = machine();
    let alive = Arc::new(AtomicUsize::new(0));
    let stream = Stream::new(&device).unwrap();
    let region = Own::new(PAGE, &alive);
    let buffer = PinnedBuffer::register(&device, region, HostRegisterFlags::SHARED).unwrap();
    sim.lose_device(0, 1, ErrorCode::ILLEGAL_ADDRESS);
    let memory = DeviceBuffer::alloc(&device, PAGE).unwrap();
    stream.copy_to_device(memory.span(), &buffer, 0).unwrap();
    assert!(stream.synchronize().is_err());
    drop((buffer, memory, stream));
    drop(device);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

#[test]
fn a_kernel_that_reads_memory_after_it_was_unregistered_is_found() {
    let (sim, device) = machine();
    let alive = Arc::new(AtomicUsize::new(0));
    let stream = Stream::new(&device).unwrap();
    let kernel = Module::load(&device, kernel::PTX).unwrap().kernel(kernel::NAME).unwrap();
    let buffer =
        PinnedBuffer::register(&device, Own::new(PAGE, &alive), HostRegisterFlags::SHARED).unwrap();
    let late = buffer.device_address();
    drop(buffer);
    device.free_retired().unwrap();
    let args = KernelArgs::new().arg(late).arg(5u32).arg(64u32);
    // SAFETY: the kernel's three parameters; that it uses memory which is gone is what the simulated
    // device, which follows no such address, is to find.
    unsafe { kernel.launch(&stream, &LaunchConfig::linear(1, 64), &args) }.unwrap();
    assert!(stream.synchronize().is_err());
    let findings = sim.findings();
    assert!(findings.iter().any(|found| found.kind == FindingKind::IllegalAccess), "{findings:?}");
}
