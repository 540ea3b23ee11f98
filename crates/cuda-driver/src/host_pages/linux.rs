//! Linux calls for mapped memory. A failure of any but the mapping itself is ignored.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;

use super::{GrantedPages, HostPages, HostPagesError, PageKind};

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

pub(super) fn map(bytes: u64, huge: bool, node: Option<u32>) -> Result<HostPages, HostPagesError> {
    let refused = |errno| HostPagesError::Refused { bytes, errno };
    let length = usize::try_from(bytes).ok().filter(|&bytes| bytes > 0);
    let length = length.and_then(|bytes| bytes.checked_next_multiple_of(PAGE_BYTES));
    let length = length.filter(|&bytes| bytes <= isize::MAX as usize - 2 * HUGE_BYTES);
    let length = length.ok_or_else(|| refused(libc::EINVAL))?;
    if host_bytes().is_some_and(|most| bytes > most) {
        return Err(refused(libc::ENOMEM));
    }
    if huge
        && length >= HUGE_BYTES
        && let Some(pages) = map_set_aside(length, node)
    {
        return Ok(pages);
    }
    let huge = huge && length >= HUGE_BYTES;
    let mut pages = if huge { map_aligned(length) } else { map_anywhere(length, 0) }
        .map_err(|error| refused(error.raw_os_error().unwrap_or(libc::ENOMEM)))?;
    if huge && advise(&pages, libc::MADV_HUGEPAGE).is_ok() {
        pages.granted.pages = PageKind::Advised;
    }
    prefer_node(&pages, node);
    if advise(&pages, libc::MADV_POPULATE_WRITE).is_err() {
        touch(&mut pages);
    }
    pages.granted.node = node_of(&pages);
    Ok(pages)
}

/// The machine's memory, or the limit of the control group.
pub(super) fn host_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    // Of the second version of control groups, where this process's own is the root that it sees.
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let group = group.and_then(|text| text.trim().parse::<u64>().ok());
    Some(kib.saturating_mul(1024).min(group.unwrap_or(u64::MAX)))
}

/// Memory in huge pages that were set aside, if that wastes little and the system grants them.
///
/// In a control group without such pages, the mapping may succeed and the first access end the
/// process (`SIGBUS`). So the pages are requested by a call that can fail. Before Linux 5.14,
/// without that call, such pages are not used.
fn map_set_aside(length: usize, node: Option<u32>) -> Option<HostPages> {
    let whole = length.next_multiple_of(HUGE_BYTES);
    if whole - length > length / 8 {
        return None;
    }
    let mut pages = map_anywhere(whole, libc::MAP_HUGETLB | MAP_HUGE_2MB).ok()?;
    pages.granted.pages = PageKind::Huge;
    prefer_node(&pages, node);
    advise(&pages, libc::MADV_POPULATE_WRITE).ok()?;
    pages.granted.node = node_of(&pages);
    Some(pages)
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
    Ok(HostPages { base, bytes: length as u64, granted })
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

/// Advises the system about the memory, or has it provide the pages.
fn advise(pages: &HostPages, advice: c_int) -> io::Result<()> {
    // SAFETY: the range is a live mapping (invariants of `base`); both pieces of advice that this
    // module gives leave its contents as they are.
    match unsafe { libc::madvise(address(pages.base), pages.bytes as usize, advice) } {
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
fn node_of(pages: &HostPages) -> Option<u32> {
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

/// Writes to each page, so that the system provides it.
fn touch(pages: &mut HostPages) {
    for offset in (0..pages.bytes as usize).step_by(PAGE_BYTES) {
        let byte = ptr::with_exposed_provenance_mut::<u8>(pages.base as usize + offset);
        // SAFETY: inside the mapping, which no other code accesses (invariants of `base`). It holds
        // zeros and goes on to.
        unsafe { byte.write_volatile(0) };
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
mod tests {
    use super::*;

    #[test]
    fn a_bus_id_leads_nowhere_else() {
        for id in ["", "..", "../../../etc", "0000:00:00.0/..", "0000:ff:1f.7", "nonsense"] {
            assert_eq!(node_of_pci_device(id), None, "{id}");
        }
    }

    #[test]
    fn memory_is_touched_by_hand_where_the_system_does_not() {
        let mut pages = map_aligned(3 * HUGE_BYTES).unwrap();
        assert_eq!((pages.base % HUGE_BYTES as u64, pages.bytes), (0, 3 * HUGE_BYTES as u64));
        touch(&mut pages);
        let mut there = vec![0u8; 3 * HUGE_BYTES / PAGE_BYTES];
        // SAFETY: the range is a live mapping; there is a byte for each of its pages.
        let answer =
            unsafe { libc::mincore(address(pages.base), pages.bytes as usize, there.as_mut_ptr()) };
        assert_eq!(answer, 0);
        assert!(there.iter().all(|page| page & 1 == 1));
    }
}
