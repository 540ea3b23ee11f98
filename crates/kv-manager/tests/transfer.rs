//! Sequences that leave for another process, and such that come from one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{admit, admitted, check_empty, computed, manager, step};
use kv_manager::{
    Adoption, Answer, Committed, ExportError, Manager, Outcome, Request, Sequence, SequenceError,
};
use kv_pool::events::BlockUse;

#[test]
fn a_sequence_leaves_when_all_that_writes_it_is_complete() {
    let mut manager = manager(8, 0);
    let mut sequence = admit(&mut manager, 0..10);
    let open = manager.begin_step().unwrap();
    manager.stage(&open, &mut [&mut sequence]).unwrap();
    manager.finish_step(open).unwrap();
    let refused = manager.export(sequence).unwrap_err();
    assert_eq!(refused.reason, ExportError::Later { step: 1 });
    let mut sequence = refused.sequence;
    common::done(&mut manager, 1);
    let refused = manager.export(sequence).unwrap_err();
    assert_eq!(refused.reason, ExportError::Later { step: 1 }, "its id is to come");
    sequence = refused.sequence;
    manager.commit(&mut sequence, 1, &[7]).unwrap();
    let blocks: Vec<_> = (0..3).map(|at| sequence.block(at).unwrap()).collect();
    let export = manager.export(sequence).unwrap();
    assert_eq!((export.tokens(), export.blocks()), (10, &blocks[..]));
    assert_eq!(export.ids().unwrap().len(), 11);
    assert_eq!(manager.free_rows(), 256);
    // Nobody gets the blocks while a transfer reads them.
    step(&mut manager, &mut []);
    step(&mut manager, &mut []);
    assert_eq!(manager.pool().claimable(), 5);
    drop(export);
    check_empty(&mut manager);
}

#[test]
fn a_reader_of_pending_blocks_does_not_leave() {
    let mut manager = manager(16, 0);
    let mut first = admit(&mut manager, 0..9);
    let open = manager.begin_step().unwrap();
    manager.stage(&open, &mut [&mut first]).unwrap();
    manager.finish_step(open).unwrap();
    let second = admit(&mut manager, 0..9);
    assert_eq!(second.cached_tokens(), 8);
    let refused = manager.export(second).unwrap_err();
    assert_eq!(refused.reason, ExportError::Later { step: 1 });
    common::done(&mut manager, 1);
    assert_eq!(manager.export(refused.sequence).unwrap().tokens(), 8);
}

#[test]
fn an_adopted_sequence_goes_on_behind_what_arrived_right() {
    for (right, end) in [(0, 0), (1, 4), (2, 8), (3, 10), (9, 10)] {
        let mut manager = manager(8, 0);
        let mut request = Request::new((0..11).collect());
        let (answer, adoption) = manager.adopt(&mut request, 10);
        let (mut sequence, adoption) = (admitted(answer), adoption.unwrap());
        assert_eq!((adoption.first(), adoption.blocks().len(), adoption.tokens()), (0, 3, 10));
        let early = manager.reserve(&mut sequence, 1).unwrap_err();
        assert!(matches!(early, kv_manager::ReserveError::Sequence(SequenceError::Arriving)));
        assert_eq!(manager.adopted(&mut sequence, adoption, right).unwrap(), end);
        let left = 11 - end as u32;
        manager.reserve(&mut sequence, left).unwrap();
        step(&mut manager, &mut [&mut sequence]);
        // What arrived is found by others.
        assert_eq!(admit(&mut manager, 0..11).cached_tokens(), 8);
        drop(sequence);
        check_empty(&mut manager);
    }
}

#[test]
fn what_is_cached_is_not_transferred() {
    let mut manager = manager(16, 0);
    drop(computed(&mut manager, 0..8));
    let mut request = Request::new((0..12).collect());
    let (answer, adoption) = manager.adopt(&mut request, 11);
    let (mut sequence, adoption) = (admitted(answer), adoption.unwrap());
    assert_eq!((adoption.first(), adoption.blocks().len()), (2, 1));
    assert_eq!(manager.adopted(&mut sequence, adoption, 1).unwrap(), 11);
    let mut request = Request::new((0..9).collect());
    let (answer, adoption) = manager.adopt(&mut request, 8);
    assert!(adoption.is_none());
    assert_eq!(admitted(answer).cached_tokens(), 8);
    let mut request = Request::new((100..200).collect());
    let (answer, adoption) = manager.adopt(&mut request, 50);
    assert!(matches!(answer, Answer::Refused(_)) && adoption.is_none());
}

#[test]
fn blocks_that_a_transfer_fills_are_nobody_elses() {
    let mut manager = manager(4, 0);
    let mut request = Request::new((0..11).collect());
    let (answer, adoption) = manager.adopt(&mut request, 10);
    let sequence = admitted(answer);
    drop(sequence);
    step(&mut manager, &mut []);
    step(&mut manager, &mut []);
    assert_eq!(manager.pool().claimable(), 1, "the transfer has three");
    drop(adoption);
    check_empty(&mut manager);
}

