//! What a cached prompt asks of the allocator: nothing. Its blocks are lists from the pool to the sequence, and its ids and
//! names are those that its request has.

use kv_testkit::alloc::allocations;

use crate::prelude::*;

const BLOCK_TOKENS: u32 = 4;

/// Runs one step of a request, and lets it go.
fn compute(cache: &mut KvCache, request: Request) {
    let step = cache.begin_step().unwrap();
    let mut sequence = admitted(cache, request, u64::MAX);
    cache.stage(&step, &mut [&mut sequence]).unwrap();
    cache.finish_step(step).unwrap();
    drop(sequence);
    cache.drain().unwrap();
}

/// Allocations of the admission and the release of a cached prompt, when it was done before.
fn of_a_cached_prompt(policy: PolicyKind, blocks: u32, is_named: bool) -> u64 {
    let sim = sim(SimConfig::default());
    let device = device(&sim);
    let options = options(shape(1, 64, BLOCK_TOKENS), 2 * blocks + 2, 0);
    let options = KvCacheOptions {
        step_tokens_max: (blocks + 1) * BLOCK_TOKENS,
        pool: PoolRules { eviction: policy.into(), ..PoolRules::default() },
        ..with_first(options, |group| group.blocks_per_sequence_max = blocks + 1)
    };
    let mut cache = KvCache::new(&streams(&[device]), options).unwrap();
    let tokens = u64::from(blocks * BLOCK_TOKENS) + 1;
    let prompt = Prompt::new(1, tokens);
    let names = prompt.hashes(BLOCK_TOKENS.into());
    let request = || match is_named {
        true => Request::named(tokens, names.clone()),
        false => Request::new((0..tokens as u32).collect()),
    };
    compute(&mut cache, request());
    let mut counted = 0;
    // All memory is mapped. The lists of plans come to their lengths in the first rounds.
    for _ in 0..8 {
        let mut queue = VecDeque::from([request()]);
        let step = cache.begin_step().unwrap();
        let before = allocations();
        let mut admitted = cache.admit(&mut queue, u64::MAX).unwrap().admitted;
        let (request, mut sequence) = admitted.pop().unwrap();
        counted = allocations() - before;
        assert_eq!(sequence.cached_tokens(), tokens - 1);
        cache.stage(&step, &mut [&mut sequence]).unwrap();
        let before = allocations();
        drop((admitted, request, sequence));
        counted += allocations() - before;
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
    }
    cache.close().unwrap();
    counted
}

#[test]
fn a_cached_prompt_is_admitted_and_released_without_an_allocation_but_for_its_names() {
    for policy in PolicyKind::ALL {
        let counts =
            |is_named| [1, 64, 1024].map(|blocks| of_a_cached_prompt(policy, blocks, is_named));
        assert_eq!((counts(true), counts(false)), ([0; 3], [1; 3]), "{policy}");
    }
    // The count is seen to count.
    let before = allocations();
    drop(std::hint::black_box(Vec::<u8>::with_capacity(64)));
    assert_eq!(allocations() - before, 1);
}
