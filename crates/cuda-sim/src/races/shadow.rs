//! The last accesses to all bytes, by ranges.
//!
//! A byte's key is its location, not its address: physical memory has one key, however often it is
//! mapped. Each page of keys has a short sorted list of segments, each with the accesses that may
//! still conflict with a later one.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use smallvec::SmallVec;

use cuda_driver::guard;

use super::epoch::{Epoch, How, Order};

/// Kept accesses of one range: the reads and writes that no other kept access covers.
pub(super) type Accesses = SmallVec<[Epoch; 2]>;

/// A run of bytes with the same accesses, as offsets in the page.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Segment {
    start: u32,
    end: u32,
    accesses: Accesses,
}

/// Accesses through one page of addresses, mapped to this page of bytes.
#[derive(Debug)]
struct Via {
    /// Number of the address page.
    page: u64,
    users: Accesses,
}

#[derive(Debug, Default)]
struct ShadowPage {
    segments: Vec<Segment>,
    vias: SmallVec<[Via; 1]>,
}

/// A hasher for page numbers. They are dense, so one multiplication suffices.
#[derive(Debug, Default)]
pub(super) struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

/// The part of a range inside one page.
#[derive(Clone, Copy, Debug)]
struct ShadowPart {
    /// Number of the page, and its first key.
    page: u64,
    base: u64,
    /// Offsets in the page.
    range: (u32, u32),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Clash {
    pub(super) earlier: Epoch,
    /// First key that both touched, and the number of bytes from there.
    pub(super) key: u64,
    pub(super) bytes: u64,
}

/// The last accesses to all memory.
#[derive(Debug)]
pub(super) struct Shadow {
    shift: u32,
    pages: HashMap<u64, ShadowPage, BuildHasherDefault<PageHasher>>,
    segments: usize,
}

impl Shadow {
    /// Creates a shadow with pages of `1 << shift` bytes.
    pub(super) fn new(shift: u32) -> Self {
        Self { shift, pages: HashMap::default(), segments: 0 }
    }

    pub(super) fn segments(&self) -> usize {
        self.segments
    }

    pub(super) fn page_bytes(&self) -> u64 {
        1 << self.shift
    }

    fn parts(&self, (key, bytes): (u64, u64)) -> impl Iterator<Item = ShadowPart> + use<> {
        let (shift, end) = (self.shift, key.saturating_add(bytes));
        (key >> shift..end.div_ceil(1 << shift)).map(move |page| {
            let base = page << shift;
            let (from, to) = (key.max(base) - base, (end - base).min(1 << shift));
            ShadowPart { page, base, range: (from as u32, to as u32) }
        })
    }

    /// Records access `epoch` of `order` to a range. For a mapping, `address` is the start of the
    /// used addresses. Calls `clash` for each earlier conflicting access that is not ordered before
    /// it.
    pub(super) fn access(
        &mut self,
        range: (u64, u64),
        address: Option<u64>,
        epoch: Epoch,
        order: &Order,
        mut clash: impl FnMut(Clash),
    ) {
        for ShadowPart { page: number, base, range: part } in self.parts(range) {
            let page = self.pages.entry(number).or_default();
            if let Some(address) = address {
                // Keys and addresses have the same offset in their pages.
                let first = address >> self.shift;
                page.reached(first + (number - (range.0 >> self.shift)), order);
            }
            let before = page.segments.len();
            page.access(part, epoch, order, &mut |earlier, from, to| {
                clash(Clash { earlier, key: base + u64::from(from), bytes: u64::from(to - from) });
            });
            self.segments = self.segments + page.segments.len() - before;
        }
    }

    /// Forgets a range whose memory was replaced.
    pub(super) fn forget(&mut self, range: (u64, u64)) {
        for ShadowPart { page: number, range, .. } in self.parts(range) {
            let Some(page) = self.pages.get_mut(&number) else { continue };
            let before = page.segments.len();
            page.replace(range, |piece| piece.accesses.clear());
            self.segments = self.segments + page.segments.len() - before;
            if page.is_empty() {
                self.pages.remove(&number);
            }
        }
    }

