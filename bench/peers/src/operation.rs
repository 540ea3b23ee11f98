//! The operations that are timed, and how each is run on a contender.
//!
//! An operation prepares its pool once and is then run in short rounds, so that the rounds of all
//! contenders can alternate.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::clock::Stopwatch;
use crate::contender::{CHAIN, Contender, chain, name, own_hash, parent};

/// Blocks of every pool but the one of [`Operation::Evict`].
pub const BLOCKS: usize = 65_536;
const CHAINS: u64 = (BLOCKS / CHAIN) as u64;
/// Chains that the mixed load looks up: the 8,192 blocks that were stored last.
const HOT_CHAINS: u64 = 128;
/// Blocks that the mixed load stores for each prefix that it looks up.
const MIXED_STORES: u64 = 16;
/// Block operations of one iteration of the mixed load.
const MIXED_BLOCKS: u64 = CHAIN as u64 + MIXED_STORES;
/// A root with more children than this loses the first [`EVICTIONS_OF_MANY`] only, for a peer takes
/// half a millisecond for each; one with fewer loses all.
const CHILDREN_MANY: usize = 16_000;
const EVICTIONS_OF_MANY: usize = 2_000;
/// Evictions of a round at least, in several pools if one has too few children.
const EVICTIONS_MIN: usize = 1_000;

/// Streams of content names, one for each purpose, so that no name comes twice.
const FILL: u64 = 1;
const FRESH: u64 = 2;
const MISSING: u64 = 3;
const CHILDREN: u64 = 4;
const THREADS: u64 = 100;

/// Something to time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Operation {
    /// Making up the name of one block: what every fresh name below costs, and is counted with it.
    Name,
    /// An atomic addition and subtraction: the least that a count shared by threads can cost here.
    Count,
    /// Allocating one block in a full pool, registering it under a new name and releasing it.
    StoreOne,
    /// The same by as few calls as the pool has for it.
    StoreOneShortly,
    /// The same, 64 blocks a call.
    StoreBatch,
    /// Looking up, holding and releasing a prefix of 64 blocks that nobody holds.
    HitCached,
    /// The same when all blocks are held elsewhere.
    HitHeld,
    /// A lookup of 64 names of which the first is unknown.
    Miss,
    /// A further reference to one of 64 held blocks, and its end.
    Pin {
        /// Threads that do so at once, on the same blocks.
        threads: usize,
    },
    /// The same with the cheapest reference that the pool offers.
    PinCheaply {
        /// Threads that do so at once, on the same blocks.
        threads: usize,
    },
    /// A prefix of 64 blocks looked up, held and released, then 16 blocks stored one by one.
    Mixed {
        /// Threads that do so at once, in one pool.
        threads: usize,
    },
    /// Eviction of the children of one root.
    Evict {
        /// Children of the root.
        children: usize,
    },
}

/// What one round took.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    /// Processor time of one thread; of several, from the first one's start to the last one's end.
    pub elapsed: Duration,
    /// Operations done, in the unit of the operation.
    pub operations: u64,
}

/// Runs one round of about as many iterations as it is told.
pub type Runner = Box<dyn FnMut(u64) -> Timed>;

impl Operation {
    /// Prepares a pool of `C`, which is full and has been turned over, and says how to time it.
    #[must_use]
    pub fn runner<C: Contender>(self) -> Runner {
        match self {
            Self::Name => names::<C>(),
            Self::Count => count(),
            Self::StoreOne => store_one::<C>(C::store_one),
            Self::StoreOneShortly => store_one::<C>(C::store_one_shortly),
            Self::StoreBatch => store_batch::<C>(),
            Self::HitCached => hit::<C>(false),
            Self::HitHeld => hit::<C>(true),
            Self::Miss => miss::<C>(),
            Self::Pin { threads } => pin::<C, _>(threads, C::Pin::clone),
            Self::PinCheaply { threads } => pin::<C, _>(threads, C::pin_cheaply),
            Self::Mixed { threads } => mixed::<C>(threads, full::<C>(C::with_blocks(BLOCKS))),
            Self::Evict { children } => evict::<C>(children),
        }
    }

