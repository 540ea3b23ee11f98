//! Host memory to pin that the driver did not allocate: mapped here in huge pages and next to a device, if the
//! system can, or registered for the program.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod other;

use std::fmt;

#[cfg(target_os = "linux")]
use linux as system;
#[cfg(not(target_os = "linux"))]
use other as system;

pub use crate::pin::{HostMemory, PinError, RegisterError};
use crate::{Device, DeviceAttribute};

/// Options for mapping memory. Options that the system lacks are ignored; [`HostPages::granted`]
/// returns the granted ones.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct HostPagesOptions {
    /// Whether memory of 2 MiB and more uses huge pages: pages that the system has set aside, or
    /// else pages that it makes huge on request.
    pub huge: bool,
    /// The memory node of the pages.
    pub node: MemoryNode,
}

impl HostPagesOptions {
    /// Huge pages next to the device.
    pub const HUGE_BESIDE_DEVICE: Self = Self { huge: true, node: MemoryNode::BesideDevice };

    /// The number of the memory node, for memory that is pinned for `device`; `None` for any.
    #[must_use]
    #[track_caller]
    pub fn node_for(&self, device: &Device) -> Option<u32> {
        match self.node {
            MemoryNode::Any => None,
            MemoryNode::BesideDevice => device.host_node(),
            MemoryNode::Number(node) => Some(node),
        }
    }
}

/// A memory node (NUMA node) of the host.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum MemoryNode {
    /// The system's choice, usually the node of the calling thread.
    Any,
    /// The node next to the device that the memory is pinned for; any node if the host does not
    /// say.
    BesideDevice,
    /// The node with this number of the system, while it has memory left; otherwise another.
    Number(u32),
}

/// The kind of pages of mapped memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum PageKind {
    /// Huge pages that the system had set aside (`MAP_HUGETLB`).
    Huge,
    /// Pages that the system was asked to make huge (`MADV_HUGEPAGE`) before the first access.
    /// Without room the system uses ordinary pages, and does not say so.
    Advised,
    /// Ordinary pages.
    Ordinary,
}

/// Page options actually granted.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct GrantedPages {
    /// The pages.
    pub pages: PageKind,
    /// The memory node of the first page, if the system says.
    pub node: Option<u32>,
}

/// Memory mapped for this process alone, zeroed.
///
/// [`PinnedBuffer::pin_pages`](crate::PinnedBuffer::pin_pages) pins such memory. A drop returns it
/// to the system.
pub struct HostPages {
    /// # Invariants
    /// A mapping of `bytes` bytes, readable, writable and private, whose provenance is exposed and
    /// which no other code unmaps; zeroed when made.
    base: u64,
    bytes: u64,
    /// Bytes asked for: `bytes` or less.
    asked: u64,
    granted: GrantedPages,
}

impl HostPages {
    /// Maps at least `bytes` bytes, on memory node `node` if one is given.
    ///
    /// Accesses every page: about 0.1 s a GiB in huge pages, several times that in ordinary ones.
    ///
    /// # Errors
    /// [`PinError`], also for more memory than [the host has](HostPages::host_bytes), or has
    /// left, because accessing it would end the process. No memory is mapped then.
    pub fn map(bytes: u64, huge: bool, node: Option<u32>) -> Result<Self, PinError> {
        system::map(bytes, huge, node)
    }

    /// Like [`map`](HostPages::map), without accessing the pages: takes microseconds, and the
    /// memory is not there yet. Threads provide it by calls of [`populate`](HostPages::populate)
    /// for parts of it, at the same time.
    ///
    /// # Errors
    /// Like `map`.
    pub fn map_unpopulated(bytes: u64, huge: bool, node: Option<u32>) -> Result<Self, PinError> {
        system::map_unpopulated(bytes, huge, node)
    }

