//! Scenarios for every device, the simulated one and a GPU: content stays right through every
//! operation of a cache. Lengths are in blocks of any size.

use std::collections::VecDeque;

use cuda_driver::{Device, Stream};
use kv_kernels::KvShape;
use kv_plane::manager::WorkerId;
use kv_plane::{GroupId, KvCache, KvCacheOptions, KvWorker};
use kv_pool::{BlockHash, ClaimError, Tier};

use super::engine::tensors::Tensors;
use super::engine::{Engine, Live, Prompt, Refused, options, streams};
use super::life;
use super::place::Place;
use super::random::random_requests;

/// The rank of a worker without others.
pub(crate) const ALONE: (WorkerId, u16) = (WorkerId(0), 1);

/// Where a scenario plays: the devices, the shape of all layers, and how blocks are divided.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) devices: Vec<Device>,
    pub(crate) shape: KvShape,
    pub(crate) place: Place,
    /// The tensors that the cache lies in, if not in memory of its own: on one device, and with as many
    /// blocks as the cache has there.
    pub(crate) tensors: Option<Tensors>,
}

impl Rig {
    pub(crate) fn engine(&self, device_blocks: u32, host_blocks: u32) -> Engine {
        self.engine_with(options(self.shape, device_blocks, host_blocks))
    }

    pub(crate) fn engine_with(&self, options: KvCacheOptions) -> Engine {
        let streams = self.streams();
        if let Some(tensors) = self.tensors {
            let (memory, paged) = tensors.make(&streams[0], options.groups[0].device_blocks.into());
            let cache = KvCache::over(&streams, vec![paged], options).unwrap();
            return Engine::over(cache, memory);
        }
        let placement = self.place.of(&options, &self.devices);
        Engine::new(&streams, KvCacheOptions { placement, ..options })
    }

    /// A new stream for each device.
    pub(crate) fn streams(&self) -> Vec<Stream> {
        streams(&self.devices)
    }

    /// A cache without an engine.
    pub(crate) fn cache(&self, options: KvCacheOptions) -> KvCache {
        KvCache::new(&self.streams(), options).unwrap()
    }

    /// A worker that is told by plans.
    pub(crate) fn worker(&self, options: KvCacheOptions) -> KvWorker {
        KvWorker::new(&self.streams(), options, ALONE).unwrap()
    }

    /// A prompt of `blocks` blocks and one token more.
    pub(crate) fn prompt(&self, seed: u32, blocks: u64) -> Prompt {
        Prompt::new(seed, blocks * self.block_tokens() + 1)
    }

    pub(crate) fn block_tokens(&self) -> u64 {
        u64::from(self.shape.block_tokens())
    }
}

pub(crate) type Scenario = fn(&Rig);

/// Every scenario, by name.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, Scenario)> {
    CACHING.iter().chain(life::ALL).copied()
}

const CACHING: &[(&str, Scenario)] = &[
    ("a_prefix_is_shared", a_prefix_is_shared),
    ("the_last_token_is_always_computed", the_last_token_is_always_computed),
    ("decoding_crosses_blocks", decoding_crosses_blocks),
    ("content_goes_to_the_host_and_comes_back", content_goes_to_the_host_and_comes_back),
    ("content_is_dropped_without_a_host_tier", content_is_dropped_without_a_host_tier),
    ("content_is_dropped_from_a_full_host_tier", content_is_dropped_from_a_full_host_tier),
    ("the_tail_of_a_prefix_is_evicted_first", the_tail_of_a_prefix_is_evicted_first),
    ("equal_content_is_found_once", equal_content_is_found_once),
    ("a_pinned_host_block_is_copied", a_pinned_host_block_is_copied),
    ("content_pinned_on_the_host_is_not_read_there", content_pinned_on_the_host_is_not_read_there),
    ("space_comes_back_when_steps_complete", space_comes_back_when_steps_complete),
    ("a_batch_keeps_what_its_requests_find", a_batch_keeps_what_its_requests_find),
    ("a_batch_is_admitted_as_far_as_it_fits", a_batch_is_admitted_as_far_as_it_fits),
    (
        "a_batch_is_admitted_as_far_as_its_budget_goes",
        a_batch_is_admitted_as_far_as_its_budget_goes,
    ),
    ("what_a_batch_shares_comes_back_once", what_a_batch_shares_comes_back_once),
    ("a_batch_copies_what_others_read", a_batch_copies_what_others_read),
    ("random_requests", |rig| random_requests(rig, 1, 300)),
];

