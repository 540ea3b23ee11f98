//! Reservations, physical memory, and the mappings between them.
//!
//! Results match those of driver 580. The crate's tests check each of them.

use std::collections::{BTreeMap, HashMap};

use cuda_driver::ErrorCode;
use cuda_driver::guard;

use super::pages::Pages;
use super::{Charge, Denied, Located, MAPPED, Memory, VIRTUAL_START, Viewer};
use crate::RangeKind;

/// Longest reservation, in bytes: the limit of a process's addresses on hardware.
const RESERVATION_BYTES_MAX: u64 = 1 << 47;

/// Maximum number of pages of all reservations.
const RESERVED_PAGES_MAX: u64 = 1 << 25;

/// Maximum number of pages of one physical handle.
const HANDLE_PAGES_MAX: u64 = 1 << 22;

/// First key of physical memory, beyond all addresses.
const KEYS_START: u64 = 1 << 61;

/// Keys of new memory start at a multiple of this, so that a page of keys belongs to a single
/// memory.
const KEYS_ALIGNMENT: u64 = 1 << 30;

const VIRTUAL_END: u64 = 1 << 60;

/// One page of addresses: `[(physical + 1) << 32 | page index in it, rights]`; zero if not mapped.
///
/// Plain integers, so that a large reservation costs only the used pages of the table.
type PageEntry = [u64; 2];

#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    entries: Vec<PageEntry>,
    /// Mappings by first address: their length and physical memory.
    mappings: BTreeMap<u64, (u64, u32)>,
}

impl Reservation {
    fn contains(&self, address: u64, bytes: u64) -> bool {
        let end = address.checked_add(bytes);
        address >= self.base && end.is_some_and(|end| end <= self.base + self.bytes)
    }
}

/// The memory of one handle, made by `cuMemCreate`.
#[derive(Debug)]
struct Physical {
    device: u32,
    /// Whether the handle is still held, not released.
    held: bool,
    mappings: u32,
    pages: Pages,
    _charge: Charge,
    /// The key of the first byte.
    key: u64,
}

#[derive(Debug)]
pub(crate) struct VirtualMemory {
    granularity: u64,
    shift: u32,
    /// By address.
    reservations: Vec<Reservation>,
    next: u64,
    physical: Vec<Option<Physical>>,
    /// Unused entries of `physical`.
    vacant: Vec<u32>,
    handles: HashMap<u64, u32>,
    next_key: u64,
}

impl VirtualMemory {
    pub(super) fn new(granularity: u64) -> Self {
        Self {
            granularity,
            shift: granularity.trailing_zeros(),
            reservations: Vec::new(),
            next: VIRTUAL_START + granularity,
            physical: Vec::new(),
            vacant: Vec::new(),
            handles: HashMap::new(),
            next_key: KEYS_START,
        }
    }

    pub(crate) fn granularity(&self) -> u64 {
        self.granularity
    }

    pub(crate) fn reservations(&self) -> &[Reservation] {
        &self.reservations
    }

    pub(crate) fn mapping_count(&self) -> usize {
        self.reservations.iter().map(|reservation| reservation.mappings.len()).sum()
    }

