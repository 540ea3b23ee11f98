//! The state spaces as one thread sees them, with every access checked.

use cuda_driver::guard;

use super::super::op::{Access, AccessOrder, Scope, Space};
use super::conflicts::{Conflict, Conflicts, StretchId, Stretches, StrongKind, Use};
use super::non_coherent::NonCoherent;
use super::observation::{Ran, Trouble};
use super::shared::SharedBytes;
use super::{LOCAL_WINDOW, MODULE_WINDOW, SHARED_WINDOW};
use crate::FindingKind;
use crate::memory::View;
use crate::races::StrongMark;

#[derive(Clone, Copy, Debug)]
enum SpaceAddress {
    Device(u64),
    Shared(u64),
    Local(u64),
    Module(u64),
    Param(u64),
}

/// The accessing thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accessor {
    /// Its number in the block, which selects its local memory.
    pub(super) thread: usize,
    pub(super) stretch: StretchId,
}

/// All memory of a running block.
#[derive(Debug)]
pub(super) struct Spaces<'a> {
    pub(super) view: View<'a>,
    pub(super) shared: SharedBytes,
    pub(super) local: Vec<u8>,
    pub(super) local_bytes: usize,
    pub(super) parameters: Vec<u8>,
    pub(super) variables: &'a mut [u8],
    pub(super) stretches: Stretches,
    pub(super) device_conflicts: Conflicts,
    pub(super) shared_conflicts: Conflicts,
    /// Only of a kernel that loads so.
    pub(super) non_coherent: Option<NonCoherent>,
    /// Mistakes of the last access that did not stop it.
    pub(super) remarks: Vec<Trouble>,
}

