//! Allocations, pinned memory and the checks of every access.

use crate::common::*;
use cuda_driver::reference::{KernelReference, ReferenceError};
use cuda_driver::{AccessDesc, Driver, ErrorCode, HostAllocFlags, KernelArgs};
use cuda_sim::{FindingKind, Pace, RaceCheck, SimConfig};

#[test]
fn allocations_are_aligned_counted_and_never_zero_at_first() {
    let sim = seeded(4);
    let free_bytes = sim.mem_get_info().unwrap().0;
    let first = sim.mem_alloc(1).unwrap();
    let second = sim.mem_alloc(513).unwrap();
    assert_eq!((first % 256, second % 256), (0, 0));
    assert_eq!(sim.device_used_bytes(0), 512 + 1024);
    assert_eq!(sim.mem_get_info().unwrap().0, free_bytes - 512 - 1024);
    assert!(download(&sim, second, 513, 0).unwrap().iter().all(|&byte| byte != 0));
    free(&sim, first).unwrap();
    assert_eq!(code(free(&sim, first)), ErrorCode::INVALID_VALUE);
    assert_eq!(code(free(&sim, second + 512)), ErrorCode::INVALID_VALUE);
    assert_eq!(code(sim.mem_alloc(0)), ErrorCode::INVALID_VALUE);
    assert_eq!(code(sim.mem_alloc(u64::MAX)), ErrorCode::OUT_OF_MEMORY);
}

#[test]
fn fresh_memory_depends_on_the_seed() {
    let first_byte = |seed| {
        let sim = seeded(seed);
        let address = sim.mem_alloc(1).unwrap();
        download(&sim, address, 1, 0).unwrap()[0]
    };
    assert_eq!(first_byte(1), first_byte(1));
    assert!((0..20).any(|seed| first_byte(seed) != first_byte(1)));
}

#[test]
fn memory_is_taken_only_when_touched() {
    let sim = machine(SimConfig { device_bytes: 1 << 42, ..SimConfig::default() });
    let address = sim.mem_alloc(1 << 41).unwrap();
    fill(&sim, address + (1 << 40) - 3, 6, 6, 0).unwrap();
    assert_eq!(download(&sim, address + (1 << 40) - 3, 6, 0).unwrap(), [6; 6]);
}

#[test]
fn a_copy_of_a_range_that_is_not_of_one_allocation_is_refused() {
    let sim = seeded(0);
    let (first, second) = (sim.mem_alloc(512).unwrap(), sim.mem_alloc(512).unwrap());
    assert_eq!(code(fill(&sim, first, 0, 513, 0)), ErrorCode::INVALID_VALUE);
    assert_eq!(code(copy(&sim, second - 1, first, 1, 0)), ErrorCode::INVALID_VALUE);
    assert_eq!(code(upload(&sim, first + 512, &[1], 0)), ErrorCode::INVALID_VALUE);
    assert_eq!(code(download(&sim, u64::MAX - 4, 8, 0)), ErrorCode::INVALID_VALUE);
    let findings = sim.findings();
    assert!(findings.iter().all(|finding| finding.kind == FindingKind::InvalidRange));
    let misses: Vec<_> = findings.iter().map(|finding| finding.nearest.unwrap()).collect();
    assert_eq!((misses[0].base, misses[0].missed_by, misses[0].before), (first, 1, false));
    assert_eq!((misses[1].base, misses[1].missed_by, misses[1].before), (second, 1, true));
    assert_eq!((misses[2].base, misses[2].missed_by, misses[2].before), (first, 1, false));
    // A refused call does not lose the device.
    fill(&sim, first, 3, 512, 0).unwrap();
    assert_eq!(download(&sim, first, 1, 0).unwrap(), [3]);
}