    /// The reservation of a mapped address: its start, its length, and the device whose memory is
    /// mapped at the address.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, u64, u32)> {
        let next = self.reservations.partition_point(|reservation| reservation.base <= address);
        let reservation = &self.reservations[next.checked_sub(1)?];
        let (&start, &(bytes, index)) = reservation.mappings.range(..=address).next_back()?;
        let device = self.physical.get(index as usize)?.as_ref()?.device;
        (address - start < bytes).then_some((reservation.base, reservation.bytes, device))
    }

    /// The number of mappings that begin in a range, and their bytes.
    pub(crate) fn mappings_in(&self, address: u64, bytes: u64) -> (u64, u64) {
        let end = address.saturating_add(bytes);
        let next = self.reservations.partition_point(|reservation| reservation.base <= address);
        let reservation = next.checked_sub(1).map(|index| &self.reservations[index]);
        let inside = reservation.map(|reservation| reservation.mappings.range(address..end));
        inside
            .into_iter()
            .flatten()
            .fold((0, 0), |(count, sum), (_, (bytes, _))| (count + 1, sum + bytes))
    }

    /// Size of the physical memory of a handle, in bytes.
    pub(crate) fn handle_bytes(&self, handle: u64) -> Option<u64> {
        self.handles.get(&handle).map(|&index| self.pages(index).bytes())
    }

    /// The mapped pages of a range, by address. With `denied`, only those that no device may
    /// access.
    pub(crate) fn mapped_pages(&self, address: u64, bytes: u64, denied: bool) -> Vec<u64> {
        let Ok(holding) = self.holding(address, bytes) else { return Vec::new() };
        let reservation = &self.reservations[holding];
        let first = ((address - reservation.base) >> self.shift) as usize;
        let entries = &reservation.entries[first..first + (bytes >> self.shift) as usize];
        let wanted = |entry: &PageEntry| entry[0] != 0 && (!denied || entry[1] == MAPPED);
        let pages = entries.iter().enumerate().filter(|(_, entry)| wanted(entry));
        pages.map(|(page, _)| address + ((page as u64) << self.shift)).collect()
    }

    pub(crate) fn handle_count(&self) -> usize {
        self.handles.len()
    }

    pub(crate) fn physical_bytes(&self) -> u64 {
        self.physical.iter().flatten().map(|physical| physical.pages.bytes()).sum()
    }

    #[inline]
    pub(super) fn locate(&self, viewer: Viewer, address: u64) -> Result<(Located, u64), Denied> {
        let next = self.reservations.partition_point(|reservation| reservation.base <= address);
        let index = next.checked_sub(1).ok_or(Denied::Nothing)?;
        let reservation = &self.reservations[index];
        let offset = address - reservation.base;
        let entry =
            reservation.entries.get((offset >> self.shift) as usize).ok_or(Denied::Nothing)?;
        let [target, rights] = *entry;
        if rights & viewer.mappings == 0 {
            return Err(if target == 0 { Denied::Unmapped } else { Denied::NoAccess });
        }
        let in_page = offset & (self.granularity - 1);
        let place = Located::Physical {
            index: (target >> 32) as u32 - 1,
            offset: ((target & 0xffff_ffff) << self.shift) + in_page,
        };
        Ok((place, self.granularity - in_page))
    }

    #[inline]
    pub(super) fn pages(&self, index: u32) -> &Pages {
        &self.physical(index).pages
    }

    pub(super) fn pages_mut(&mut self, index: u32) -> &mut Pages {
        match &mut self.physical[index as usize] {
            Some(physical) => &mut physical.pages,
            None => unreachable!("a mapping keeps its physical memory alive"),
        }
    }

    /// The key of the first byte of physical memory.
    pub(super) fn key(&self, index: u32) -> u64 {
        self.physical(index).key
    }

    #[inline]
    fn physical(&self, index: u32) -> &Physical {
        match &self.physical[index as usize] {
            Some(physical) => physical,
            None => unreachable!("a handle or mapping keeps its physical memory alive"),
        }
    }

    fn is_aligned(&self, address: u64, bytes: u64) -> bool {
        bytes > 0 && (address | bytes) & (self.granularity - 1) == 0
    }

    /// The reservation that contains a whole, non-empty, aligned range.
    fn holding(&self, address: u64, bytes: u64) -> Result<usize, ErrorCode> {
        if !self.is_aligned(address, bytes) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let next = self.reservations.partition_point(|reservation| reservation.base <= address);
        let index = next.checked_sub(1).ok_or(ErrorCode::INVALID_VALUE)?;
        if !self.reservations[index].contains(address, bytes) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        Ok(index)
    }

    pub(crate) fn reserve(
        &mut self,
        bytes: u64,
        alignment: u64,
        hint: u64,
    ) -> Result<u64, ErrorCode> {
        let is_odd = alignment != 0 && !alignment.is_power_of_two();
        if is_odd || !self.is_aligned(hint, bytes) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let alignment = alignment.max(self.granularity);
        if bytes > RESERVATION_BYTES_MAX || alignment > RESERVATION_BYTES_MAX {
            return Err(ErrorCode::OUT_OF_MEMORY);
        }
        let pages = bytes >> self.shift;
        let reserved: u64 = self.reservations.iter().map(|other| other.entries.len() as u64).sum();
        let is_large = reserved + pages > RESERVED_PAGES_MAX;
        if guard!("sim.reservations-bounded", is_large, else false) {
            return Err(ErrorCode::OUT_OF_MEMORY);
        }
        let base = if self.is_free(hint, bytes, alignment) {
            hint
        } else {
            let base = self.next.next_multiple_of(alignment);
            if base + bytes > VIRTUAL_END {
                return Err(ErrorCode::OUT_OF_MEMORY);
            }
            base
        };
        // Leaves a gap of one page, so that an access past the end hits no memory.
        self.next = self.next.max(base + bytes + self.granularity);
        let place = self.reservations.partition_point(|other| other.base < base);
        let entries = vec![[0; 2]; pages as usize];
        let reservation = Reservation { base, bytes, entries, mappings: BTreeMap::new() };
        self.reservations.insert(place, reservation);
        Ok(base)
    }

    /// Whether the address hint can be used.
    fn is_free(&self, hint: u64, bytes: u64, alignment: u64) -> bool {
        let fits = (VIRTUAL_START..=VIRTUAL_END - bytes).contains(&hint);
        fits && hint.is_multiple_of(alignment)
            && self
                .reservations
                .iter()
                .all(|other| hint + bytes <= other.base || other.base + other.bytes <= hint)
    }

    pub(crate) fn map(
        &mut self,
        address: u64,
        bytes: u64,
        offset: u64,
        handle: u64,
    ) -> Result<(), ErrorCode> {
        let &index = self.handles.get(&handle).ok_or(ErrorCode::INVALID_VALUE)?;
        // The driver maps only whole handles.
        if bytes != 0 && (offset != 0 || bytes != self.pages(index).bytes()) {
            return Err(ErrorCode::NOT_SUPPORTED);
        }
        let holding = self.holding(address, bytes)?;
        let reservation = &mut self.reservations[holding];
        let first = ((address - reservation.base) >> self.shift) as usize;
        let entries = &mut reservation.entries[first..first + (bytes >> self.shift) as usize];
        if entries.iter().any(|entry| entry[0] != 0) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        for (page, entry) in entries.iter_mut().enumerate() {
            *entry = [(u64::from(index) + 1) << 32 | page as u64, MAPPED];
        }
        reservation.mappings.insert(address, (bytes, index));
        if let Some(physical) = &mut self.physical[index as usize] {
            physical.mappings += 1;
        }
        Ok(())
    }

    fn add(&mut self, handle: u64, device: u32, pages: Pages, charge: Charge) {
        let key = self.next_key;
        self.next_key += pages.bytes().next_multiple_of(KEYS_ALIGNMENT);
        let physical =
            Some(Physical { device, held: true, mappings: 0, pages, _charge: charge, key });
        let index = match self.vacant.pop() {
            Some(index) => {
                self.physical[index as usize] = physical;
                index
            }
            None => {
                self.physical.push(physical);
                (self.physical.len() - 1) as u32
            }
        };
        self.handles.insert(handle, index);
    }

    /// Start addresses of the mappings in a range. Fails if the range splits a mapping.
    fn whole_mappings(
        reservation: &Reservation,
        address: u64,
        bytes: u64,
    ) -> Result<Vec<u64>, ErrorCode> {
        let end = address + bytes;
        let before = reservation.mappings.range(..address).next_back();
        if before.is_some_and(|(&start, &(length, _))| start + length > address) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let inside = reservation.mappings.range(address..end);
        inside
            .map(
                |(&start, &(length, _))| {
                    if start + length > end { Err(ErrorCode::INVALID_VALUE) } else { Ok(start) }
                },
            )
            .collect()
    }

    pub(crate) fn set_access(
        &mut self,
        address: u64,
        bytes: u64,
        devices: &[u32],
        can_access: impl Fn(u32, u32) -> bool,
    ) -> Result<(), ErrorCode> {
        let holding = self.holding(address, bytes)?;
        let reservation = &self.reservations[holding];
        let starts = Self::whole_mappings(reservation, address, bytes)?;
        let mut mapped = 0;
        for start in starts {
            let (length, index) = reservation.mappings[&start];
            mapped += length;
            let owner = self.physical[index as usize].as_ref().map(|physical| physical.device);
            let in_reach = |device: &u32| {
                owner.is_none_or(|owner| owner == *device || can_access(*device, owner))
            };
            if !devices.iter().all(in_reach) {
                return Err(ErrorCode::INVALID_VALUE);
            }
        }
        if devices.is_empty() || mapped != bytes {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let rights = devices.iter().fold(0, |rights, device| rights | 1 << device);
        let reservation = &mut self.reservations[holding];
        let first = ((address - reservation.base) >> self.shift) as usize;
        for entry in &mut reservation.entries[first..first + (bytes >> self.shift) as usize] {
            entry[1] |= rights;
        }
        Ok(())
    }
}

