//! Work in proportion: no call takes more steps in a larger pool, or beside more tenants, but for those of which
//! the page of this crate says so.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::clock::ManualClock;
use crate::policy::{PolicyKind, ReuseHint};
use crate::steps::steps;
use crate::tenants::TenantQuota;
use crate::{
    BlockHash, BlockPool, Claimed, Naming, Pinned, PoolConfig, Priority, Retention, TenantId, Tier,
};

const NEAR: Tier = Tier::Primary;
const FAR: Tier = Tier::Secondary;
const GRANULE: u32 = 64;
/// Blocks of a tenant that are kept for it, and were passed over.
const KEPT: u64 = 2;

/// What a pool has beside its blocks.
#[derive(Clone, Copy, Debug)]
struct Kind {
    policy: bool,
    divided: bool,
    tenants: u64,
    /// All but a few blocks are in use.
    full: bool,
}

struct Fixture {
    pool: BlockPool,
    clock: ManualClock,
    kind: Kind,
    tenants: Vec<TenantId>,
    /// Keeps blocks in use.
    _used: Option<Claimed>,
    names: u32,
    most: BTreeMap<&'static str, u64>,
}

impl Fixture {
    fn new(blocks: u64, kind: Kind) -> Self {
        let config = PoolConfig { secondary_blocks: 256, ..PoolConfig::primary_only(blocks) };
        let clock = ManualClock::new();
        let mut builder = BlockPool::builder(&config).events(16).clock(clock.clone());
        if kind.policy {
            let policy = PolicyKind::default().make(blocks + 256).unwrap();
            builder = builder.policy(NEAR, policy.unwrap());
        }
        if kind.divided {
            builder = builder.granules(NEAR, GRANULE);
        }
        let pool = builder.build().unwrap();
        if kind.divided {
            // All but the last ones.
            let granules = blocks / u64::from(GRANULE) - 2;
            (0..granules).for_each(|granule| pool.grant(NEAR, granule).unwrap());
        }
        let (tenants, most) = (Vec::new(), BTreeMap::new());
        let mut fixture = Self { pool, clock, kind, tenants, _used: None, names: 0, most };
        fixture.add_tenants();
        let rest = fixture.pool.empty();
        if kind.full {
            fixture._used = Some(fixture.pool.claim(rest - 64).unwrap());
        } else {
            for _ in 0..rest / 8 {
                let names = fixture.names(8);
                let mut claimed = fixture.pool.claim(8).unwrap();
                drop(claimed.register(&names, Naming::default()).unwrap());
            }
        }
        fixture
    }

    /// Each has blocks that are kept for it, which claims have passed over.
    fn add_tenants(&mut self) {
        for _ in 0..self.kind.tenants {
            let tenant = self.pool.add_tenant().unwrap();
            let quota = TenantQuota { reserved: KEPT, ..TenantQuota::NONE };
            self.pool.set_quota(tenant, NEAR, quota).unwrap();
            for name in self.names(KEPT as usize) {
                let own = self.pool.claim_for(tenant, 1).unwrap();
                let naming = Naming::from(Priority::MIN);
                assert_eq!(own.cache(&[name], naming), Ok(1));
            }
            self.tenants.push(tenant);
        }
    }

    fn names(&mut self, count: usize) -> Vec<BlockHash> {
        self.names += count as u32;
        let names = self.names - count as u32..self.names;
        names.map(|content| BlockHash::chain(BlockHash::ROOT, &[content])).collect()
    }

    /// What a call returns; its steps are counted.
    fn count<T>(&mut self, what: &'static str, call: impl FnOnce(&BlockPool) -> T) -> T {
        let pool = self.pool.clone();
        let (answer, steps) = steps(|| call(&pool));
        let most = self.most.entry(what).or_default();
        *most = steps.max(*most);
        answer
    }

    fn claim(&mut self) -> (Vec<BlockHash>, Pinned) {
        let names = self.names(8);
        let mut new = self.count("claim", |pool| pool.claim(8).unwrap());
        self.count("take_offload", |_| {
            while let Some(offload) = new.take_offload() {
                offload.commit();
            }
        });
        let keep = Retention { priority: Priority::MAX, duration: None };
        let mut pins = self.count("register", |_| new.register(&names[..4], keep).unwrap());
        let naming = Naming::after(names[3]);
        self.count("register_onto", |_| {
            new.register_onto(&names[4..6], naming, &mut pins).unwrap()
        });
        let rest = self.count("register", |_| new.register(&names[6..], Naming::after(names[5])));
        self.count("append", |_| pins.append(rest.unwrap()).unwrap());
        (names, pins)
    }

