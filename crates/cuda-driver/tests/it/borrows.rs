//! Borrowed memory of copies: no copy uses it after the borrow has ended, whatever call is refused.

use std::sync::Arc;

use cuda_driver::{
    CopyError, Device, DeviceBuffer, ErrorCode, HostAllocFlags, PinnedBuffer, Stream,
};
use cuda_sim::{LeakReport, Pace, SimConfig, SimDriver};
use kv_testkit::alloc;

const BYTES: usize = 4096;
/// More than anything else that a device frees here.
const OWN_BYTES: usize = 12_345;

/// Calls that can refuse the wait after the copy was enqueued: the wait, and the bind before it.
const REFUSALS: [(&str, u64); 2] = [("cuCtxSetCurrent", 3), ("cuStreamSynchronize", 1)];

struct Machine {
    sim: SimDriver,
    device: Device,
    stream: Stream,
    memory: DeviceBuffer,
    /// Pinned memory that has one owner after the other, as a staging buffer has.
    shared: PinnedBuffer,
}

impl Machine {
    fn new() -> Self {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        sim.set_pace(Pace::Slowest);
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let memory = DeviceBuffer::alloc(&device, BYTES as u64).unwrap();
        let shared = PinnedBuffer::alloc(&device, BYTES as u64, HostAllocFlags::CACHED).unwrap();
        Self { sim, device, stream, memory, shared }
    }

    /// The pinned memory, lent to one owner.
    fn lent(&mut self) -> &mut [u8] {
        // SAFETY: nothing that was told of this memory is pending; that the calls below leave nothing
        // pending when they return is what these tests are about.
        unsafe { self.shared.slice_mut() }
    }
}

#[test]
fn a_download_that_cannot_be_waited_for_writes_no_later_owner() {
    for (call, nth) in REFUSALS {
        let mut machine = Machine::new();
        let Machine { stream, memory, .. } = &machine;
        let (stream, span) = (stream.clone(), memory.span());
        stream.upload(span, &[0xAA; BYTES]).unwrap();
        machine.sim.fail_nth(call, nth, ErrorCode::UNKNOWN);
        let refused = stream.download(machine.lent(), span);
        assert!(refused.is_err(), "{call}");
        assert_eq!(machine.device.poison(), None, "{call}: a refusal is no loss");
        // The borrow has ended: the next owner writes.
        machine.lent().fill(0xBB);
        stream.synchronize().unwrap();
        assert!(machine.lent().iter().all(|&byte| byte == 0xBB), "{call}: another's bytes");
        assert_eq!(machine.sim.findings(), [], "{call}");
    }
}

#[test]
fn an_upload_that_cannot_be_waited_for_reads_no_later_owner() {
    for (call, nth) in REFUSALS {
        let mut machine = Machine::new();
        let (stream, span) = (machine.stream.clone(), machine.memory.span());
        stream.upload(span, &[0; BYTES]).unwrap();
        machine.lent().fill(0xAA);
        machine.sim.fail_nth(call, nth, ErrorCode::UNKNOWN);
        let refused = stream.upload(span, machine.lent());
        assert!(refused.is_err(), "{call}");
        machine.lent().fill(0xBB);
        let mut arrived = [0; BYTES];
        stream.download(&mut arrived, span).unwrap();
        assert!(!arrived.contains(&0xBB), "{call}: the copy read what another wrote later");
        assert_eq!(machine.sim.findings(), [], "{call}");
    }
}

#[test]
fn memory_of_a_copy_that_was_not_waited_for_is_freed_after_a_wait() {
    let machine = Machine::new();
    let Machine { sim, device, stream, .. } = &machine;
    // Longer, because the simulated device's memory is an allocation as well.
    let memory = DeviceBuffer::alloc(device, 1 << 20).unwrap();
    let span = memory.span().slice(0, OWN_BYTES as u64).unwrap();
    let refuse = || {
        sim.fail_nth("cuStreamSynchronize", 1, ErrorCode::UNKNOWN);
        assert!(stream.upload(span, &[1; OWN_BYTES]).is_err());
        assert_eq!(device.alive().retired, 1, "kept as long as the device may read it");
        // What the simulated copy itself holds goes with it.
        stream.synchronize().unwrap();
    };
    let waits = || sim.calls().get("cuCtxSynchronize").copied().unwrap_or(0);
    let free = |answer: Result<usize, ()>| {
        let before = alloc::bytes();
        assert_eq!(device.free_retired().map_err(drop), answer);
        before - alloc::bytes() >= OWN_BYTES as i64
    };
    refuse();
    assert_eq!(waits(), 0);
    assert!(free(Ok(1)));
    assert_eq!(waits(), 1, "after a wait");
    // A wait that is refused proves nothing: the memory is never let go of.
    refuse();
    for nth in 1..=2 {
        sim.fail_nth("cuCtxSynchronize", nth, ErrorCode::UNKNOWN);
    }
    assert!(!free(Err(())));
    assert_eq!(device.alive().retired, 0);
    // A device that stopped uses nothing any more.
    refuse();
    sim.fail_nth("cuCtxSynchronize", 1, ErrorCode::ILLEGAL_ADDRESS);
    assert!(free(Err(())));
    assert_eq!(device.alive().retired, 0);
}