    /// Calls `clash` for each access to a range that conflicts with `epoch` and is not ordered
    /// before it. Records nothing.
    pub(super) fn compare(
        &self,
        range: (u64, u64),
        epoch: Epoch,
        order: &Order,
        mut clash: impl FnMut(Clash),
    ) {
        for ShadowPart { page: number, base, range: (from, to) } in self.parts(range) {
            let page = self.pages.get(&number);
            for segment in page.map_or(&[][..], |page| &page.segments) {
                let (low, high) = (segment.start.max(from), segment.end.min(to));
                if low >= high {
                    continue;
                }
                for &earlier in &segment.accesses {
                    if earlier.conflicts(epoch) && !order.is_after(earlier) {
                        let (key, bytes) = (base + u64::from(low), u64::from(high - low));
                        clash(Clash { earlier, key, bytes });
                    }
                }
            }
        }
    }

    /// Records that an address page no longer maps the page of `key`, and returns the accesses made
    /// through it.
    pub(super) fn unmapped(&mut self, key: u64, page: u64) -> Accesses {
        let Some(found) = self.pages.get_mut(&(key >> self.shift)) else {
            return Accesses::new();
        };
        let index = found.vias.iter().position(|via| via.page == page);
        let users = index.map(|index| found.vias.swap_remove(index).users).unwrap_or_default();
        if found.is_empty() {
            self.pages.remove(&(key >> self.shift));
        }
        users
    }

    /// The ranges of the page of `key` that a call touched and that no later access covers, as
    /// offsets in the page, lengths and uses.
    pub(super) fn touched_by(&self, key: u64, sequence: u64) -> Vec<(u64, u64, How)> {
        let page = self.pages.get(&(key >> self.shift));
        let segments = page.map_or(&[][..], |page| &page.segments);
        let pieces = segments.iter().flat_map(|segment| {
            let (start, bytes) = (segment.start.into(), (segment.end - segment.start).into());
            let of_call = segment.accesses.iter().filter(move |epoch| epoch.sequence() == sequence);
            of_call.map(move |epoch| (start, bytes, epoch.how()))
        });
        pieces.collect()
    }

    pub(super) fn clear(&mut self) {
        self.pages.clear();
        self.segments = 0;
    }

    /// Keeps only the accesses for which `keeps` returns true.
    pub(super) fn retain(&mut self, mut keeps: impl FnMut(Epoch) -> bool) {
        let mut segments = 0;
        self.pages.retain(|_, page| {
            for segment in &mut page.segments {
                segment.accesses.retain(|epoch| keeps(*epoch));
            }
            page.segments.retain(|segment| !segment.accesses.is_empty());
            page.segments.shrink_to_fit();
            segments += page.segments.len();
            for via in &mut page.vias {
                via.users.retain(|epoch| keeps(*epoch));
            }
            page.vias.retain(|via| !via.users.is_empty());
            !page.is_empty()
        });
        self.segments = segments;
    }

    /// Calls `visit` with the number of every call that is kept.
    pub(super) fn each(&self, mut visit: impl FnMut(u64)) {
        for page in self.pages.values() {
            let accesses = page.segments.iter().flat_map(|segment| &segment.accesses);
            let users = page.vias.iter().flat_map(|via| &via.users);
            accesses.chain(users).for_each(|epoch| visit(epoch.sequence()));
        }
    }
}

/// Replaces the newest access by a new one of the same actor and kind. All other kept accesses were
/// there before the replaced one, and what was ordered before the replaced one is ordered before
/// the new one.
#[inline]
fn renews(accesses: &mut Accesses, epoch: Epoch) -> bool {
    match accesses.last_mut() {
        Some(last) if last.is_like(epoch) => {
            *last = epoch;
            true
        }
        _ => false,
    }
}

/// Adds an access to those of one range, replacing those that it covers.
#[inline]
fn keep(accesses: &mut Accesses, epoch: Epoch, order: &Order) {
    if renews(accesses, epoch) {
        return;
    }
    accesses.retain(|earlier| !(earlier.is_covered_by(epoch) && order.is_after(*earlier)));
    accesses.push(epoch);
}

/// Like `add`, but first calls `clash` for the conflicting unordered accesses. They are reported
/// once, so they need not be kept.
#[inline]
fn meet(accesses: &mut Accesses, epoch: Epoch, order: &Order, mut clash: impl FnMut(Epoch)) {
    if renews(accesses, epoch) {
        return;
    }
    accesses.retain(|earlier| {
        let is_after = order.is_after(*earlier);
        let conflicts = earlier.conflicts(epoch);
        if conflicts && !is_after {
            clash(*earlier);
        }
        !(earlier.is_covered_by(epoch) && (is_after || conflicts))
    });
    accesses.push(epoch);
}

impl ShadowPage {
    fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.vias.is_empty()
    }