    /// Whether the length of a round follows from the operation, not from the time it takes.
    #[must_use]
    pub fn has_fixed_rounds(self) -> bool {
        matches!(self, Self::Evict { .. })
    }

    /// Whether reports give operations a second, not nanoseconds an operation.
    #[must_use]
    pub fn is_throughput(self) -> bool {
        matches!(self, Self::Mixed { .. })
    }
}

fn timed(operations: u64, work: impl FnOnce()) -> Timed {
    let watch = Stopwatch::start();
    work();
    Timed { elapsed: watch.elapsed(), operations }
}

fn names<C: Contender>() -> Runner {
    let mut n = 0;
    Box::new(move |iterations| {
        timed(iterations, || {
            for _ in 0..iterations {
                black_box(name::<C>(FRESH, n));
                n += 1;
            }
        })
    })
}

fn count() -> Runner {
    let counts: Vec<AtomicU32> = (0..CHAIN).map(|_| AtomicU32::new(0)).collect();
    Box::new(move |iterations| {
        timed(iterations, || {
            for i in 0..iterations as usize {
                let count = &counts[i % CHAIN];
                black_box(count.fetch_add(1, Relaxed));
                black_box(count.fetch_sub(1, Relaxed));
            }
        })
    })
}

fn store_one<C: Contender>(
    store: impl Fn(&C, Option<C::Hash>, C::Hash) -> usize + 'static,
) -> Runner {
    let pool = C::with_blocks(BLOCKS);
    let mut n = 0;
    let mut run = move |iterations| {
        timed(iterations, || {
            for _ in 0..iterations {
                black_box(store(&pool, parent::<C>(FRESH, n), name::<C>(FRESH, n)));
                n += 1;
            }
        })
    };
    run(2 * BLOCKS as u64);
    Box::new(run)
}

fn store_batch<C: Contender>() -> Runner {
    let pool = C::with_blocks(BLOCKS);
    let mut next = 0;
    let mut run = move |iterations: u64| {
        timed(iterations * CHAIN as u64, || {
            for _ in 0..iterations {
                black_box(pool.store_batch(&chain::<C>(FRESH, next)));
                next += 1;
            }
        })
    };
    run(2 * CHAINS);
    Box::new(run)
}

/// Stores the first [`CHAINS`] chains of the stream [`FILL`].
fn full<C: Contender>(pool: C) -> C {
    for number in 0..CHAINS {
        pool.store_batch(&chain::<C>(FILL, number));
    }
    pool
}

fn hit<C: Contender>(held: bool) -> Runner {
    let pool = C::with_blocks(BLOCKS);
    let pool = if held { pool } else { full(pool) };
    let chains = if held { 0..CHAINS } else { 0..0 };
    let pins: Vec<_> =
        chains.map(|number| pool.store_and_hold(None, &chain::<C>(FILL, number))).collect();
    let mut random = Random::new(1);
    Box::new(move |iterations| {
        let _held = &pins;
        timed(iterations * CHAIN as u64, || {
            for _ in 0..iterations {
                let hashes = chain::<C>(FILL, random.below(CHAINS));
                assert_eq!(pool.hit(black_box(&hashes)), CHAIN);
            }
        })
    })
}

fn miss<C: Contender>() -> Runner {
    let pool = full(C::with_blocks(BLOCKS));
    let queries: Vec<_> = (0..CHAINS).map(|number| chain::<C>(MISSING, number)).collect();
    Box::new(move |iterations| {
        timed(iterations, || {
            for query in queries.iter().cycle().take(iterations as usize) {
                assert_eq!(pool.hit(black_box(query)), 0);
            }
        })
    })
}

