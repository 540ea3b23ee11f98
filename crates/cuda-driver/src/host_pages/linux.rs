//! Linux calls for mapped memory. A failure of any but the mapping itself is ignored.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::guard;

use super::{GrantedPages, HostPages, PageKind, PinError};

/// The size of an ordinary page on every supported machine.
const PAGE_BYTES: usize = 4096;
/// A huge page.
const HUGE_BYTES: usize = 2 << 20;
/// Asks `mmap` for huge pages of 2 MiB (`MAP_HUGE_2MB`): the base-2 logarithm, from bit 26 on.
const MAP_HUGE_2MB: c_int = 21 << 26;
/// Number of nodes in a mask.
const NODES_MAX: usize = 1024;
/// `get_mempolicy` answers the node of an address (`MPOL_F_NODE | MPOL_F_ADDR`).
const NODE_OF_ADDRESS: usize = 1 | 2;

pub(super) fn map(bytes: u64, huge: bool, node: Option<u32>) -> Result<HostPages, PinError> {
    let mut pages = map_unpopulated(bytes, huge, node)?;
    if pages.granted.pages == PageKind::Huge && populate(&pages, 0, pages.bytes).is_err() {
        pages = map_not_set_aside(bytes, huge, node)?;
    }
    if pages.granted.pages != PageKind::Huge {
        populate(&pages, 0, pages.bytes)?;
    }
    pages.note_node();
    Ok(pages)
}

pub(super) fn map_unpopulated(
    bytes: u64,
    huge: bool,
    node: Option<u32>,
) -> Result<HostPages, PinError> {
    let length = whole_pages(bytes)?;
    if huge
        && length >= HUGE_BYTES
        && let Some(mut pages) = map_set_aside(length, node)
    {
        pages.asked = bytes;
        return Ok(pages);
    }
    map_not_set_aside(bytes, huge, node)
}

/// The length of a mapping of `bytes` bytes, if there can be one.
fn whole_pages(bytes: u64) -> Result<usize, PinError> {
    let refused = |errno| PinError::Refused { bytes, errno };
    let length = usize::try_from(bytes).ok().filter(|&bytes| bytes > 0);
    let length = length.and_then(|bytes| bytes.checked_next_multiple_of(PAGE_BYTES));
    let length = length.filter(|&bytes| bytes <= isize::MAX as usize - 2 * HUGE_BYTES);
    let length = length.ok_or_else(|| refused(libc::EINVAL))?;
    if host_bytes().is_some_and(|most| bytes > most) {
        return Err(refused(libc::ENOMEM));
    }
    Ok(length)
}

fn map_not_set_aside(bytes: u64, huge: bool, node: Option<u32>) -> Result<HostPages, PinError> {
    let refused = |errno| PinError::Refused { bytes, errno };
    let length = whole_pages(bytes)?;
    let is_short = available_bytes().is_some_and(|most| bytes > most);
    if guard!("driver.host-has-pages", is_short, else false) {
        return Err(refused(libc::ENOMEM));
    }
    let huge = huge && length >= HUGE_BYTES;
    let mapped = if huge { map_aligned(length) } else { map_anywhere(length, 0) };
    let mut pages =
        mapped.map_err(|error| refused(error.raw_os_error().unwrap_or(libc::ENOMEM)))?;
    pages.asked = bytes;
    if huge && advise(&pages, (0, length), libc::MADV_HUGEPAGE).is_ok() {
        pages.granted.pages = PageKind::Advised;
    }
    prefer_node(&pages, node);
    Ok(pages)
}

/// Memory in huge pages that were set aside, if that wastes little and the system grants them.
///
/// In a control group without such pages, the mapping may succeed and the first access end the
/// process (`SIGBUS`). So the pages are requested by a call that can fail.
fn map_set_aside(length: usize, node: Option<u32>) -> Option<HostPages> {
    let whole = length.next_multiple_of(HUGE_BYTES);
    if whole - length > length / 8 {
        return None;
    }
    let mut pages = map_anywhere(whole, libc::MAP_HUGETLB | MAP_HUGE_2MB).ok()?;
    pages.granted.pages = PageKind::Huge;
    prefer_node(&pages, node);
    Some(pages)
}

