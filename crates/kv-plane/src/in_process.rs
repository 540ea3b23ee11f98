//! The devices of this process carry out what the manager decides.

use std::sync::Arc;

use kv_manager::{BudgetError, Budgeted, Checked, Completion, GroupId, Manager, Outcome, WorkerId};
use kv_pool::Tier;
use kv_stage::{BatchStep, error::BatchError};
use kv_tier::HostShare;

use crate::growth::Grown;
use crate::pinned::Pinned;
use crate::{CloseErrors, DemandError, KvCacheOptions, KvWorker, StepError, Workers};

/// The worker of a [`KvCache`](crate::KvCache) whose devices are this process's: a [`KvWorker`], and how far its memory has come.
#[derive(Debug)]
pub struct InProcess {
    pub(crate) worker: KvWorker,
    pub(crate) grown: Grown,
    pub(crate) pinned: Pinned,
    /// The host tier, once it is shared.
    pub(crate) share: Option<Arc<HostShare>>,
}

impl InProcess {
    pub(crate) fn new(worker: KvWorker) -> Self {
        let blocks = worker.options().first().device_blocks.into();
        let shares = worker.options().shared.is_some();
        let grown = if shares { Grown::granted(blocks) } else { Grown::new(blocks) };
        let pinned = Pinned::new(worker.options());
        Self { worker, grown, pinned, share: None }
    }

    /// Tells a new manager of host memory that is pinned already, and what the worker's tiers have had since before.
    pub(crate) fn begin(&mut self, manager: &mut Manager) {
        self.take_pinned(manager);
        for survivors in &self.worker.survivors(WorkerId(0)) {
            if let Err(error) = manager.take_survivors(survivors) {
                tracing::error!(%error, "survivors of a tier that the manager does not know");
            }
        }
    }

    fn note_completed(&mut self, manager: &mut Manager, (step, outcome): (u64, Outcome)) {
        // What a step has read of loads is known before the step is over.
        self.settle(manager);
        let completion = Completion { worker: WorkerId(0), step, outcome };
        if let Err(error) = manager.complete(completion) {
            tracing::error!(%error, "a completed step that was not staged");
        }
    }

    /// Tells the manager what has become of stores and loads.
    fn take_transfers(&mut self, manager: &mut Manager) {
        self.worker.work_tiers();
        self.settle(manager);
        for gained in &self.worker.gained(WorkerId(0)) {
            if let Err(error) = manager.take_gained(gained) {
                tracing::error!(%error, "a tier that the manager does not know");
            }
        }
    }
}

impl Workers for InProcess {
    type Work<'a> = &'a mut dyn FnMut(usize, &mut BatchStep<'_>) -> Result<(), BatchError>;
    type Closed = ();

    fn options(&self) -> &KvCacheOptions {
        self.worker.options()
    }

    fn ready_blocks(&mut self) -> u64 {
        self.grown.take_mapped(&self.worker);
        self.grown.ready_blocks
    }

    fn can_grow(&self) -> bool {
        self.grown.can_grow()
    }

    fn grow(&mut self, blocks: u64) -> Result<u64, DemandError> {
        self.grown.grow_to(&self.worker, blocks)
    }

    fn set_budget(
        &mut self,
        manager: &mut Manager,
        (group, tier): (GroupId, Tier),
        blocks: u64,
    ) -> Result<(u64, Budgeted), BudgetError> {
        match tier {
            Tier::Secondary => self.set_host_budget(manager, group, blocks),
            _ if group.0 == 0 => self.set_device_budget(manager, blocks),
            // All of its memory is there, and stays.
            _ => Ok((blocks, manager.set_budget(group, tier, blocks)?)),
        }
    }

    fn wait_for_host(&mut self, manager: &mut Manager) {
        if let Err(error) = self.worker.wait_for_host() {
            tracing::warn!(%error, "less host memory than a tenant's quota is pinned");
        }
        self.take_pinned(manager);
    }

    #[track_caller]
    fn carry_out(
        &mut self,
        plan: Checked<'_>,
        work: Option<Self::Work<'_>>,
    ) -> Result<(), StepError> {
        match work {
            Some(add) => self.worker.carry_out_own(plan, add),
            None => self.worker.carry_out_own(plan, |_, _| Ok(())),
        }
    }

    #[track_caller]
    fn finish(&mut self, outcome: Outcome) -> Result<(), StepError> {
        self.worker.finish(outcome)
    }

    fn in_flight(&self) -> usize {
        self.worker.in_flight()
    }

    #[track_caller]
    fn complete(&mut self, manager: &mut Manager, most: usize) -> Result<(), StepError> {
        while self.worker.in_flight() > most || self.worker.has_failed() {
            let Some(completed) = self.worker.wait()? else { break };
            self.note_completed(manager, completed);
        }
        while let Some(completed) = self.worker.poll()? {
            self.note_completed(manager, completed);
        }
        Ok(())
    }

    fn settle(&mut self, manager: &mut Manager) {
        let (mut settled, mut dropped) = (Vec::new(), Vec::new());
        self.worker.take_ended(WorkerId(0), &mut settled, &mut dropped);
        for dropped in &dropped {
            if let Err(error) = manager.dropped(dropped) {
                tracing::error!(%error, "names of a tier that the manager does not know");
            }
        }
        for settled in &settled {
            if let Err(error) = manager.settle(settled) {
                tracing::error!(%error, "a ticket that the manager does not know");
            }
        }
    }

    fn tend(&mut self, manager: &mut Manager) -> Result<(), StepError> {
        self.take_transfers(manager);
        self.take_pinned(manager);
        self.give_back(manager);
        self.give_back_host(manager);
        Ok(())
    }

    #[track_caller]
    fn close(self) -> Result<(), CloseErrors> {
        self.worker.close()
    }
}