    /// Records that `order` reaches the bytes through an address page.
    fn reached(&mut self, page: u64, order: &Order) {
        // An unmapping conflicts with both reads and writes.
        let epoch = Epoch::new(order.actor, order.sequence, How::READ);
        match self.vias.iter_mut().find(|via| via.page == page) {
            Some(via) => keep(&mut via.users, epoch, order),
            None => self.vias.push(Via { page, users: Accesses::from_elem(epoch, 1) }),
        }
    }

    /// The number of segments from `at` that exactly fill the range, without gaps; `None` if they
    /// do not.
    fn whole_segments(&self, at: usize, start: u32, end: u32) -> Option<usize> {
        let mut next = start;
        for (count, segment) in self.segments[at..].iter().enumerate() {
            if segment.start != next || segment.end > end {
                return None;
            }
            next = segment.end;
            if guard!("sim.whole-segments", next == end, else next <= end) {
                return Some(count + 1);
            }
        }
        None
    }

    fn access(
        &mut self,
        (start, end): (u32, u32),
        epoch: Epoch,
        order: &Order,
        clash: &mut impl FnMut(Epoch, u32, u32),
    ) {
        let at = self.segments.partition_point(|segment| segment.end <= start);
        // Most accesses cover whole blocks that were accessed before.
        if let Some(count) = self.whole_segments(at, start, end) {
            for segment in &mut self.segments[at..at + count] {
                let (from, to) = (segment.start, segment.end);
                meet(&mut segment.accesses, epoch, order, |earlier| clash(earlier, from, to));
            }
            return;
        }
        match self.segments.get(at) {
            // No segment is in the range.
            next if next.is_none_or(|segment| segment.start >= end) => {
                let accesses = Accesses::from_elem(epoch, 1);
                self.segments.insert(at, Segment { start, end, accesses });
            }
            _ => self.replace((start, end), |piece| {
                let (from, to) = (piece.start, piece.end);
                meet(&mut piece.accesses, epoch, order, |earlier| clash(earlier, from, to));
            }),
        }
    }

    /// Splits the segments at both ends of a range and lets `change` change those inside; a gap is
    /// passed as a segment without accesses. Then joins equal neighbours and drops segments without
    /// accesses.
    fn replace(&mut self, (start, end): (u32, u32), mut change: impl FnMut(&mut Segment)) {
        let first = self.segments.partition_point(|segment| segment.end <= start);
        let last = first + self.segments[first..].partition_point(|segment| segment.start < end);
        let mut pieces: SmallVec<[Segment; 8]> = SmallVec::new();
        let mut push = |piece: Segment| {
            if piece.accesses.is_empty() || piece.start >= piece.end {
                return;
            }
            match pieces.last_mut() {
                Some(last) if last.end == piece.start && last.accesses == piece.accesses => {
                    last.end = piece.end;
                }
                _ => pieces.push(piece),
            }
        };
        let mut at = start;
        let mut inside = |start: u32, end: u32, accesses: Accesses| {
            let mut piece = Segment { start, end, accesses };
            change(&mut piece);
            piece
        };
        for segment in &self.segments[first..last] {
            let (low, high) = (segment.start.max(start), segment.end.min(end));
            let part = |start, end| Segment { start, end, accesses: segment.accesses.clone() };
            push(part(segment.start, low));
            if at < low {
                push(inside(at, low, Accesses::new()));
            }
            push(inside(low, high, segment.accesses.clone()));
            at = high;
            push(part(high, segment.end));
        }
        if at < end {
            push(inside(at, end, Accesses::new()));
        }
        self.segments.splice(first..last, pieces);
    }
}
