//! The structs that the virtual-memory calls read, each built in one place.
//!
//! A literal names every field, so none is left uninitialised, and the sizes leave no padding.

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use crate::{AccessDesc, AllocationProp, ShareableKind};

const _: () = assert!(size_of::<CUmemLocation>() == 4 + 4);
const _: () = assert!(size_of::<CUmemAllocationProp>() == 4 + 4 + 8 + 8 + 8);
const _: () = assert!(size_of::<CUmemAccessDesc>() == 8 + 4);

/// Memory of, or access from, the device `ordinal`.
fn location(ordinal: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal }
}

/// The driver's name of a form of export.
pub(super) fn handle_type(kind: ShareableKind) -> CUmemAllocationHandleType {
    match kind {
        ShareableKind::PosixFd => {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        }
        ShareableKind::Fabric => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
    }
}

/// The forms in which memory may be exported: bits.
fn handle_types(prop: AllocationProp) -> CUmemAllocationHandleType {
    let asked = [(prop.posix_fd, ShareableKind::PosixFd), (prop.fabric, ShareableKind::Fabric)];
    let asked = asked.iter().filter(|(asked, _)| *asked);
    CUmemAllocationHandleType(asked.fold(0, |bits, &(_, kind)| bits | handle_type(kind).0))
}

/// `CUmemAllocationProp` as the driver fills it in: with plain integers where the binding has enums,
/// which a newer driver's number would make invalid.
#[repr(C)]
#[derive(Default)]
pub(super) struct AnsweredProp {
    kind: u32,
    handle_types: u32,
    location_kind: u32,
    location_id: i32,
    win32: usize,
    flags: u64,
}

const _: () = assert!(size_of::<AnsweredProp>() == size_of::<CUmemAllocationProp>());
const _: () = assert!(align_of::<AnsweredProp>() >= align_of::<CUmemAllocationProp>());

impl AnsweredProp {
    /// What the memory was created as, if it is of a device.
    pub(super) fn device_memory(&self) -> Option<AllocationProp> {
        let has = |kind| self.handle_types & handle_type(kind).0 != 0;
        let on_device = self.location_kind == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
        on_device.then(|| AllocationProp {
            device: self.location_id,
            posix_fd: has(ShareableKind::PosixFd),
            fabric: has(ShareableKind::Fabric),
        })
    }
}

/// Pinned memory on a device.
pub(super) fn allocation_prop(prop: AllocationProp) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: handle_types(prop),
        location: location(prop.device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Read-write access of a device.
pub(super) fn access_desc(access: AccessDesc) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: location(access.device),
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_pinned_on_the_named_device() {
        let prop = allocation_prop(AllocationProp::on(3));
        assert_eq!(prop.type_ as u32, 1);
        assert_eq!((prop.location.type_ as u32, prop.location.id), (1, 3));
        assert_eq!(prop.requestedHandleTypes.0, 0);
        assert!(prop.win32HandleMetaData.is_null());
    }

    #[test]
    fn forms_of_export_are_bits() {
        for (posix_fd, fabric, bits) in
            [(false, false, 0), (true, false, 1), (false, true, 8), (true, true, 9)]
        {
            let prop = AllocationProp { device: 2, posix_fd, fabric };
            assert_eq!(allocation_prop(prop).requestedHandleTypes.0, bits);
            let answered = AnsweredProp {
                kind: 1,
                handle_types: bits,
                location_kind: 1,
                location_id: 2,
                ..AnsweredProp::default()
            };
            assert_eq!(answered.device_memory(), Some(prop));
        }
    }

    #[test]
    fn memory_of_the_host_is_no_device_memory() {
        for location_kind in [0, 2, 3, 4, 77] {
            let answered = AnsweredProp { location_kind, ..AnsweredProp::default() };
            assert_eq!(answered.device_memory(), None);
        }
    }

    #[test]
    fn access_is_read_write_from_the_named_device() {
        let desc = access_desc(AccessDesc { device: 2 });
        assert_eq!((desc.location.type_ as u32, desc.location.id, desc.flags as u32), (1, 2, 3));
    }
}
