//! Calls of a worker that are made again, after one that was refused or has panicked.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use cuda_driver::{ErrorCode, Stream};
use kv_kernels::KvFormat;
use kv_kernels::link::Transport;
use kv_plane::manager::{
    BatchRow, BlockCopy, GranuleMove, GroupId, LayerLoad, Outcome, Row, RowEdit, Snapshot,
    SnapshotTable, Start, StepPlan, WorkerId,
};
use kv_plane::tier::{BlockSink, BlockSource, Direction, LowerTier, TicketId, Transfer};
use kv_plane::{
    GroupKind, HostPinning, KvCache, KvCacheOptions, KvWorker, LowerTiers, SharedMemory, StepError,
    TransportChoice,
};
use kv_pool::{BlockHash, BlockId, Location, TableEntry, Tier};
use kv_testkit::machine::read;

use crate::common::engine::tensors::Tensors;
use crate::common::engine::{Engine, Prompt, by, group, one_step, options, shape, streams};
use crate::common::scenarios::ALONE;
use crate::machine::{Machine, small};

fn worker(machine: &Machine, options: KvCacheOptions) -> (Vec<Stream>, KvWorker) {
    let streams = streams(&machine.rig.devices);
    let mut worker = KvWorker::new(&streams, options, ALONE).unwrap();
    worker.grow_to(4).unwrap();
    (streams, worker)
}

fn finished(worker: &mut KvWorker, plan: &StepPlan) {
    worker.carry_out(plan, |_, _| Ok(())).unwrap();
    worker.finish(Outcome::Done).unwrap();
    assert_eq!(worker.wait().unwrap(), Some((plan.step, Outcome::Done)));
}

fn snapshot(worker: &KvWorker, step: u64, granules: &[Option<GroupId>]) -> Snapshot {
    let rows = worker.options().sequences_max;
    let tables = worker.options().groups.iter().map(|group| {
        let width = group.blocks_per_sequence_max;
        SnapshotTable { width, ids: vec![TableEntry::NONE; (width * rows) as usize] }
    });
    Snapshot { step, tables: tables.collect(), granules: granules.to_vec() }
}

/// A tier whose loads come to nothing when they are taken away.
#[derive(Clone, Debug, Default)]
struct Nothing(Arc<Mutex<Vec<BlockSink>>>);

impl LowerTier for Nothing {
    fn store(&mut self, _: Vec<BlockSource>) {}
    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.0.lock().unwrap().extend(blocks);
    }
    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

#[test]
fn a_step_that_has_not_waited_for_its_layers_has_failed_however_often_it_is_finished() {
    for call in ["cuEventRecord", "cuEventCreate"] {
        let machine = Machine::new(1, 1, small());
        let (tier, mut tiers) = (Nothing::default(), LowerTiers::new(b"a model"));
        let made = tier.clone();
        tiers.push(move || Box::new(made.clone()));
        let (streams, mut worker) =
            worker(&machine, KvCacheOptions { tiers, ..options(small(), 8, 8) });
        let (ticket, group, from) = (TicketId(1), GroupId(0), BlockId::from(3));
        let blocks = vec![(BlockHash::ROOT, from)];
        let (at, direction) = (Tier::Third, Direction::Load);
        let transfers = vec![Transfer { ticket, tier: at, group, direction, blocks }];
        finished(&mut worker, &StepPlan { step: 1, transfers, ..StepPlan::default() });
        worker.poll_transfers(WorkerId(0), &mut Vec::new(), &mut Vec::new());
        let layer_loads = vec![LayerLoad { ticket, group, from, to: BlockId::from(2) }];
        let plan = StepPlan { step: 2, after: 1, layer_loads, ..StepPlan::default() };
        worker.carry_out(&plan, |_, _| Ok(())).unwrap();
        tier.0.lock().unwrap().clear();
        machine.sim.fail_nth(call, 1, ErrorCode::UNKNOWN);
        if let Err(refused) = worker.finish(Outcome::Done) {
            assert!(matches!(refused, StepError::Device(_)), "{call}: {refused}");
            worker.finish(Outcome::Done).unwrap();
        }
        assert_eq!(worker.wait().unwrap(), Some((2, Outcome::Failed)), "{call}");
        worker.close().unwrap();
        drop(streams);
        machine.sim.run_all();
    }
}

