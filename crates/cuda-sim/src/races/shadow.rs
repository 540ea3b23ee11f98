//! Who accessed which bytes last, by ranges.
//!
//! Bytes are keyed by where they lie, not by an address: physical memory has one key however often it is
//! mapped. A page of keys has a short sorted list of segments, each with the accesses that a later one
//! may still conflict with.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use smallvec::SmallVec;

use super::epoch::{Epoch, How, Order};

/// Accesses that are kept of one range: the writes and reads that nothing kept covers.
pub(super) type Accesses = SmallVec<[Epoch; 2]>;

/// Bytes with the same accesses, by their offsets in the page.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Segment {
    start: u32,
    end: u32,
    accesses: Accesses,
}

/// Accesses by way of one page of addresses, which a mapping put over this page of bytes.
#[derive(Debug)]
struct Via {
    /// Number of the page of addresses.
    page: u64,
    users: Accesses,
}

#[derive(Debug, Default)]
struct ShadowPage {
    segments: Vec<Segment>,
    vias: SmallVec<[Via; 1]>,
}

/// Mixes the numbers of pages, which are dense, by one multiplication.
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

/// Some of a range, in one page.
#[derive(Clone, Copy, Debug)]
struct ShadowPart {
    /// Number of the page, and its first key.
    page: u64,
    base: u64,
    /// Offsets in the page.
    range: (u32, u32),
}

/// Two accesses that nothing orders.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Clash {
    pub(super) earlier: Epoch,
    /// First key that both touched, and how many bytes from there on.
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
    /// Pages of `1 << shift` bytes.
    pub(super) fn new(shift: u32) -> Self {
        Self { shift, pages: HashMap::default(), segments: 0 }
    }

    pub(super) fn segments(&self) -> usize {
        self.segments
    }

    pub(super) fn page_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// The parts of a range that lie in one page each.
    fn parts(&self, (key, bytes): (u64, u64)) -> impl Iterator<Item = ShadowPart> + use<> {
        let (shift, end) = (self.shift, key.saturating_add(bytes));
        (key >> shift..end.div_ceil(1 << shift)).map(move |page| {
            let base = page << shift;
            let (from, to) = (key.max(base) - base, (end - base).min(1 << shift));
            ShadowPart { page, base, range: (from as u32, to as u32) }
        })
    }

    /// Notes that `order` accesses a range, which is `epoch`, by way of the addresses from `address` on where
    /// a mapping leads to it, and hands `clash` each earlier access that it conflicts with and that is not
    /// ordered before it.
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
                // Keys and addresses lie alike in their pages.
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

    /// Forgets a range that no longer is what it was.
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

    /// Hands `clash` each access of a range that conflicts with `epoch` and is not ordered before it,
    /// and notes nothing.
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

    /// Notes that a page of addresses leads to the page of `key` no longer, and returns who used it so.
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

    /// What a call touched of the page of `key`, as offsets in the page, lengths and uses: as far as
    /// nothing that came later covers it.
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

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.pages.clear();
        self.segments = 0;
    }

    /// Keeps of all accesses those that `keeps` wants, which are those that may still matter.
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

/// Puts an access in the place of the newest, where its actor did the same then: all others were there then
/// too, and what came before that one comes before this one.
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

/// Adds an access to those of one range, in place of those that it covers.
#[inline]
fn keep(accesses: &mut Accesses, epoch: Epoch, order: &Order) {
    if renews(accesses, epoch) {
        return;
    }
    accesses.retain(|earlier| !(earlier.is_covered_by(epoch) && order.is_after(*earlier)));
    accesses.push(epoch);
}

/// The same, after handing `clash` those that it conflicts with, unordered. They are told once, so
/// they need not be kept.
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

    /// Notes that `order` reaches the bytes by a page of addresses.
    fn reached(&mut self, page: u64, order: &Order) {
        // Whoever unmaps conflicts with reads and writes alike.
        let epoch = Epoch::new(order.actor, order.sequence, How::READ);
        match self.vias.iter_mut().find(|via| via.page == page) {
            Some(via) => keep(&mut via.users, epoch, order),
            None => self.vias.push(Via { page, users: Accesses::from_elem(epoch, 1) }),
        }
    }

    /// How many segments from `at` on make up a range, none of them in part and without a gap.
    fn whole_segments(&self, at: usize, start: u32, end: u32) -> Option<usize> {
        let mut next = start;
        for (count, segment) in self.segments[at..].iter().enumerate() {
            if segment.start != next || segment.end > end {
                return None;
            }
            next = segment.end;
            if next == end {
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
        // Most accesses are of whole blocks that were accessed before.
        if let Some(count) = self.whole_segments(at, start, end) {
            for segment in &mut self.segments[at..at + count] {
                let (from, to) = (segment.start, segment.end);
                meet(&mut segment.accesses, epoch, order, |earlier| clash(earlier, from, to));
            }
            return;
        }
        match self.segments.get(at) {
            // Nothing there.
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

    /// Cuts the segments at both ends of a range, lets `change` change those inside, gaps among them as
    /// segments of no accesses, and joins neighbours that are alike. What has no accesses goes.
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
