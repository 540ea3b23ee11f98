//! A refused call changes nothing: every call that can be refused, at every point of random lives of a pool, with the
//! whole state compared.

use crate::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};
use crate::tenants::TenantQuota;
use crate::{BlockHash, BlockPool, Claimed, Epoch, Naming, Pinned, PoolConfig, TenantId, Tier};

const BLOCKS: u64 = 12;

fn name(content: u64) -> BlockHash {
    BlockHash::chain(BlockHash::ROOT, &[content as u32])
}

/// All that the lock guards, without the lists that are kept for the next user.
fn picture(pool: &BlockPool) -> String {
    let state = pool.shared.state.lock();
    let lists = (&state.blocks, &state.index, &state.tiers, &state.retiring, &state.stand_ins);
    let counts = (&state.current, &state.completed, &state.counters, &state.ages);
    format!("{:?}", (lists, counts, &state.watch, state.plain, &state.loans))
}

/// The oldest goes first, and none that others follow.
#[derive(Debug, Default)]
struct Oldest(Vec<(RecordId, bool)>);

impl EvictionPolicy for Oldest {
    fn name(&self) -> &'static str {
        "oldest"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.0.push((block, facts.has_children));
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.0.iter_mut().filter(|of| of.0 == block).for_each(|of| of.1 = has_children);
    }

    fn held(&mut self, block: RecordId) {
        self.0.retain(|of| of.0 != block);
    }

    fn removed(&mut self, block: RecordId) {
        self.held(block);
    }

    fn victim(&mut self, _: PolicyTime) -> Option<RecordId> {
        let at = self.0.iter().position(|(_, has_children)| !has_children)?;
        Some(self.0.remove(at).0)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// A pool in the middle of its life, and another one whose handles it does not take.
struct Life {
    pool: BlockPool,
    divided: bool,
    random: u64,
    tenants: Vec<TenantId>,
    claimed: Vec<Claimed>,
    pinned: Vec<Pinned>,
    epochs: Vec<Epoch>,
    foreign: Foreign,
    refused: u64,
    /// The picture of the pool, unless it has changed since.
    seen: Option<String>,
}

struct Foreign {
    tenant: TenantId,
    epoch: Epoch,
    pins: Pinned,
    claimed: Claimed,
}

impl Foreign {
    fn new() -> Self {
        let pool = BlockPool::new(&PoolConfig::primary_only(2)).unwrap();
        let pins = pool.claim(1).unwrap().register(&[name(0)], Naming::default()).unwrap();
        let (tenant, epoch) = (pool.add_tenant().unwrap(), pool.begin_epoch());
        Self { tenant, epoch, pins, claimed: pool.claim(1).unwrap() }
    }
}

impl Life {
    fn new(seed: u64) -> Self {
        let config = PoolConfig { secondary_blocks: 4, ..PoolConfig::primary_only(BLOCKS) };
        let (divided, policy) = (seed % 3 == 1, seed % 2 == 1);
        let mut builder = BlockPool::builder(&config).events(64);
        if divided {
            builder = builder.granules(Tier::Primary, 4);
        }
        if policy {
            builder = builder.policy(Tier::Primary, Box::new(Oldest::default()));
        }
        let pool = builder.build().unwrap();
        let granules = if divided { 0..3 } else { 0..0 };
        granules.for_each(|granule| pool.grant(Tier::Primary, granule).unwrap());
        let mut tenants = vec![TenantId::NOBODY];
        tenants.extend((0..seed % 4 / 2 * 2).map(|_| pool.add_tenant().unwrap()));
        let (claimed, pinned, epochs) = (Vec::new(), Vec::new(), Vec::new());
        let foreign = Foreign::new();
        let (random, refused, seen) = (seed, 0, None);
        Self { pool, divided, random, tenants, claimed, pinned, epochs, foreign, refused, seen }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end
    }

    fn pick<T>(&mut self, list: impl Fn(&mut Self) -> &mut Vec<T>) -> Option<T> {
        let len = list(self).len() as u64;
        let at = if len == 0 { return None } else { self.below(len) };
        Some(list(self).swap_remove(at as usize))
    }

    fn step(&mut self) {
        self.seen = None;
        match self.below(11) {
            0..3 => {
                let (tenant, count) = (self.below(self.tenants.len() as u64), self.below(4));
                let tenant = self.tenants[tenant as usize];
                self.claimed.extend(self.pool.claim_for(tenant, count as usize));
            }
            3..6 => {
                let Some(mut claimed) = self.pick(|life| &mut life.claimed) else { return };
                let first = self.below(20);
                let names: Vec<_> = (first..first + claimed.len() as u64).map(name).collect();
                while let Some(offload) = claimed.take_offload() {
                    offload.commit();
                }
                let naming = Naming { parent: first.checked_sub(1).map(name), ..Naming::default() };
                self.pinned.push(claimed.register(&names, naming).unwrap());
            }
            6 => drop(self.pick(|life| &mut life.claimed)),
            7 | 8 => drop(self.pick(|life| &mut life.pinned)),
            9 => {
                // Content that follows it is found again, and then follows it again.
                let content = self.below(20);
                self.pool.remove(name(content));
            }
            _ => match self.pick(|life| &mut life.epochs) {
                Some(epoch) => self.pool.complete_epoch(epoch).unwrap(),
                None => self.epochs.push(self.pool.begin_epoch()),
            },
        }
    }

    /// Whether a call is refused, which changes nothing.
    fn refuses<T>(&mut self, what: &str, call: impl FnOnce(&mut Self) -> Option<T>) {
        let before = self.seen.take().unwrap_or_else(|| picture(&self.pool));
        if call(self).is_none() {
            self.refused += 1;
            assert!(before == picture(&self.pool), "a refused {what} has changed something");
            self.seen = Some(before);
        }
    }

    fn refuse_claims(&mut self) {
        let (more, theirs) = (self.pool.claimable() + 1, self.foreign.tenant);
        self.refuses("claim", |life| life.pool.claim(more).ok());
        self.refuses("claim of all", |life| life.pool.claim(usize::MAX).ok());
        self.refuses("claim_one", |life| (life.pool.claimable() == 0).then_some(()));
        self.refuses("claim_in", |life| life.pool.claim_in(Tier::Third, 1).ok());
        self.refuses("claim_for", |life| life.pool.claim_for(theirs, 1).ok());
        for tenant in self.tenants.clone() {
            let most =
                (0..more).rev().find(|&n| self.pool.check_claim(Tier::Primary, tenant, n).is_ok());
            let beyond = most.unwrap_or(0) + 1;
            self.refuses("claim for a tenant", |life| life.pool.claim_for(tenant, beyond).ok());
            let check = |life: &mut Self| life.pool.check_claim(Tier::Primary, tenant, beyond).ok();
            self.refuses("check_claim", check);
        }
    }

    fn refuse_names(&mut self) {
        let names: Vec<_> = (0..50).map(name).collect();
        if let Some(mut claimed) = self.pick(|life| &mut life.claimed) {
            self.refuses("register", |_| claimed.register(&names, Naming::default()).ok());
            let onto = |life: &mut Self| {
                let theirs = &mut life.foreign.pins;
                claimed
                    .register_onto(&names[..1], Naming::default(), theirs)
                    .ok()
                    .filter(|&n| n > 0)
            };
            self.refuses("register_onto", onto);
            let append = |life: &mut Self| {
                let theirs = claimed.append(std::mem::take(&mut life.foreign.claimed));
                life.foreign.claimed = theirs.err()?;
                None::<()>
            };
            self.refuses("append", append);
            if let Some(pins) = self.pick(|life| &mut life.pinned) {
                let target = claimed;
                let mut back = None;
                let begin = |life: &mut Self| match life.pool.begin_onboard(pins, target) {
                    Ok(begun) => Some(begun),
                    Err(refused) => {
                        back = Some((refused.pinned, refused.target));
                        None
                    }
                };
                self.refuses("begin_onboard", begin);
                let (pins, target) = back.unwrap_or_default();
                self.pinned.push(pins);
                claimed = target;
            }
            self.claimed.push(claimed);
        }
        self.refuses("lend", |life| life.pool.lend(&[name(99)], Tier::Primary));
        self.refuses("end_loan", |life| life.pool.end_loan(crate::LoanId(0)).then_some(()));
        self.refuses("complete_epoch", |life| life.pool.complete_epoch(life.foreign.epoch).ok());
        self.refuses("find_and_pin", |life| life.pool.find_and_pin(name(99), Tier::Primary));
        self.refuses("remove", |life| life.pool.remove(name(99)).then_some(()));
    }

    fn refuse_settings(&mut self) {
        let (near, theirs) = (Tier::Primary, self.foreign.tenant);
        for tenant in [theirs, *self.tenants.last().unwrap()] {
            for (reserved, held_max) in [(99, u64::MAX), (2, 1), (0, u64::MAX)] {
                if tenant != theirs && reserved == 0 {
                    continue;
                }
                let quota = TenantQuota { reserved, held_max, ..TenantQuota::NONE };
                self.refuses("set_quota", |life| life.pool.set_quota(tenant, near, quota).ok());
            }
        }
        self.refuses("quota", |life| life.pool.quota(theirs, near).ok());
        self.refuses("tenant_counts", |life| life.pool.tenant_counts(theirs, near).ok());
        self.refuses("set_budget", |life| life.pool.set_budget(near, BLOCKS + 1).ok());
        self.refuses("grant", |life| life.pool.grant(near, 3).ok());
        self.refuses("withdraw", |life| life.pool.withdraw(near, 3).ok());
        self.refuses("granule", |life| life.pool.granule(near, u64::MAX).ok());
        if self.divided {
            self.refuses("set_budget of granules", |life| life.pool.set_budget(near, 1).ok());
            // The last one is not there.
            self.refuses("vacate", |life| life.pool.vacate(near, &[0, 1, 0, 2, 3]).ok());
        }
        // What is kept for a tenant cannot be taken.
        if let [_, tenant, ..] = self.tenants[..] {
            let quota = self.pool.quota(tenant, near).unwrap();
            let all = TenantQuota { reserved: BLOCKS, ..quota };
            self.seen = None;
            if self.pool.set_quota(tenant, near, all).is_ok() {
                self.refuses("set_budget of a reserve", |life| life.pool.set_budget(near, 4).ok());
                self.refuses("withdraw of a reserve", |life| life.pool.withdraw(near, 1).ok());
                self.refuses("vacate of a reserve", |life| life.pool.vacate(near, &[1]).ok());
                let claim = |life: &mut Self| life.pool.claim(1).ok();
                self.refuses("claim of what is kept", claim);
                self.seen = None;
                let small = TenantQuota { reserved: 2, held_max: 6, cached_max: 3 };
                self.pool.set_quota(tenant, near, small).unwrap();
            }
        }
    }
}

#[test]
fn every_refused_call_leaves_the_pool_as_it_was() {
    let mut refused = 0;
    for seed in 0..12 {
        let mut life = Life::new(seed);
        for _ in 0..60 {
            life.step();
            life.refuse_claims();
            life.refuse_names();
            life.refuse_settings();
            life.pool.check_integrity().unwrap();
        }
        refused += life.refused;
    }
    assert!(refused > 20_000, "{refused} refusals");
}
