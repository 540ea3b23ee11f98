//! The structs that the virtual-memory calls read and write, each built in one place.
//!
//! They are declared here, with plain integers: the bindings' fields differ between versions of CUDA, and their
//! enums would make a newer driver's number invalid. Sizes and alignments are compared with the
//! bindings'.

use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp};

use crate::{AccessDesc, AllocationProp};

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
pub(super) struct MemoryProp {
    kind: u32,
    /// Forms of export: none.
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

/// Pinned memory on a device.
pub(super) fn allocation_prop(prop: AllocationProp) -> MemoryProp {
    MemoryProp {
        kind: PINNED,
        handle_types: 0,
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
    fn access_is_read_write_from_the_named_device() {
        let desc = access_desc(AccessDesc { device: 2 });
        assert_eq!((desc.location.kind, desc.location.id, desc.flags), (1, 2, 3));
    }
}
