//! A policy or a clock of the caller's that panics under the pool's lock: the pool stays whole, and no
//! block that is in use is handed out.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Order, checked, name};
use kv_pool::clock::Clock;
use kv_pool::moves::Offload;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};
use kv_pool::retention::Retention;
use kv_pool::tenants::{TenantId, TenantQuota};
use kv_pool::{BlockHash, BlockPool, Claimed, Epoch, Naming, Pinned, PoolConfig};
use kv_pool::{BlockId, LoanId, Priority, Tier};

const PRIMARY: u64 = 8;
const SECONDARY: u64 = 4;
const CONTENTS: usize = 24;
const STEPS: usize = 300;

/// When code of the caller's panics: at one call, or at that and all later ones. Clones count together.
#[derive(Clone, Debug)]
struct Fuse {
    calls: Arc<AtomicU64>,
    /// Calls are counted, and panic.
    lit: Arc<AtomicBool>,
    at: u64,
    ever_after: bool,
}

/// What a panic carries, which panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("what the panic carried was dropped");
    }
}

impl Fuse {
    fn new(at: u64, ever_after: bool) -> Self {
        Self { calls: Arc::default(), lit: Arc::new(true.into()), at, ever_after }
    }

    fn burn(&self) {
        if !self.lit.load(Ordering::Relaxed) {
            return;
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call == self.at || self.ever_after && call > self.at {
            // As a panic, without its message on the screen.
            resume_unwind(Box::new(Bomb));
        }
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn has_burned(&self) -> bool {
        self.calls() > self.at
    }
}

/// A right policy, whose every call may panic before or after it has its effect.
#[derive(Debug)]
struct Panicking {
    order: Order,
    fuse: Fuse,
}

impl Panicking {
    fn call<T>(&mut self, call: impl FnOnce(&mut Order) -> T) -> T {
        self.fuse.burn();
        let answer = call(&mut self.order);
        self.fuse.burn();
        answer
    }
}

impl EvictionPolicy for Panicking {
    fn name(&self) -> &'static str {
        "panicking"
    }

    fn missed(&mut self, hash: BlockHash, now: PolicyTime) {
        self.call(|order| order.missed(hash, now));
    }

    fn stored(&mut self, block: RecordId, facts: &BlockFacts) {
        self.call(|order| order.stored(block, facts));
    }

    fn found(&mut self, block: RecordId, now: PolicyTime) {
        self.call(|order| order.found(block, now));
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.call(|order| order.evictable(block, facts));
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.call(|order| order.children(block, has_children));
    }

    fn held(&mut self, block: RecordId) {
        self.call(|order| order.held(block));
    }

    fn removed(&mut self, block: RecordId) {
        self.call(|order| order.removed(block));
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        self.call(|order| order.victim(now))
    }

    fn len(&self) -> usize {
        self.order.len()
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        // Of a policy that has panicked, the pool does this under its lock.
        if self.fuse.ever_after && self.fuse.has_burned() {
            self.fuse.burn();
        }
    }
}

/// A clock that goes on by a millisecond with each reading, but for those that panic.
#[derive(Clone, Debug)]
struct PanickingClock(Fuse);

impl Clock for PanickingClock {
    fn now(&self) -> Duration {
        self.0.burn();
        Duration::from_millis(self.0.calls())
    }
}

/// A pool and all that its callers hold.
struct World {
    pool: BlockPool,
    owner: TenantId,
    random: u64,
    contents: Vec<BlockHash>,
    pinned: Vec<Pinned>,
    claimed: Vec<Claimed>,
    offloads: Vec<Offload>,
    epochs: Vec<Epoch>,
    loans: Vec<LoanId>,
}

impl World {
    fn new(pool: BlockPool, seed: u64) -> Self {
        let owner = pool.add_tenant().unwrap();
        let quota = TenantQuota { reserved: 2, ..TenantQuota::NONE };
        pool.set_quota(owner, Tier::Primary, quota).unwrap();
        let contents = (0..CONTENTS as u32).map(name).collect();
        let (pinned, claimed, offloads, epochs, loans) = Default::default();
        Self { pool, owner, random: seed, contents, pinned, claimed, offloads, epochs, loans }
    }

