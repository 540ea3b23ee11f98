//! The defects that this crate removes, as they were published: the model checker finds each, and
//! finds nothing in the same program on the pool as it is.

use std::sync::Arc;

use kv_pool::{Claimed, Pinned, Tier};
use loom::thread;

use crate::explore::{Bound, defect, explore};
use crate::ops::{FAR, NEAR, World, find, name};

const BOUND: Bound = Bound::Preemptions(3);

/// Two steps where the pool has one.
#[derive(Clone, Copy)]
enum Steps {
    One,
    Two,
}

impl Steps {
    fn claim(self, world: &World, tier: Tier) -> Option<Claimed> {
        match self {
            Self::One => world.pool.claim_in(tier, 1).ok(),
            Self::Two => {
                let peeked = world.pool.broken_peek(tier)?;
                Some(world.pool.broken_claim(peeked))
            }
        }
    }

    fn find_and_pin(self, world: &World, content: u32, tier: Tier) -> Option<Pinned> {
        match self {
            Self::One => world.pool.find_and_pin(name(content), tier),
            Self::Two => world.pool.broken_find_and_pin(name(content), tier),
        }
    }
}

/// Two threads claim a block each and write it.
fn two_claims(steps: Steps) {
    let world = Arc::new(World::new(2, 0));
    // Both blocks have been used: a peek sees them.
    drop(world.pool.claim(2));
    let claim = move |world: &World, owner| {
        let Some(block) = steps.claim(world, Tier::Primary) else { return };
        world.own_it(&block, owner);
    };
    let other = Arc::clone(&world);
    let thread = thread::spawn(move || claim(&other, 1));
    claim(&world, 2);
    thread.join().unwrap();
    world.check();
}

/// One thread takes a block of the secondary tier for content that is to come there, while a
/// remote reader pins what lies in it.
fn claim_and_remote_reader(steps: Steps) {
    let world = Arc::new(World::new(1, 1));
    let other = Arc::clone(&world);
    let thread = thread::spawn(move || {
        let Some(block) = steps.claim(&other, Tier::Secondary) else { return };
        other.write(&block, NEAR);
    });
    if let Some(pin) = world.pool.find_and_pin(name(FAR), Tier::Secondary) {
        world.read(&pin, FAR);
    }
    thread.join().unwrap();
    world.check();
}

/// The last reference to a block is given back while another thread finds the block and pins it.
fn last_unpin_and_find(steps: Steps) {
    let world = Arc::new(World::new(1, 0));
    let pin = find(&world.pool, NEAR).unwrap();
    let thread = thread::spawn(move || drop(pin));
    let found = steps.find_and_pin(&world, NEAR, Tier::Primary).unwrap();
    thread.join().unwrap();
    // What is pinned is nobody else's.
    if let Ok(block) = world.pool.claim_one() {
        world.write(&block, FAR);
    }
    world.read(&found, NEAR);
    drop(found);
    world.check();
}

fn only_in_two_steps(test: &str, program: fn(Steps)) {
    let found = defect(test, BOUND, move || program(Steps::Two));
    let failure = found.failure.unwrap_or_else(|| panic!("not found in {} orders", found.order));
    let orders = explore(test, BOUND, move || program(Steps::One));
    println!("{test}: found by order {}: {failure}; in one step nothing in {orders}", found.order);
}

#[test]
fn peek_then_claim_hands_one_block_to_two() {
    only_in_two_steps("broken::peek_then_claim_hands_one_block_to_two", two_claims);
}

#[test]
fn peek_then_claim_overwrites_what_a_remote_reader_has_pinned() {
    only_in_two_steps(
        "broken::peek_then_claim_overwrites_what_a_remote_reader_has_pinned",
        claim_and_remote_reader,
    );
}

#[test]
fn find_then_pin_leaves_a_pinned_block_to_be_claimed() {
    only_in_two_steps(
        "broken::find_then_pin_leaves_a_pinned_block_to_be_claimed",
        last_unpin_and_find,
    );
}
