//! Groups that share device memory by granules.

use kv_plane::manager::GranuleMove;

use super::faults::differences;
use crate::prelude::*;

const FULL: GroupId = GroupId(0);
const WINDOW: GroupId = GroupId(1);

/// Six granules: of a page for two full blocks on each of two devices, or for one block of a window.
fn shared() -> KvCacheOptions {
    let mut options = options(shape(2, 256, 4), 12, 0);
    let window = GroupKind::Window { tokens: 6, sinks: 0 };
    options.groups.push(group(window, shape(4, 256, 4), 6, 0));
    options.shared = Some(SharedMemory { granules: 6, granule_blocks: vec![2, 1] });
    options
}

/// A worker of so many devices, in this memory.
fn worker(seed: u64, devices: u32) -> Told {
    Told::new(Machine::new(seed, devices, small()), shared())
}

/// A plan that only moves a granule.
fn moving(step: u64, granule: u32, owners: &[Option<GroupId>]) -> StepPlan {
    let moves = owners.windows(2).map(|two| GranuleMove { granule, from: two[0], to: two[1] });
    StepPlan { step, after: step - 1, moves: moves.collect(), ..StepPlan::default() }
}

/// The memory of a granule where a group has it.
fn memory(part: &Part, group: GroupId, granule: u64) -> DeviceSpan {
    let paged = part.groups()[usize::from(group.0)].paged();
    paged.span().slice(granule * PAGE, PAGE).unwrap()
}

fn fill(worker: &KvWorker, group: GroupId, granule: u64, byte: u8) {
    for part in worker.parts() {
        part.compute().fill(memory(part, group, granule), byte).unwrap();
    }
}

/// Whether all of a granule has this content, on every device.
fn is_all(worker: &KvWorker, group: GroupId, granule: u64, byte: u8) -> bool {
    worker.parts().iter().all(|part| {
        let bytes = read(part.compute(), memory(part, group, granule));
        bytes.iter().all(|&one| one == byte)
    })
}

#[test]
fn a_granule_is_zero_when_a_group_gets_it_on_every_device() {
    let mut told = worker(1, 2);
    assert_eq!(told.worker.parts().len(), 2);
    told.complete(&moving(1, 3, &[None, Some(FULL)]));
    assert!(is_all(&told.worker, FULL, 3, 0), "a fresh one is zeroed");
    fill(&told.worker, FULL, 3, 0xA5);
    // The neighbours keep what they have.
    told.complete(&moving(2, 4, &[None, Some(FULL)]));
    assert!(is_all(&told.worker, FULL, 3, 0xA5) && is_all(&told.worker, FULL, 4, 0));
    told.complete(&moving(3, 3, &[Some(FULL), None, Some(WINDOW)]));
    assert!(is_all(&told.worker, WINDOW, 3, 0));
    assert!(is_all(&told.worker, FULL, 3, 0), "it is the same memory");
    fill(&told.worker, WINDOW, 3, 0x5A);
    // There and back in one plan.
    let owners = [Some(WINDOW), Some(FULL), None, Some(WINDOW), None, Some(FULL)];
    told.complete(&moving(4, 3, &owners));
    assert!(is_all(&told.worker, FULL, 3, 0));
    assert_eq!(told.worker.ready_blocks(FULL), 12);
    told.close();
}

#[test]
fn a_restored_worker_zeroes_all_that_groups_have() {
    let mut told = worker(2, 2);
    told.complete(&moving(1, 0, &[None, Some(FULL)]));
    fill(&told.worker, FULL, 0, 0xA5);
    // In the plans that it has missed, the granule went to the window and back, and another one to the window.
    let owners = [Some(FULL), Some(WINDOW), None, None, None, None];
    let fewer = told.snapshot(3, &owners[..5]);
    let refused = told.worker.restore(&fewer).unwrap_err();
    assert!(
        matches!(
            refused,
            StepError::Plan(PlanError::SnapshotGranules { granules: 5, expected: 6 })
        ),
        "{refused}"
    );
    told.worker.restore(&told.snapshot(3, &owners)).unwrap();
    told.complete(&StepPlan { step: 4, after: 3, ..StepPlan::default() });
    assert!(is_all(&told.worker, FULL, 0, 0));
    assert!(is_all(&told.worker, WINDOW, 1, 0));
    told.close();
}

#[test]
fn what_the_plan_behind_a_snapshot_brings_into_a_granule_that_it_moves_stays() {
    let mut options = shared();
    options.groups[0].host_blocks = 2;
    let mut told = Told::new(Machine::new(7, 2, small()), options);
    told.complete(&moving(1, 0, &[None, Some(FULL)]));
    fill(&told.worker, FULL, 0, 0xA5);
    told.worker.parts().iter().for_each(|part| part.compute().synchronize().unwrap());
    let [near, far] = [Tier::Primary, Tier::Secondary]
        .map(|tier| Location { tier, id: BlockId::new(0).unwrap() });
    let copy = |from, to| vec![BlockCopy { group: FULL, from, to, tokens: 4, written_by: 0 }];
    let out = StepPlan { step: 2, after: 1, copies: copy(near, far), ..StepPlan::default() };
    told.complete(&out);
    told.worker.restore(&told.snapshot(3, &[Some(WINDOW), None, None, None, None, None])).unwrap();
    let back = moving(4, 0, &[Some(WINDOW), None, Some(FULL)]);
    told.complete(&StepPlan { copies: copy(far, near), ..back });
    for part in told.worker.parts() {
        let block = part.groups()[0].paged().block_span(0).unwrap().unwrap();
        assert!(read(part.compute(), block).iter().all(|&byte| byte == 0xA5));
    }
    told.close();
}