pub(super) fn populate(pages: &HostPages, offset: u64, bytes: u64) -> Result<(), PinError> {
    let most = guard!("driver.populate-bounded", pages.bytes, else pages.bytes + PAGE_BYTES as u64);
    let end = offset.saturating_add(bytes).min(most).next_multiple_of(PAGE_BYTES as u64);
    let first = offset / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    if offset >= pages.bytes || bytes == 0 {
        return Ok(());
    }
    // Inside the mapping, which is of whole pages.
    let range = (first as usize, (end - first) as usize);
    let Err(error) = advise(pages, range, libc::MADV_POPULATE_WRITE) else { return Ok(()) };
    let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
    // Before Linux 5.14, without that call, pages that are set aside are not used: the first access
    // may end the process.
    if pages.granted.pages == PageKind::Huge || errno == libc::ENOMEM {
        return Err(PinError::Refused { bytes: pages.bytes, errno });
    }
    touch(pages, range);
    Ok(())
}

/// The machine's memory, or the limit of the control group.
pub(super) fn host_bytes() -> Option<u64> {
    // Of the second version of control groups, where this process's own is the root that it sees.
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let group = group.and_then(|text| text.trim().parse::<u64>().ok());
    Some(of_the_machine("MemTotal:")?.min(group.unwrap_or(u64::MAX)))
}

/// What the machine can provide now without swapping; pages that are set aside do not count.
fn available_bytes() -> Option<u64> {
    of_the_machine("MemAvailable:")
}

/// An entry of the machine's memory table, in bytes.
fn of_the_machine(entry: &str) -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let text = info.lines().find_map(|line| line.strip_prefix(entry))?;
    let kib: u64 = text.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Ordinary memory that begins where a huge page may.
fn map_aligned(length: usize) -> io::Result<HostPages> {
    let mut pages = map_anywhere(length + HUGE_BYTES, 0)?;
    let first = pages.base.next_multiple_of(HUGE_BYTES as u64);
    let (base, end) = (pages.base, pages.base + pages.bytes);
    let kept_end = first + length as u64;
    for (from, to) in [(base, first), (kept_end, end)] {
        // SAFETY: a part of the mapping that was made just now, of whole pages; from here on it is no
        // part of `pages`, and no other code has its addresses.
        unsafe { unmap_range(from, to - from) };
    }
    (pages.base, pages.bytes) = (first, length as u64);
    Ok(pages)
}

fn map_anywhere(length: usize, flags: c_int) -> io::Result<HostPages> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: a new mapping, at an address of the system's choice, touches no memory that Rust knows.
    let base = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // Exposed: code that accesses the memory makes its pointers from this number.
    let base = base.expose_provenance() as u64;
    let granted = GrantedPages { pages: PageKind::Ordinary, node: None };
    Ok(HostPages { base, bytes: length as u64, asked: length as u64, granted })
}

pub(super) fn unmap(pages: &mut HostPages) {
    // SAFETY: the mapping is this value's alone (invariants of `base`), which is being dropped, and
    // its length is of whole pages.
    unsafe { unmap_range(pages.base, pages.bytes) };
}

/// Gives memory back to the system.
///
/// # Safety
/// - the range is of whole pages, mapped by this module, and no longer used.
unsafe fn unmap_range(base: u64, bytes: u64) {
    if bytes == 0 {
        return;
    }
    // SAFETY: the caller's promise.
    if unsafe { libc::munmap(address(base), bytes as usize) } != 0 {
        let error = io::Error::last_os_error();
        tracing::warn!(%error, bytes, "host memory was not unmapped");
    }
}