/// A plan with a row of two blocks that computes five tokens.
fn row(step: u64) -> StepPlan {
    let row = Row::new(1);
    StepPlan {
        step,
        after: step - 1,
        edits: vec![RowEdit { group: GroupId(0), row, first: 0, count: 2 }],
        edit_ids: [0, 1].map(TableEntry::from).to_vec(),
        batch: vec![BatchRow { row, start: Start::At(0), tokens: 5, drafts: 0, input: 0 }],
        ..StepPlan::default()
    }
}

#[test]
fn a_step_whose_arrays_panic_has_failed_and_the_worker_goes_on() {
    let machine = Machine::new(1, 2, small());
    let (streams, mut worker) = worker(&machine, options(small(), 8, 8));
    finished(&mut worker, &row(1));
    for restores in [false, true] {
        let step = if restores { 5 } else { 2 };
        let panics = |part: usize, _: &mut kv_plane::BatchStep<'_>| {
            assert_eq!(part, 0, "on purpose");
            Ok(())
        };
        let caught = catch_unwind(AssertUnwindSafe(|| worker.carry_out(&row(step), panics)));
        assert!(caught.is_err());
        if restores {
            worker.restore(&snapshot(&worker, step, &[])).unwrap();
        } else {
            worker.finish(Outcome::Failed).unwrap();
            assert_eq!(worker.wait().unwrap(), Some((step, Outcome::Failed)));
        }
        for step in step + 1..step + 3 {
            finished(&mut worker, &row(step));
        }
    }
    worker.close().unwrap();
    machine.left(streams);
}

#[test]
fn a_copy_behind_a_snapshot_waits_for_the_step_from_before_that_it_names() {
    let machine = Machine::new(1, 1, small());
    let (streams, mut worker) = worker(&machine, options(small(), 8, 8));
    let block = |worker: &KvWorker, id| worker.parts()[0].paged().block_span(id).unwrap().unwrap();
    machine.sim.hold(streams[0].raw());
    worker.carry_out(&row(1), |_, _| Ok(())).unwrap();
    streams[0].fill(block(&worker, 1), 0x5A).unwrap();
    worker.finish(Outcome::Done).unwrap();
    worker.restore(&snapshot(&worker, 1, &[])).unwrap();
    let [near, far, back] = [(Tier::Primary, 1), (Tier::Secondary, 7), (Tier::Primary, 2)]
        .map(|(tier, id)| Location { tier, id: BlockId::new(id).unwrap() });
    let copy = |from, to| BlockCopy { group: GroupId(0), from, to, tokens: 4, written_by: 1 };
    let copies = vec![copy(near, far)];
    worker
        .carry_out(&StepPlan { step: 2, after: 1, copies, ..StepPlan::default() }, |_, _| Ok(()))
        .unwrap();
    worker.finish(Outcome::Done).unwrap();
    // All that is not held.
    machine.sim.run_all();
    machine.sim.release_hold(streams[0].raw());
    assert_eq!(worker.wait().unwrap(), Some((2, Outcome::Done)));
    let copies = vec![copy(far, back)];
    finished(&mut worker, &StepPlan { step: 3, after: 2, copies, ..StepPlan::default() });
    let found = read(&streams[0], block(&worker, 2));
    assert!(found.iter().all(|&byte| byte == 0x5A), "{:?}", &found[..4]);
    worker.close().unwrap();
    machine.left(streams);
}

#[test]
fn a_restored_worker_maps_no_granule_for_a_plan_from_before() {
    let machine = Machine::new(1, 1, small());
    let mut options = options(shape(1, 256, 4), 12, 0);
    let window = GroupKind::Window { tokens: 6, sinks: 0 };
    options.groups.push(group(window, shape(2, 256, 4), 6, 0));
    options.shared = Some(SharedMemory { granules: 6, granule_blocks: vec![2, 1] });
    let (streams, mut worker) = worker(&machine, options);
    let moves = vec![GranuleMove { granule: 3, from: None, to: Some(GroupId(1)) }];
    let plan = StepPlan { step: 1, moves, ..StepPlan::default() };
    machine.sim.fail_nth("cuMemMap", 1, ErrorCode::OUT_OF_MEMORY);
    let refused = worker.carry_out(&plan, |_, _| Ok(())).unwrap_err();
    assert!(matches!(refused, StepError::Granule(_)), "{refused}");
    let before = machine.calls("cuMemMap");
    worker.restore(&snapshot(&worker, 1, &[None; 6])).unwrap();
    finished(&mut worker, &StepPlan { step: 2, after: 1, ..StepPlan::default() });
    assert_eq!(machine.calls("cuMemMap"), before, "no group has it");
    worker.close().unwrap();
    machine.left(streams);
}

