//! Every size and count of this crate's functions, at 0, 1, an ordinary number, the largest, and
//! where sums overflow: each is served or refused with a typed error, in bounded memory and time.

use std::sync::Arc;

use cuda_driver::host_pages::{HostMemory, HostPages, HostPagesOptions, HostRegion, MemoryNode};
use cuda_driver::{
    AccessDesc, AddressRange, AllocationProp, CopyError, Device, DeviceAttribute, DeviceBuffer,
    DeviceError, DeviceSpan, ErrorCode, HostAllocFlags, HostRegisterFlags, KernelArgs,
    LaunchConfig, Module, PeerAttribute, PhysicalMemory, PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};

use crate::common::kernel;

const SIZES: [u64; 16] = [
    0,
    1,
    255,
    4095,
    4096,
    4097,
    2 << 20,
    1 << 40,
    1 << 47,
    (1 << 62) + 1,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - (4 << 20),
    u64::MAX - 4095,
    u64::MAX - 1,
    u64::MAX,
];
/// Bytes of what offsets are tried on.
const MEMORY_BYTES: u64 = 4096;

fn machine() -> (SimDriver, Device, Stream) {
    let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
    sim.register_kernels(&[kernel::REFERENCE]);
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    let stream = Stream::new(&device).unwrap();
    (sim, device, stream)
}

fn assert_clean((sim, device, stream): (SimDriver, Device, Stream)) {
    drop(stream);
    device.close().unwrap();
    assert_eq!(sim.findings(), []);
    assert!(sim.check_leaks().is_clean(), "{}", sim.check_leaks());
}

fn inside(offset: u64, bytes: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= MEMORY_BYTES)
}

#[test]
fn ordinals_and_attributes() {
    let machine = machine();
    let (_, device, _) = &machine;
    for ordinal in [i32::MIN, -1, 0, 1, 2, i32::MAX] {
        let opened = Device::open(device.driver().clone(), ordinal).map(|opened| opened.ordinal());
        assert_eq!(opened.is_ok(), [0, 1].contains(&ordinal), "{ordinal}");
    }
    let peer = Device::open(device.driver().clone(), 1).unwrap();
    for number in [0, 1, 16, 1 << 20, u32::MAX - 1, u32::MAX] {
        let answer = device.attribute(DeviceAttribute(number));
        assert_eq!(answer.is_ok(), matches!(number, 1 | 16), "{number}: {answer:?}");
        let answer = device.peer_attribute(&peer, PeerAttribute(number));
        assert_eq!(answer.is_ok(), number == 1, "{number}: {answer:?}");
    }
    drop(peer);
    assert_clean(machine);
}

#[test]
fn physical_memory_is_of_a_device_that_is_there() {
    let machine = machine();
    let (_, device, _) = &machine;
    let driver = device.driver();
    for ordinal in [i32::MIN, -1, 0, 1, 2, i32::MAX] {
        let made = driver.mem_create(2 << 20, AllocationProp::on(ordinal));
        assert_eq!(made.is_ok(), [0, 1].contains(&ordinal), "{ordinal}: {made:?}");
        if let Ok(handle) = made {
            // SAFETY: the handle was just made, and nobody else has it.
            unsafe { driver.mem_release(handle) }.unwrap();
        }
    }
    assert_clean(machine);
}

