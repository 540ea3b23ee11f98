//! Memory under device blocks that is mapped when a call needs some: its owner is asked, by one callback.
//!
//! It is asked once it is known that the tenant's bound allows the call, and before anything is pinned or claimed.

use std::collections::VecDeque;
use std::fmt;

use kv_pool::tenants::TenantError;
use kv_pool::{BlockHash, ClaimError, Tier, guard};
use kv_tier::GroupFormat;

use crate::hit::Extent;
use crate::reserve::Stop;
use crate::shared::Wanted;
use crate::{
    Admission, Adoption, Answer, GroupId, Manager, Missing, Request, ReserveError, Reserved, Room,
    Sequence, SuspendError,
};

/// Asks for so many device blocks of a group without content; how many blocks of the group have memory then.
type Grow<'a, E> = &'a mut dyn FnMut(GroupId, usize) -> Result<u64, E>;

/// The calls of a [`Manager`] that claim device blocks, for an owner of memory that maps it when it is needed. Each answers
/// what the manager's call of that name does; see [`Manager::growing`].
///
/// # Errors
/// Of all calls: what the owner of the memory has returned. Nothing has changed then, but for memory that was mapped.
pub struct Growing<'a, E> {
    manager: &'a mut Manager,
    grow: Option<Grow<'a, E>>,
}

/// The memory of a call.
#[derive(Default)]
pub(crate) struct Memory<'a> {
    /// None if all blocks have some that may ever have.
    grow: Option<&'a mut dyn FnMut(GroupId, usize) -> Option<u64>>,
    /// Its owner could not say whether there is more. The call ends, and changes nothing.
    pub(crate) has_failed: bool,
}

impl Memory<'_> {
    pub(crate) fn is_there(&self) -> bool {
        self.grow.is_none()
    }
}

impl Manager {
    /// The calls that claim device blocks, with memory that is mapped when they need it. Before cached content of a group is
    /// evicted or room is refused, `grow` is asked for so many device blocks of it without content, and returns how many
    /// blocks of the group have memory then, as for [`set_budget`](Self::set_budget). It is not asked for a tenant whose
    /// own bound refuses the call, nor for what has no room with all memory that the options say, nor where groups
    /// [share](crate::ManagerOptions::shared) memory.
    ///
    /// Without `grow`, the calls are the manager's own.
    pub fn growing<'a, E>(&'a mut self, grow: Option<Grow<'a, E>>) -> Growing<'a, E> {
        Growing { manager: self, grow }
    }

    /// Asks for memory where a claim would have content evicted, or has no room.
    pub(crate) fn grow_for(
        &mut self,
        memory: &mut Memory<'_>,
        extents: &[Extent],
        wanted: &[Wanted],
    ) -> Result<(), Missing> {
        if memory.is_there() {
            return Ok(());
        }
        if memory.has_failed {
            return Err(self.groups[0].exhausted(0, 0));
        }
        for (index, (extent, wanted)) in extents.iter().zip(wanted).enumerate() {
            let group = &self.groups[index];
            let (pool, with_leave) = (&group.pool, wanted.count.saturating_add(wanted.leave));
            let room = pool.claimable().saturating_sub(extent.unused);
            if wanted.count == 0 || wanted.count <= pool.empty() && with_leave <= room {
                continue;
            }
            // What has no room with all memory there is, is refused with what is mapped.
            let unmapped = group.capacity.saturating_sub(pool.stats().primary.blocks);
            let fits = with_leave as u64 <= unmapped.saturating_add(room as u64);
            if guard!("manager.maps-nothing-for-what-has-no-room", fits, else true) {
                self.grow_to(memory, index, with_leave)?;
            }
        }
        Ok(())
    }

