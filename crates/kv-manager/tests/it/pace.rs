//! Sequences that decode: what a step costs while they go on as before, and what ends that.

use crate::prelude::*;
use kv_testkit::alloc::allocations;

const BLOCK: u32 = 16;

/// Sequences of which blocks become full at different steps, with their prompts computed by step 1.
fn decoding(count: u32, steps: u64) -> (Manager, Vec<Sequence>) {
    let blocks = u64::from(count) * (steps / u64::from(BLOCK) + 8);
    let mut manager = made(ManagerOptions {
        sequences_max: count,
        ..ManagerOptions::new(BLOCK, PoolConfig::primary_only(blocks))
    });
    let request = |number: u32| {
        let ids = (0..64 + number % BLOCK).map(|at| number * 1000 + at).collect();
        let mut request = Request::new(ids);
        request.tokens_max = steps + 96;
        request
    };
    let step = manager.begin_step().unwrap();
    let mut queue: VecDeque<_> = (0..count).map(request).collect();
    let admitted = manager.admit(&mut queue, u64::MAX).admitted;
    let mut running: Vec<_> = admitted.into_iter().map(|(_, sequence)| sequence).collect();
    manager.stage(&step, &mut running.iter_mut().collect::<Vec<_>>()).unwrap();
    manager.finish_step(step).unwrap();
    (manager, running)
}

/// A step of all of them, with one of overlap, and the completion of the step before.
fn decode(manager: &mut Manager, batch: &mut [&mut Sequence]) {
    let step = manager.begin_step().unwrap();
    let number = step.number();
    for sequence in batch.iter_mut() {
        if number > 2 {
            let id = [number as u32];
            assert_eq!(manager.commit(sequence, number - 2, &id).unwrap(), Committed::Taken);
        }
        manager.reserve(sequence, 1).unwrap().given().unwrap();
    }
    manager.stage(&step, batch).unwrap();
    manager.finish_step(step).unwrap();
    let (worker, outcome) = (WorkerId(0), Outcome::Done);
    manager.complete(Completion { worker, step: number - 1, outcome }).unwrap();
}

#[test]
fn ten_thousand_steps_of_256_decoding_sequences_allocate_nothing() {
    const STEPS: u64 = 10_000;
    let (mut manager, mut running) = decoding(256, STEPS + 64);
    let mut batch: Vec<&mut Sequence> = running.iter_mut().collect();
    // The lists of a step come to their lengths while every sequence begins a block.
    for _ in 0..64 {
        decode(&mut manager, &mut batch);
    }
    let (before, blocks) = (allocations(), batch[0].block_count(GroupId(0)));
    for _ in 0..STEPS {
        decode(&mut manager, &mut batch);
    }
    assert_eq!(allocations() - before, 0);
    assert_eq!(batch[0].block_count(GroupId(0)) - blocks, (STEPS / u64::from(BLOCK)) as usize);
    manager.first_pool().check_integrity().unwrap();
}

/// A sequence in its fifth step of decoding, with blocks of four tokens, of which the last step is in flight.
fn in_step() -> (Manager, Sequence) {
    let mut manager = manager(16, 0);
    let step = manager.begin_step().unwrap();
    let mut queue = [Request::new((0..9).collect())].into();
    let (_, mut sequence) = manager.admit(&mut queue, u64::MAX).admitted.remove(0);
    manager.stage(&step, &mut [&mut sequence]).unwrap();
    manager.finish_step(step).unwrap();
    for _ in 0..4 {
        decode(&mut manager, &mut [&mut sequence]);
    }
    assert_eq!((sequence.known(), sequence.upper(), sequence.block_count(GroupId(0))), (12, 13, 4));
    (manager, sequence)
}

#[test]
fn a_sequence_that_is_cut_has_no_more_room_than_its_blocks() {
    let (mut manager, mut sequence) = in_step();
    assert_eq!(manager.reserve(&mut sequence, 1).unwrap().given().unwrap().blocks, 0);
    assert_eq!(manager.truncate(&mut sequence, 4).unwrap(), 4);
    assert_eq!(manager.reserve(&mut sequence, 1).unwrap().given().unwrap().blocks, 1);
    assert_eq!(manager.commit(&mut sequence, 4, &[1]).unwrap(), Committed::Stale);
}

#[test]
fn a_failed_step_is_told_to_a_sequence_that_goes_on_as_before() {
    for call in 0..3 {
        let (mut manager, mut sequence) = in_step();
        let (worker, outcome) = (WorkerId(0), Outcome::Failed);
        if call == 2 {
            manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
        }
        manager.complete(Completion { worker, step: 5, outcome }).unwrap();
        let told = match call {
            0 => manager.commit(&mut sequence, 4, &[1]).map(|committed| match committed {
                Committed::Redo { from } => from,
                other => panic!("{other:?}"),
            }),
            1 => match manager.reserve(&mut sequence, 1).unwrap_err() {
                kv_manager::ReserveError::Sequence(SequenceError::Redo { from }) => Ok(from),
                other => panic!("{other:?}"),
            },
            _ => {
                let step = manager.begin_step().unwrap();
                match manager.stage(&step, &mut [&mut sequence]).unwrap_err() {
                    kv_manager::StageError::Sequence {
                        reason: SequenceError::Redo { from },
                        ..
                    } => Ok(from),
                    other => panic!("{other:?}"),
                }
            }
        };
        assert!(told.unwrap() <= 11, "call {call}");
    }
}

#[test]
fn ids_that_are_placeholders_from_now_on_are_refused_in_a_step_as_before() {
    let (mut manager, mut sequence) = in_step();
    manager.set_placeholder_ids(vec![7..=7]);
    let refused = manager.commit(&mut sequence, 4, &[7]).unwrap_err();
    let is_placeholder =
        matches!(refused, CommitError::Tokens(TokensError::Placeholder { id: 7, .. }));
    assert!(is_placeholder, "{refused:?}");
    assert_eq!(manager.commit(&mut sequence, 4, &[8]).unwrap(), Committed::Taken);
    done(&mut manager, 5);
}
