//! Who owns a pin and a pool: stocks of pins, and pools whose handles are gone before their pins.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[allow(dead_code, reason = "other tests count allocations")]
mod counting;

use common::{cache, checked, find, name, pool};
use counting::bytes;
use kv_pool::{BlockPool, Naming, Onboarded, PinStock, PoolConfig, Priority, Registration, Tier};

#[test]
fn a_block_is_held_until_its_stock_and_all_pins_of_it_are_gone() {
    let pool = pool(1, 0);
    cache(&pool, 1, Priority::DEFAULT);
    let mut stock = PinStock::new(find(&pool, 1).unwrap());
    let (first, second) = (stock.take(), stock.take());
    assert_eq!((first.block(), first.slot()), (stock.pin().block(), stock.pin().slot()));
    stock.give_back(first).unwrap();
    let third = stock.take();
    stock.give_back(third).unwrap();
    assert_eq!(pool.claimable(), 0);
    drop(stock);
    assert_eq!(pool.claimable(), 0, "one pin is out still");
    std::thread::scope(|scope| scope.spawn(move || drop(second)).join().unwrap());
    assert_eq!(pool.claimable(), 1);
    checked(&pool);
}

#[test]
fn a_stock_takes_back_what_is_of_its_block_and_count_alone() {
    let pool = pool(2, 0);
    cache(&pool, 1, Priority::DEFAULT);
    cache(&pool, 2, Priority::DEFAULT);
    let mut stock = PinStock::new(find(&pool, 1).unwrap());
    let other = stock.give_back(find(&pool, 2).unwrap()).unwrap_err();
    assert_eq!(other.hash(), Some(name(2)));
    // The same block, pinned anew, has a count of its own.
    let counted_apart = stock.give_back(find(&pool, 1).unwrap()).unwrap_err();
    let clone = stock.pin().clone();
    stock.give_back(clone).unwrap();
    drop((other, stock));
    assert_eq!(pool.claimable(), 1);
    drop(counted_apart);
    assert_eq!(pool.claimable(), 2);
    checked(&pool);
}

#[test]
fn a_spare_pin_of_a_stock_keeps_a_block_where_it_is() {
    let pool = pool(1, 1);
    cache(&pool, 1, Priority::DEFAULT);
    let mut block = pool.claim_one().unwrap();
    block.take_offload().unwrap().commit();
    let pin = pool.find_and_pin(name(1), Tier::Secondary).unwrap();
    let mut stock = PinStock::new(pin.clone());
    let spare = stock.take();
    stock.give_back(spare).unwrap();
    let onboard = pool.begin_onboard(pin, block).unwrap();
    let Onboarded::Copied { copy, source } = onboard.commit() else { panic!("it has moved") };
    assert_eq!(source.location(), stock.pin().location());
    drop((copy, source, stock));
    checked(&pool);
}

/// Uses a pool in all ways that leave something spare behind, and hands out what holds it.
fn used() -> (BlockPool, impl Sized) {
    let pool = BlockPool::new(&PoolConfig::primary_only(64)).unwrap();
    for content in 0..200 {
        let block = pool.claim_one().unwrap();
        let Registration::New(pin) = block.register(name(content), Naming::default()) else {
            panic!("every name is new")
        };
        drop((pin.clone(), pin));
    }
    let pins: Vec<_> = (190..200).map(|content| find(&pool, content).unwrap()).collect();
    drop(pins);
    let held = (find(&pool, 199).unwrap(), pool.match_prefix(&[name(198)]), pool.claim_one());
    let more = (pool.claim(3).unwrap(), PinStock::new(find(&pool, 197).unwrap()));
    (pool, (held, more))
}

#[test]
fn nothing_is_left_of_a_pool_when_its_handles_and_pins_are_gone() {
    // What the first thread to wait, print or measure allocates is not the pool's.
    drop(used());
    let before = bytes();
    let (pool, held) = used();
    assert!(bytes() > before + 4_000, "the pool is seen to take memory");
    drop(held);
    drop(pool);
    assert_eq!(bytes(), before, "pins first");

    let (pool, held) = used();
    let another = pool.clone();
    drop(pool);
    drop(held);
    assert!(bytes() > before + 4_000, "a handle is a handle");
    drop(another);
    assert_eq!(bytes(), before, "a clone of the handle last");

    let (pool, held) = used();
    drop(pool);
    assert!(bytes() > before + 4_000, "pins keep it");
    drop(held);
    assert_eq!(bytes(), before, "handles first");
}
