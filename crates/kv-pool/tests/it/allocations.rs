//! In steady state nothing is allocated: what every request does, counted by the allocator.

use crate::common::OneClaimed;
use crate::common::name;
use kv_pool::{BlockHash, BlockPool, Naming, Pinned, PoolConfig, Tier, tenants::TenantId};
use kv_testkit::alloc::{allocations, bytes};

const BLOCKS: u32 = 512;

/// What requests do, each with 16 new blocks, so that everything is evicted many times over.
fn requests(
    pool: &BlockPool,
    names: &mut impl Iterator<Item = BlockHash>,
    buffer: &mut [BlockHash],
) {
    for _ in 0..100 {
        buffer.iter_mut().zip(&mut *names).for_each(|(place, name)| *place = name);
        let epoch = pool.begin_epoch();
        let mut claimed = pool.claim(buffer.len()).unwrap();
        let pins = claimed.register(buffer, Naming::default()).unwrap();
        drop((claimed, pins));
        let found = pool.match_prefix(buffer);
        assert_eq!(found.len(), buffer.len());
        let again = found.clone();
        drop((found, again));
        pool.complete_epoch(epoch).unwrap();

        let mut block = pool.claim_one().unwrap();
        let pin = block.register(&[names.next().unwrap()], Naming::default()).unwrap();
        drop((pin.clone(), pin));
        assert!(pool.claim_one().unwrap().cache_one(names.next().unwrap(), Naming::default()));
    }
}

#[test]
fn nothing_is_allocated_in_steady_state() {
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS.into())).unwrap();
    let mut names = (0..).map(name);
    let mut buffer = [BlockHash::ROOT; 16];
    requests(&pool, &mut names, &mut buffer);
    let before = allocations();
    requests(&pool, &mut names, &mut buffer);
    assert_eq!(allocations() - before, 0);
    // The count is seen to count.
    drop(std::hint::black_box(Vec::<u8>::with_capacity(64)));
    assert_eq!(allocations() - before, 1);
    pool.check_integrity().unwrap();
}

/// Sequences that name one block after the other: their lists were as long before.
#[test]
fn blocks_named_one_after_the_other_allocate_nothing_in_steady_state() {
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS.into())).unwrap();
    let mut names = (0..).map(name);
    let mut round = || {
        let (mut claimed, mut held) = (pool.claim(48).unwrap(), Pinned::default());
        while !claimed.is_empty() {
            let hash = names.next().unwrap();
            assert_eq!(claimed.register_onto(&[hash], Naming::default(), &mut held), Ok(1));
        }
        assert_eq!(held.len(), 48);
    };
    (0..20).for_each(|_| round());
    let before = allocations();
    (0..20).for_each(|_| round());
    assert_eq!(allocations() - before, 0);
    pool.check_integrity().unwrap();
}

/// Lists longer than any that is kept for its shortness, and more handles at once than a few.
#[test]
fn long_lists_and_many_handles_allocate_nothing_in_steady_state() {
    const LONG: usize = 8_192;
    let pool = BlockPool::new(&PoolConfig::primary_only(2 * LONG as u64)).unwrap();
    let mut names = (0..).map(name);
    let mut buffer = vec![BlockHash::ROOT; LONG];
    let mut singles = Vec::with_capacity(LONG);
    let mut round = || {
        buffer.iter_mut().zip(&mut names).for_each(|(place, name)| *place = name);
        let mut claimed = pool.claim(LONG).unwrap();
        drop(claimed.register(&buffer, Naming::default()).unwrap());
        let found = pool.match_prefix(&buffer);
        assert_eq!(found.len(), LONG);
        singles.extend((0..1_000).map(|at| found.pin(at).unwrap()));
        drop(found);
        singles.clear();
    };
    round();
    round();
    let before = allocations();
    round();
    assert_eq!(allocations() - before, 0);
    pool.check_integrity().unwrap();
}

#[test]
fn a_large_pool_takes_memory_as_its_blocks_come_into_use() {
    let before = bytes();
    let pool = BlockPool::new(&PoolConfig::primary_only(1 << 20)).unwrap();
    let each = (bytes() - before) as f64 / f64::from(1 << 20);
    assert!(each <= 64.1, "{each} bytes a block");
    drop(pool);
}

#[test]
fn a_question_about_tenants_makes_no_tables_for_them() {
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS.into())).unwrap();
    let before = allocations();
    let counts = pool.tenant_counts(TenantId::NOBODY, Tier::Primary).unwrap();
    assert_eq!((counts.held, counts.cached), (0, 0));
    pool.quota(TenantId::NOBODY, Tier::Primary).unwrap();
    assert_eq!(allocations() - before, 0);
}
