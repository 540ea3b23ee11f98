//! The structs that the virtual-memory calls read, each built in one place.
//!
//! A literal names every field, so none is left uninitialised, and the sizes leave no padding.

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use crate::{AccessDesc, AllocationProp};

const _: () = assert!(size_of::<CUmemLocation>() == 4 + 4);
const _: () = assert!(size_of::<CUmemAllocationProp>() == 4 + 4 + 8 + 8 + 8);
const _: () = assert!(size_of::<CUmemAccessDesc>() == 8 + 4);

/// Memory of, or access from, the device `ordinal`.
fn location(ordinal: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal }
}

/// Pinned memory on a device.
pub(super) fn allocation_prop(prop: AllocationProp) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if prop.posix_fd {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        },
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
        let prop = allocation_prop(AllocationProp { device: 3, posix_fd: false });
        assert_eq!(prop.type_ as u32, 1);
        assert_eq!((prop.location.type_ as u32, prop.location.id), (1, 3));
        assert_eq!(prop.requestedHandleTypes.0, 0);
        assert!(prop.win32HandleMetaData.is_null());
        let exported = allocation_prop(AllocationProp { device: 0, posix_fd: true });
        assert_eq!(exported.requestedHandleTypes.0, 1);
    }

    #[test]
    fn access_is_read_write_from_the_named_device() {
        let desc = access_desc(AccessDesc { device: 2 });
        assert_eq!((desc.location.type_ as u32, desc.location.id, desc.flags as u32), (1, 2, 3));
    }
}