impl Spaces<'_> {
    /// Resets block-wide memory for a new block.
    pub(super) fn renew(&mut self) {
        self.shared.renew();
        self.shared_conflicts.clear();
        self.local.fill(0);
    }

    /// Reads `bytes` bytes, a power of two up to 16, into the start of `into`.
    #[inline]
    pub(super) fn load(
        &mut self,
        access: &Access,
        address: u64,
        bytes: u32,
        by: Accessor,
        into: &mut [u8; 16],
    ) -> Ran<()> {
        check_alignment(address, bytes)?;
        match place(access.space, address) {
            SpaceAddress::Device(address) => {
                let found = self.view.load_as(address, bytes.into(), mark(access));
                let found = found.map_err(|fault| {
                    let kind = FindingKind::IllegalAccess;
                    Trouble::at(kind, fault.address, fault.bytes, fault.reason)
                })?;
                into[..bytes as usize].copy_from_slice(&found);
                let is_written = self.view.initialised(address, bytes.into());
                if guard!("sim.unwritten-told", !is_written, else false) {
                    let detail = "reads bytes that were never written".to_owned();
                    let kind = FindingKind::Uninitialised;
                    self.remarks.push(*Trouble::at(kind, address, bytes.into(), detail));
                }
                self.record(access, (address, bytes), by, false);
            }
            SpaceAddress::Shared(offset) => {
                if !self.shared.load(offset, bytes, into)? {
                    let kind = FindingKind::Uninitialised;
                    let detail = format!(
                        "reads {bytes} bytes at offset {offset:#x} of shared memory that were never \
                         written"
                    );
                    self.remarks.push(*Trouble::new(kind, detail));
                }
                self.record_shared(access, (offset, bytes), by, false);
            }
            SpaceAddress::Local(offset) => {
                let start = by.thread * self.local_bytes;
                let local = &self.local[start..start + self.local_bytes];
                into[..bytes as usize].copy_from_slice(part(local, offset, bytes, "local memory")?);
            }
            SpaceAddress::Param(offset) => {
                let found = part(&self.parameters, offset, bytes, "the parameters")?;
                into[..bytes as usize].copy_from_slice(found);
            }
            SpaceAddress::Module(offset) => {
                let found = part(self.variables, offset, bytes, "the module's variables")?;
                into[..bytes as usize].copy_from_slice(found);
                self.record(access, (MODULE_WINDOW | offset, bytes), by, false);
            }
        }
        Ok(())
    }

    /// Writes `data`. Its length is a power of two up to 16.
    #[inline]
    pub(super) fn store(
        &mut self,
        access: &Access,
        address: u64,
        data: &[u8],
        by: Accessor,
    ) -> Ran<()> {
        let bytes = data.len() as u32;
        check_alignment(address, bytes)?;
        match place(access.space, address) {
            SpaceAddress::Device(address) => {
                self.view.store_as(address, data, mark(access)).map_err(|fault| {
                    let kind = FindingKind::IllegalAccess;
                    Trouble::at(kind, fault.address, fault.bytes, fault.reason)
                })?;
                self.record(access, (address, bytes), by, true);
            }
            SpaceAddress::Shared(offset) => {
                self.shared.store(offset, data)?;
                self.record_shared(access, (offset, bytes), by, true);
            }
            SpaceAddress::Local(offset) => {
                let start = by.thread * self.local_bytes;
                let local = &mut self.local[start..start + self.local_bytes];
                part_mut(local, offset, bytes, "local memory")?.copy_from_slice(data);
            }
            SpaceAddress::Param(_) => {
                let detail = "writes a kernel parameter";
                return Err(Trouble::new(FindingKind::IllegalAccess, detail));
            }
            SpaceAddress::Module(offset) => {
                let found = part_mut(self.variables, offset, bytes, "the module's variables")?;
                found.copy_from_slice(data);
                self.record(access, (MODULE_WINDOW | offset, bytes), by, true);
            }
        }
        Ok(())
    }

    #[inline]
    fn record(&mut self, access: &Access, range: (u64, u32), by: Accessor, writes: bool) {
        if let Some(seen) = &mut self.non_coherent
            && (writes || access.order == AccessOrder::NonCoherent)
            && guard!("sim.other-cache", seen.access(range, writes), else false)
        {
            self.remark_non_coherent(range, writes);
        }
        let Some(how) = meant(access, writes) else { return };
        let found = self.device_conflicts.access(&self.stretches, by.stretch, range, how);
        if let Some(conflict) = found {
            let address = (range.0 < MODULE_WINDOW).then_some(range.0);
            self.remark_conflict(conflict, range, address, writes);
        }
    }

    #[inline]
    fn record_shared(&mut self, access: &Access, range: (u64, u32), by: Accessor, writes: bool) {
        let Some(how) = meant(access, writes) else { return };
        let found = self.shared_conflicts.access(&self.stretches, by.stretch, range, how);
        if let Some(conflict) = found {
            self.remark_conflict(conflict, range, None, writes);
        }
    }

    #[cold]
    fn remark_non_coherent(&mut self, (address, bytes): (u64, u32), writes: bool) {
        let detail = if writes {
            "writes bytes that the kernel reads by ld.global.nc"
        } else {
            "reads bytes by ld.global.nc that the kernel writes"
        };
        let (kind, address) = (FindingKind::Conflict, Some(address));
        let detail = format!("{detail}, whose cache is not kept up to date");
        self.remarks.push(Trouble { kind, address, bytes: bytes.into(), detail });
    }

    #[cold]
    fn remark_conflict(
        &mut self,
        conflict: Conflict,
        (place, bytes): (u64, u32),
        address: Option<u64>,
        writes: bool,
    ) {
        let this = if writes { "writes" } else { "reads" };
        let that = if conflict.wrote { "wrote" } else { "read" };
        let what = match address {
            Some(address) => format!("{address:#x}"),
            None if place >= MODULE_WINDOW => "a module's variable".to_owned(),
            None => format!("offset {place:#x} of shared memory"),
        };
        let thread = self.stretches.thread(conflict.with);
        let detail = format!(
            "{this} {bytes} bytes at {what} that thread {{{thread}}} {that}, with no barrier \
             between them"
        );
        let kind = FindingKind::Conflict;
        self.remarks.push(Trouble { kind, address, bytes: bytes.into(), detail });
    }
}

