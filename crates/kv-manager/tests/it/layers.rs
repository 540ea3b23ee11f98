//! Sequences that are admitted while their prefix is loaded: nothing wrong is named or committed.

use crate::prelude::*;

/// A manager with two workers, and a request that was admitted while its first three blocks are loaded.
struct Entered {
    rig: Rig,
    names: Vec<BlockHash>,
    load: Transfer,
    sequence: Sequence,
}

impl Entered {
    fn new() -> Self {
        Self::with(false)
    }

    fn with(scrubs: bool) -> Self {
        let lower = lower();
        let mut rig = Rig::with(ManagerOptions { workers: 2, lower, scrubs, ..options(12, 8) });
        let names = rig.store_away(0..12);
        let mut wanted = by_layers(0..14);
        let load = rig.load(&mut wanted);
        let sequence = admitted(rig.again(&mut wanted));
        assert_eq!((sequence.cached_tokens(), sequence.resolved()), (12, 12));
        assert_eq!(sequence.loads(), Some(load.ticket));
        Self { rig, names, load, sequence }
    }

    /// Stages the sequence, without a worker having completed the step.
    fn stage(&mut self) -> StepPlan {
        staged(&mut self.rig.manager, &mut [&mut self.sequence])
    }

    fn complete(&mut self, worker: u16, step: u64) {
        let completion = Completion { worker: WorkerId(worker), step, outcome: Outcome::Done };
        self.rig.manager.complete(completion).unwrap();
    }

    fn settle(&mut self, worker: u16, wrong: &[(u32, BlockFault)]) {
        self.rig.settle(worker, self.load.ticket, wrong);
    }

    fn commit(&mut self, step: u64) -> Result<Committed, CommitError> {
        self.rig.manager.commit(&mut self.sequence, step, &[100])
    }

    /// How many blocks of the prompt others find.
    fn named(&self) -> usize {
        self.names.iter().take_while(|name| self.rig.found(**name).is_some()).count()
    }
}

#[test]
fn a_step_reads_blocks_that_are_loaded_and_counts_when_the_load_has_ended() {
    let mut entered = Entered::new();
    let plan = entered.stage();
    let blocks: Vec<_> = (0..3).map(|at| entered.sequence.block(GroupId(0), at).unwrap()).collect();
    let copies: Vec<_> = plan.layer_loads.iter().map(|load| (load.from, load.to)).collect();
    let from = entered.load.blocks.iter().map(|&(_, block)| block);
    assert_eq!(copies, from.zip(blocks).collect::<Vec<_>>());
    assert!(plan.layer_loads.iter().all(|load| load.ticket == entered.load.ticket));
    entered.settle(0, &[]);
    entered.complete(0, plan.step);
    let ticket = entered.load.ticket;
    let later = entered.commit(plan.step).unwrap_err();
    assert_eq!(later, CommitError::Sequence(SequenceError::Loading { ticket }));
    assert_eq!((entered.named(), entered.sequence.known()), (0, 14));
    entered.settle(1, &[]);
    entered.complete(1, plan.step);
    assert_eq!(entered.commit(plan.step), Ok(Committed::Taken));
    assert_eq!((entered.named(), entered.sequence.loads()), (3, None));
    let stats = entered.rig.manager.lower_stats();
    assert_eq!((stats.entered, stats.redone, stats.loaded_blocks[0]), (1, 0, 3));
}

#[test]
fn a_block_that_a_load_has_written_is_scrubbed_before_anybody_else_gets_it() {
    let mut entered = Entered::with(true);
    let plan = entered.stage();
    let loaded: Vec<_> = plan.layer_loads.iter().map(|load| load.to).collect();
    for worker in 0..2 {
        // The tier has brought another tenant's content.
        entered.settle(worker, &[(1, BlockFault::Checksum)]);
        entered.complete(worker, plan.step);
    }
    assert_eq!(entered.commit(plan.step), Ok(Committed::Redo { from: 4 }));
    drop(entered.sequence);
    let manager = &mut entered.rig.manager;
    let mut step = |batch: &mut [&mut Sequence]| {
        let step = manager.begin_step().unwrap();
        let plan = manager.stage(&step, batch).unwrap().clone();
        manager.finish_step(step).unwrap();
        for worker in [0, 1].map(WorkerId) {
            let outcome = Outcome::Done;
            manager.complete(Completion { worker, step: plan.step, outcome }).unwrap();
        }
        plan
    };
    step(&mut []);
    let _all = admit(&mut entered.rig.manager, 500..548);
    let step = entered.rig.manager.begin_step().unwrap();
    let plan = entered.rig.manager.stage(&step, &mut []).unwrap();
    for block in loaded {
        assert!(plan.scrubs.iter().any(|scrub| scrub.block == block), "{:?}", plan.scrubs);
    }
}

