//! A worker's copy of the block tables, and what it checks of each plan before it carries it out.

use std::ops::Deref;

use kv_pool::{TableEntry, Tier, guard};
use kv_tier::GroupKind;
use smallvec::SmallVec;

use crate::options::{check_groups, check_kind, check_table, needed_blocks, repeated, row_width};
use crate::plan::{BatchRow, GranuleMove, RowEdit, Snapshot, Start, StepPlan};
use crate::{GroupId, Manager, OptionsError, PlanError, Row, SharedMemory};

/// A plan that can be carried out without another look, and the block tables as it leaves them: those of the manager that has
/// [staged](Manager::staged) it, or of the [`Replica`] that has [checked](Replica::check) it.
#[derive(Clone, Copy, Debug)]
pub struct Checked<'a> {
    plan: &'a StepPlan,
    tables: Tables<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Tables<'a> {
    Own(&'a Manager),
    Copied(&'a Replica),
}

impl Deref for Checked<'_> {
    type Target = StepPlan;

    fn deref(&self) -> &StepPlan {
        self.plan
    }
}

impl<'a> Checked<'a> {
    /// The entries of a row in a group; none if there is no such row.
    #[must_use]
    pub fn row(self, group: GroupId, row: Row) -> &'a [TableEntry] {
        match self.tables {
            Tables::Own(manager) => manager.row_of(group, row),
            Tables::Copied(replica) => replica.row(group, row).unwrap_or_default(),
        }
    }

    /// Whose a granule of shared memory is.
    #[must_use]
    pub fn owner(self, granule: u32) -> Option<GroupId> {
        let granules = match self.tables {
            Tables::Own(manager) => manager.granules(),
            Tables::Copied(replica) => replica.granules(),
        };
        granules.get(granule as usize).copied().flatten()
    }
}

impl Manager {
    /// The plan of the last step that was staged, for workers of this process, which need no copy of the block tables: they carry it
    /// out before anything else is decided.
    #[must_use]
    pub fn staged(&self) -> Checked<'_> {
        Checked { plan: self.last_plan(), tables: Tables::Own(self) }
    }

    fn row_of(&self, group: GroupId, row: Row) -> &[TableEntry] {
        let table = self.groups.get(usize::from(group.0)).map(|group| &group.table);
        let has_row = row.index() < self.options.sequences_max as usize;
        table.filter(|_| has_row).map(|table| table.row(row)).unwrap_or_default()
    }
}

/// The block tables of a manager in another process, as a worker knows them. Without any ([`default`](Self::default)), all plans with
/// a batch are refused.
///
/// # Examples
///
/// ```
/// use kv_manager::{Replica, StepPlan};
/// use kv_tier::GroupKind;
///
/// let mut replica = Replica::new(8, [(GroupKind::Full, 32)])?;
/// replica.check(&StepPlan { step: 1, ..StepPlan::default() }, &[])?;
/// let later = StepPlan { step: 3, after: 2, ..StepPlan::default() };
/// let missed = replica.check(&later, &[]);
/// assert_eq!(missed.unwrap_err().to_string(), "plan 3 follows plan 2, but plan 1 was the last one here");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Replica {
    step: u64,
    rows: usize,
    groups: Vec<Copied>,
    owners: Owners,
    /// Those of a draft model; `None` if that was not said.
    drafts: Option<SmallVec<[GroupId; 2]>>,
    /// What the changes of the last plan have replaced.
    before: Vec<TableEntry>,
}

/// The block table of a group.
#[derive(Clone, Debug)]
struct Copied {
    kind: GroupKind,
    width: usize,
    ids: Vec<TableEntry>,
}

impl Replica {
    /// Tables of `rows` rows, all without blocks, before the first plan: the manager's
    /// [`sequences_max`](crate::ManagerOptions::sequences_max). `groups` are the kind of each group, and its
    /// [`blocks_per_sequence_max`](crate::GroupOptions::blocks_per_sequence_max).
    ///
    /// # Errors
    /// [`OptionsError`], as for the manager.
    pub fn new(
        rows: u32,
        groups: impl IntoIterator<Item = (GroupKind, u32)>,
    ) -> Result<Self, OptionsError> {
        let table = |(group, (kind, width)): (GroupId, (GroupKind, u32))| {
            check_kind(group, kind)?;
            let width = row_width(kind, width);
            check_table(group, rows, width)?;
            let width = width as usize;
            Ok(Copied { kind, width, ids: repeated(TableEntry::NONE, rows as usize * width)? })
        };
        let groups = (0..).map(GroupId).zip(groups).map(table);
        let groups = groups.collect::<Result<Vec<_>, OptionsError>>()?;
        check_groups(groups.len())?;
        let (rows, owners) = (rows as usize, Owners::default());
        Ok(Self { step: 0, rows, groups, owners, drafts: None, before: Vec::new() })
    }