/// Advises the system about a part of the memory, given as offset and length, or has it provide the
/// pages.
fn advise(pages: &HostPages, (offset, bytes): (usize, usize), advice: c_int) -> io::Result<()> {
    assert!(offset + bytes <= pages.bytes as usize, "{bytes} bytes at {offset} of {pages:?}");
    // SAFETY: the range lies inside a live mapping (invariants of `base`, and the check above); both
    // pieces of advice that this module gives leave its contents as they are.
    match unsafe { libc::madvise(address(pages.base + offset as u64), bytes, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Asks for pages of `node`, before the first access.
fn prefer_node(pages: &HostPages, node: Option<u32>) {
    let Some(node) = node.map(|node| node as usize).filter(|&node| node < NODES_MAX) else {
        return;
    };
    let mut nodes = [0u64; NODES_MAX / 64];
    nodes[node / 64] = 1 << (node % 64);
    // SAFETY: the range is a live mapping (invariants of `base`), whose contents stay as they are; the
    // mask is live and has the bits that the call is told, of which it reads one less.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address(pages.base),
            pages.bytes as usize,
            libc::MPOL_PREFERRED as usize,
            nodes.as_ptr(),
            NODES_MAX + 1,
            0usize,
        )
    };
    if answer != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, node, "host memory was not put on a memory node");
    }
}

/// The node of the first page.
pub(super) fn node_of(pages: &HostPages) -> Option<u32> {
    let mut node: c_int = -1;
    // SAFETY: `node` is live and of the type that the call writes, there is no mask, and the address
    // is looked up.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &mut node,
            ptr::null_mut::<u64>(),
            0usize,
            address(pages.base),
            NODE_OF_ADDRESS,
        )
    };
    if answer == 0 { u32::try_from(node).ok() } else { None }
}

/// Writes to each page of a part, given as offset and length, so that the system provides it.
fn touch(pages: &HostPages, (offset, bytes): (usize, usize)) {
    assert!(offset + bytes <= pages.bytes as usize, "{bytes} bytes at {offset} of {pages:?}");
    for offset in (offset..offset + bytes).step_by(PAGE_BYTES) {
        let byte = ptr::with_exposed_provenance_mut::<u8>(pages.base as usize + offset);
        // SAFETY: inside the mapping, which is live, readable and writable (invariants of `base`), and
        // which only this function accesses, atomically.
        let byte = unsafe { AtomicU8::from_ptr(byte) };
        // Counts as a write and changes nothing. An addition of 0 would be compiled to a load, for
        // which the system provides no page.
        let _ = byte.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

fn address(base: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(base as usize)
}

/// The node next to a device of the PCI bus, by the system's tables.
pub(super) fn node_of_pci_device(bus_id: &str) -> Option<i64> {
    // The id becomes part of a path: only digits, letters and their separators are allowed.
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, ':' | '.');
    if !bus_id.chars().all(known) || bus_id.contains("..") {
        return None;
    }
    let path = format!("/sys/bus/pci/devices/{}/numa_node", bus_id.to_ascii_lowercase());
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
pub(super) use tests::populated_pages;

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of pages that are there.
    pub(in super::super) fn populated_pages(pages: &HostPages) -> u64 {
        let mut there = vec![0u8; pages.bytes as usize / PAGE_BYTES];
        // SAFETY: the range is a live mapping; there is a byte for each of its pages.
        let answer =
            unsafe { libc::mincore(address(pages.base), pages.bytes as usize, there.as_mut_ptr()) };
        assert_eq!(answer, 0);
        there.iter().filter(|&page| page & 1 == 1).count() as u64
    }

    #[test]
    fn a_bus_id_leads_nowhere_else() {
        for id in ["", "..", "../../../etc", "0000:00:00.0/..", "0000:ff:1f.7", "nonsense"] {
            assert_eq!(node_of_pci_device(id), None, "{id}");
        }
    }

    #[test]
    fn memory_is_touched_by_hand_where_the_system_does_not() {
        let pages = map_aligned(3 * HUGE_BYTES).unwrap();
        assert_eq!((pages.base % HUGE_BYTES as u64, pages.bytes), (0, 3 * HUGE_BYTES as u64));
        assert_eq!(populated_pages(&pages), 0);
        touch(&pages, (0, 3 * HUGE_BYTES));
        assert_eq!(populated_pages(&pages), pages.bytes / PAGE_BYTES as u64);
    }
}