#[test]
fn a_store_that_faults_writes_nothing() {
    const HALF_BAD: &[KernelReference] = &[KernelReference {
        name: "add_one",
        run: |memory, _, args| {
            let address = args.get::<u64>(0).ok_or(ReferenceError::Argument { index: 0 })?;
            let before = memory.load(address, 8)?.into_owned();
            assert!(memory.store(address, &[0; 9]).is_err());
            assert_eq!(&memory.load(address, 8)?[..], &before[..]);
            Ok(memory.store(address, &[0; 8])?)
        },
    }];
    let sim = seeded(0);
    sim.register_kernels(HALF_BAD);
    let address = sim.mem_alloc(8).unwrap();
    let function = kernel(&sim, "add_one");
    launch(&sim, function, &KernelArgs::new().arg(address), 0).unwrap();
    assert_eq!(download(&sim, address, 8, 0).unwrap(), [0; 8]);
}

#[test]
fn a_copy_over_itself_is_found() {
    let sim = seeded(0);
    let (memory, host) = (sim.mem_alloc(4096).unwrap(), pinned(&sim, 4096));
    fill(&sim, memory, 1, 4096, 0).unwrap();
    for (to, from, overlaps) in [
        (memory + 64, memory, true),
        (memory, memory + 127, true),
        (memory, memory + 128, false),
        (memory + 128, memory, false),
        // Each byte is copied to itself.
        (memory, memory, false),
        (host, host + 1, true),
    ] {
        let before = sim.findings().len();
        copy(&sim, to, from, 128, 0).unwrap();
        let found = sim.findings();
        let kinds: Vec<_> = found[before..].iter().map(|one| (one.kind, one.address)).collect();
        let expected = [(FindingKind::Conflict, Some(to))];
        assert_eq!(kinds, if overlaps { &expected[..] } else { &[] }, "{to:#x} {from:#x}");
    }
    // One page at two addresses is one memory.
    let first = reserve(&sim, 2);
    let page = SimConfig::default().granularity;
    let handle = map_page(&sim, first);
    map(&sim, first + page, page, 0, handle).unwrap();
    sim.mem_set_access(first, 2 * page, &[AccessDesc { device: 0 }]).unwrap();
    fill(&sim, first, 1, page, 0).unwrap();
    let before = sim.findings().len();
    copy(&sim, first + page, first, page, 0).unwrap();
    assert_eq!(sim.findings().len(), before);
    copy(&sim, first + page + 8, first, 64, 0).unwrap();
    assert_eq!(sim.findings().len(), before + 1);
    sync(&sim, 0).unwrap();
}

#[test]
fn use_after_free_names_the_freed_allocation() {
    let sim = seeded(0);
    let (freed, to) = (sim.mem_alloc(64).unwrap(), sim.mem_alloc(64).unwrap());
    free(&sim, freed).unwrap();
    launch_copy(&sim, (to, freed), 16, 0).unwrap();
    assert_eq!(code(sync(&sim, 0)), ErrorCode::ILLEGAL_ADDRESS);
    let nearest = sim.findings()[0].nearest.unwrap();
    assert_eq!((nearest.base, nearest.freed, nearest.missed_by), (freed, true, 0));
}

#[test]
fn pinned_memory_freed_with_its_context_is_missed_by_another_devices_copy() {
    let (pace, races) = (Pace::Slowest, RaceCheck::Report);
    let sim = machine(SimConfig { devices: 2, pace, races, ..SimConfig::default() });
    let host = pinned(&sim, 64);
    bind(&sim, 1);
    let to = sim.mem_alloc(64).unwrap();
    upload_async(&sim, to, host, 64, 0).unwrap();
    // SAFETY: no handle of device 0's context is used again.
    unsafe { sim.device_primary_ctx_release(0) }.unwrap();
    assert_eq!(code(sync(&sim, 0)), ErrorCode::ILLEGAL_ADDRESS);
    let kinds: Vec<_> = sim.findings().iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [FindingKind::LostObjects, FindingKind::IllegalAccess, FindingKind::Race]);
}

