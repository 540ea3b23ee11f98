//! Whose each granule of shared memory is, as a worker knows it: each is one group's at a time.

use kv_pool::Tier;
use kv_pool::guard;

use crate::GroupId;
use crate::options::repeated;
use crate::plan::{GranuleMove, Snapshot, StepPlan};
use crate::{OptionsError, PlanError, SharedMemory};

/// The owners of all granules; none where groups have memory of their own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners {
    /// Blocks of a granule in each group.
    blocks: Vec<u32>,
    owners: Vec<Option<GroupId>>,
}

impl Owners {
    pub(crate) fn new(memory: &SharedMemory) -> Result<Self, OptionsError> {
        if memory.granules == 0 || memory.granule_blocks.contains(&0) {
            return Err(OptionsError::Zero { field: "granule_blocks" });
        }
        let owners = repeated(None, memory.granules as usize)?;
        Ok(Self { blocks: memory.granule_blocks.clone(), owners })
    }

    pub(crate) fn all(&self) -> &[Option<GroupId>] {
        &self.owners
    }

    /// Whether a group may use a block.
    pub(crate) fn has(&self, group: GroupId, block: u64) -> bool {
        let Some(&blocks) = self.blocks.get(usize::from(group.0)) else {
            return self.blocks.is_empty();
        };
        let granule = usize::try_from(block / u64::from(blocks)).ok();
        granule.and_then(|granule| self.owners.get(granule)) == Some(&Some(group))
    }

    /// Makes the moves of a plan, all or none.
    pub(crate) fn apply(&mut self, plan: &StepPlan) -> Result<(), PlanError> {
        for (made, one) in plan.moves.iter().enumerate() {
            if let Err(error) = self.make(plan.step, *one) {
                self.undo(&plan.moves[..made]);
                return Err(error);
            }
        }
        Ok(())
    }

    fn make(&mut self, step: u64, one: GranuleMove) -> Result<(), PlanError> {
        let GranuleMove { granule, from, to } = one;
        let (granules, groups) = (self.owners.len(), self.blocks.len());
        let Some(owner) = self.owners.get_mut(granule as usize) else {
            return Err(PlanError::NoGranule { step, granule, granules });
        };
        if let Some(group) = to.filter(|to| usize::from(to.0) >= groups) {
            return Err(PlanError::Group { step, group, groups });
        }
        if guard!("manager.granules-have-one-owner", *owner != from, else false) {
            return Err(PlanError::GranuleOwner { step, granule, from, owner: *owner });
        }
        *owner = to;
        Ok(())
    }

    /// Takes the moves of a plan back that were made.
    pub(crate) fn take_back(&mut self, plan: &StepPlan) {
        self.undo(&plan.moves);
    }

    fn undo(&mut self, moves: &[GranuleMove]) {
        for &GranuleMove { granule, from, .. } in moves.iter().rev() {
            self.owners[granule as usize] = from;
        }
    }

    /// Checks that what a plan copies and scrubs on the device lies in granules of its groups.
    pub(crate) fn check_blocks(&self, plan: &StepPlan) -> Result<(), PlanError> {
        let copies =
            plan.copies.iter().flat_map(|copy| [copy.from, copy.to].map(|at| (copy.group, at)));
        let copied =
            copies.filter(|(_, at)| at.tier == Tier::Primary).map(|(group, at)| (group, at.id));
        let scrubbed = plan.scrubs.iter().map(|scrub| (scrub.group, scrub.block));
        let mut blocks = copied.chain(scrubbed).map(|(group, id)| (group, id.index() as u64));
        match blocks.find(|&(group, id)| !self.has(group, id)) {
            Some((group, id)) => Err(PlanError::NotOwned { step: plan.step, group, id }),
            None => Ok(()),
        }
    }

    /// Takes the owners of a snapshot, for `groups` groups.
    pub(crate) fn restore(&mut self, snapshot: &Snapshot, groups: usize) -> Result<(), PlanError> {
        let (granules, expected) = (snapshot.granules.len(), self.owners.len());
        if granules != expected {
            return Err(PlanError::SnapshotGranules { granules, expected });
        }
        let outside = |group: &&GroupId| usize::from(group.0) >= groups;
        if let Some(&group) = snapshot.granules.iter().flatten().find(outside) {
            return Err(PlanError::Group { step: snapshot.step, group, groups });
        }
        self.owners.copy_from_slice(&snapshot.granules);
        Ok(())
    }
}