impl Memory {
    pub(crate) fn address_free(&mut self, address: u64, bytes: u64) -> Result<(), ErrorCode> {
        let virtual_memory = &mut self.virtual_memory;
        let found = virtual_memory.reservations.binary_search_by_key(&address, |r| r.base);
        let index = found.map_err(|_| ErrorCode::INVALID_VALUE)?;
        let reservation = &virtual_memory.reservations[index];
        if reservation.bytes != bytes || !reservation.mappings.is_empty() {
            return Err(ErrorCode::INVALID_VALUE);
        }
        virtual_memory.reservations.remove(index);
        self.remember_freed(RangeKind::Reservation, address, bytes);
        Ok(())
    }

    /// Creates physical memory on `device`, under the new handle `handle`.
    pub(crate) fn create(&mut self, handle: u64, device: u32, bytes: u64) -> Result<(), ErrorCode> {
        if !self.virtual_memory.is_aligned(0, bytes) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        if bytes >> self.virtual_memory.shift > HANDLE_PAGES_MAX {
            return Err(ErrorCode::OUT_OF_MEMORY);
        }
        let charge = self.take(device, bytes)?;
        let pages = Pages::new(bytes, self.virtual_memory.shift, self.fresh());
        self.virtual_memory.add(handle, device, pages, charge);
        Ok(())
    }

