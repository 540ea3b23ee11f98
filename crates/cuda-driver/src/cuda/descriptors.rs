//! The structs that the virtual-memory calls read and write, each built in one place.
//!
//! They are declared here, with plain integers: the bindings' fields differ between versions of CUDA, and their
//! enums would make a newer driver's number invalid. Sizes and alignments are compared with the
//! bindings'.

use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp};

use crate::{AccessDesc, AllocationProp, ShareableKind};

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: u32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u32 = 3;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Location {
    pub(super) kind: u32,
    pub(super) id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Default)]
pub(super) struct MemoryProp {
    kind: u32,
    handle_types: u32,
    location: Location,
    /// Of Windows: a pointer, null.
    win32: usize,
    flags: u64,
}

const _: () = assert!(size_of::<MemoryProp>() == size_of::<CUmemAllocationProp>());
const _: () = assert!(align_of::<MemoryProp>() >= align_of::<CUmemAllocationProp>());

/// `CUmemAccessDesc`.
#[repr(C)]
pub(super) struct Access {
    location: Location,
    flags: u32,
}

const _: () = assert!(size_of::<Access>() == size_of::<CUmemAccessDesc>());
const _: () = assert!(align_of::<Access>() == align_of::<CUmemAccessDesc>());

/// Memory of, or access from, the device `ordinal`.
fn location(ordinal: i32) -> Location {
    Location { kind: DEVICE, id: ordinal }
}

/// The driver's name of a form of export: `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR` and `..._FABRIC`.
pub(super) fn handle_type(kind: ShareableKind) -> CUmemAllocationHandleType {
    CUmemAllocationHandleType(match kind {
        ShareableKind::PosixFd => 1,
        ShareableKind::Fabric => 8,
    })
}

/// The forms in which memory may be exported, as bits.
fn handle_types(prop: AllocationProp) -> u32 {
    let asked = [(prop.posix_fd, ShareableKind::PosixFd), (prop.fabric, ShareableKind::Fabric)];
    let asked = asked.iter().filter(|(asked, _)| *asked);
    asked.fold(0, |bits, &(_, kind)| bits | handle_type(kind).0)
}

impl MemoryProp {
    /// The properties that the memory was created with, if it is of a device.
    pub(super) fn device_memory(&self) -> Option<AllocationProp> {
        let has = |kind| self.handle_types & handle_type(kind).0 != 0;
        (self.location.kind == DEVICE).then(|| AllocationProp {
            device: self.location.id,
            posix_fd: has(ShareableKind::PosixFd),
            fabric: has(ShareableKind::Fabric),
        })
    }
}

/// Pinned memory on a device.
pub(super) fn allocation_prop(prop: AllocationProp) -> MemoryProp {
    MemoryProp {
        kind: PINNED,
        handle_types: handle_types(prop),
        location: location(prop.device),
        win32: 0,
        flags: 0,
    }
}

/// Read-write access of a device.
pub(super) fn access_desc(access: AccessDesc) -> Access {
    Access { location: location(access.device), flags: READ_WRITE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_pinned_on_the_named_device() {
        let prop = allocation_prop(AllocationProp::on(3));
        assert_eq!((prop.kind, prop.location.kind, prop.location.id), (1, 1, 3));
        assert_eq!((prop.handle_types, prop.win32, prop.flags), (0, 0, 0));
    }

    #[test]
    fn forms_of_export_are_bits() {
        for (posix_fd, fabric, bits) in
            [(false, false, 0), (true, false, 1), (false, true, 8), (true, true, 9)]
        {
            let prop = AllocationProp { device: 2, posix_fd, fabric };
            assert_eq!(allocation_prop(prop).handle_types, bits);
            let location = Location { kind: 1, id: 2 };
            let answered = MemoryProp { handle_types: bits, location, ..MemoryProp::default() };
            assert_eq!(answered.device_memory(), Some(prop));
        }
    }

    #[test]
    fn memory_of_the_host_is_no_device_memory() {
        for kind in [0, 2, 3, 4, 77] {
            let location = Location { kind, id: 0 };
            let answered = MemoryProp { location, ..MemoryProp::default() };
            assert_eq!(answered.device_memory(), None);
        }
    }

    #[test]
    fn access_is_read_write_from_the_named_device() {
        let desc = access_desc(AccessDesc { device: 2 });
        assert_eq!((desc.location.kind, desc.location.id, desc.flags), (1, 2, 3));
    }
}