    /// The same where the groups share [memory](SharedMemory), of which nobody has a granule yet.
    ///
    /// # Errors
    /// [`OptionsError`], as for the manager.
    pub fn sharing(self, memory: &SharedMemory) -> Result<Self, OptionsError> {
        let (given, groups) = (memory.granule_blocks.len(), self.groups.len());
        if given != groups {
            return Err(OptionsError::SharedGroups { given, groups });
        }
        Ok(Self { owners: Owners::new(memory)?, ..self })
    }

    /// The same where it is known which groups a draft model writes, maybe none: its
    /// [batch](StepPlan::draft_batch) must have its blocks in each of them. Else one group that keeps all must have them.
    #[must_use]
    pub fn drafting(self, groups: impl IntoIterator<Item = GroupId>) -> Self {
        Self { drafts: Some(groups.into_iter().collect()), ..self }
    }

    /// Whose each granule of shared memory is.
    #[must_use]
    pub fn granules(&self) -> &[Option<GroupId>] {
        self.owners.all()
    }

    /// The step of the last plan that was checked.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The entries of a row in a group; `None` if there is no such row.
    #[must_use]
    pub fn row(&self, group: GroupId, row: Row) -> Option<&[TableEntry]> {
        let table = self.groups.get(usize::from(group.0))?;
        table.ids.chunks_exact(table.width.max(1)).nth(row.index())
    }

    /// Takes the place that a snapshot describes, of devices with so many blocks of each group.
    ///
    /// # Errors
    /// [`PlanError`]; nothing has changed.
    pub fn restore(&mut self, snapshot: &Snapshot, device: &[u64]) -> Result<(), PlanError> {
        let widths = self.widths();
        snapshot.check(self.rows, &widths, device)?;
        self.owners.restore(snapshot, widths.len())?;
        for (own, table) in self.groups.iter_mut().zip(&snapshot.tables) {
            own.ids.copy_from_slice(&table.ids);
        }
        self.step = snapshot.step;
        Ok(())
    }

    fn widths(&self) -> SmallVec<[usize; 8]> {
        self.groups.iter().map(|table| table.width).collect()
    }