fn a_prefix_is_shared(rig: &Rig) {
    let mut engine = rig.engine(32, 0);
    let system = Prompt::new(1, 3 * rig.block_tokens());
    let mut first = engine.admit(&system.then(2, 5)).unwrap();
    assert_eq!(first.sequence.cached_tokens(), 0);
    engine.run(&mut [&mut first]).unwrap();
    // While the first runs on, and after it is gone.
    let mut second = engine.admit(&system.then(3, 7)).unwrap();
    assert_eq!(second.sequence.cached_tokens(), 3 * rig.block_tokens());
    let blocks =
        |live: &Live| [0, 1, 2].map(|index| live.sequence.block(GroupId(0), index).unwrap());
    assert_eq!(blocks(&first), blocks(&second));
    assert_ne!(first.sequence.block(GroupId(0), 3), second.sequence.block(GroupId(0), 3));
    engine.run(&mut [&mut second, &mut first]).unwrap();
    let shared = blocks(&second);
    drop((first, second));
    let third = engine.admit(&system.then(4, 1)).unwrap();
    assert_eq!(blocks(&third), shared);
    engine.end(third);
    engine.close();
}

fn the_last_token_is_always_computed(rig: &Rig) {
    let mut engine = rig.engine(32, 0);
    let prompt = Prompt::new(1, 3 * rig.block_tokens());
    for cached_blocks in [0, 2, 2] {
        let mut live = engine.admit(&prompt).unwrap();
        assert_eq!(live.sequence.cached_tokens(), cached_blocks * rig.block_tokens());
        engine.run(&mut [&mut live]).unwrap();
    }
    // One token more, and all three blocks are found.
    let live = engine.admit(&prompt.then(2, 1)).unwrap();
    assert_eq!(live.sequence.cached_tokens(), 3 * rig.block_tokens());
    engine.end(live);
    engine.close();
}

fn decoding_crosses_blocks(rig: &Rig) {
    let mut engine = rig.engine(32, 0);
    let mut lives =
        [1, 2, 3].map(|seed| engine.admit(&Prompt::new(seed, u64::from(seed))).unwrap());
    let steps = 2 * rig.block_tokens() + 2;
    for step in 0..steps {
        engine.run_all(&mut lives);
        for live in &mut lives {
            engine.extend(live, 100 + step as u32, 1).unwrap();
        }
    }
    // The last token has no KV yet.
    let blocks = steps.div_ceil(rig.block_tokens());
    assert_eq!(lives[0].sequence.block_count(GroupId(0)) as u64, blocks);
    drop(lives);
    engine.close();
}

fn content_goes_to_the_host_and_comes_back(rig: &Rig) {
    let mut engine = rig.engine(8, 32);
    let prompts = [1, 2, 3, 4].map(|seed| rig.prompt(seed, 5));
    for prompt in &prompts {
        assert_eq!(engine.serve(prompt), (0, 0));
    }
    assert!(engine.decided().offloaded_blocks >= 10);
    for _ in 0..3 {
        for prompt in &prompts {
            let (cached_tokens, onboarded) = engine.serve(prompt);
            assert_eq!(cached_tokens, 5 * rig.block_tokens());
            // What was evicted is its tail first, so something of it always was.
            assert!(onboarded > 0);
        }
    }
    let (decided, counters) = (engine.decided(), engine.pool().counters());
    assert_eq!(decided.onboarded_blocks, counters.onboarded);
    assert_eq!(decided.offloaded_blocks, counters.offloaded);
    let (bytes, stats) = (rig.shape.block_bytes(), engine.cache.stats());
    assert_eq!(stats.ways.device_to_host, decided.offloaded_blocks * bytes);
    assert_eq!(stats.ways.host_to_device, decided.onboarded_blocks * bytes);
    assert_eq!(stats.copied_bytes, stats.ways.device_to_host + stats.ways.host_to_device);
    engine.close();
}