#[test]
fn long_memory_travels_in_pieces_and_whole() {
    let Machine { sim, device, stream, memory, shared } = Machine::new();
    for bytes in [0, 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 3] {
        let data: Vec<u8> = (0..bytes).map(|i: usize| (i * 7 + (i >> 9)) as u8).collect();
        let long = DeviceBuffer::alloc(&device, 10 << 20).unwrap();
        let span = long.span().slice(5, bytes as u64).unwrap();
        stream.fill(long.span(), 0xEE).unwrap();
        stream.upload(span, &data).unwrap();
        let mut back = vec![0; bytes];
        stream.download(&mut back, span).unwrap();
        assert!(back == data, "{bytes} bytes");
        let mut around = [0; 5];
        stream.download(&mut around, long.span().slice(0, 5).unwrap()).unwrap();
        assert_eq!(around, [0xEE; 5]);
    }
    drop((memory, shared, stream));
    assert_eq!(device.alive().handles(), 0);
    drop(device);
    assert_eq!((sim.findings(), sim.check_leaks()), (vec![], LeakReport::default()));
}

#[test]
fn pinned_memory_of_another_driver_is_refused() {
    let [ours, theirs] = [Machine::new(), Machine::new()];
    let span = ours.memory.span();
    for refused in [
        ours.stream.copy_to_device(span, &theirs.shared, 0),
        ours.stream.copy_to_host(&theirs.shared, 0, span),
    ] {
        // Nobody would wait for this copy before the memory is freed.
        let Err(CopyError::Device(error)) = refused else { panic!("{refused:?}") };
        assert_eq!(error.driver_error().code, ErrorCode::INVALID_VALUE);
    }
    assert!(ours.stream.is_idle().unwrap());
}

#[test]
fn copies_of_no_bytes_wait_as_well() {
    let Machine { sim, stream, memory, .. } = &Machine::new();
    let none = memory.span().slice(0, 0).unwrap();
    let enqueue = || {
        stream.fill(memory.span(), 1).unwrap();
        assert!(!stream.is_idle().unwrap());
    };
    enqueue();
    stream.upload(none, &[]).unwrap();
    assert!(stream.is_idle().unwrap(), "an upload");
    enqueue();
    stream.download(&mut [], none).unwrap();
    assert!(stream.is_idle().unwrap(), "a download");
    assert_eq!(sim.findings(), []);
}

#[test]
fn kernels_do_not_reach_pinned_memory_of_another_driver() {
    let [ours, theirs] = [Machine::new(), Machine::new()];
    // Nobody would wait for this kernel before the memory is freed.
    for span in [
        theirs.shared.span(0, 64).unwrap(),
        theirs.shared.span_for(&theirs.stream, 0, 64).unwrap(),
        theirs.shared.span_for(&ours.stream, 0, 64).unwrap(),
    ] {
        let refused = CopyError::OtherDriver { stream: ours.stream.raw() };
        assert_eq!(span.device_address(&ours.stream), Err(refused));
    }
    assert!(ours.shared.span(0, 64).unwrap().device_address(&ours.stream).is_ok());
}

/// `CU_STREAM_PER_THREAD` is another stream on every thread: to no handle could it be one.
#[test]
fn the_stream_of_each_thread_is_not_adopted() {
    let Machine { sim, device, .. } = &Machine::new();
    let asked = || sim.calls().get("cuStreamGetCtx").copied().unwrap_or(0);
    let before = asked();
    // SAFETY: a name that the driver knows.
    let refused = unsafe { Stream::adopt(device, 2) }.unwrap_err();
    assert_eq!(refused.driver_error().code, ErrorCode::INVALID_HANDLE);
    assert_eq!(asked(), before, "refused whatever context is current");
    // SAFETY: the legacy default stream.
    assert!(unsafe { Stream::adopt(device, 0) }.is_ok());
}
