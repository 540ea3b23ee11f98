//! Plans and snapshots of another process, and tensors of the engine, which are not believed.

use kv_plane::manager::{BatchRow, BlockScrub, Forget, LayerLoad, Row, RowEdit, Start};
use kv_plane::tier::{Direction, Transfer};

use crate::prelude::*;

/// A worker whose first four of eight device blocks have memory.
fn worker(options: KvCacheOptions) -> Told {
    let mut told = Told::new(Machine::new(1, 1, small()), options);
    assert_eq!(told.worker.grow_to(4).unwrap(), 4);
    told
}

fn copy(from: (Tier, u32), to: (Tier, u32)) -> BlockCopy {
    let [from, to] = [from, to].map(|(tier, id)| Location { tier, id: BlockId::new(id).unwrap() });
    BlockCopy { group: GroupId(0), from, to, tokens: small().block_tokens(), written_by: 0 }
}

/// The first plan, with one row of these blocks that computes five tokens.
fn row_of(ids: &[u16]) -> StepPlan {
    let row = Row::new(1);
    StepPlan {
        step: 1,
        edits: vec![RowEdit { group: GroupId(0), row, first: 0, count: ids.len() as u32 }],
        edit_ids: ids.iter().map(|&id| TableEntry::from(id)).collect(),
        batch: vec![BatchRow { row, start: Start::At(0), tokens: 5, drafts: 0, input: 0 }],
        ..StepPlan::default()
    }
}

#[test]
fn plans_that_lie_are_refused_and_no_device_hears_of_them() {
    use Tier::{Primary, Secondary};
    let copies = |copy| StepPlan { step: 1, copies: vec![copy], ..StepPlan::default() };
    let scrubs = StepPlan {
        step: 1,
        scrubs: vec![BlockScrub { group: GroupId(0), block: BlockId::from(4), after: 0 }],
        ..StepPlan::default()
    };
    let mut hole = row_of(&[0, 1]);
    hole.edit_ids[1] = TableEntry::NONE;
    let forgets = vec![Forget::All(Tier::Third)];
    let forgets = StepPlan { step: 1, forgets, ..StepPlan::default() };
    let lies = [
        ("a copy of no memory", copies(copy((Primary, 4), (Primary, 2)))),
        ("a copy to no memory", copies(copy((Primary, 2), (Primary, 7)))),
        ("a copy out of no memory", copies(copy((Primary, 5), (Secondary, 0)))),
        ("a copy back to no memory", copies(copy((Secondary, 0), (Primary, 4)))),
        ("a scrub of no memory", scrubs),
        ("a tier that there is not", forgets),
        ("a row with too few blocks", row_of(&[0])),
        ("a row with a hole", hole),
        ("a row of no memory", row_of(&[0, 6])),
        ("a row of a draft model that there is not", drafts(row_of(&[0, 1]), 6)),
    ];
    for (what, lie) in lies {
        let mut told = worker(options(small(), 8, 8));
        let before = told.machine.sim.calls();
        let refused = told.carry_out(&lie);
        assert!(matches!(refused, Err(StepError::Plan(_))), "{what}: {refused:?}");
        assert_eq!(told.machine.sim.calls(), before, "{what}");
        // With a snapshot it goes on.
        told.worker.restore(&told.snapshot(1, &[])).unwrap();
        let mut truth = row_of(&[3, 0]);
        (truth.step, truth.after) = (2, 1);
        truth.copies = vec![copy((Primary, 3), (Secondary, 7))];
        told.complete(&truth);
        told.close();
    }
}

#[test]
fn a_restored_worker_tells_nothing_of_the_steps_before() {
    for open in [false, true] {
        let mut told = worker(options(small(), 8, 8));
        told.carry_out(&row_of(&[0, 1])).unwrap();
        if !open {
            told.worker.finish(Outcome::Done).unwrap();
        }
        told.streams[0].synchronize().unwrap();
        // Another manager begins anew, with the same numbers.
        told.worker.restore(&told.snapshot(0, &[])).unwrap();
        told.machine.sim.hold(told.streams[0].raw());
        told.finish(&row_of(&[2, 3]));
        assert_eq!(told.worker.poll().unwrap(), None, "its first step is held");
        told.machine.sim.release_hold(told.streams[0].raw());
        assert_eq!(told.worker.wait().unwrap(), Some((1, Outcome::Done)));
        assert_eq!(told.worker.wait().unwrap(), None);
        told.close();
    }
}