fn content_is_dropped_without_a_host_tier(rig: &Rig) {
    let mut engine = rig.engine(8, 0);
    let [first, second] = [1, 2].map(|seed| rig.prompt(seed, 7));
    assert_eq!(engine.serve(&first), (0, 0));
    assert_eq!(engine.serve(&first), (7 * rig.block_tokens(), 0));
    assert_eq!(engine.serve(&second), (0, 0));
    assert_eq!(engine.serve(&first), (0, 0));
    assert_eq!(engine.decided().offloaded_blocks, 0);
    assert!(engine.pool().counters().dropped >= 7);
    engine.close();
}

fn content_is_dropped_from_a_full_host_tier(rig: &Rig) {
    let mut engine = rig.engine(8, 3);
    for seed in 1..=4 {
        assert_eq!(engine.serve(&rig.prompt(seed, 7)), (0, 0));
    }
    let counters = engine.pool().counters();
    assert!(counters.offloaded > 0 && counters.dropped > 0, "{counters:?}");
    for seed in (1..=4).rev() {
        engine.serve(&rig.prompt(seed, 7));
    }
    engine.close();
}

fn the_tail_of_a_prefix_is_evicted_first(rig: &Rig) {
    let mut engine = rig.engine(8, 0);
    let [first, second] = [1, 2].map(|seed| rig.prompt(seed, 5));
    engine.serve(&first);
    // Six blocks, of which three are empty.
    engine.serve(&second);
    assert_eq!(engine.serve(&first), (2 * rig.block_tokens(), 0));
    engine.close();
}

fn equal_content_is_found_once(rig: &Rig) {
    let mut engine = rig.engine(16, 0);
    let prompt = rig.prompt(1, 3);
    // Both are computed, for neither finds the other when it is admitted.
    let mut first = engine.admit(&prompt).unwrap();
    let mut second = engine.admit(&prompt).unwrap();
    assert_eq!(second.sequence.cached_tokens(), 0);
    engine.run(&mut [&mut first, &mut second]).unwrap();
    assert_eq!(engine.pool().counters().duplicates, 3);
    let mut third = engine.admit(&prompt).unwrap();
    for index in 0..3 {
        // Both stay where they are, under work that may read either.
        assert_ne!(
            first.sequence.block(GroupId(0), index),
            second.sequence.block(GroupId(0), index)
        );
        assert_eq!(
            first.sequence.block(GroupId(0), index),
            third.sequence.block(GroupId(0), index)
        );
    }
    for seed in 10..14 {
        engine.run(&mut [&mut second, &mut first, &mut third]).unwrap();
        engine.extend(&mut first, seed, 1).unwrap();
        engine.extend(&mut second, seed + 100, 1).unwrap();
    }
    drop((first, second, third));
    engine.drain().unwrap();
    assert_eq!(engine.pool().stats().primary.pinned, 0);
    engine.close();
}

fn a_pinned_host_block_is_copied(rig: &Rig) {
    let mut engine = rig.engine(8, 16);
    let [first, second] = [1, 2].map(|seed| rig.prompt(seed, 6));
    engine.serve(&first);
    engine.serve(&second);
    // A reader elsewhere holds what was evicted.
    let hashes = first.hashes(rig.block_tokens());
    let pool = engine.pool();
    let held: Vec<_> =
        hashes.iter().filter_map(|hash| pool.find_and_pin(*hash, Tier::Secondary)).collect();
    assert!(!held.is_empty());
    for _ in 0..2 {
        let (cached_tokens, onboarded) = engine.serve(&first);
        assert_eq!(cached_tokens, 6 * rig.block_tokens());
        assert!(onboarded >= held.len());
    }
    drop(held);
    engine.serve(&second);
    engine.serve(&first);
    engine.close();
}