    /// Has the system provide the pages of `bytes` bytes at `offset`, or those of the part of that
    /// range that is mapped. Contents stay as they are.
    ///
    /// # Errors
    /// [`PinError::Refused`] if the system has no such pages left. Pages that are set aside
    /// ([`PageKind::Huge`]) can be mapped and then refused here; mapping anew with
    /// [`map`](HostPages::map) uses other pages.
    pub fn populate(&self, offset: u64, bytes: u64) -> Result<(), PinError> {
        system::populate(self, offset, bytes)
    }

    /// The most memory that this process can have, in bytes, if the system says: the machine's
    /// memory, or the limit of the control group.
    #[must_use]
    pub fn host_bytes() -> Option<u64> {
        system::host_bytes()
    }

    /// Page options actually granted. The node is known once memory is populated.
    #[must_use]
    pub fn granted(&self) -> GrantedPages {
        self.granted
    }

    /// Length that was asked for, in bytes.
    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }

    /// Notes the memory node of the first page, which is there.
    pub(crate) fn note_node(&mut self) {
        self.granted.node = system::node_of(self);
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        system::unmap(self);
    }
}

impl fmt::Debug for HostPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPages")
            .field("bytes", &self.bytes)
            .field("granted", &self.granted)
            .finish()
    }
}

// SAFETY: the mapping does not move or shrink and lives until the value is dropped; it is readable,
// writable and zeroed (invariants of `base`), and nobody calls the method that accesses it, `populate`,
// on a value that a buffer owns.
unsafe impl HostRegion for HostPages {
    fn address(&self) -> u64 {
        self.base
    }

    /// Length in bytes: the requested length, rounded up to a whole page.
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Memory of the host program that a [`PinnedBuffer`](crate::PinnedBuffer) can be made of, such as a
/// segment that processes share.
///
/// # Safety
/// - both methods always return the same range: at most `isize::MAX` bytes of initialised, readable
///   and writable memory with exposed provenance, which stays mapped until the value is dropped;
/// - no other code of this process accesses the range while it is registered.
pub unsafe trait HostRegion: fmt::Debug + Send + Sync {
    /// The first address.
    fn address(&self) -> u64;