/// The kind under which the conflict check records an access; `None` if it is not recorded.
#[inline]
fn meant(access: &Access, writes: bool) -> Option<Use> {
    Some(match access.order {
        AccessOrder::Plain | AccessOrder::NonCoherent if writes => Use::Write,
        AccessOrder::Plain | AccessOrder::NonCoherent => Use::Read,
        AccessOrder::Strong(scope) | AccessOrder::Atomic(scope) => {
            let of_block = scope == Scope::Block;
            let kind = StrongKind { of_block, bytes: access.bytes };
            guard!(
                "sim.atomics-recorded",
                Use::Strong { writes, kind },
                else return (!writes).then_some(Use::Strong { writes, kind })
            )
        }
        AccessOrder::AtomicLoad(_) => return None,
    })
}

/// How an access takes part in synchronisation with other launches, if it does. No other launch is
/// in the scope of a block.
#[inline]
fn mark(access: &Access) -> Option<StrongMark> {
    let (scope, is_update) = match access.order {
        AccessOrder::Plain | AccessOrder::NonCoherent => return None,
        AccessOrder::Strong(scope) => (scope, false),
        AccessOrder::Atomic(scope) | AccessOrder::AtomicLoad(scope) => (scope, true),
    };
    let size_log2 = access.bytes.trailing_zeros() as u8;
    let is_system = scope == Scope::System;
    let is_seen = guard!("sim.block-scope-is-plain", scope != Scope::Block, else true);
    is_seen.then_some(StrongMark { is_system, is_update, size_log2 })
}

#[inline]
fn check_alignment(address: u64, bytes: u32) -> Ran<()> {
    if guard!("sim.aligned", address & u64::from(bytes - 1) == 0, else true) {
        return Ok(());
    }
    let detail =
        format!("an access of {bytes} bytes at {address:#x}, which is not a multiple of {bytes}");
    Err(Trouble::at(FindingKind::Misaligned, address, bytes.into(), detail))
}

#[inline]
fn place(space: Space, address: u64) -> SpaceAddress {
    match space {
        Space::Shared => SpaceAddress::Shared(address),
        Space::Local => SpaceAddress::Local(address),
        Space::Param => SpaceAddress::Param(address),
        _ if address >= MODULE_WINDOW => SpaceAddress::Module(address - MODULE_WINDOW),
        Space::Generic if address >= LOCAL_WINDOW => SpaceAddress::Local(address - LOCAL_WINDOW),
        Space::Generic if address >= SHARED_WINDOW => SpaceAddress::Shared(address - SHARED_WINDOW),
        _ => SpaceAddress::Device(address),
    }
}

/// Whether a generic address lies in `space`.
pub(super) fn is_in(space: Space, address: u64) -> bool {
    matches!(
        (space, place(Space::Generic, address)),
        (Space::Shared, SpaceAddress::Shared(_))
            | (Space::Local, SpaceAddress::Local(_))
            | (Space::Global, SpaceAddress::Device(_) | SpaceAddress::Module(_))
    )
}

fn range(size: usize, offset: u64, bytes: u32, what: &str) -> Ran<std::ops::Range<usize>> {
    match offset.checked_add(bytes.into()) {
        Some(end) if end <= size as u64 => Ok(offset as usize..end as usize),
        _ => {
            let detail = format!("{bytes} bytes at offset {offset:#x} of {size} bytes of {what}");
            Err(Trouble::new(FindingKind::IllegalAccess, detail))
        }
    }
}

fn part<'a>(memory: &'a [u8], offset: u64, bytes: u32, what: &str) -> Ran<&'a [u8]> {
    Ok(&memory[range(memory.len(), offset, bytes, what)?])
}

fn part_mut<'a>(memory: &'a mut [u8], offset: u64, bytes: u32, what: &str) -> Ran<&'a mut [u8]> {
    let range = range(memory.len(), offset, bytes, what)?;
    Ok(&mut memory[range])
}