    /// Asks for memory beside the blocks that are kept for other tenants. Whether it was those that were missing.
    pub(crate) fn grow_beside_kept(
        &mut self,
        memory: &mut Memory<'_>,
        missing: &Missing,
    ) -> Result<bool, Missing> {
        let ClaimError::Tenant(TenantError::KeptForOthers { requested, unheld, kept, .. }) =
            missing.reason
        else {
            return Ok(false);
        };
        if memory.is_there() {
            return Ok(false);
        }
        let index = usize::from(missing.group.0);
        let more = requested.saturating_add(kept).saturating_sub(unheld);
        let more = usize::try_from(more).unwrap_or(usize::MAX);
        let empty = self.groups[index].pool.empty();
        self.grow_to(memory, index, empty.saturating_add(more))?;
        Ok(true)
    }

    /// Asks for so many blocks of a group without content.
    fn grow_to(
        &mut self,
        memory: &mut Memory<'_>,
        index: usize,
        blocks: usize,
    ) -> Result<(), Missing> {
        let group = &self.groups[index];
        let (id, most) = (group.id, group.capacity);
        let Some(ready) = memory.grow.as_mut().and_then(|grow| grow(id, blocks)) else {
            memory.has_failed = true;
            return Err(group.exhausted(blocks, group.pool.empty()));
        };
        let noted = self.set_budget(id, Tier::Primary, ready.min(most));
        debug_assert!(noted.is_ok(), "{noted:?}");
        Ok(())
    }
}

impl<E> Growing<'_, E> {
    /// See [`Manager::admit`]. What was admitted stays so whatever the callback returned for those behind: it is asked anew in
    /// the next call, and an error is one only if nothing was admitted. All requests are in the queue then.
    pub fn admit<R: AsMut<Request>>(
        self,
        queue: &mut VecDeque<R>,
        budget: u64,
    ) -> Result<Admission<R>, E> {
        self.call(|manager, memory| manager.admit_in(memory, queue, budget))
    }

    /// See [`Manager::reserve`].
    pub fn reserve(
        self,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Result<Room<Reserved>, ReserveError>, E> {
        self.call(|manager, memory| manager.reserve_in(memory, sequence, tokens))
    }

    /// See [`Manager::reserve_draft`].
    pub fn reserve_draft(
        self,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Result<Room<()>, ReserveError>, E> {
        self.call(|manager, memory| {
            Stop::answered(manager.reserve_draft_in(memory, sequence, tokens))
        })
    }

    /// See [`Manager::resume`].
    pub fn resume(self, sequence: &mut Sequence) -> Result<Result<Room<u64>, SuspendError>, E> {
        self.call(|manager, memory| manager.resume_in(memory, sequence))
    }

    /// See [`Manager::adopt`].
    pub fn adopt(
        self,
        request: &mut Request,
        tokens: u64,
        there: &[GroupFormat],
    ) -> Result<(Answer, Option<Adoption>), E> {
        self.call(|manager, memory| manager.adopt_in(memory, request, tokens, there))
    }

    /// See [`Manager::prefetch`]. What is on its way stays so.
    pub fn prefetch(self, names: &[BlockHash]) -> Result<usize, E> {
        self.call(|manager, memory| manager.prefetch_in(memory, names))
    }

    fn call<T>(self, call: impl FnOnce(&mut Manager, &mut Memory<'_>) -> T) -> Result<T, E> {
        let Self { manager, grow } = self;
        let Some(grow) = grow.filter(|_| manager.shared.is_none()) else {
            return Ok(call(manager, &mut Memory::default()));
        };
        let mut failed = None;
        let mut ask =
            |group, blocks| grow(group, blocks).map_err(|error| failed = Some(error)).ok();
        let mut memory = Memory { grow: Some(&mut ask), has_failed: false };
        let answer = call(manager, &mut memory);
        let has_failed = memory.has_failed;
        match failed.filter(|_| has_failed) {
            Some(error) => Err(error),
            None => Ok(answer),
        }
    }
}

impl<E> fmt::Debug for Growing<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Growing").finish_non_exhaustive()
    }
}