fn content_pinned_on_the_host_is_not_read_there(rig: &Rig) {
    let mut engine = rig.engine(8, 16);
    let [first, second] = [1, 2].map(|seed| rig.prompt(seed, 6));
    engine.serve(&first);
    engine.serve(&second);
    let pool = engine.pool();
    let hashes = first.hashes(rig.block_tokens());
    let pin = |hash: &BlockHash| pool.find_and_pin(*hash, Tier::Secondary);
    let held: Vec<_> = hashes.iter().filter_map(pin).collect();
    assert!(!held.is_empty());
    // Computed again unseen: the names stay with the blocks on the host.
    let mut live = engine.admit_unseen(&first).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    assert!(pool.counters().duplicates >= held.len() as u64);
    drop((live, held));
    engine.drain().unwrap();
    assert_eq!(engine.serve(&first).0, 6 * rig.block_tokens());
    engine.close();
}

fn space_comes_back_when_steps_complete(rig: &Rig) {
    let mut engine = rig.engine(8, 0);
    let first = engine.computed(&rig.prompt(1, 5));
    // All memory is mapped by the first refusal; the second changes nothing at all.
    engine.admit(&rig.prompt(2, 5)).unwrap_err();
    let before = engine.pool().stats();
    let refused = engine.admit(&rig.prompt(2, 5)).unwrap_err();
    assert!(matches!(refused, Refused::NoRoom(_)), "{refused}");
    let after = engine.pool().stats();
    assert_eq!((before.primary, before.counters.evicted), (after.primary, after.counters.evicted));
    engine.end(first);
    engine.serve(&rig.prompt(2, 5));
    engine.close();
}

fn a_batch_keeps_what_its_requests_find(rig: &Rig) {
    let [old, new] = [rig.prompt(1, 5), rig.prompt(2, 4)];
    // Of eleven blocks, five hold the older prefix, four a newer one, and two are empty.
    let filled = || {
        let mut engine = rig.engine(11, 0);
        engine.serve(&old);
        engine.serve(&rig.prompt(3, 4));
        engine
    };
    // One after the other, the first takes blocks of the prefix that the second would have found.
    let mut engine = filled();
    let first = engine.admit(&new).unwrap();
    let second = engine.admit(&old).unwrap();
    assert_eq!(second.sequence.cached_tokens(), 2 * rig.block_tokens());
    drop((first, second, engine));

    let mut engine = filled();
    let mut lives = engine.admit_batch(&[new.clone(), old.clone()]).unwrap();
    assert_eq!(lives[1].sequence.cached_tokens(), 5 * rig.block_tokens());
    assert_eq!(engine.pool().counters().evicted, 4);
    engine.run_all(&mut lives);
    drop(lives);
    engine.close();
}

fn a_batch_is_admitted_as_far_as_it_fits(rig: &Rig) {
    let mut engine = rig.engine(12, 0);
    let cached = rig.prompt(1, 3);
    engine.serve(&cached);
    // Of twelve blocks the first two need ten, and the third needs six.
    let batch = [cached.clone(), rig.prompt(2, 5), rig.prompt(3, 5), rig.prompt(4, 1)];
    let (mut lives, refused) = engine.admit_fitting(&batch).unwrap();
    let refused = refused.unwrap();
    let Refused::NoRoom(missing) = &refused else { panic!("{refused}") };
    let ClaimError::Exhausted { requested, claimable, .. } = missing.reason else {
        panic!("{missing}")
    };
    assert!(requested > claimable, "{missing}");
    assert_eq!((lives.len(), lives[0].sequence.cached_tokens()), (2, 3 * rig.block_tokens()));
    // The refused ones have taken nothing: what is left is enough for the last.
    lives.push(engine.admit(&batch[3]).unwrap());
    engine.run_all(&mut lives);
    drop(lives);
    engine.drain().unwrap();

    // Nor is a refusal of the first one seen in the pool, when all memory is mapped.
    let whole = rig.prompt(5, 10);
    let holds = engine.admit(&cached).unwrap();
    let before = engine.pool().stats();
    let (none, refused) = engine.admit_fitting(&[whole]).unwrap();
    assert!(none.is_empty() && refused.is_some());
    assert_eq!(engine.pool().stats(), before);
    drop(holds);
    // Eight rows there are, and eight are admitted.
    let many: Vec<_> = (0..9).map(|seed| Prompt::new(20 + seed, 1)).collect();
    let (lives, refused) = engine.admit_fitting(&many).unwrap();
    assert!(matches!(refused, Some(Refused::NoRow)), "{refused:?}");
    assert_eq!(lives.len(), 8);
    drop(lives);
    engine.close();
}