    fn next(&mut self, end: usize) -> usize {
        const STEP: u64 = 1_442_695_040_888_963_407;
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(STEP);
        (self.random >> 33) as usize % end
    }

    fn any<T>(&mut self, list: impl Fn(&mut Self) -> &mut Vec<T>) -> Option<T> {
        let len = list(self).len();
        let at = if len == 0 { return None } else { self.next(len) };
        Some(list(self).swap_remove(at))
    }

    fn some_content(&mut self) -> BlockHash {
        let content = self.next(CONTENTS);
        self.contents[content]
    }

    /// A few consecutive contents. The number of a content before is smaller by one.
    fn some_contents(&mut self) -> std::ops::Range<usize> {
        let first = self.next(CONTENTS - 3);
        first..first + 1 + self.next(3)
    }

    fn keep(&mut self, mut claimed: Claimed) {
        while let Some(offload) = claimed.take_offload() {
            self.offloads.push(offload);
        }
        self.claimed.push(claimed);
    }

    fn name_some(&mut self) {
        let Some(mut claimed) = self.any(|world| &mut world.claimed) else { return };
        let contents = self.some_contents();
        let names = self.contents[contents.clone()][..contents.len().min(claimed.len())].to_vec();
        let parent = contents.start.checked_sub(1).map(|before| self.contents[before]);
        let mut naming = Naming { parent, ..Naming::default() };
        if self.next(3) == 0 {
            let duration = Some(Duration::from_millis(9));
            naming.retention = Retention { priority: Priority::MAX, duration };
        }
        match self.next(4) {
            0 => drop(claimed.cache(&names, naming)),
            _ => {
                let named = claimed.register(&names, naming).unwrap();
                self.pinned.push(named);
                self.claimed.push(claimed);
            }
        }
    }

    fn onboard(&mut self) {
        let hash = self.some_content();
        let Some(pin) = self.pool.find_and_pin(hash, Tier::Secondary) else { return };
        let Ok(target) = self.pool.claim_one() else { return };
        if let Ok(move_up) = self.pool.begin_onboard(pin, target) {
            let done = move_up.commit();
            self.pinned.push(done.pinned);
            self.claimed.push(done.copies);
        }
    }

    fn find_and_claim(&mut self) {
        let contents = self.some_contents();
        let prefix = self.contents[contents].to_vec();
        let blocks = prefix.len() + self.next(2);
        let tenant = if self.next(2) == 0 { self.owner } else { TenantId::NOBODY };
        let found = self.pool.match_prefix(&prefix);
        let new = self.pool.claim_for(tenant, blocks - found.len());
        self.pinned.push(found);
        new.into_iter().for_each(|claimed| self.keep(claimed));
    }

    fn step(&mut self) {
        let (count, hash) = (1 + self.next(3), self.some_content());
        match self.next(16) {
            0 => self.pool.claim(count).into_iter().for_each(|claimed| self.keep(claimed)),
            1 => {
                let claimed = self.pool.claim_for(self.owner, count);
                claimed.into_iter().for_each(|claimed| self.keep(claimed));
            }
            2 => self.pool.claim_in(Tier::Secondary, 1).into_iter().for_each(|one| self.keep(one)),
            3..6 => self.name_some(),
            6 => drop(self.any(|world| &mut world.claimed)),
            7 | 8 => drop(self.any(|world| &mut world.pinned)),
            9 => {
                let contents = self.some_contents();
                self.pinned.push(self.pool.match_prefix(&self.contents[contents]));
            }
            10 => match self.any(|world| &mut world.offloads) {
                Some(offload) if self.next(4) > 0 => offload.commit(),
                offload => drop(offload),
            },
            11 => drop(match self.next(2) {
                0 => self.pool.remove(hash).into(),
                _ => self.pool.remove_with_successors(hash) as u64,
            }),
            12 => self.onboard(),
            13 => {
                self.pool.tick();
                self.pool.refresh();
                let loan = self.pool.lend(&[hash], Tier::Primary);
                self.loans.extend(loan.map(|loan| loan.id));
                let over = self.loans.len().saturating_sub(2);
                self.loans.drain(..over).for_each(|loan| assert!(self.pool.end_loan(loan)));
            }
            14 => match self.any(|world| &mut world.epochs) {
                Some(epoch) => self.pool.complete_epoch(epoch).unwrap(),
                None => self.epochs.push(self.pool.begin_epoch()),
            },
            _ => self.find_and_claim(),
        }
    }