#[test]
fn tensors_that_two_parts_would_write_are_refused() {
    let machine = Machine::new(1, 1, small());
    let device = &machine.rig.devices[0];
    let streams = streams(&[device.clone(), device.clone()]);
    // Each part has half of the layers.
    let half = shape(2, 32, 4);
    let bytes = 8 * half.block_bytes();
    let memory = DeviceBuffer::alloc(device, 2 * bytes).unwrap();
    let over = |starts: [u64; 2]| {
        let paged = |(stream, start)| {
            let (layout, span) = (PagedLayout::block_major(&half), memory.span());
            PagedKv::new(stream, half, layout, span.slice(start, bytes).unwrap(), 8).unwrap()
        };
        let tensors = streams.iter().zip(starts).map(paged).collect();
        KvCache::over(&streams, tensors, options(small(), 8, 0))
    };
    for starts in [[0, 0], [0, bytes - 16], [bytes, 16]] {
        let address = memory.address() + starts[0].max(starts[1]);
        let refused = over(starts).unwrap_err();
        let BuildError::Options(OptionsError::AdoptedOverlap { first, second, address: at }) =
            refused
        else {
            panic!("{starts:?}: {refused}")
        };
        assert_eq!((first + second, at), (1, address), "{starts:?}");
    }
    over([bytes, 0]).unwrap().close().unwrap();
    drop((memory, streams));
    machine.assert_clean();
}

#[test]
fn a_worker_is_restored_only_with_the_memory_that_it_has_lent() {
    let tier = Patient::default();
    let mut told = tier.worker(TransportChoice::Quickest);
    let transfers = vec![transfer(1, Direction::Load, 3)];
    told.finish(&StepPlan { transfers, ..row_of(&[0, 1]) });
    told.worker.wait().unwrap();
    told.worker.poll_transfers(WorkerId(0), &mut Vec::new(), &mut Vec::new());
    let sink = tier.loads.lock().unwrap().pop().unwrap();
    let lent = sink.lend().unwrap();
    let of = |at: usize| Arc::clone(&lent.pieces()[at].memory).downcast::<PinnedBuffer>();
    assert!(of(0).is_ok(), "pinned memory, whose addresses a tier of files hands to the system");
    let refused = told.worker.restore(&told.snapshot(1, &[])).unwrap_err();
    assert!(matches!(&refused, StepError::Lent { waited } if waited.is_zero()), "{refused:?}");
    drop(lent);
    told.worker.restore(&told.snapshot(1, &[])).unwrap();
    drop(sink);
    told.close();
}

/// A tier that keeps what it is asked for.
#[derive(Clone, Debug, Default)]
struct Patient {
    stores: Arc<Mutex<Vec<BlockSource>>>,
    loads: Arc<Mutex<Vec<BlockSink>>>,
}

impl LowerTier for Patient {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        self.stores.lock().unwrap().extend(blocks);
    }
    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.loads.lock().unwrap().extend(blocks);
    }
    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

impl Patient {
    /// A worker over this tier, whose first four of eight device blocks have memory.
    fn worker(&self, choice: TransportChoice) -> Told {
        let mut tiers = LowerTiers::new(b"a model");
        tiers.rules.wait_max = Duration::ZERO;
        let tier = self.clone();
        tiers.push(move || Box::new(tier.clone()));
        let options =
            KvCacheOptions { tiers, overlap_depth: 3, ..by(choice, options(small(), 8, 8)) };
        worker(options)
    }
}

fn transfer(ticket: u64, direction: Direction, block: u32) -> Transfer {
    let blocks = vec![(BlockHash::ROOT, BlockId::new(block).unwrap())];
    let (tier, group) = (Tier::Third, GroupId(0));
    Transfer { ticket: TicketId(ticket), tier, group, direction, blocks }
}

#[test]
fn a_load_by_layers_to_a_block_without_memory_is_refused() {
    let tier = Patient::default();
    let mut told = tier.worker(TransportChoice::Quickest);
    let load = transfer(1, Direction::Load, 3);
    told.complete(&StepPlan { step: 1, transfers: vec![load], ..StepPlan::default() });
    let (ticket, group, from) = (TicketId(1), GroupId(0), BlockId::from(3));
    let to = |id: u16| LayerLoad { ticket, group, from, to: id.into() };
    let plan = |to| StepPlan { step: 2, after: 1, layer_loads: vec![to], ..StepPlan::default() };
    let refused = told.carry_out(&plan(to(4))).unwrap_err();
    let StepError::Plan(PlanError::Block { tier: Tier::Primary, id, blocks: 4, .. }) = refused
    else {
        panic!("{refused}")
    };
    assert_eq!(id, BlockId::from(4));
    told.carry_out(&plan(to(3))).unwrap();
    tier.loads.lock().unwrap().clear();
    told.worker.poll_transfers(WorkerId(0), &mut Vec::new(), &mut Vec::new());
    tier.loads.lock().unwrap().clear();
    told.worker.finish(Outcome::Done).unwrap();
    told.close();
}

