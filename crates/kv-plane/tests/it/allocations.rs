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

/// A cache after 80 steps of eight sequences that decode with one step of overlap. Beside it, how many of them went through
/// one call, and the allocations of these calls in the last 32 steps.
fn decoded(in_one_call: bool) -> (KvCache, Vec<Sequence>, usize, u64) {
    let sim = sim(SimConfig::default());
    let options = options(shape(1, 64, BLOCK_TOKENS), 8 * 32, 0);
    let options = KvCacheOptions { step_tokens_max: 256, sequences_max: 8, ..options };
    let options = with_first(options, |group| group.blocks_per_sequence_max = 32);
    let mut cache = KvCache::new(&streams(&[device(&sim)]), options).unwrap();
    let request = |number: u32| {
        let ids = (0..5 + number).map(|at| number * 100 + at).collect();
        let mut request = Request::new(ids);
        request.tokens_max = 128;
        request
    };
    let mut queue: VecDeque<_> = (0..8).map(request).collect();
    let (mut running, mut done, mut allocated) = (Vec::new(), 0, 0);
    for at in 0..80 {
        let step = cache.begin_step().unwrap();
        let admitted = cache.admit(&mut queue, u64::MAX).unwrap().admitted;
        running.extend(admitted.into_iter().map(|(_, sequence)| sequence));
        let mut batch: Vec<&mut Sequence> = running.iter_mut().collect();
        let (before, mut rest) = (step.number().saturating_sub(2), &mut batch[..]);
        while !rest.is_empty() && at > 0 {
            if in_one_call {
                let counted = allocations();
                let count = cache.decode(rest, before, &[7; 8]);
                allocated += if at < 48 { 0 } else { allocations() - counted };
                done += count;
                rest = &mut rest[count..];
            }
            let [one, behind @ ..] = rest else { break };
            if one.awaits() == Some(before) {
                assert_eq!(cache.commit(one, before, &[7]).unwrap(), Committed::Taken);
            }
            let _ = cache.reserve(one, 1).unwrap().given().unwrap();
            rest = behind;
        }
        cache.stage(&step, &mut batch).unwrap();
        cache.finish_step(step).unwrap();
    }
    cache.drain().unwrap();
    (cache, running, done, allocated)
}

#[test]
fn sequences_that_decode_in_one_call_are_as_those_that_go_call_by_call_and_allocate_nothing() {
    let (each, each_running, none, _) = decoded(false);
    let (one, running, done, allocated) = decoded(true);
    assert_eq!(one.manager().stats(), each.manager().stats());
    let pool =
        |cache: &KvCache| format!("{:?}", cache.manager().pool(GroupId(0)).unwrap().snapshot());
    assert_eq!(pool(&one), pool(&each));
    assert_eq!(format!("{running:?}"), format!("{each_running:?}"));
    assert_eq!((none, allocated), (0, 0));
    assert!(done > 8 * 60, "{done}");
    drop((each_running, running));
    one.close().unwrap();
    each.close().unwrap();
}