    /// Length in bytes.
    fn bytes(&self) -> u64;
}

impl Device {
    /// The host's memory node next to this device; `None` if the host has no nodes or does not say.
    #[must_use]
    #[track_caller]
    pub fn host_node(&self) -> Option<u32> {
        let node = match self.attribute(DeviceAttribute::HOST_NUMA_ID) {
            Ok(node) => Some(i64::from(node)),
            // An older driver does not have the attribute.
            Err(_) => system::node_of_pci_device(&self.info().pci_bus_id),
        };
        node.and_then(|node| u32::try_from(node).ok())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::linux::populated_pages;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bytes_of(pages: &HostPages) -> &[u8] {
        let first = std::ptr::with_exposed_provenance::<u8>(pages.base as usize);
        // SAFETY: the mapping is live, initialised and of this length (invariants of `base`), and
        // no code writes it.
        unsafe { std::slice::from_raw_parts(first, pages.bytes as usize) }
    }

    #[test]
    fn mapped_memory_is_whole_pages_of_zeros() {
        for (bytes, huge) in [(1, false), (1, true), (5000, true), (2 * MIB, true), (5 * MIB, true)]
        {
            let pages = HostPages::map(bytes, huge, None).unwrap();
            assert!(pages.bytes() >= bytes && pages.bytes().is_multiple_of(4096), "{pages:?}");
            assert!(pages.bytes() - bytes < 4096 || pages.granted().pages == PageKind::Huge);
            assert!(bytes_of(&pages).iter().all(|&byte| byte == 0));
            let may_be_huge = huge && bytes >= 2 * MIB;
            assert!(may_be_huge || pages.granted().pages == PageKind::Ordinary, "{pages:?}");
            if pages.granted().pages != PageKind::Ordinary {
                assert_eq!(pages.address() % (2 * MIB), 0, "a huge page begins there");
            }
        }
    }

    #[test]
    fn pages_are_provided_part_by_part_from_several_threads() {
        for huge in [false, true] {
            let pages = HostPages::map_unpopulated(9 * MIB + 1, huge, None).unwrap();
            let pages = &pages;
            assert_eq!(populated_pages(pages), 0, "{pages:?}");
            pages.populate(0, 1).unwrap();
            let first = populated_pages(pages);
            assert!((1..=512).contains(&first), "{first} pages");
            std::thread::scope(|scope| {
                for part in 0..5 {
                    scope.spawn(move || pages.populate(part * 2 * MIB, 2 * MIB).unwrap());
                }
            });
            assert_eq!(populated_pages(pages), pages.bytes() / 4096);
            assert!(bytes_of(pages).iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn parts_that_are_not_mapped_are_not_provided() {
        let pages = HostPages::map_unpopulated(3 * 4096, false, None).unwrap();
        for (offset, bytes) in [
            (0, 0),
            (1, 0),
            (3 * 4096, 1),
            (3 * 4096, u64::MAX),
            (u64::MAX, 1),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(pages.populate(offset, bytes), Ok(()), "{bytes} bytes at {offset}");
            assert_eq!(populated_pages(&pages), 0, "{bytes} bytes at {offset}");
        }
        // Whole pages: from the one that the range begins in to the one that it ends in.
        pages.populate(2 * 4096 - 1, u64::MAX).unwrap();
        assert_eq!(populated_pages(&pages), 2);
    }

    #[test]
    fn a_node_that_is_not_there_is_done_without() {
        for node in [0, 63, 900, 5000, u32::MAX] {
            let pages = HostPages::map(MIB, false, Some(node)).unwrap();
            assert!(bytes_of(&pages).iter().all(|&byte| byte == 0), "{node}");
            assert!(pages.granted().node.is_none_or(|got| got < 1024), "{pages:?}");
        }
    }

    #[test]
    fn more_than_there_are_addresses_is_refused() {
        for bytes in [0, 1 << 62, u64::MAX - 4096, u64::MAX] {
            for huge in [false, true] {
                for map in [HostPages::map, HostPages::map_unpopulated] {
                    let refused = map(bytes, huge, None).map(drop);
                    let Err(PinError::Refused { bytes: asked, errno }) = refused else {
                        panic!("{bytes} bytes: {refused:?}");
                    };
                    assert_eq!(asked, bytes);
                    assert_ne!(errno, 0);
                }
            }
        }
    }

    #[test]
    fn no_more_than_the_host_has_is_mapped() {
        let most = HostPages::host_bytes().unwrap();
        // The system may promise more than it has, so the size is checked before it is asked.
        let refused = HostPages::map(most + 1, false, None).map(drop);
        assert_eq!(refused, Err(PinError::Refused { bytes: most + 1, errno: libc::ENOMEM }));
        // The system itself takes a part of what the machine has, so less is left.
        let refused = HostPages::map_unpopulated(most, false, None).map(drop);
        assert_eq!(refused, Err(PinError::Refused { bytes: most, errno: libc::ENOMEM }));
    }

    #[test]
    fn dropped_memory_is_unmapped_to_the_last_page() {
        let lines = || std::fs::read_to_string("/proc/self/maps").unwrap();
        let pages = HostPages::map(3 * MIB + 1, true, Some(0)).unwrap();
        let (first, end) = (pages.address(), pages.address() + pages.bytes());
        let touches = |line: &str| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let (from, to) = range.unwrap();
            let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
            from < end && first < to
        };
        let mapped = lines();
        let within: Vec<_> = mapped.lines().filter(|line| touches(line)).collect();
        assert!(!within.is_empty());
        drop(pages);
        let left = lines();
        assert_eq!(left.lines().filter(|line| touches(line)).count(), 0, "{left}");
    }
}