    fn look(&mut self, names: &[BlockHash]) {
        let found = self.count("match_prefix", |pool| pool.match_prefix(names));
        assert_eq!(found.len(), names.len());
        self.count("hint", |_| Pinned::hint([&found], 0..4, ReuseHint::SharedHead));
        let keep = Retention { priority: Priority::MAX, duration: Some(Duration::from_secs(1)) };
        self.count("retain", |pool| pool.retain(&found, keep));
        self.count("drop", |_| drop(found));
        let last = self.count("match_last", |pool| pool.match_last(names)).unwrap();
        let one = self.count("find_and_pin", |pool| pool.find_and_pin(names[0], NEAR)).unwrap();
        self.count("release", |pool| pool.release(vec![last.1, one]));
        self.count("locate", |pool| pool.locate(names[0])).unwrap();
        self.count("prefix_len", |pool| pool.prefix_len(names));
        self.count("pin_cost", |pool| pool.pin_cost(names));
        self.count("candidate", |pool| pool.candidate(names[0]));
        let lent = self.count("lend", |pool| pool.lend(names, NEAR)).unwrap();
        assert!(self.count("end_loan", |pool| pool.end_loan(lent.id)));
        self.count("refresh", BlockPool::refresh);
    }

    fn settings(&mut self) {
        self.count("claim_one", |pool| drop(pool.claim_one().unwrap()));
        self.count("claim_in", |pool| drop(pool.claim_in(FAR, 2).unwrap()));
        self.count("check_claim", |pool| pool.check_claim(NEAR, TenantId::NOBODY, 1).unwrap());
        let epoch = self.count("begin_epoch", BlockPool::begin_epoch);
        self.count("complete_epoch", |pool| pool.complete_epoch(epoch)).unwrap();
        self.count("stats", |pool| pool.stats());
        self.count("tick", BlockPool::tick);
        self.count("blocks_end", |pool| pool.blocks_end(NEAR));
        if let Some(&tenant) = self.tenants.first() {
            self.count("claim_for", |pool| drop(pool.claim_for(tenant, 1).unwrap()));
            let quota = self.count("quota", |pool| pool.quota(tenant, NEAR)).unwrap();
            self.count("set_quota", |pool| pool.set_quota(tenant, NEAR, quota)).unwrap();
            self.count("tenant_counts", |pool| pool.tenant_counts(tenant, NEAR)).unwrap();
            self.count("add_tenant", |pool| pool.add_tenant()).unwrap();
        }
        if self.kind.divided {
            let granules = self.pool.shared.state.lock().tier(NEAR).capacity / GRANULE;
            let last = u64::from(granules) - 2;
            self.count("grant", |pool| {
                pool.grant(NEAR, last).and_then(|()| pool.grant(NEAR, last + 1)).unwrap();
            });
            self.count("granule", |pool| pool.granule(NEAR, last)).unwrap();
            self.count("withdraw", |pool| drop(pool.withdraw(NEAR, last).unwrap()));
            self.count("vacate", |pool| pool.vacate(NEAR, &[last + 1, last])).unwrap();
        }
    }

    /// Every call, many times: a window that slides, and prompts that are found.
    fn run(mut self) -> BTreeMap<&'static str, u64> {
        for round in 0..40 {
            if round == 8 {
                // What is done once for all has been done.
                self.most.clear();
            }
            let (names, mut pins) = self.claim();
            if round == 7 {
                // Once, the heads of what is in use are all that is left.
                let tail = pins.split_off(4);
                drop(pins);
                let kept = KEPT * self.kind.tenants;
                drop(self.pool.claim(self.pool.claimable() - kept as usize).unwrap());
                drop(tail);
                continue;
            }
            self.look(&names);
            self.clock.advance(Duration::from_millis(700));
            self.settings();
            self.count("remove", |pool| pool.remove(names[7]));
            self.count("drop", |_| drop(pins));
        }
        integrity(&self.pool);
        self.most
    }
}

fn integrity(pool: &BlockPool) {
    pool.check_integrity().unwrap();
    assert_eq!(pool.counters().policy_faults, 0);
}

#[test]
fn no_call_takes_more_steps_in_a_larger_pool_or_beside_more_tenants() {
    for (policy, divided, full) in [
        (false, false, false),
        (true, false, false),
        (false, true, false),
        (true, false, true),
        (false, true, true),
    ] {
        let steps = |blocks, tenants| {
            let kind = Kind { policy, divided, tenants, full };
            Fixture::new(blocks, kind).run()
        };
        for tenants in [0, 16] {
            compare(&steps(1 << 12, tenants), &steps(1 << 18, tenants), (policy, divided, full));
        }
        compare(&steps(1 << 14, 16), &steps(1 << 14, 4096), (policy, divided, full));
    }
}

fn compare(small: &BTreeMap<&str, u64>, large: &BTreeMap<&str, u64>, kind: (bool, bool, bool)) {
    assert!(small.len() >= 28, "{small:?}");
    for (call, &few) in small {
        let many = large[call];
        assert!(many <= 2 * few + 64, "{call}: {few} steps, then {many}, of {kind:?}");
    }
}
