//! What the tests have in common.

#![allow(dead_code, reason = "each test uses a part of it")]
pub(crate) mod below;
pub(crate) mod ends;
pub(crate) mod host;
pub(crate) mod state;

use kv_manager::{
    Answer, Completion, GroupOptions, Manager, ManagerOptions, Outcome, Request, Sequence,
    StepPlan, WorkerId,
};
use kv_pool::{BlockHash, PoolConfig};
use kv_tier::GroupKind;

/// Blocks of four tokens.
pub(crate) const BLOCK: u32 = 4;

pub(crate) fn options(device: u64, host: u64) -> ManagerOptions {
    let pool = PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(device) };
    ManagerOptions { block_tokens: BLOCK, pool, ..ManagerOptions::default() }
}

/// A group with so many device blocks.
pub(crate) fn group(kind: GroupKind, device: u64) -> GroupOptions {
    GroupOptions {
        kind,
        block_tokens: BLOCK,
        pool: PoolConfig::primary_only(device),
        blocks_per_sequence_max: 64,
        watermark_blocks: 0,
        draft_model: false,
    }
}

pub(crate) fn manager(device: u64, host: u64) -> Manager {
    Manager::new(options(device, host)).unwrap()
}

pub(crate) fn admitted(answer: Answer) -> Sequence {
    match answer {
        Answer::Admitted(sequence) => sequence,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn admit(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) -> Sequence {
    let mut requests = [Request::new(ids.into_iter().collect())];
    admitted(manager.admit(&mut requests, u64::MAX).pop().unwrap())
}

/// The answer to a request that is alone.
pub(crate) fn ask(manager: &mut Manager, request: Request) -> Answer {
    manager.admit(&mut [request], u64::MAX).pop().unwrap()
}

/// The answer to a prompt that waits for nobody.
pub(crate) fn ask_now(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) -> Answer {
    let mut request = Request::new(ids.into_iter().collect());
    request.waits = false;
    ask(manager, request)
}

pub(crate) fn admit_now(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) -> Sequence {
    admitted(ask_now(manager, ids))
}

/// The names of the blocks that ids fill.
pub(crate) fn names(ids: impl IntoIterator<Item = u32>) -> Vec<BlockHash> {
    let ids: Vec<u32> = ids.into_iter().collect();
    let mut parent = BlockHash::ROOT;
    let name = |ids: &[u32]| {
        parent = BlockHash::chain(parent, ids);
        parent
    };
    ids.chunks_exact(BLOCK as usize).map(name).collect()
}

pub(crate) fn done(manager: &mut Manager, step: u64) {
    complete(manager, step, Outcome::Done);
}

pub(crate) fn complete(manager: &mut Manager, step: u64, outcome: Outcome) {
    manager.complete(Completion { worker: WorkerId(0), step, outcome }).unwrap();
}

/// Stages a step of these sequences and leaves it in flight; its plan.
pub(crate) fn staged(manager: &mut Manager, batch: &mut [&mut Sequence]) -> StepPlan {
    let step = manager.begin_step().unwrap();
    let plan = manager.stage(&step, batch).unwrap().clone();
    manager.finish_step(step).unwrap();
    plan
}

/// A whole step of these sequences, which is complete; its plan.
pub(crate) fn step(manager: &mut Manager, batch: &mut [&mut Sequence]) -> StepPlan {
    let plan = staged(manager, batch);
    done(manager, plan.step);
    plan
}

/// A sequence whose prompt is computed and complete.
pub(crate) fn computed(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) -> Sequence {
    let mut sequence = admit(manager, ids);
    step(manager, &mut [&mut sequence]);
    sequence
}

/// The same of a prompt whose chunks may end at checkpoints.
pub(crate) fn computed_in_chunks(
    manager: &mut Manager,
    ids: impl IntoIterator<Item = u32>,
) -> Sequence {
    let mut sequence = admit(manager, ids);
    loop {
        step(manager, &mut [&mut sequence]);
        let left = sequence.to_compute() as u32;
        if left == 0 {
            return sequence;
        }
        manager.reserve(&mut sequence, left).unwrap();
    }
}

/// The same with the id that came out.
pub(crate) fn sampled(
    manager: &mut Manager,
    ids: impl IntoIterator<Item = u32>,
    id: u32,
) -> Sequence {
    let mut sequence = computed_in_chunks(manager, ids);
    let last = sequence.awaits().unwrap();
    manager.commit(&mut sequence, last, &[id]).unwrap();
    sequence
}

/// Nothing is in use, and nothing was lost.
pub(crate) fn check_empty(manager: &mut Manager) {
    while let Ok(step) = manager.begin_step() {
        let number = manager.stage(&step, &mut []).unwrap().step;
        manager.finish_step(step).unwrap();
        done(manager, number);
        if manager.pool().claimable() as u64 == manager.options().pool.primary_blocks {
            break;
        }
    }
    assert_eq!(manager.pool().claimable() as u64, manager.options().pool.primary_blocks);
    assert_eq!(manager.free_rows(), manager.options().sequences_max as usize);
    manager.pool().check_integrity().unwrap();
}
