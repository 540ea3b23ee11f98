//! Requests before they are admitted: whether each can be now, without a change of anything but what the request
//! itself keeps.

use std::collections::{HashMap, HashSet};

use kv_pool::tenants::{TenantError, TenantId};
use kv_pool::{ClaimError, Tier, guard};

use crate::admit::{Answer, Request, Waiting, Wanted};
use crate::group::Group;
use crate::rows::RowLease;
use crate::{AdmitError, Manager, Missing};

/// The first requests of a call.
pub(crate) struct Ready {
    /// Of each, with [`Answer::NoRow`] for those that are to be admitted.
    pub(crate) answers: Vec<Answer>,
    /// The positions of those that are to be admitted.
    pub(crate) places: Vec<usize>,
    pub(crate) rows: Vec<RowLease>,
}

/// What was seen of a request: what it waits for, if it does.
pub(crate) type Prepared = Result<Option<Waiting>, AdmitError>;

/// Why a request is not admitted now.
pub(crate) enum Not {
    Row,
    Room(Missing),
    Turn(Waiting),
}

impl From<Not> for Answer {
    fn from(not: Not) -> Self {
        match not {
            Not::Row => Self::NoRow,
            Not::Room(missing) => Self::NoRoom(missing),
            Not::Turn(waiting) => Self::Waiting(waiting),
        }
    }
}

/// What earlier requests of a call leave to those behind them.
#[derive(Default)]
pub(crate) struct Queue {
    /// The blocks that they compute next.
    nexts: HashSet<(usize, kv_pool::BlockHash)>,
    /// Tenants that hold as much as they may, with what is missing to the first request of each.
    barred: HashMap<TenantId, Missing>,
    /// Blocks of each tenant.
    claims: HashMap<TenantId, usize>,
}

impl Queue {
    /// Whether an earlier request computes the block that a request computes next, which waits for it then.
    pub(crate) fn computes(
        &self,
        manager: &Manager,
        request: &Request,
        cached: u64,
    ) -> Option<Waiting> {
        let next = manager.next_block(request, cached).filter(|_| request.waits)?;
        let tokens = next.0 as u64 * u64::from(manager.namer.block_tokens);
        let is_computed = self.nexts.contains(&next);
        guard!("manager.waits-for-those-of-its-call", is_computed, else false)
            .then_some(Waiting::Prefix { tokens })
    }

    /// A request is to compute what follows `cached` tokens.
    pub(crate) fn enter(&mut self, manager: &Manager, request: &Request, cached: u64) {
        self.nexts.extend(manager.next_block(request, cached));
    }

    /// What is missing to an earlier request of the same tenant, which comes first.
    pub(crate) fn bar(&self, tenant: TenantId) -> Option<Missing> {
        self.barred.get(&tenant).cloned()
    }

    /// Whether those of other tenants are looked at although this is missing.
    pub(crate) fn passes(&mut self, tenant: TenantId, missing: &Missing) -> bool {
        let is_bound = matches!(missing.reason, ClaimError::Tenant(TenantError::HeldMax { .. }));
        let own = guard!("manager.a-tenants-bound-bars-it-alone", is_bound, else false);
        if own {
            self.barred.insert(tenant, missing.clone());
        }
        own
    }
}

impl Manager {
    /// Leases rows for the requests that can be admitted now, up to the first without one and as far as blocks to
    /// write, and blocks to be had, may suffice.
    pub(crate) fn ready(
        &mut self,
        requests: &mut [Request],
        queue: &mut Queue,
        to_write_max: usize,
        room: usize,
    ) -> Ready {
        let (answers, places) = (Vec::with_capacity(requests.len()), Vec::new());
        let mut ready = Ready { answers, places, rows: Vec::new() };
        // What was claimed is held.
        queue.claims.clear();
        let (mut to_write, alone) = (0_usize, requests.len() == 1);
        for at in 0..requests.len() {
            // No more is found of a prefix than what is counted here, so the pool comes no further.
            let suffices = to_write >= to_write_max || to_write > room;
            if guard!("manager.names-no-more-than-may-enter", suffices, else false) {
                self.look_ahead(&mut requests[at..]);
                break;
            }
            if let Some(answer) = self.turned_away(&mut requests[at], queue) {
                ready.answers.push(answer);
                continue;
            }
            // There is nobody whom one request could stop, or find its prefix with.
            let turn = if alone { Ok(0) } else { self.take_turn(&requests[at], queue) };
            let blocks = match turn {
                Ok(blocks) => blocks,
                Err(not) => {
                    ready.answers.push(not.into());
                    continue;
                }
            };
            ready.answers.push(Answer::NoRow);
            let Some(row) = self.home.lease() else { break };
            to_write = to_write.saturating_add(blocks);
            ready.places.push(at);
            ready.rows.push(row);
        }
        ready
    }

    /// The answer to a request whose turn it is not, whatever room there is. It names nothing and loads nothing if those
    /// before it bar it.
    pub(crate) fn turned_away(&mut self, request: &mut Request, queue: &Queue) -> Option<Answer> {
        if let Some(missing) = queue.bar(request.tenant) {
            return Some(Answer::NoRoom(missing));
        }
        match self.prepare(request) {
            Err(error) => Some(Answer::Refused(error)),
            Ok(waiting) => waiting.map(Answer::Waiting),
        }
    }

