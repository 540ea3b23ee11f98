//! Admission of a batch, done to the reference: everything is found first, then claimed.

use std::collections::{HashMap, HashSet};

use super::operations::Refusal;
use super::reference::{Block, Model, ModelClaim, PRIMARY};

/// What one sequence needs.
#[derive(Clone, Debug)]
pub struct Request {
    pub prefix: Vec<u32>,
    pub partial: Vec<u32>,
    pub blocks: usize,
    pub tenant: usize,
}

/// Where the beginning of the block after the prefix is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Begun {
    Copy(usize),
    TakenOver,
}

/// What one sequence is given.
#[derive(Debug)]
pub struct Served {
    pub prefix: Vec<usize>,
    pub claimed: Vec<ModelClaim>,
    pub partial: Option<(usize, Begun)>,
}

/// What tenants are to hold beside what they hold, by tenant.
#[derive(Debug, Default)]
pub struct Needs {
    claimed: HashMap<usize, u64>,
    reused: HashMap<usize, u64>,
    /// Blocks that were counted.
    counted: HashSet<usize>,
}

impl Needs {
    fn of(&self, tenant: usize) -> u64 {
        let of = |map: &HashMap<usize, u64>| map.get(&tenant).copied().unwrap_or(0);
        of(&self.claimed) + of(&self.reused)
    }
}

impl Model {
    /// Whether the tenant of a block may hold it beside what is needed, if nobody does yet.
    pub fn may_use_beside(&self, block: usize, needs: &mut Needs) -> bool {
        let Block { tenant, tier, .. } = self.blocks[block];
        let free = self.tenants.len() == 1 || tier != PRIMARY;
        if free || !self.is_unused(block) || needs.counted.contains(&block) {
            return true;
        }
        let all = 0..self.tenants.len();
        let held = |tenant: usize| self.shares(tenant).0 + needs.of(tenant);
        let others = all.clone().filter(|&other| other != tenant);
        let kept: u64 = others.map(|t| self.tenants[t].reserved.saturating_sub(held(t))).sum();
        let in_use: u64 = all.map(held).sum();
        let may = held(tenant) < self.tenants[tenant].held_max && in_use + kept < self.room();
        if may {
            *needs.reused.entry(tenant).or_default() += 1;
            needs.counted.insert(block);
        }
        may
    }

    pub fn admit(&mut self, batch: &[Request]) -> Result<Vec<Served>, Refusal> {
        let mut needs = Needs::default();
        let mut found: Vec<Vec<usize>> = Vec::new();
        for request in batch {
            let own = self.cached(request, &mut needs);
            let claimed = self.needs(request, &own) as u64;
            *needs.claimed.entry(request.tenant).or_default() += claimed;
            found.push(own);
        }
        let mut slack = self.check_batch(batch, &found)?;
        // Only now, when it is certain that all is admitted.
        found.iter().for_each(|found| self.adopt_all(found));
        // What is used again is counted as held below.
        needs.reused.clear();
        needs.counted.clear();
        for (request, found) in batch.iter().zip(&found) {
            self.counters.lookups += request.prefix.len().min(request.blocks) as u64;
            self.counters.hits += found.len() as u64;
        }
        found.iter().flatten().for_each(|&block| self.pin(block));
        let mut taken_over = false;
        let mut begun = Vec::new();
        for (request, found) in batch.iter().zip(&found) {
            begun.push(self.begin(request, found.len(), &mut taken_over, &mut slack, &mut needs));
        }
        let mut served = Vec::new();
        for ((request, prefix), begun) in batch.iter().zip(found).zip(begun) {
            let far = prefix.iter().filter(|&&block| self.blocks[block].tier != PRIMARY).count();
            let after = request.blocks - prefix.len();
            let mut claimed = Vec::new();
            let mut claim = |model: &mut Self, count: usize| {
                claimed
                    .extend((0..count).map(|_| model.claim_one(PRIMARY, request.tenant).unwrap()));
            };
            claim(self, far);
            let partial = match begun {
                Some((candidate, Ok(own))) => {
                    claim(self, after - 1);
                    claimed.insert(far, own);
                    Some((candidate, Begun::TakenOver))
                }
                Some((candidate, Err(source))) => {
                    claim(self, after);
                    Some((candidate, Begun::Copy(source)))
                }
                None => {
                    claim(self, after);
                    None
                }
            };
            served.push(Served { prefix, claimed, partial });
        }
        Ok(served)
    }