#[test]
fn a_block_that_is_wrong_at_one_worker_is_computed_again_with_all_behind_it() {
    let mut entered = Entered::new();
    let plan = entered.stage();
    entered.settle(0, &[]);
    entered.complete(0, plan.step);
    // A later step, which is in flight when the load ends.
    entered.rig.manager.reserve(&mut entered.sequence, 1).unwrap().given().unwrap();
    let later = entered.stage();
    assert!(later.layer_loads.is_empty(), "it is copied once");
    entered.settle(1, &[(1, BlockFault::Checksum)]);
    entered.complete(1, plan.step);
    assert_eq!(entered.commit(plan.step), Ok(Committed::Redo { from: 4 }));
    assert_eq!((entered.sequence.resolved(), entered.sequence.known()), (4, 14));
    assert_eq!(entered.commit(later.step), Ok(Committed::Stale), "it has read the same");
    assert_eq!(entered.named(), 1);
    // It is computed, and named, and there is nothing to be told a second time.
    entered.rig.manager.reserve(&mut entered.sequence, 10).unwrap().given().unwrap();
    let again = entered.stage();
    (0..2).for_each(|worker| entered.complete(worker, again.step));
    assert_eq!(entered.commit(again.step), Ok(Committed::Taken));
    assert_eq!(entered.named(), 3);
    assert_eq!(entered.rig.manager.lower_stats().redone, 1);
}

#[test]
fn nothing_behind_a_load_is_named_before_it_has_ended() {
    let mut entered = Entered::new();
    entered.rig.manager.extend(&mut entered.sequence, &[14, 15, 16]).unwrap();
    entered.rig.manager.reserve(&mut entered.sequence, 5).unwrap().given().unwrap();
    let plan = entered.stage();
    // The fourth block is full, of known ids. A request that asks for it waits, or finds nothing.
    let mut wanted = request(0..17);
    let answer = entered.rig.again(&mut wanted);
    assert!(matches!(answer, Answer::Waiting(_)), "{answer:?}");
    assert_eq!(entered.named(), 0);
    (0..2).for_each(|worker| entered.settle(worker, &[(0, BlockFault::Short)]));
    (0..2).for_each(|worker| entered.complete(worker, plan.step));
    assert_eq!(entered.commit(plan.step), Ok(Committed::Redo { from: 0 }));
    assert_eq!(entered.named(), 0);
}

#[test]
fn a_worker_that_completes_a_step_without_its_loads_has_not_loaded_them() {
    let mut entered = Entered::new();
    let plan = entered.stage();
    entered.complete(0, plan.step);
    (0..2).for_each(|worker| entered.settle(worker, &[]));
    entered.complete(1, plan.step);
    // The load was right in the end, and what the step has read is not known.
    assert_eq!(entered.rig.manager.lower_stats().loaded_blocks[0], 3);
    assert_eq!(entered.commit(plan.step), Ok(Committed::Redo { from: 0 }));
}

#[test]
fn what_reads_or_copies_the_blocks_waits_for_the_load() {
    let mut entered = Entered::new();
    let ticket = entered.load.ticket;
    // The load has ended, and no plan has copied it.
    (0..2).for_each(|worker| entered.settle(worker, &[]));
    for _ in 0..2 {
        let (manager, sequence) = (&mut entered.rig.manager, &mut entered.sequence);
        let loading = SequenceError::Loading { ticket };
        let suspended = manager.suspend(sequence);
        assert!(matches!(suspended, Err(SuspendError::Sequence(error)) if error == loading));
        let forked = manager.fork(sequence);
        assert!(matches!(forked, Err(ChangeError::Sequence(error)) if error == loading));
    }
    let plan = entered.stage();
    assert_eq!(plan.layer_loads.len(), 3);
    (0..2).for_each(|worker| entered.complete(worker, plan.step));
    assert_eq!(entered.commit(plan.step), Ok(Committed::Taken));
    drop(entered.rig.manager.fork(&mut entered.sequence).unwrap());
    entered.rig.manager.suspend(&mut entered.sequence).unwrap();
}