#[test]
fn memory_of_any_size_is_had_or_refused() {
    let machine = machine();
    let (sim, device, _) = &machine;
    let ordinary = HostMemory::Pages(HostPagesOptions { huge: false, node: MemoryNode::Any });
    let node = HostPagesOptions { huge: true, node: MemoryNode::Number(u32::MAX) };
    let origins = [HostMemory::Driver(HostAllocFlags::CACHED), ordinary, HostMemory::Pages(node)];
    for bytes in SIZES {
        let small = (1..=2 << 20).contains(&bytes);
        assert_eq!(DeviceBuffer::alloc(device, bytes).is_ok(), small, "{bytes}");
        let flags = HostAllocFlags::CACHED;
        assert_eq!(PinnedBuffer::alloc(device, bytes, flags).is_ok(), small, "{bytes}");
        for memory in origins {
            assert_eq!(PinnedBuffer::pin(device, bytes, memory).is_ok(), small, "{bytes}");
        }
        for huge in [false, true] {
            for node in [None, Some(0), Some(1023), Some(1024), Some(u32::MAX)] {
                assert_eq!(HostPages::map(bytes, huge, node).is_ok(), small, "{bytes}");
                let mapped = HostPages::map_unpopulated(bytes, huge, node);
                assert_eq!(mapped.is_ok(), small, "{bytes}");
                if let Ok(pages) = mapped {
                    for (offset, length) in [(0, bytes), (bytes, u64::MAX), (u64::MAX, bytes)] {
                        assert_eq!(pages.populate(offset, length), Ok(()));
                    }
                }
            }
        }
        assert_eq!(PhysicalMemory::create(device, bytes).is_ok(), bytes == 2 << 20, "{bytes}");
        device.free_retired().unwrap();
        // The simulated device keeps a place for each page of a range: 1 GiB for the longest there is.
        if bytes != 1 << 47 {
            let reserved = AddressRange::reserve(device, bytes);
            assert_eq!(reserved.is_ok(), [2 << 20, 1 << 40].contains(&bytes), "{bytes}");
        }
    }
    assert_eq!(sim.pinned_bytes(), 0);
    assert_clean(machine);
}

/// Memory of whatever length it says.
#[derive(Debug)]
struct Claimed(HostPages, u64);

// SAFETY: mapped, zeroed and not moved until it is dropped. What it says beyond its pages reaches the
// simulated device only, which is asked to refuse it before anything is read.
unsafe impl HostRegion for Claimed {
    fn address(&self) -> u64 {
        self.0.address()
    }

    fn bytes(&self) -> u64 {
        self.1
    }
}

#[test]
fn regions_of_no_bytes_or_of_more_than_there_are_addresses_are_refused() {
    let machine = machine();
    for bytes in [0, 1, 4096, 1 << 63, u64::MAX - 4095, u64::MAX] {
        let region = Box::new(Claimed(HostPages::map(4096, false, None).unwrap(), bytes));
        let registered =
            PinnedBuffer::register(&machine.1, region, HostRegisterFlags::SHARED).map(drop);
        assert_eq!(registered.is_ok(), (1..=4096).contains(&bytes), "{bytes}: {registered:?}");
    }
    assert_clean(machine);
}

#[test]
fn spans_and_copies_at_any_offset_stay_inside_or_are_refused() {
    let machine = machine();
    let (sim, device, stream) = &machine;
    let far = Device::open(device.driver().clone(), 1).unwrap();
    let far_memory = DeviceBuffer::alloc(&far, MEMORY_BYTES).unwrap();
    let memory = DeviceBuffer::alloc(device, MEMORY_BYTES).unwrap();
    let flags = HostAllocFlags::CACHED;
    let mut pinned = PinnedBuffer::alloc(device, MEMORY_BYTES, flags).unwrap();
    stream.fill(memory.span(), 0).unwrap();
    for offset in SIZES {
        for bytes in SIZES {
            let fits = inside(offset, bytes);
            // SAFETY: used by nobody.
            let raw = unsafe { DeviceSpan::from_raw(offset, bytes) };
            assert_eq!(raw.is_ok(), offset.checked_add(bytes).is_some());
            let span = memory.span().slice(offset, bytes);
            assert_eq!(span.is_ok(), fits, "{bytes} at {offset}");
            assert_eq!(pinned.span(offset, bytes).is_ok(), fits);
            assert_eq!(pinned.span_for(stream, offset, bytes).is_ok(), fits);
            assert_eq!(PinnedBuffer::lend(&pinned, offset, bytes, false).is_ok(), fits);
            let whole = pinned.span(0, MEMORY_BYTES).unwrap();
            assert_eq!(whole.slice(offset, bytes).is_ok(), fits);
            if bytes > MEMORY_BYTES {
                continue;
            }
            let mut data = vec![1; bytes as usize];
            assert_eq!(pinned.read_at(offset, &mut data).is_ok(), fits);
            assert_eq!(pinned.write_at(offset, &data).is_ok(), fits);
            assert_eq!(pinned.write_shared(offset, &data).is_ok(), fits);
            let front = memory.span().slice(0, bytes).unwrap();
            assert_eq!(stream.copy_to_device(front, &pinned, offset).is_ok(), fits);
            assert_eq!(stream.copy_to_host(&pinned, offset, front).is_ok(), fits);
            stream.synchronize().unwrap();
            let Ok(span) = span else { continue };
            stream.fill(span, 1).unwrap();
            stream.upload(span, &data).unwrap();
            stream.download(&mut data, span).unwrap();
            stream.copy_on_device(span, span).unwrap();
            let there = far_memory.span().slice(offset, bytes).unwrap();
            stream.copy_between((&far, there), (device, span)).unwrap();
            let longer = [0; MEMORY_BYTES as usize + 1];
            assert!(matches!(stream.upload(span, &longer), Err(CopyError::Lengths { .. })));
            let mut longer = longer;
            assert!(matches!(stream.download(&mut longer, span), Err(CopyError::Lengths { .. })));
        }
    }
    stream.synchronize().unwrap();
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
    drop((pinned, memory, far_memory));
    far.close().unwrap();
    assert_clean(machine);
}