    /// The least number of blocks that a request writes behind those before it, where there is one group, which keeps all.
    fn take_turn(&self, request: &Request, queue: &mut Queue) -> Result<usize, Not> {
        let (group, tenant) = (&self.groups[0], request.tenant);
        let names = self.names_of(request);
        let near = group.prefix_len(names);
        let loads = if request.enters() { self.open_load(request, near).blocks() } else { 0 };
        let cached = group.tokens_of(near + loads);
        if let Some(waiting) = queue.computes(self, request, cached) {
            return Err(Not::Turn(waiting));
        }
        let blocks = group.blocks_for(request.tokens()) - near;
        let claims = queue.claims.entry(tenant).or_default();
        // What lies in host memory takes a device block each.
        let far = group.pool.pin_cost(&names[..near]).far;
        let wanted = claims.saturating_add(blocks + far);
        if let Err(reason) = group.pool.check_quota(tenant, &[&names[..near]], wanted, 0) {
            let missing = Missing { group: group.id, reason: reason.into() };
            if queue.passes(tenant, &missing) {
                return Err(Not::Room(missing));
            }
        }
        *queue.claims.entry(tenant).or_default() = wanted;
        queue.enter(self, request, cached);
        Ok(blocks)
    }

    /// Begins the loads of requests whose turn has not come: of as many as loads may be open. One that has no names yet
    /// is the last, since to name a long prompt takes a part of a step.
    pub(crate) fn look_ahead(&mut self, requests: &mut [Request]) {
        for request in requests.iter_mut().take(self.loads_ahead()) {
            let is_named = matches!(request.tokens, Wanted::Known(_));
            // Its answer comes when it is asked for.
            drop(self.prepare(request));
            if !is_named {
                break;
            }
        }
    }

    /// Names the blocks of a request, and looks at whether it can be admitted now.
    pub(crate) fn prepare(&mut self, request: &mut Request) -> Prepared {
        let tokens = request.tokens();
        if matches!(request.tokens, Wanted::Taken) {
            return Err(AdmitError::Admitted);
        }
        if tokens == 0 {
            return Err(AdmitError::NoTokens);
        }
        for group in &self.groups {
            let (blocks, max) = (group.blocks_for(tokens) as u64, group.table.width() as u64);
            if blocks > max {
                return Err(AdmitError::TooLong { blocks, max });
            }
            let (blocks, capacity) = (group.peak(tokens, 1) as u64, group.capacity);
            if blocks > capacity {
                return Err(AdmitError::NeverFits { blocks, capacity });
            }
            guard!(
                "manager.refuses-what-never-fits-its-tenant",
                group.check_ever(request.tenant, blocks)?
            );
        }
        if let Some((granules, capacity)) = self.never_fits(request.tenant, tokens) {
            return Err(AdmitError::NeverFitsShared { granules, capacity });
        }
        if matches!(&request.tokens, Wanted::Known(known) if !known.is_of(&self.namer)) {
            // What it waits for is another manager's.
            request.load = None;
        }
        if let Some(known) = self.known(request)? {
            request.tokens = Wanted::Known(known);
        }
        let names = self.names_of(request);
        let waiting = request.waits.then(|| self.frontiers.find(names)).flatten();
        let block_tokens = u64::from(self.namer.block_tokens);
        let waiting = waiting.map(|block| Waiting::Prefix { tokens: block as u64 * block_tokens });
        Ok(waiting.or_else(|| self.await_load(request)))
    }
}

impl Group {
    /// Checks that a tenant may ever hold so many blocks.
    fn check_ever(&self, tenant: TenantId, blocks: u64) -> Result<(), AdmitError> {
        let most = self.pool.tenant_room(self.tenant(tenant), Tier::Primary)?.ever;
        if blocks > most {
            Err(AdmitError::NeverFitsTenant { group: self.id, blocks, most })
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_pool::PoolConfig;

    use super::*;
    use crate::{GroupOptions, ManagerOptions};
    use kv_tier::GroupKind;

    /// Managers with blocks of four tokens: with one group that keeps all, and with a window beside it.
    fn managers(device: u64) -> [Manager; 2] {
        let pool = PoolConfig::primary_only(device);
        let one = ManagerOptions { block_tokens: 4, pool: pool.clone(), ..Default::default() };
        let window = GroupOptions {
            kind: GroupKind::Window { tokens: 8, sinks: 0 },
            block_tokens: 4,
            pool,
            blocks_per_sequence_max: 64,
            watermark_blocks: 0,
            draft_model: false,
        };
        let two = ManagerOptions { further_groups: vec![window], ..one.clone() };
        [one, two].map(|options| Manager::new(options).unwrap())
    }

    fn named(requests: &[Request]) -> usize {
        let named = |request: &&Request| !matches!(request.tokens, Wanted::Ids(_));
        requests.iter().filter(named).count()
    }

    #[test]
    fn no_more_requests_are_named_than_the_budget_the_room_and_the_rows_may_suffice_for() {
        let request = |at: u32| Request::new((at * 100..at * 100 + 40).collect());
        for (device, budget, sequences_max, most) in
            [(512, 40, 64, 1), (512, 100, 64, 3), (35, u64::MAX, 64, 4), (512, u64::MAX, 5, 6)]
        {
            for manager in managers(device) {
                let options = ManagerOptions { sequences_max, ..manager.options().clone() };
                let mut manager = Manager::new(options).unwrap();
                let mut requests: Vec<_> = (0..64).map(request).collect();
                let answers = manager.admit(&mut requests, budget);
                assert!(matches!(answers[0], Answer::Admitted(_)));
                assert!(named(&requests) <= most, "{} of {most}", named(&requests));
                drop(answers);
            }
        }
    }
}
