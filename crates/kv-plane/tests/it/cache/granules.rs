//! Groups that share device memory by granules.

use cuda_driver::{DeviceSpan, Stream};
use kv_kernels::{PagedKv, PagedLayout};
use kv_plane::manager::{
    BlockCopy, BudgetError, GranuleMove, GroupId, Outcome, PlanError, Snapshot, SnapshotTable,
    StepPlan,
};
use kv_plane::{
    BuildError, GranuleError, GroupKind, KvCache, KvCacheOptions, KvWorker, OptionsError, Part,
    Request, SharedMemory, StepError,
};
use kv_pool::{BlockId, Location, TableEntry, Tier};
use kv_testkit::machine::read;

use super::faults::differences;
use crate::common::engine::{admitted, group, one_step, options, shape, streams};
use crate::machine::{Machine, PAGE, refusal, small};

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

fn worker(machine: &Machine) -> (Vec<Stream>, KvWorker) {
    let streams = streams(&machine.rig.devices);
    let worker = KvWorker::new(&streams, shared()).unwrap();
    (streams, worker)
}

/// A plan that only moves a granule.
fn moving(step: u64, granule: u32, owners: &[Option<GroupId>]) -> StepPlan {
    let moves = owners.windows(2).map(|two| GranuleMove { granule, from: two[0], to: two[1] });
    StepPlan { step, after: step - 1, moves: moves.collect(), ..StepPlan::default() }
}