#[test]
fn a_span_is_for_its_stream_whatever_handle_names_it() {
    let machine = machine();
    let (_, device, stream) = &machine;
    let (other, twin) = (Stream::new(device).unwrap(), stream.clone());
    // SAFETY: `stream` outlives it.
    let adopted = unsafe { Stream::adopt(device, stream.raw()) }.unwrap();
    let flags = HostAllocFlags::CACHED;
    let pinned = PinnedBuffer::alloc(device, MEMORY_BYTES, flags).unwrap();
    let span = pinned.span_for(stream, 64, 128).unwrap();
    let address = pinned.device_address() + 64;
    for same in [stream, &twin, &adopted] {
        assert_eq!(span.device_address(same), Ok(address));
        assert_eq!(span.slice(8, 8).unwrap().device_address(same), Ok(address + 8));
    }
    // Two machines of one seed give out the same numbers.
    let theirs = self::machine();
    assert_eq!(theirs.2.raw(), stream.raw());
    assert_eq!(theirs.1.context(), device.context());
    assert!(!device.shares_context(&theirs.1) && device.shares_context(device));
    let unknown = CopyError::OtherStream { reader: stream.raw(), stream: other.raw() };
    let foreign = CopyError::OtherDriver { stream: theirs.2.raw() };
    for (at, refused, plain) in [(&other, unknown, Ok(address)), (&theirs.2, foreign, Err(foreign))]
    {
        assert_eq!(span.device_address(at), Err(refused));
        assert_eq!(span.slice(8, 8).unwrap().device_address(at), Err(refused));
        assert_eq!(pinned.span(64, 128).unwrap().device_address(at), plain);
    }
    assert_eq!(span.raw_address(), address);
    drop((pinned, other, twin, adopted));
    assert_clean(theirs);
    assert_clean(machine);
}

#[test]
fn memory_of_the_program_is_looked_up_at_any_address() {
    let machine = machine();
    let memory = DeviceBuffer::alloc(&machine.1, MEMORY_BYTES).unwrap();
    for address in SIZES {
        for bytes in SIZES {
            // No bytes are anywhere.
            // SAFETY: nothing is enqueued with the span.
            let span = unsafe { DeviceSpan::of_device(&machine.1, address, bytes) };
            assert_eq!(span.is_ok(), bytes == 0, "{bytes} at {address}: {span:?}");
        }
    }
    for bytes in SIZES {
        // SAFETY: as above.
        let span = unsafe { DeviceSpan::of_device(&machine.1, memory.address(), bytes) };
        assert_eq!(span.is_ok(), bytes <= MEMORY_BYTES, "{bytes}: {span:?}");
    }
    drop(memory);
    assert_clean(machine);
}