#[test]
fn a_restored_worker_stores_no_block_before_the_copies_of_before_are_done() {
    let tier = Patient::default();
    let mut told = tier.worker(TransportChoice::Quickest);
    told.machine.sim.hold(told.streams[0].raw());
    told.finish(&row_of(&[0, 1]));
    // Behind the work of the step before, which is held.
    let copies =
        vec![BlockCopy { written_by: 1, ..copy((Tier::Primary, 3), (Tier::Secondary, 7)) }];
    told.finish(&StepPlan { step: 2, after: 1, copies, ..StepPlan::default() });
    told.worker.restore(&told.snapshot(2, &[])).unwrap();
    let transfers = vec![transfer(1, Direction::Store, 7)];
    told.finish(&StepPlan { step: 3, after: 2, transfers, ..StepPlan::default() });
    let begun = |worker: &mut KvWorker| {
        worker.poll_transfers(WorkerId(0), &mut Vec::new(), &mut Vec::new());
        tier.stores.lock().unwrap().len()
    };
    assert_eq!(told.worker.poll().unwrap(), None);
    assert_eq!(begun(&mut told.worker), 0, "the copy has not been made");
    told.machine.sim.release_hold(told.streams[0].raw());
    assert_eq!(told.worker.wait().unwrap(), Some((3, Outcome::Done)));
    assert_eq!(begun(&mut told.worker), 1);
    tier.stores.lock().unwrap().clear();
    told.close();
}

#[test]
fn copies_that_were_refused_before_a_snapshot_are_never_made() {
    let mut told = Patient::default().worker(TransportChoice::EachBlock);
    let copies = vec![copy((Tier::Primary, 3), (Tier::Secondary, 7))];
    told.machine.sim.fail_nth("cuMemcpyDtoHAsync", 1, ErrorCode::UNKNOWN);
    let plan = StepPlan { step: 1, copies, ..StepPlan::default() };
    let refused = told.carry_out(&plan).unwrap_err();
    assert!(matches!(refused, StepError::HostCopy(_)), "{refused}");
    let copies = told.machine.calls("cuMemcpyDtoHAsync");
    told.worker.restore(&told.snapshot(1, &[])).unwrap();
    told.complete(&StepPlan { step: 2, after: 1, ..StepPlan::default() });
    assert_eq!(told.machine.calls("cuMemcpyDtoHAsync"), copies);
    told.close();
}

/// The same plan, in which the draft model computes from token 5 up to token `end` as well.
fn drafts(plan: StepPlan, end: u32) -> StepPlan {
    let start = Start::At(5);
    let row = BatchRow { row: Row::new(1), start, tokens: end - 5, drafts: 0, input: 0 };
    StepPlan { draft_batch: vec![row], ..plan }
}

/// A worker with a draft model, and memory for all blocks.
fn drafting() -> Told {
    let mut options = options(small(), 8, 8);
    let draft = GroupOptions { draft_model: true, ..group(GroupKind::Full, small(), 8, 8) };
    options.groups.push(draft);
    let mut told = worker(options);
    told.worker.grow_to(8).unwrap();
    told
}

/// The host waits of the compute stream for copies, if a copy to the third block of a draft model's row is made, and the
/// draft model computes up to token `end`.
fn waits(end: u32) -> u64 {
    let mut told = drafting();
    let mut plan = drafts(row_of(&[0, 1]), end);
    let (row, group) = (Row::new(1), GroupId(1));
    plan.edits.push(RowEdit { group, row, first: 0, count: 3 });
    plan.edit_ids.extend([0, 1, 2].map(TableEntry::from));
    let back = BlockCopy { group, ..copy((Tier::Secondary, 0), (Tier::Primary, 2)) };
    plan.copies = vec![back];
    let before = told.machine.calls("cuStreamWaitEvent");
    told.finish(&plan);
    let waits = told.machine.calls("cuStreamWaitEvent") - before;
    told.close();
    waits
}

#[test]
fn work_waits_for_copies_to_blocks_that_only_the_draft_model_reads() {
    assert_eq!(waits(8), waits(6));
    assert_eq!(waits(9), waits(8) + 1, "the third block is the draft model's alone");
}

#[test]
fn a_plan_of_more_tokens_than_a_step_has_room_for_is_refused_before_it_is_carried_out() {
    let mut told = drafting();
    let most = told.worker.options().step_tokens_max;
    let mut longer = row_of(&[0, 1]);
    longer.batch[0].tokens = most + 1;
    for plan in [longer, drafts(row_of(&[0, 1]), 5 + most + 1)] {
        let refused = told.carry_out(&plan).unwrap_err();
        let StepError::Batch(BatchError::Tokens { tokens, max }) = refused else {
            panic!("{refused}")
        };
        assert_eq!((tokens, max), (u64::from(most) + 1, most));
    }
    let mut plan = row_of(&[0, 1]);
    plan.edits.push(RowEdit { group: GroupId(1), ..plan.edits[0] });
    plan.edit_ids.extend([0, 1].map(TableEntry::from));
    told.complete(&plan);
    told.close();
}