#[test]
fn a_transfer_belongs_to_one_sequence() {
    let mut manager = manager(16, 0);
    let mut requests = [Request::new((0..11).collect()), Request::new((50..61).collect())];
    let [first, second] = &mut requests;
    let (one, adoption) = manager.adopt(first, 10);
    let (other, _kept) = manager.adopt(second, 10);
    let (mut one, mut other) = (admitted(one), admitted(other));
    let foreign = manager.adopted(&mut other, adoption.unwrap(), 3).unwrap_err();
    assert_eq!(foreign, SequenceError::Foreign);
    assert!(manager.reserve(&mut one, 1).is_err(), "what its transfer did is not known");
}

#[test]
fn content_comes_back_before_it_is_asked_for() {
    let mut manager = manager(4, 8);
    drop(computed(&mut manager, 0..16));
    step(&mut manager, &mut []);
    drop(computed(&mut manager, 100..116));
    step(&mut manager, &mut []);
    let name = |ids: std::ops::Range<u32>| {
        let ids: Vec<_> = ids.collect();
        let hasher = kv_pool::BlockHasher::FAST;
        let block_tokens = std::num::NonZeroU32::new(common::BLOCK).unwrap();
        hasher.prefix(kv_pool::BlockHash::ROOT, &ids, block_tokens).collect::<Vec<_>>()
    };
    let first = name(0..16);
    assert_eq!(manager.prefetch(&first), 0, "no block is without content");
    assert_eq!(manager.forget(&name(100..116)[2..]), 2);
    step(&mut manager, &mut []);
    assert_eq!(manager.prefetch(&first), 2);
    let plan = step(&mut manager, &mut []);
    assert_eq!(plan.copies.len(), 2);
    let pinned = manager.pool().match_prefix(&first);
    let near = pinned.locations().filter(|at| at.tier == kv_pool::Tier::Primary);
    assert_eq!((pinned.len(), near.count()), (4, 2));
}

#[test]
fn a_sequence_leaves_when_its_copies_are_made() {
    let mut manager = manager(4, 4);
    drop(computed(&mut manager, 0..9));
    drop(computed(&mut manager, 50..66));
    let back = admit(&mut manager, 0..9);
    assert_eq!((back.cached_tokens(), back.onboarded_blocks()), (8, 2));
    let refused = manager.export(back).unwrap_err();
    assert_eq!(refused.reason, ExportError::Later { step: 3 }, "no plan has brought it back yet");
    let open = manager.begin_step().unwrap();
    manager.stage(&open, &mut []).unwrap();
    manager.finish_step(open).unwrap();
    // Its second block evicts nothing.
    let blocks = manager.pool().snapshot().blocks;
    let unused = blocks.iter().filter(|block| block.usage == BlockUse::Unused);
    let unused: Vec<_> = unused.filter_map(|block| block.hash).collect();
    assert_ne!(manager.forget(&unused), 0);
    let again = admit(&mut manager, 0..5);
    let refused = manager.export(refused.sequence).unwrap_err();
    assert_eq!(refused.reason, ExportError::Later { step: 3 }, "the plan is not carried out");
    let other = manager.export(again).unwrap_err();
    assert_eq!(other.reason, ExportError::Later { step: 3 }, "it found what is on its way");
    common::done(&mut manager, 3);
    assert_eq!(manager.export(refused.sequence).unwrap().tokens(), 8);
}

/// A sequence that arrives behind a prefix of two blocks, of whose step nothing is known.
fn arriving(manager: &mut Manager) -> (Sequence, Adoption) {
    let mut first = admit(manager, 0..9);
    let open = manager.begin_step().unwrap();
    manager.stage(&open, &mut [&mut first]).unwrap();
    manager.finish_step(open).unwrap();
    let mut request = Request::new((0..17).collect());
    let (answer, adoption) = manager.adopt(&mut request, 16);
    let adoption = adoption.unwrap();
    assert_eq!(adoption.first(), 2);
    (admitted(answer), adoption)
}

#[test]
fn what_arrives_behind_a_failed_prefix_is_not_used() {
    for told in [false, true] {
        let mut manager = manager(16, 0);
        let (mut sequence, adoption) = arriving(&mut manager);
        common::complete(&mut manager, 1, Outcome::Failed);
        if told {
            let ids: &[u32] = &[];
            let set_back = manager.commit(&mut sequence, 1, &ids.to_vec());
            assert_eq!(set_back, Ok(Committed::Redo { from: 0 }));
        }
        let end = manager.adopted(&mut sequence, adoption, 2);
        assert_eq!(end, if told { Ok(0) } else { Err(SequenceError::Redo { from: 0 }) });
        assert_eq!((sequence.resolved(), manager.pool().stats().primary.cached), (0, 0));
    }
}

#[test]
fn a_transfer_of_another_manager_is_refused() {
    let (mut manager, mut other) = (manager(16, 0), manager(16, 0));
    let (mut sequence, _adoption) = arriving(&mut manager);
    let (_sequence, foreign) = arriving(&mut other);
    assert_eq!(manager.adopted(&mut sequence, foreign, 2), Err(SequenceError::Foreign));
    assert_eq!(sequence.resolved(), 8);
}