    pub(crate) fn release(&mut self, handle: u64) -> Result<(), ErrorCode> {
        let index = self.virtual_memory.handles.remove(&handle).ok_or(ErrorCode::INVALID_VALUE)?;
        if let Some(physical) = &mut self.virtual_memory.physical[index as usize] {
            physical.held = false;
        }
        self.drop_unused(index);
        Ok(())
    }

    pub(crate) fn can_unmap(&self, address: u64, bytes: u64) -> Result<(), ErrorCode> {
        let holding = self.virtual_memory.holding(address, bytes)?;
        let reservation = &self.virtual_memory.reservations[holding];
        VirtualMemory::whole_mappings(reservation, address, bytes).map(drop)
    }

    pub(crate) fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), ErrorCode> {
        let virtual_memory = &mut self.virtual_memory;
        let holding = virtual_memory.holding(address, bytes)?;
        let reservation = &mut virtual_memory.reservations[holding];
        let starts = VirtualMemory::whole_mappings(reservation, address, bytes)?;
        let mut unused = Vec::with_capacity(starts.len());
        for start in starts {
            let Some((length, index)) = reservation.mappings.remove(&start) else { continue };
            let first = ((start - reservation.base) >> virtual_memory.shift) as usize;
            let count = (length >> virtual_memory.shift) as usize;
            reservation.entries[first..first + count].fill([0; 2]);
            if let Some(physical) = &mut virtual_memory.physical[index as usize] {
                physical.mappings -= 1;
            }
            unused.push(index);
        }
        for index in unused {
            self.drop_unused(index);
        }
        Ok(())
    }

    /// Frees physical memory that no handle and no mapping keeps.
    fn drop_unused(&mut self, index: u32) {
        let place = &mut self.virtual_memory.physical[index as usize];
        let unused = place.take_if(|physical| !physical.held && physical.mappings == 0);
        if unused.is_some() {
            self.virtual_memory.vacant.push(index);
        }
    }
}