    /// Checks a plan and changes the tables as it says. What came from another process is not believed: a plan that names what is
    /// not there changes nothing. The rows of its batches must be such as can be computed together: each once in a batch, and those
    /// of the draft model in the batch. Every row must then have, in each group, the blocks that it writes and
    /// reads, among those that have memory; the draft model's, in [its groups](Self::drafting). `memory` says of each group how many
    /// tokens a block has, and how many of the device's first blocks have memory.
    ///
    /// # Errors
    /// [`PlanError`]; nothing has changed.
    pub fn check<'a>(
        &'a mut self,
        plan: &'a StepPlan,
        memory: &[(u32, u64)],
    ) -> Result<Checked<'a>, PlanError> {
        plan.check_follows(self.step)?;
        plan.check_table(self.rows, &self.widths())?;
        guard!("manager.rows-go-together", plan.check_rows()?);
        self.owners.apply(plan)?;
        self.write(plan);
        let checked = self.owners.check_blocks(plan).and_then(|()| self.check_batch(plan, memory));
        if let Err(error) = checked {
            self.take_back(plan);
            guard!("manager.refused-plans-move-nothing", self.owners.take_back(plan));
            return Err(error);
        }
        self.step = plan.step;
        Ok(Checked { plan, tables: Tables::Copied(self) })
    }

    /// Makes the changes of a plan, and notes what was there.
    fn write(&mut self, plan: &StepPlan) {
        self.before.clear();
        let mut ids = &plan.edit_ids[..];
        for edit in &plan.edits {
            let (here, rest) = ids.split_at(edit.count as usize);
            let entries = self.groups[usize::from(edit.group.0)].entries(edit);
            self.before.extend_from_slice(entries);
            entries.copy_from_slice(here);
            ids = rest;
        }
    }

    /// Puts back what the changes of a plan have replaced, the last one first: edits may overlap.
    fn take_back(&mut self, plan: &StepPlan) {
        for edit in plan.edits.iter().rev() {
            let start = self.before.len() - edit.count as usize;
            let entries = self.groups[usize::from(edit.group.0)].entries(edit);
            entries.copy_from_slice(&self.before[start..]);
            self.before.truncate(start);
        }
    }

    fn check_batch(&self, plan: &StepPlan, memory: &[(u32, u64)]) -> Result<(), PlanError> {
        let step = plan.step;
        let groups = || (0..self.groups.len() as u16).map(GroupId);
        let lacks = |batch: &BatchRow| {
            let (Start::At(upper) | Start::Open { upper, .. }) = batch.start;
            PlanError::NoBlocks {
                step,
                row: batch.row,
                end: upper.saturating_add(batch.tokens.into()),
            }
        };
        for batch in &plan.batch {
            if !groups().all(|group| self.has_blocks(group, batch, memory)) {
                return Err(lacks(batch));
            }
        }
        for batch in &plan.draft_batch {
            let has = |group: &GroupId| self.has_blocks(*group, batch, memory);
            let keeps_all =
                |group: &GroupId| self.groups[usize::from(group.0)].kind == GroupKind::Full;
            let there = match &self.drafts {
                Some(drafts) => !drafts.is_empty() && drafts.iter().all(has),
                None => groups().filter(keeps_all).any(|group| has(&group)),
            };
            if guard!("manager.drafts-have-blocks", !there, else false) {
                return Err(lacks(batch));
            }
        }
        Ok(())
    }

    /// Whether a row has the blocks in a group that it writes and reads, among those that have memory.
    fn has_blocks(&self, group: GroupId, batch: &BatchRow, memory: &[(u32, u64)]) -> bool {
        let Some(table) = self.groups.get(usize::from(group.0)) else { return false };
        let memory = memory.get(usize::from(group.0)).copied();
        let (block_tokens, blocks) = memory.unwrap_or_default();
        let (lower, upper) = match batch.start {
            Start::At(start) => (start, start),
            Start::Open { resolved, upper } => (resolved, upper),
        };
        let end = upper.saturating_add(batch.tokens.into());
        let row = self.row(group, batch.row).unwrap_or_default();
        let is_of =
            |id| guard!("manager.batches-stay-in-granules", self.owners.has(group, id), else true);
        let is_ready = |entry: &TableEntry| {
            entry.block().map(|id| id.index() as u64).is_some_and(|id| id < blocks && is_of(id))
        };
        let there = |(first, end): (u64, u64)| {
            let (first, end) = (usize::try_from(first).ok()?, usize::try_from(end).ok()?);
            Some(row.get(first..end)?.iter().all(is_ready))
        };
        let needs = needed_blocks(table.kind, batch, (lower, end), block_tokens.max(1).into());
        needs.into_iter().all(|range| there(range) == Some(true))
    }
}

impl Copied {
    /// The entries that an edit changes.
    fn entries(&mut self, edit: &RowEdit) -> &mut [TableEntry] {
        let first = edit.row.index() * self.width + edit.first as usize;
        &mut self.ids[first..first + edit.count as usize]
    }
}

/// The owners of all granules; none where groups have memory of their own.
#[derive(Clone, Debug, Default)]
struct Owners {
    /// Blocks of a granule in each group.
    blocks: Vec<u32>,
    owners: Vec<Option<GroupId>>,
}

impl Owners {
    fn new(memory: &SharedMemory) -> Result<Self, OptionsError> {
        if memory.granules == 0 || memory.granule_blocks.contains(&0) {
            return Err(OptionsError::Zero { field: "granule_blocks" });
        }
        let owners = repeated(None, memory.granules as usize)?;
        Ok(Self { blocks: memory.granule_blocks.clone(), owners })
    }

    fn all(&self) -> &[Option<GroupId>] {
        &self.owners
    }

    /// Whether a group may use a block.
    fn has(&self, group: GroupId, block: u64) -> bool {
        let Some(&blocks) = self.blocks.get(usize::from(group.0)) else {
            return self.blocks.is_empty();
        };
        let granule = usize::try_from(block / u64::from(blocks)).ok();
        granule.and_then(|granule| self.owners.get(granule)) == Some(&Some(group))
    }

    /// Makes the moves of a plan, all or none.
    fn apply(&mut self, plan: &StepPlan) -> Result<(), PlanError> {
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
    fn take_back(&mut self, plan: &StepPlan) {
        self.undo(&plan.moves);
    }

    fn undo(&mut self, moves: &[GranuleMove]) {
        for &GranuleMove { granule, from, .. } in moves.iter().rev() {
            self.owners[granule as usize] = from;
        }
    }

    /// Checks that what a plan copies and scrubs on the device lies in granules of its groups.
    fn check_blocks(&self, plan: &StepPlan) -> Result<(), PlanError> {
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
    fn restore(&mut self, snapshot: &Snapshot, groups: usize) -> Result<(), PlanError> {
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