fn carry_out(worker: &mut KvWorker, plan: &StepPlan) {
    worker.carry_out(plan, |_, _| Ok(())).unwrap();
    worker.finish(Outcome::Done).unwrap();
    assert_eq!(worker.wait().unwrap(), Some((plan.step, Outcome::Done)));
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

fn snapshot(worker: &KvWorker, step: u64, granules: &[Option<GroupId>]) -> Snapshot {
    let rows = worker.options().sequences_max;
    let tables = worker.options().groups.iter().map(|group| {
        let width = group.blocks_per_sequence_max;
        SnapshotTable { width, ids: vec![TableEntry::NONE; (width * rows) as usize] }
    });
    Snapshot { step, tables: tables.collect(), granules: granules.to_vec() }
}

#[test]
fn a_granule_is_zero_when_a_group_gets_it_on_every_device() {
    let machine = Machine::new(1, 2, small());
    let (streams, mut worker) = worker(&machine);
    assert_eq!(worker.parts().len(), 2);
    carry_out(&mut worker, &moving(1, 3, &[None, Some(FULL)]));
    assert!(is_all(&worker, FULL, 3, 0), "a fresh one is zeroed");
    fill(&worker, FULL, 3, 0xA5);
    // The neighbours keep what they have.
    carry_out(&mut worker, &moving(2, 4, &[None, Some(FULL)]));
    assert!(is_all(&worker, FULL, 3, 0xA5) && is_all(&worker, FULL, 4, 0));
    carry_out(&mut worker, &moving(3, 3, &[Some(FULL), None, Some(WINDOW)]));
    assert!(is_all(&worker, WINDOW, 3, 0));
    assert!(is_all(&worker, FULL, 3, 0), "it is the same memory");
    fill(&worker, WINDOW, 3, 0x5A);
    // There and back in one plan.
    let owners = [Some(WINDOW), Some(FULL), None, Some(WINDOW), None, Some(FULL)];
    carry_out(&mut worker, &moving(4, 3, &owners));
    assert!(is_all(&worker, FULL, 3, 0));
    assert_eq!(worker.ready_blocks(FULL), 12);
    worker.close().unwrap();
    machine.left(streams);
}

#[test]
fn a_restored_worker_zeroes_all_that_groups_have() {
    let machine = Machine::new(2, 2, small());
    let (streams, mut worker) = worker(&machine);
    carry_out(&mut worker, &moving(1, 0, &[None, Some(FULL)]));
    fill(&worker, FULL, 0, 0xA5);
    // In the plans that it has missed, the granule went to the window and back, and another one to the window.
    let owners = [Some(FULL), Some(WINDOW), None, None, None, None];
    let fewer = snapshot(&worker, 3, &owners[..5]);
    let refused = worker.restore(&fewer).unwrap_err();
    assert!(
        matches!(
            refused,
            StepError::Plan(PlanError::SnapshotGranules { granules: 5, expected: 6 })
        ),
        "{refused}"
    );
    worker.restore(&snapshot(&worker, 3, &owners)).unwrap();
    carry_out(&mut worker, &StepPlan { step: 4, after: 3, ..StepPlan::default() });
    assert!(is_all(&worker, FULL, 0, 0));
    assert!(is_all(&worker, WINDOW, 1, 0));
    worker.close().unwrap();
    machine.left(streams);
}

#[test]
fn what_the_plan_behind_a_snapshot_brings_into_a_granule_that_it_moves_stays() {
    let machine = Machine::new(7, 2, small());
    let mut options = shared();
    options.groups[0].host_blocks = 2;
    let streams = streams(&machine.rig.devices);
    let mut worker = KvWorker::new(&streams, options).unwrap();
    carry_out(&mut worker, &moving(1, 0, &[None, Some(FULL)]));
    fill(&worker, FULL, 0, 0xA5);
    worker.parts().iter().for_each(|part| part.compute().synchronize().unwrap());
    let [near, far] = [Tier::Primary, Tier::Secondary]
        .map(|tier| Location { tier, id: BlockId::new(0).unwrap() });
    let copy = |from, to| vec![BlockCopy { group: FULL, from, to, tokens: 4, written_by: 0 }];
    let out = StepPlan { step: 2, after: 1, copies: copy(near, far), ..StepPlan::default() };
    carry_out(&mut worker, &out);
    worker.restore(&snapshot(&worker, 3, &[Some(WINDOW), None, None, None, None, None])).unwrap();
    let back = moving(4, 0, &[Some(WINDOW), None, Some(FULL)]);
    carry_out(&mut worker, &StepPlan { copies: copy(far, near), ..back });
    for part in worker.parts() {
        let block = part.groups()[0].paged().block_span(0).unwrap().unwrap();
        assert!(read(part.compute(), block).iter().all(|&byte| byte == 0xA5));
    }
    worker.close().unwrap();
    machine.left(streams);
}

#[test]
fn a_granule_whose_mapping_was_refused_is_mapped_when_the_step_ends() {
    for (call, device) in [("cuMemMap", 0), ("cuMemSetAccess", 1)] {
        let machine = Machine::new(3, 2, small());
        let (streams, mut worker) = worker(&machine);
        machine.sim.fail_nth(call, device + 1, refusal(call));
        let plan = moving(1, 5, &[None, Some(WINDOW)]);
        let refused = worker.carry_out(&plan, |_, _| Ok(())).unwrap_err();
        let StepError::Granule(GranuleError::Map { group, granule, ordinal, .. }) = refused else {
            panic!("{refused}")
        };
        assert_eq!((group, granule, ordinal), (WINDOW, 5, device as i32));
        // Nothing may touch it before.
        worker.wait_for_layer(GroupId(0), 0).unwrap();
        worker.finish(Outcome::Failed).unwrap();
        assert_eq!(worker.wait().unwrap(), Some((1, Outcome::Failed)));
        assert!(is_all(&worker, WINDOW, 5, 0));
        carry_out(&mut worker, &StepPlan { step: 2, after: 1, ..StepPlan::default() });
        worker.close().unwrap();
        machine.left(streams);
    }
}

/// A cache whose first sequence has a prompt of ten tokens, computed.
fn cache_with_a_prompt(streams: &[Stream]) -> KvCache {
    let mut cache = KvCache::new(streams, shared()).unwrap();
    let mut sequence = admitted(&mut cache, Request::new((0..10).collect()), 64);
    one_step(&mut cache, &mut [&mut sequence]);
    drop(sequence);
    cache
}

#[test]
fn padding_names_memory_that_no_group_owns() {
    let machine = Machine::new(4, 1, small());
    let streams = streams(&machine.rig.devices);
    let mut cache = KvCache::new(&streams, shared_on_one()).unwrap();
    let mut sequence = admitted(&mut cache, Request::new((0..10).collect()), 64);
    one_step(&mut cache, &mut [&mut sequence]);
    let part = &cache.parts()[0];
    for (group, null) in [(FULL, 12), (WINDOW, 6)] {
        let table = part.batch().tables[usize::from(group.0)].block_table;
        let ids = read(part.compute(), table);
        let ids: Vec<i32> =
            ids.chunks_exact(4).map(|id| i32::from_le_bytes(id.try_into().unwrap())).collect();
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
    machine.left(streams);
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
    let streams = streams(&machine.rig.devices);
    let mut cache = cache_with_a_prompt(&streams);
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
    machine.left(streams);
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
    let streams = streams(&machine.rig.devices);
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
        let machine = Machine::new(1, 1, small());
        let (streams, mut worker) = worker(&machine);
        machine.sim.hold(streams[0].raw());
        worker.carry_out(&moving(1, 3, &[None, Some(FULL)]), |_, _| Ok(())).unwrap();
        if !open {
            worker.finish(Outcome::Done).unwrap();
        }
        let good = snapshot(&worker, 7, &[None; 6]);
        let mut wrong = vec![good.clone(); 4];
        wrong[0].granules.pop();
        wrong[1].granules[2] = Some(GroupId(2));
        wrong[2].tables.pop();
        wrong[3].tables[1].ids[0] = TableEntry::from(6);
        let calls = machine.sim.calls();
        for wrong in &wrong {
            let refused = worker.restore(wrong);
            assert!(matches!(refused, Err(StepError::Plan(_))), "{refused:?}");
            assert_eq!(worker.in_flight(), usize::from(!open));
        }
        assert_eq!(machine.sim.calls(), calls, "no device hears of it");
        machine.sim.release_hold(streams[0].raw());
        if open {
            worker.finish(Outcome::Done).unwrap();
        }
        assert_eq!(worker.wait().unwrap(), Some((1, Outcome::Done)), "it was carried out");
        carry_out(&mut worker, &moving(2, 3, &[Some(FULL), Some(WINDOW)]));
        worker.restore(&good).unwrap();
        worker.close().unwrap();
        machine.left(streams);
    }
}
