//! Requests before they are admitted: whether each can be now, without a change of anything but what the request
//! itself keeps.

use std::collections::{HashMap, HashSet};

use kv_pool::guard;
use kv_pool::tenants::TenantId;

use crate::names::Namer;
use crate::request::{Answer, Request, Waiting, Wanted};
use crate::{AdmitError, Manager, Missing};

/// What was seen of a request: what it waits for, if it does.
pub(crate) type Prepared = Result<Option<Waiting>, AdmitError>;

/// Why a request is not admitted now.
pub(crate) enum Not {
    Row,
    Room(Missing),
    Turn(Waiting),
}

impl From<Missing> for Not {
    fn from(missing: Missing) -> Self {
        Self::Room(missing)
    }
}

/// What earlier requests of a call leave to those behind them.
#[derive(Default)]
pub(crate) struct Queue {
    /// The blocks that they compute next.
    nexts: HashSet<(usize, kv_pool::BlockHash)>,
    /// Tenants that hold as much as they may, with what is missing to the first request of each.
    barred: HashMap<TenantId, Missing>,
}

impl Queue {
    /// Whether an earlier request computes the block that a request computes next, which waits for it then.
    pub(crate) fn computes(
        &self,
        namer: &Namer,
        request: &Request,
        cached: u64,
    ) -> Option<Waiting> {
        let next = request.next_block(namer, cached).filter(|_| request.waits)?;
        let is_computed = self.nexts.contains(&next);
        guard!("manager.waits-for-those-of-its-call", is_computed, else false)
            .then(|| Waiting::Prefix { tokens: next.0 as u64 * namer.unit() })
    }

    /// A request is to compute what follows `cached` tokens.
    pub(crate) fn enter(&mut self, namer: &Namer, request: &Request, cached: u64) {
        self.nexts.extend(request.next_block(namer, cached));
    }

    /// What is missing to an earlier request of the same tenant, which comes first.
    pub(crate) fn bar(&self, tenant: TenantId) -> Option<Missing> {
        self.barred.get(&tenant).cloned()
    }

    /// Whether those of other tenants are looked at although this is missing.
    pub(crate) fn passes(&mut self, tenant: TenantId, missing: &Missing) -> bool {
        let is_bound = missing.is_bound();
        let own = guard!("manager.a-tenants-bound-bars-it-alone", is_bound, else false);
        if own {
            self.barred.insert(tenant, missing.clone());
        }
        own
    }
}

impl Manager {
    /// The answer to a request that can never be admitted, or whose turn it is not, whatever room there is. It names nothing
    /// and loads nothing if those before it bar it.
    pub(crate) fn turned_away(&mut self, request: &mut Request, queue: &Queue) -> Option<Answer> {
        if let Some(missing) = queue.bar(request.tenant) {
            let never = self.check_ever(request).err();
            return Some(never.map_or(Answer::NoRoom(missing), Answer::Refused));
        }
        match self.prepare(request) {
            Err(error) => Some(Answer::Refused(error)),
            Ok(waiting) => waiting.map(Answer::Waiting),
        }
    }

    /// Checks that a request can be admitted at some time. It need not have names.
    fn check_ever(&self, request: &Request) -> Result<(), AdmitError> {
        let tokens = request.tokens();
        if matches!(request.tokens, Wanted::Taken) {
            return Err(AdmitError::Admitted);
        }
        if tokens == 0 {
            return Err(AdmitError::NoTokens);
        }
        self.groups.iter().try_for_each(|group| group.check_ever(request.tenant, tokens))?;
        if let Some((granules, capacity)) = self.never_fits(request.tenant, tokens) {
            return Err(AdmitError::NeverFitsShared { granules, capacity });
        }
        Ok(())
    }

    /// Names the blocks of a request, and looks at whether it can be admitted now.
    pub(crate) fn prepare(&mut self, request: &mut Request) -> Prepared {
        self.check_ever(request)?;
        if matches!(&request.tokens, Wanted::Known(known) if !known.is_of(&self.namer)) {
            // What it waits for is another manager's.
            request.load = None;
        }
        request.name(&self.namer)?;
        let waiting = request.waits.then(|| self.namer.computing(request.findable(&self.namer)));
        let waiting = waiting.flatten().map(|tokens| Waiting::Prefix { tokens });
        Ok(waiting.or_else(|| self.await_load(request)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use kv_pool::PoolConfig;

    use super::*;
    use crate::{GroupOptions, ManagerOptions};
    use kv_tier::GroupKind;

    /// Managers with blocks of four tokens: with one group that keeps all, and with a window beside it.
    fn managers(device: u64) -> [Manager; 2] {
        let pool = PoolConfig::primary_only(device);
        let one = ManagerOptions::new(4, pool.clone());
        let kind = GroupKind::Window { tokens: 8, sinks: 0 };
        let mut two = one.clone();
        two.groups.push(GroupOptions { kind, ..GroupOptions::new(4, pool) });
        [one, two].map(|options| Manager::new(options).unwrap())
    }

    fn named(requests: &VecDeque<Request>) -> usize {
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
                let mut requests: VecDeque<_> = (0..64).map(request).collect();
                let admission = manager.admit(&mut requests, budget);
                let named = admission.admitted.len() + named(&requests);
                assert!(!admission.admitted.is_empty());
                assert!(named <= most, "{named} of {most}");
            }
        }
    }
}