#[test]
fn host_memory_that_a_budget_brings_back_and_the_driver_refuses_is_told() {
    for pinning in [HostPinning::AT_ONCE, HostPinning { threads: 1, ..HostPinning::AT_ONCE }] {
        let machine = Machine::new(1, 1, small());
        let streams = streams(&machine.rig.devices);
        let pinning = HostPinning { slab_bytes_max: 2 * small().block_bytes(), ..pinning };
        let options = KvCacheOptions { pinning, ..options(small(), 8, 8) };
        let mut cache = KvCache::new(&streams, options).unwrap();
        cache.wait_for_host().unwrap();
        cache.set_budget(GroupId(0), Tier::Secondary, 0).unwrap();
        one_step(&mut cache, &mut []);
        for call in ["cuMemHostAlloc", "cuMemHostRegister"] {
            machine.sim.fail_nth(call, 2, ErrorCode::OUT_OF_MEMORY);
        }
        cache.set_budget(GroupId(0), Tier::Secondary, 8).unwrap();
        let waited = cache.wait_for_host();
        let refused = waited.err().or(cache.take_host_refusal());
        assert!(refused.is_some_and(|refused| refused.is_out_of_memory()), "{pinning:?}");
        assert_eq!(cache.stats().host_blocks, 2, "{pinning:?}");
        cache.set_budget(GroupId(0), Tier::Secondary, 8).unwrap();
        cache.wait_for_host().unwrap();
        assert_eq!((cache.stats().host_blocks, cache.take_host_refusal()), (8, None));
        cache.close().unwrap();
        drop(streams);
    }
}

#[test]
fn host_memory_that_the_device_had_no_table_for_is_used_later() {
    for tensors in [None, Some(Tensors::new(KvFormat::FlashInferNhd))] {
        let mut machine = Machine::new(1, 1, tensors.map_or_else(small, |of| of.shape()));
        machine.rig.tensors = tensors;
        let slab_bytes_max = 4 * machine.rig.shape.block_bytes();
        let pinning = HostPinning { slab_bytes_max, ..HostPinning::AT_ONCE };
        let lists = by(TransportChoice::Quickest, options(machine.rig.shape, 12, 32));
        let mut engine = machine.rig.engine_with(KvCacheOptions { pinning, ..lists });
        engine.cache.set_budget(GroupId(0), Tier::Secondary, 0).unwrap();
        engine.idle().unwrap();
        // That of the third slab.
        machine.sim.fail_nth("cuMemAlloc", 3, ErrorCode::OUT_OF_MEMORY);
        engine.cache.set_budget(GroupId(0), Tier::Secondary, 32).unwrap();
        assert_eq!(engine.cache.stats().host_blocks, 8, "{tensors:?}");
        let serve = |engine: &mut Engine| {
            let bt = engine.block_tokens();
            (1..9).for_each(|seed| assert!(engine.serve(&Prompt::new(seed, 11 * bt)).1 < 12));
        };
        serve(&mut engine);
        assert_eq!(engine.cache.stats().host_blocks, 32, "{tensors:?}");
        serve(&mut engine);
        assert!(engine.decided().onboarded_blocks + engine.decided().offloaded_blocks > 0);
        machine.close(engine);
    }
}

#[test]
fn blocks_in_pieces_are_copied_when_their_kernel_can_be_loaded_again() {
    let tensors = Tensors::new(KvFormat::FlashInferNhd);
    let mut machine = Machine::new(1, 1, tensors.shape());
    machine.rig.tensors = Some(tensors);
    let lists =
        by(TransportChoice::Only(Transport::DirectKernel), options(tensors.shape(), 12, 32));
    let mut engine = machine.rig.engine_with(lists);
    let bt = engine.block_tokens();
    engine.serve(&Prompt::new(1, 11 * bt));
    let calls = machine.calls("cuModuleLoadDataEx");
    machine.sim.fail_nth("cuModuleLoadDataEx", 1, ErrorCode::OUT_OF_MEMORY);
    let mut live = engine.admit(&Prompt::new(2, 11 * bt)).unwrap();
    let refused = engine.run(&mut [&mut live]).unwrap_err();
    assert!(machine.calls("cuModuleLoadDataEx") > calls, "{refused}");
    drop(live);
    engine.drain().unwrap();
    (1..4).for_each(|seed| assert!(engine.serve(&Prompt::new(seed, 11 * bt)).1 < 12));
    machine.close(engine);
}