#[test]
fn a_granule_whose_mapping_was_refused_is_mapped_when_the_step_ends() {
    for (call, device) in [("cuMemMap", 0), ("cuMemSetAccess", 1)] {
        let mut told = worker(3, 2);
        told.machine.sim.fail_nth(call, device + 1, refusal(call));
        let plan = moving(1, 5, &[None, Some(WINDOW)]);
        let refused = told.carry_out(&plan).unwrap_err();
        let StepError::Granule(GranuleError::Map { group, granule, ordinal, .. }) = refused else {
            panic!("{refused}")
        };
        assert_eq!((group, granule, ordinal), (WINDOW, 5, device as i32));
        // Nothing may touch it before.
        told.worker.wait_for_layer(GroupId(0), 0).unwrap();
        told.worker.finish(Outcome::Failed).unwrap();
        assert_eq!(told.worker.wait().unwrap(), Some((1, Outcome::Failed)));
        assert!(is_all(&told.worker, WINDOW, 5, 0));
        told.complete(&StepPlan { step: 2, after: 1, ..StepPlan::default() });
        told.close();
    }
}

#[test]
fn padding_names_memory_that_no_group_owns() {
    let machine = Machine::new(4, 1, small());
    let mut cache = machine.rig.cache(shared_on_one());
    let mut sequence = admitted(&mut cache, Request::new((0..10).collect()), 64);
    one_step(&mut cache, &mut [&mut sequence]);
    let part = &cache.parts()[0];
    for (group, null) in [(FULL, 12), (WINDOW, 6)] {
        let table = part.batch().tables[usize::from(group.0)].block_table;
        let ids = read_words(part.compute(), table);
        let own = cache.manager().block_ids(group, &sequence);
        assert!(own.iter().all(|id| id.get() < null));
        assert!(ids[own.len()..].iter().all(|&id| id == null), "{group:?}: {ids:?}");
        let block = part.groups()[usize::from(group.0)].paged().block_span(null as u64);
        let block = block.unwrap().unwrap();
        part.compute().fill(block, 7).unwrap();
        assert!(read(part.compute(), block).iter().all(|&byte| byte == 7), "it has memory");
    }
    drop(sequence);
    cache.close().unwrap();
    machine.assert_clean();
}

/// The same for one device, which has all layers.
fn shared_on_one() -> KvCacheOptions {
    let mut options = shared();
    options.groups[0].shape = shape(1, 256, 4);
    options.groups[1].shape = shape(2, 256, 4);
    options
}

#[test]
fn the_groups_budget_is_a_number_of_granules() {
    let machine = Machine::new(5, 2, small());
    let mut cache = machine.rig.cache(shared());
    let mut sequence = admitted(&mut cache, Request::new((0..10).collect()), 64);
    one_step(&mut cache, &mut [&mut sequence]);
    drop(sequence);
    let owned = |cache: &KvCache| cache.manager().granules().iter().flatten().count();
    assert_eq!(owned(&cache), 5, "two of full blocks, and three blocks of the window");
    assert!(matches!(cache.set_budget(GroupId(0), Tier::Primary, 4), Err(BudgetError::Pool(_))));
    assert!(matches!(
        cache.set_granules(7),
        Err(BudgetError::OverGranules { granules: 7, most: 6 })
    ));
    cache.set_granules(1).unwrap();
    one_step(&mut cache, &mut []);
    assert_eq!(owned(&cache), 1);
    cache.set_granules(6).unwrap();
    cache.close().unwrap();
    machine.assert_clean();
}

#[test]
fn every_call_of_building_and_closing_fails_once() {
    let healthy = Machine::new(6, 2, small());
    let before = healthy.sim.calls();
    let of_machine = streams(&healthy.rig.devices);
    KvCache::new(&of_machine, shared()).unwrap().close().unwrap();
    let calls = differences(&before, healthy.sim.calls());
    drop(of_machine);
    healthy.assert_clean();
    assert!(calls.iter().any(|&(call, count)| call == "cuMemCreate" && count >= 12), "{calls:?}");
    // The others are those of any cache.
    for (call, count) in calls.into_iter().filter(|(call, _)| call.starts_with("cuMem")) {
        for nth in 1..=count {
            let machine = Machine::new(6, 2, small());
            machine.sim.fail_nth(call, nth, refusal(call));
            let of_machine = cuda_streams(&machine);
            let Some(of_machine) = of_machine else { continue };
            // Addresses that the driver will not free are lost, and told of.
            let told = match KvCache::new(&of_machine, shared()) {
                Ok(cache) => cache.close().is_err(),
                Err(_) => false,
            };
            drop(of_machine);
            if told {
                continue;
            }
            let leaks = machine.sim.check_leaks();
            let left = (leaks.mappings, leaks.reservations, leaks.physical_handles);
            assert_eq!(left, (0, 0, 0), "{call} {nth}");
        }
    }
}