fn pin<C: Contender, P>(threads: usize, further: impl Fn(&C::Pin) -> P + Sync + 'static) -> Runner {
    let pool = C::with_blocks(BLOCKS);
    let pins = pool.store_and_hold(None, &chain::<C>(FILL, 0));
    Box::new(move |iterations| {
        let _pool = &pool;
        let each = iterations.div_ceil(threads as u64);
        let elapsed = on_threads(vec![(); threads], |thread, ()| {
            for i in 0..each as usize {
                black_box(further(&pins[(i + 16 * thread) % CHAIN]));
            }
        });
        Timed { elapsed, operations: each * threads as u64 }
    })
}

/// What a thread of the mixed load carries from round to round.
struct MixedThread {
    random: Random,
    stored: u64,
}

fn mixed<C: Contender>(threads: usize, pool: C) -> Runner {
    let mut states: Vec<_> = (0..threads)
        .map(|thread| MixedThread { random: Random::new(thread as u64 + 1), stored: 0 })
        .collect();
    let mut run = move |iterations: u64| {
        let each = iterations.div_ceil(threads as u64);
        let elapsed = on_threads(states.iter_mut().collect(), |thread, state| {
            let stream = THREADS + thread as u64;
            for _ in 0..each {
                let hot = CHAINS - HOT_CHAINS + state.random.below(HOT_CHAINS);
                let hashes = chain::<C>(FILL, hot);
                // Hot prefixes stay cached; else the figure would be that of misses.
                assert_eq!(pool.hit(&hashes), CHAIN);
                for _ in 0..MIXED_STORES {
                    let before = parent::<C>(stream, state.stored);
                    let name = name::<C>(stream, state.stored);
                    black_box(pool.store_one(before, name));
                    state.stored += 1;
                }
            }
        });
        Timed { elapsed, operations: each * threads as u64 * MIXED_BLOCKS }
    };
    run(6_000);
    Box::new(run)
}

fn evict<C: Contender>(children: usize) -> Runner {
    Box::new(move |_| {
        let evictions = if children > CHILDREN_MANY { EVICTIONS_OF_MANY } else { children };
        // Enough pools that the clock's own cost is none of the figure.
        let pools: Vec<C> =
            (0..EVICTIONS_MIN.div_ceil(children)).map(|_| family(children)).collect();
        let mut claims = Vec::with_capacity(pools.len() * evictions);
        let timed = timed((pools.len() * evictions) as u64, || {
            for pool in &pools {
                claims.extend((0..evictions).map(|_| pool.claim()));
            }
        });
        drop(claims);
        timed
    })
}

/// A pool full of one root and its children, which nobody holds.
fn family<C: Contender>(children: usize) -> C {
    let pool = C::with_blocks(children + 1);
    let root = own_hash(CHILDREN, 0);
    let parent = C::hash(root, 0, 0);
    let held = pool.store_and_hold(None, &[parent]);
    for child in 1..=children as u64 {
        let name = C::hash(own_hash(CHILDREN, child), root, 1);
        pool.release(pool.store_and_hold(Some(parent), &[name]));
    }
    pool.release(held);
    pool
}

/// Runs `work` once a state, each on a thread of its own that waits for the others to be there.
fn on_threads<S: Send>(states: Vec<S>, work: impl Fn(usize, S) + Sync) -> Duration {
    if states.len() == 1 {
        let watch = Stopwatch::start();
        states.into_iter().for_each(|state| work(0, state));
        return watch.elapsed();
    }
    let barrier = Barrier::new(states.len());
    let (barrier, work) = (&barrier, &work);
    let spans: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = states
            .into_iter()
            .enumerate()
            .map(|(thread, state)| {
                scope.spawn(move || {
                    barrier.wait();
                    let start = Instant::now();
                    work(thread, state);
                    (start, Instant::now())
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no thread of a benchmark panics"))
            .collect()
    });
    let start = spans.iter().map(|span| span.0).min();
    let end = spans.iter().map(|span| span.1).max();
    start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start)
}

/// Xorshift: a number costs nothing beside an operation.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(own_hash(0, seed) | 1)
    }

    #[inline]
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}