/// A request is admitted if those before it leave something of the budget.
fn a_batch_is_admitted_as_far_as_its_budget_goes(rig: &Rig) {
    let bt = rig.block_tokens();
    let mut engine = rig.engine(32, 0);
    let cached = rig.prompt(1, 3);
    engine.serve(&cached);
    // One block to compute, of which the rest is cached, then five, then two.
    let batch = [cached.clone(), rig.prompt(2, 4), rig.prompt(3, 1)];
    for (budget, admitted) in
        [(0, 0), (1, 1), (bt, 1), (bt + 1, 2), (6 * bt, 2), (6 * bt + 1, 3), (u64::MAX, 3)]
    {
        let mut queue: VecDeque<_> = batch.iter().map(|prompt| engine.request(prompt)).collect();
        let admission = engine.cache.admit(&mut queue, budget).unwrap();
        assert_eq!(admission.admitted.len(), admitted, "{budget}");
        assert_eq!(queue.len(), batch.len() - admitted, "{admission:?}");
        let chunks: u64 = admission.admitted.iter().map(|of| u64::from(of.1.next())).sum();
        assert!(chunks <= budget && (admitted < 3 || chunks == 1 + 5 * bt - bt + 1 + bt + 1));
    }
    engine.close();
}

fn what_a_batch_shares_comes_back_once(rig: &Rig) {
    let mut engine = rig.engine(16, 16);
    let system = Prompt::new(1, 4 * rig.block_tokens());
    engine.serve(&system.then(2, 1));
    // Evicts all of it to the host.
    engine.serve(&rig.prompt(3, 15));
    let before = engine.decided().onboarded_blocks;
    let batch = [4, 5, 6].map(|seed| system.then(seed, 3));
    let mut lives = engine.admit_batch(&batch).unwrap();
    assert_eq!(engine.decided().onboarded_blocks - before, 4);
    for live in &lives {
        assert_eq!(live.sequence.cached_tokens(), 4 * rig.block_tokens());
        assert_eq!(live.sequence.onboarded_blocks(), 4);
        for index in 0..4 {
            assert_eq!(
                live.sequence.block(GroupId(0), index),
                lives[0].sequence.block(GroupId(0), index)
            );
        }
    }
    engine.run_all(&mut lives);
    drop(lives);
    engine.close();
}

fn a_batch_copies_what_others_read(rig: &Rig) {
    let mut engine = rig.engine(12, 16);
    let system = Prompt::new(1, 3 * rig.block_tokens());
    engine.serve(&system.then(2, 1));
    engine.serve(&rig.prompt(3, 11));
    let pool = engine.pool();
    let hashes = system.hashes(rig.block_tokens());
    let reader = pool.find_and_pin(hashes[1], Tier::Secondary).unwrap();
    let batch = [4, 5].map(|seed| system.then(seed, 3));
    let mut lives = engine.admit_batch(&batch).unwrap();
    let blocks = |index| [0, 1].map(|live: usize| lives[live].sequence.block(GroupId(0), index));
    assert_eq!(blocks(0)[0], blocks(0)[1]);
    assert_ne!(blocks(1)[0], blocks(1)[1], "the block stays where its reader is");
    assert_eq!(blocks(2)[0], blocks(2)[1]);
    assert!(reader.locations().all(|at| at.tier == Tier::Secondary));
    engine.run_all(&mut lives);
    drop((lives, reader));
    engine.close();
}