#[test]
fn copies_of_freed_or_partly_pinned_host_memory_are_refused() {
    let sim = seeded(0);
    let (host, to) = (pinned(&sim, 4096), sim.mem_alloc(8192).unwrap());
    // SAFETY: the copy is refused before it reads anything.
    let beyond = unsafe { sim.memcpy_htod_async(to, host + 1, 4096, 0) };
    assert_eq!(code(beyond), ErrorCode::INVALID_VALUE);
    free_host(&sim, host).unwrap();
    assert_eq!(code(upload_async(&sim, to, host, 16, 0)), ErrorCode::INVALID_VALUE);
    // Device memory is in the same address space.
    upload_async(&sim, to, to, 16, 0).unwrap();
    assert_eq!(code(upload_async(&sim, to, 0, 16, 0)), ErrorCode::INVALID_VALUE);
    let kinds: Vec<_> = sim.findings().iter().map(|finding| finding.kind).collect();
    use FindingKind::{FreedHostMemory, InvalidRange};
    assert_eq!(kinds, [InvalidRange, FreedHostMemory, InvalidRange]);
}

#[test]
fn pinned_memory_has_a_limit() {
    let sim = machine(SimConfig { pinned_bytes: 8192, ..SimConfig::default() });
    let host = pinned(&sim, 4096);
    assert_eq!(sim.pinned_bytes(), 4096);
    let too_much = sim.mem_host_alloc(4097, HostAllocFlags::CACHED);
    assert_eq!(code(too_much), ErrorCode::OUT_OF_MEMORY);
    free_host(&sim, host).unwrap();
    assert_eq!(sim.pinned_bytes(), 0);
}

#[test]
fn large_copies_keep_every_byte() {
    let sim = seeded(0);
    let bytes = 5 * PAGE as usize + 123;
    let data: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251) as u8).collect();
    let host = pinned(&sim, bytes as u64);
    host_write(host, &data);
    let first = sim.mem_alloc(bytes as u64 + 9).unwrap();
    let second = sim.mem_alloc(bytes as u64 + 9).unwrap();
    upload_async(&sim, first + 9, host, bytes as u64, 0).unwrap();
    copy(&sim, second + 1, first + 9, bytes as u64, 0).unwrap();
    assert_eq!(download(&sim, second + 1, bytes, 0).unwrap(), data);
    host_write(host, &vec![0; bytes]);
    // SAFETY: the host reads the memory only after the synchronisation.
    unsafe { sim.memcpy_dtoh_async(host, second + 1, bytes as u64, 0) }.unwrap();
    sync(&sim, 0).unwrap();
    assert_eq!(host_read(host, bytes), data);
}

#[test]
fn a_reference_may_read_on_several_threads() {
    const SUM: &[KernelReference] = &[KernelReference {
        name: "add_one",
        run: |memory, _, args| {
            let address = args.get::<u64>(0).ok_or(ReferenceError::Argument { index: 0 })?;
            let view = &*memory;
            let sum = |half: u64| -> Result<u64, ReferenceError> {
                let bytes = view.load(address + half * PAGE, PAGE)?;
                Ok(bytes.iter().map(|&byte| u64::from(byte)).sum())
            };
            let total = std::thread::scope(|scope| {
                let first = scope.spawn(|| sum(0));
                Ok::<_, ReferenceError>(sum(1)? + first.join().unwrap()?)
            })?;
            Ok(memory.store(address, &total.to_le_bytes())?)
        },
    }];
    let sim = seeded(0);
    sim.register_kernels(SUM);
    let address = sim.mem_alloc(2 * PAGE).unwrap();
    fill(&sim, address, 3, 2 * PAGE, 0).unwrap();
    let function = kernel(&sim, "add_one");
    launch(&sim, function, &KernelArgs::new().arg(address), 0).unwrap();
    assert_eq!(download(&sim, address, 8, 0).unwrap(), (6 * PAGE).to_le_bytes());
}