#[test]
fn mappings_at_any_offset_are_made_or_refused() {
    let machine = machine();
    let (_, device, _) = &machine;
    let page = PhysicalMemory::granularity(device).unwrap();
    let range = AddressRange::reserve(device, 2 * page).unwrap();
    let memory = PhysicalMemory::create(device, page).unwrap();
    let access = |device| [AccessDesc { device }];
    for offset in SIZES.into_iter().chain([page, 2 * page]) {
        let mapped = range.map(offset, &memory);
        assert_eq!(mapped.is_ok(), [0, page].contains(&offset), "{offset}: {mapped:?}");
        for bytes in SIZES {
            let fits = offset.checked_add(bytes).is_some_and(|end| end <= 2 * page);
            assert_eq!(range.span(offset, bytes).is_ok(), fits);
            let whole = mapped.is_ok() && bytes == page;
            assert_eq!(range.set_access(offset, bytes, &access(0)).is_ok(), whole, "{bytes}");
            for device in [i32::MIN, -1, 2, i32::MAX] {
                assert!(range.set_access(offset, bytes, &access(device)).is_err());
            }
            assert!(whole || range.unmap(offset, bytes).is_err(), "{bytes} at {offset}");
        }
        if mapped.is_ok() {
            range.unmap(offset, page).unwrap();
        }
    }
    drop((memory, range));
    assert_clean(machine);
}

#[test]
fn launches_of_any_geometry_run_or_are_refused() {
    let machine = machine();
    let (_, device, stream) = &machine;
    let kernel = Module::load(device, kernel::PTX).unwrap().kernel(kernel::NAME).unwrap();
    let memory = DeviceBuffer::alloc(device, 64).unwrap();
    let args = KernelArgs::new().arg(memory.address()).arg(1u32).arg(0u32);
    let counts = [0, 1, 32, 1024, 1025, 65_535, 65_536, i32::MAX as u32, u32::MAX];
    let plain = LaunchConfig::linear(1, 1);
    for count in counts {
        for axis in 0..3 {
            let (mut grid, mut block) = (plain, plain);
            grid.grid[axis] = count;
            block.block[axis] = count;
            let shared = LaunchConfig { shared_bytes: count, ..plain };
            let all = LaunchConfig { grid: [count; 3], block: [count; 3], shared_bytes: count };
            let most = [i32::MAX as u32, 65_535, 65_535][axis];
            let threads = [1024, 1024, 64][axis];
            let of_grid = (1..=most).contains(&count);
            let of_block = (1..=threads).contains(&count);
            for (config, possible) in
                [(grid, of_grid), (block, of_block), (shared, count <= 48 << 10), (all, count == 1)]
            {
                // SAFETY: the kernel's three parameters; it writes nothing.
                let launched = unsafe { kernel.launch(stream, &config, &args) };
                assert_eq!(launched.is_ok(), possible, "{config:?}: {launched:?}");
                // SAFETY: as above.
                let prepared = unsafe { kernel.prepare(&config, &args) };
                let Ok(prepared) = prepared else { continue };
                // SAFETY: as above.
                let launched = unsafe { prepared.launch(stream) };
                assert_eq!(launched.is_ok(), possible, "prepared, {config:?}: {launched:?}");
            }
        }
    }
    stream.synchronize().unwrap();
    let mut many = KernelArgs::new();
    for number in 0..10_000u64 {
        many = many.arg(number);
    }
    assert_eq!((many.count(), many.get::<u64>(9_999)), (10_000, Some(9_999)));
    for index in [10_000, usize::MAX] {
        assert_eq!((many.bytes(index), many.get::<u64>(index)), (None, None));
    }
    for ptx in ["", "\0", &"x".repeat(1 << 20)] {
        assert!(Module::load(device, ptx).is_err());
    }
    drop((kernel, memory));
    assert_clean(machine);
}

#[test]
fn refusals_for_their_size_are_no_loss() {
    let machine = machine();
    let (_, device, _) = &machine;
    let refused = DeviceBuffer::alloc(device, u64::MAX).map(drop).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused:?}");
    let refused = DeviceBuffer::alloc(device, 0).map(drop).unwrap_err();
    assert!(
        matches!(refused, DeviceError::Driver(error) if error.code == ErrorCode::INVALID_VALUE)
    );
    assert_eq!(device.poison(), None);
    assert_clean(machine);
}