#[test]
fn host_blocks_stay_until_they_are_copied() {
    let mut entered = Entered::new();
    let plan = entered.stage();
    (0..2).for_each(|worker| entered.settle(worker, &[(2, BlockFault::Late)]));
    let in_use = |entered: &Entered| {
        let stats = entered.rig.pool().stats().secondary;
        stats.pinned + stats.claimed
    };
    assert_eq!(in_use(&entered), 3, "right or wrong, they are being read");
    entered.complete(0, plan.step);
    assert_eq!(in_use(&entered), 3);
    entered.complete(1, plan.step);
    assert_eq!(in_use(&entered), 0);
    assert_eq!(entered.commit(plan.step), Ok(Committed::Redo { from: 8 }));
    // What is late is below still.
    assert_eq!(entered.rig.manager.find_below(GroupId(0), entered.names[2]), Some(Tier::Third));
}

#[test]
fn a_block_that_is_wrong_so_far_is_not_entered_with() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(12, 8) });
    rig.store_away(0..12);
    let mut wanted = by_layers(0..14);
    // No plan has begun the load, so it may have to wait for copies of the plan that would read it.
    for _ in 0..2 {
        let answer = rig.again(&mut wanted);
        assert!(matches!(answer, Answer::Waiting(Waiting::Load { .. })), "{answer:?}");
    }
    let load = rig.load(&mut wanted);
    rig.settle(0, load.ticket, &[(1, BlockFault::Failed)]);
    // What is right before it is not all that is below.
    let answer = rig.again(&mut wanted);
    assert!(matches!(answer, Answer::Waiting(Waiting::Load { .. })), "{answer:?}");
    rig.settle(1, load.ticket, &[]);
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 4);
}

#[test]
fn a_redo_is_told_by_the_call_that_comes_first() {
    let mut entered = Entered::new();
    let plan = entered.stage();
    (0..2).for_each(|worker| entered.settle(worker, &[(0, BlockFault::Missing)]));
    (0..2).for_each(|worker| entered.complete(worker, plan.step));
    let step = entered.rig.manager.begin_step().unwrap();
    let refused = entered.rig.manager.stage(&step, &mut [&mut entered.sequence]).unwrap_err();
    let reason = SequenceError::Redo { from: 0 };
    assert_eq!(refused, StageError::Sequence { index: 0, reason });
}

#[test]
fn a_request_enters_when_all_that_is_below_is_on_its_way() {
    let mut rig = Rig::with(ManagerOptions {
        lower: LowerOptions { ticket_blocks_max: 1, loads_open_max: 2, ..lower() },
        ..options(12, 8)
    });
    for block in 0..3 {
        rig.store(0..4 * (block + 1));
    }
    rig.push_out();
    let mut wanted = by_layers(0..14);
    let first = rig.load(&mut wanted);
    // Two of three blocks are on their way.
    assert!(matches!(rig.again(&mut wanted), Answer::Waiting(Waiting::Load { .. })));
    rig.settle(0, first.ticket, &[]);
    let answer = rig.again(&mut wanted);
    assert!(matches!(answer, Answer::Waiting(Waiting::Load { .. })), "{answer:?}");
    // The first has come, and a ticket for the third is opened by the next ask but one.
    let mut plans = 0;
    let sequence = loop {
        match rig.again(&mut wanted) {
            Answer::Admitted(sequence) => break sequence,
            Answer::Waiting(Waiting::Load { ticket, .. }) => {
                let plan = rig.step(&mut []);
                let opened = plan.transfers.iter().any(|one| one.ticket == ticket);
                if !opened {
                    rig.settle(0, ticket, &[]);
                }
            }
            answer => panic!("{answer:?}"),
        }
        plans += 1;
        assert!(plans < 10, "it never enters");
    };
    assert_eq!(sequence.cached_tokens(), 12);
    let by_loads = sequence.loads().is_some();
    assert!(by_loads, "the last block is on its way");
}

#[test]
fn a_block_of_a_sequence_that_has_gone_is_not_loaded_for_its_next_owner() {
    let Entered { mut rig, sequence, .. } = Entered::new();
    // The step of its admission ends without a plan.
    let step = rig.manager.begin_step().unwrap();
    drop(sequence);
    rig.manager.finish_step(step).unwrap();
    let mut next = admitted(rig.ask(1000..1000 + 12 * 4).1);
    let plan = rig.step(&mut [&mut next]);
    assert_eq!(plan.layer_loads, [], "it would come at any time of the next owner's step");
}

#[test]
fn a_worker_that_joins_is_told_of_no_load_from_before() {
    let Entered { mut rig, sequence, .. } = Entered::new();
    let worker = WorkerId(1);
    rig.manager.lose_worker(worker).unwrap();
    rig.manager.fence_worker(worker).unwrap();
    rig.manager.join_worker(worker).unwrap();
    // The blocks are the lost sequence's still, so nobody else takes the loads off the plan.
    let plan = rig.step(&mut []);
    assert_eq!(plan.layer_loads, [], "of a ticket that it does not know");
    drop(sequence);
}
