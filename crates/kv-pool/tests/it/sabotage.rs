//! The protection taken out: when finding and taking a block are two steps, two callers write one
//! block id. The same scenario on the pool as it is does no harm.

use crate::common::memory::{Harm, Memory};
use crate::common::{One, OneClaimed, Registration};
use crate::common::{claim, name, named, pool};
use kv_pool::{BlockPool, Priority};

const FIRST: u32 = 1;
const SECOND: u32 = 2;

/// Two requests claim a block each, write it and share it; then both contents are read.
fn two_requests(pool: &BlockPool) -> Vec<Harm> {
    let memory = Memory::new(4, 0);
    let mut harms = Vec::new();
    let (first, second) = (claim(pool), claim(pool));
    harms.extend(memory.take(&first, FIRST));
    harms.extend(memory.take(&second, SECOND));
    memory.write(&first, FIRST.into());
    memory.write(&second, SECOND.into());
    harms.extend(memory.own(&first, FIRST.into()));
    harms.extend(memory.own(&second, SECOND.into()));
    for (block, owner) in [(first, FIRST), (second, SECOND)] {
        harms.extend(memory.give(&block, owner));
        match block.register_one(name(owner), Priority::DEFAULT) {
            Registration::New(pin) => harms.extend(memory.shared(&pin, owner.into())),
            duplicate => panic!("{duplicate:?}"),
        }
    }
    harms
}

#[test]
fn peek_then_claim_hands_one_block_to_two_requests() {
    let pool = pool(4, 0);
    pool.sabotage_peek_then_claim();
    let harms = two_requests(&pool);
    let twice = Harm::HandedOutTwice { block_id: 0, owner: FIRST, second: SECOND };
    let overwritten =
        Harm::Overwritten { block_id: 0, read: SECOND.into(), expected: FIRST.into() };
    assert_eq!(harms[..2], [twice, overwritten], "{harms:?}");
}

#[test]
fn peek_then_claim_takes_a_block_from_its_reader() {
    let (pool, memory) = (pool(2, 0), Memory::new(2, 0));
    pool.sabotage_peek_then_claim();
    let first = claim(&pool);
    memory.write(&first, FIRST.into());
    let reader = named(first, FIRST, Priority::DEFAULT);
    assert_eq!(memory.shared(&reader, FIRST.into()), None);
    // The second request acts on a peek of before.
    let second = claim(&pool);
    memory.write(&second, SECOND.into());
    let block_id = reader.block_id().index();
    let overwritten = Harm::Overwritten { block_id, read: SECOND.into(), expected: FIRST.into() };
    assert_eq!(memory.shared(&reader, FIRST.into()), Some(overwritten));
    let error = pool.check_integrity().unwrap_err().to_string();
    assert!(error.contains("references and is"), "{error}");
}

#[test]
fn a_claim_in_one_step_does_neither() {
    let pool = pool(4, 0);
    assert_eq!(two_requests(&pool), []);
    pool.check_integrity().unwrap();
}

#[test]
fn a_block_handed_out_twice_is_given_back_once() {
    let pool = pool(4, 0);
    pool.sabotage_peek_then_claim();
    drop((claim(&pool), claim(&pool)));
    assert_eq!(pool.counters().misuses, 1);
    let error = pool.check_integrity().unwrap_err().to_string();
    assert_eq!(error, "1 releases of blocks that were not held");
}