    /// The pool is whole, and nobody's blocks are another's.
    fn check(&self) {
        checked(&self.pool);
        let mut own = HashSet::<(Tier, BlockId)>::new();
        for list in &self.claimed {
            list.ids().for_each(|id| assert!(own.insert((list.tier(), id)), "claimed twice"));
        }
        for at in self.pinned.iter().flat_map(Pinned::locations) {
            assert!(!own.contains(&(at.tier, at.id)), "{at:?} is pinned, and claimed");
        }
        for offload in &self.offloads {
            assert!(
                !own.contains(&(Tier::Secondary, offload.to())),
                "a copy writes a claimed block"
            );
        }
    }

    /// Gives everything back, after which all blocks can be claimed.
    fn end(mut self) {
        self.offloads.drain(..).for_each(Offload::commit);
        self.pinned.clear();
        self.claimed.clear();
        let last = self.pool.begin_epoch();
        self.pool.complete_epoch(last).unwrap();
        self.pool.set_quota(self.owner, Tier::Primary, TenantQuota::NONE).unwrap();
        let loans = self.pool.loans() as u64;
        assert!(self.pool.stats().primary.claimable() + loans >= PRIMARY);
        // Every tier needs a victim, and so learns of a policy that has panicked since the last one.
        for round in 1..4 {
            let mut claimed = self.pool.claim(self.pool.claimable()).unwrap();
            std::iter::from_fn(|| claimed.take_offload()).for_each(Offload::commit);
            let names: Vec<_> =
                (0..claimed.len() as u32).map(|at| name(100 * round + at)).collect();
            drop(claimed.register(&names, Naming::default()).unwrap());
            checked(&self.pool);
        }
    }
}

fn config() -> PoolConfig {
    PoolConfig { secondary_blocks: SECONDARY, ..PoolConfig::primary_only(PRIMARY) }
}

/// Runs the steps of several seeds, with a panic at each call in turn, up to the first that is not made.
/// `run` is given a seed and the number of a call, and says whether it was made.
fn at_every_call(least: u64, run: impl Fn(u64, u64) -> bool) {
    for seed in 0..3 {
        let calls = (0..).take_while(|&at| run(seed, at)).count() as u64;
        assert!(calls >= least, "{calls} calls with seed {seed}");
    }
}

/// Steps that panic at the calls of `fuse`, until they do so no more.
fn run(world: World, fuse: &Fuse, may_panic: bool) {
    let mut world = world;
    for step in 0..STEPS {
        let panicked = catch_unwind(AssertUnwindSafe(|| world.step())).map_err(std::mem::forget);
        assert!(may_panic || panicked.is_ok(), "call {} at step {step} went through", fuse.at);
        world.check();
    }
    fuse.lit.store(false, Ordering::Relaxed);
    world.end();
}

#[test]
fn a_policy_that_panics_is_asked_no_more() {
    for (tier, ever_after) in
        [(Tier::Primary, false), (Tier::Primary, true), (Tier::Secondary, false)]
    {
        at_every_call(50, |seed, at| {
            let fuse = Fuse::new(at, ever_after);
            let policy = Box::new(Panicking { order: Order::default(), fuse: fuse.clone() });
            let pool = BlockPool::builder(&config()).policy(tier, policy).build().unwrap();
            run(World::new(pool.clone(), seed), &fuse, false);
            // The drop of a policy that goes on panicking is a call, too.
            let last = at + 1 + u64::from(ever_after);
            assert!(fuse.calls() <= last, "after call {at} of seed {seed} it was called again");
            let faults = pool.counters().policy_faults;
            assert_eq!(faults, u64::from(fuse.has_burned()), "call {at} of seed {seed}, {tier:?}");
            fuse.has_burned()
        });
    }
}

#[test]
fn a_clock_that_panics_leaves_every_operation_done_or_undone() {
    at_every_call(15, |seed, at| {
        let fuse = Fuse::new(at, false);
        let clock = PanickingClock(fuse.clone());
        let pool = BlockPool::builder(&config()).clock(clock).build().unwrap();
        run(World::new(pool, seed), &fuse, true);
        fuse.has_burned()
    });
}