    /// The cached prefix of one sequence.
    fn cached(&self, request: &Request, needs: &mut Needs) -> Vec<usize> {
        let mut found: Vec<usize> = Vec::new();
        for &content in request.prefix.iter().take(request.blocks) {
            let Some(block) = self.find(content) else { break };
            if !self.may_use_beside(block, needs) {
                break;
            }
            found.push(block);
        }
        found
    }

    /// How many blocks the batch needs beside those that it has found.
    fn needs(&self, request: &Request, found: &[usize]) -> usize {
        let far = found.iter().filter(|&&block| self.blocks[block].tier != PRIMARY).count();
        request.blocks - found.len() + far
    }

    /// Whether there is room for all; how many blocks more there is room for.
    fn check_batch(&self, batch: &[Request], found: &[Vec<usize>]) -> Result<usize, Refusal> {
        let mut reused: Vec<usize> = found.iter().flatten().copied().collect();
        reused.sort_unstable();
        reused.dedup();
        reused.retain(|&block| self.is_unused(block) && self.blocks[block].tier == PRIMARY);
        let pairs = || batch.iter().zip(found);
        let requested: usize = pairs().map(|(request, found)| self.needs(request, found)).sum();
        let claimable = self.claimable(PRIMARY) - reused.len();
        if requested > claimable {
            let retiring = self.retiring(PRIMARY);
            return Err(Refusal::Exhausted { requested, claimable, retiring });
        }
        let slack = claimable - requested;
        if self.tenants.len() == 1 {
            return Ok(slack);
        }
        Ok(self.check_tenants(batch, found, &reused)?.min(slack))
    }

    /// Whether the tenants may hold all that together; how many blocks more may be in use.
    fn check_tenants(
        &self,
        batch: &[Request],
        found: &[Vec<usize>],
        reused: &[usize],
    ) -> Result<usize, Refusal> {
        let needs = |tenant: usize| -> u64 {
            let own = batch.iter().zip(found).filter(|(request, _)| request.tenant == tenant);
            own.map(|(request, found)| self.needs(request, found) as u64).sum()
        };
        let again = |tenant: usize| {
            reused.iter().filter(|&&block| self.blocks[block].tenant == tenant).count() as u64
        };
        let all = 0..self.tenants.len();
        let claimants = all.clone().filter(|&tenant| needs(tenant) > 0).count();
        let (mut unheld, mut requested, mut kept) = (self.room(), 0, 0);
        for tenant in all {
            let (quota, held) = (self.tenants[tenant], self.shares(tenant).0 + again(tenant));
            if needs(tenant) > 0 && held + needs(tenant) > quota.held_max {
                return Err(Refusal::HeldMax);
            }
            unheld -= held;
            requested += needs(tenant);
            // From whom is it kept?
            if needs(tenant) == 0 || claimants > 1 {
                kept += quota.reserved.saturating_sub(held + needs(tenant));
            }
        }
        match unheld.checked_sub(requested + kept) {
            Some(slack) => Ok(slack as usize),
            None if requested > 0 => Err(Refusal::KeptForOthers),
            None => Ok(0),
        }
    }

    /// Takes a block over, or pins the one to be copied.
    fn begin(
        &mut self,
        request: &Request,
        matched: usize,
        taken_over: &mut bool,
        slack: &mut usize,
        needs: &mut Needs,
    ) -> Option<(usize, Result<ModelClaim, usize>)> {
        if matched < request.prefix.len() || matched >= request.blocks {
            return None;
        }
        let found = |&content: &u32| self.find(content);
        let candidate = request.partial.iter().position(|content| found(content).is_some())?;
        let block = found(&request.partial[candidate])?;
        let free = self.blocks[block].tier == PRIMARY && self.is_unused(block);
        let kept = self.is_kept(block, request.tenant);
        if free && !*taken_over && !kept && self.children(block) == 0 {
            *taken_over = true;
            self.count_evicted(block);
            self.forget(block);
            self.counters.claimed += 1;
            *needs.claimed.entry(request.tenant).or_default() -= 1;
            return Some((candidate, Ok(self.claimed(block, request.tenant, true, None))));
        }
        if free && *slack == 0 || !self.may_use_beside(block, needs) {
            return None;
        }
        *slack -= usize::from(free);
        needs.reused.clear();
        needs.counted.clear();
        self.pin(block);
        Some((candidate, Err(block)))
    }
}