/// Streams of all devices, if the machine has not refused one.
fn cuda_streams(machine: &Machine) -> Option<Vec<Stream>> {
    machine.rig.devices.iter().map(|device| Stream::new(device).ok()).collect()
}

#[test]
fn memory_that_cannot_be_shared_is_refused_by_name() {
    let machine = Machine::new(7, 1, small());
    let streams = machine.rig.streams();
    let refused = |options: KvCacheOptions| match KvCache::new(&streams, options).unwrap_err() {
        BuildError::Options(error) => error.to_string(),
        BuildError::Manager(error) => error.to_string(),
        error => panic!("{error}"),
    };
    let mut half = shared_on_one();
    half.groups[0].shape = shape(1, 128, 4);
    assert_eq!(
        refused(half),
        "a granule of group 0 has 2048 bytes, no multiple of the device's pages of 4096"
    );
    let mut fewer = shared_on_one();
    fewer.groups[0].device_blocks = 11;
    assert!(refused(fewer).contains("11"));
    let mut alone = shared_on_one();
    alone.groups.truncate(1);
    assert!(!refused(alone).is_empty());
    let own = options(small(), 8, 0);
    let tensors = || {
        let bytes = 13 * small().block_bytes();
        let memory = cuda_driver::DeviceBuffer::alloc(&machine.rig.devices[0], bytes).unwrap();
        let layout = PagedLayout::block_major(&small());
        let paged = PagedKv::new(&streams[0], small(), layout, memory.span(), 13).unwrap();
        (memory, paged)
    };
    let (_memory, paged) = tensors();
    let error = KvCache::over(&streams, vec![paged], shared_on_one()).unwrap_err();
    assert!(matches!(error, BuildError::Options(OptionsError::SharedAdopted)), "{error}");
    // What a device has is divided without waste, where that can be.
    let of = |bytes| {
        let mut options = own.clone();
        options.groups.push(shared_on_one().groups[1]);
        options.sharing(bytes, 1)
    };
    let divided = of(1 << 30).unwrap();
    let memory = divided.shared.clone().unwrap();
    let granules = divided.groups.iter().zip(&memory.granule_blocks);
    let bytes: Vec<u64> =
        granules.map(|(group, &of)| group.shape.block_bytes() * u64::from(of)).collect();
    assert_eq!(bytes, [2 << 20; 2]);
    assert_eq!(memory.granules, 510, "less a page for the null block of each group");
    assert_eq!(divided.groups[0].device_blocks, 510 * memory.granule_blocks[0]);
    let least = of(6 << 20).unwrap();
    assert_eq!(least.shared.unwrap().granules, 1);
    assert!(matches!(of(5 << 20), Err(OptionsError::Granule { .. })));
    assert!(matches!(of(u64::MAX), Err(OptionsError::TooManyBlocks { .. })));
    assert!(matches!(own.clone().sharing(1 << 30, 0), Err(OptionsError::Zero { .. })));
    let many = own.sharing(1 << 30, 5).unwrap_err();
    assert_eq!(many, OptionsError::DevicesOverLayers { group: FULL, devices: 5, layers: 4 });
}

#[test]
fn a_snapshot_that_is_refused_changes_nothing() {
    for open in [false, true] {
        let mut told = worker(1, 1);
        told.machine.sim.hold(told.streams[0].raw());
        told.carry_out(&moving(1, 3, &[None, Some(FULL)])).unwrap();
        if !open {
            told.worker.finish(Outcome::Done).unwrap();
        }
        let good = told.snapshot(7, &[None; 6]);
        let mut wrong = vec![good.clone(); 4];
        wrong[0].granules.pop();
        wrong[1].granules[2] = Some(GroupId(2));
        wrong[2].tables.pop();
        wrong[3].tables[1].ids[0] = TableEntry::from(6);
        let calls = told.machine.sim.calls();
        for wrong in &wrong {
            let refused = told.worker.restore(wrong);
            assert!(matches!(refused, Err(StepError::Plan(_))), "{refused:?}");
            assert_eq!(told.worker.in_flight(), usize::from(!open));
        }
        assert_eq!(told.machine.sim.calls(), calls, "no device hears of it");
        told.machine.sim.release_hold(told.streams[0].raw());
        if open {
            told.worker.finish(Outcome::Done).unwrap();
        }
        assert_eq!(told.worker.wait().unwrap(), Some((1, Outcome::Done)), "it was carried out");
        told.complete(&moving(2, 3, &[Some(FULL), Some(WINDOW)]));
        told.worker.restore(&good).unwrap();
        told.close();
    }
}
