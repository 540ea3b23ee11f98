//! The memory accesses of operations and of the host, as they happen.

use cuda_driver::guard;

use super::{
    Accesses, CHANGES_AT, CHANGES_MAX, CallName, Change, Clash, Epoch, Found, HOST, HOST_ACCESS,
    How, Order, RaceActor, RaceCheck, RaceUse, Races, SEGMENTS_MAX, SWEEP_AT,
};
use crate::RangeKind;
use crate::memory::{Memory, Viewer};

/// Maximum number of races of one operation that are examined further.
pub(super) const FOUND_MAX: usize = 4096;

/// Maximum number of pieces of memory reported for one pair of accesses.
const PIECES_MAX: usize = 4;

fn used(how: How) -> RaceUse {
    if how.writes { RaceUse::Write } else { RaceUse::Read }
}

impl Races {
    /// Records that an operation accesses a range. `viewer` may access all of the range.
    pub(crate) fn touched(
        &mut self,
        memory: &Memory,
        order: &Order,
        viewer: Viewer,
        (address, bytes): (u64, u64),
        how: How,
    ) {
        self.changed_since(order, how, (address, bytes));
        let mut done = 0;
        while done < bytes {
            let at = address + done;
            let Some(piece) = memory.piece_at(viewer, at) else { return };
            let length = piece.bytes.min(bytes - done);
            let by_way = piece.is_mapped.then_some(at);
            let how = if piece.is_host { how } else { how.on_device() };
            let epoch = Epoch::new(order.actor, order.sequence, how);
            let found = &mut self.found;
            self.shadow.access((piece.key, length), by_way, epoch, order, |clash| {
                note(found, clash, at + (clash.key - piece.key), order.sequence, used(how));
            });
            done += length;
        }
    }

    /// Reports calls that began or ended memory at these addresses after the operation was
    /// enqueued. They race with the operation, whatever is at the addresses now.
    fn changed_since(&mut self, order: &Order, how: How, (address, bytes): (u64, u64)) {
        let end = address.saturating_add(bytes);
        let since = self.changes.iter().rev().take_while(
            |change| guard!("sim.ended-since", change.sequence > order.sequence, else false),
        );
        // The first of several such calls is reported: the operation had to come before it, or
        // after it.
        let first = since.filter(|change| change.start < end && address < change.end).last();
        let Some(&Change { start, end: stop, sequence, used: later_use, .. }) = first else {
            return;
        };
        let address = address.max(start);
        self.find(Found {
            earlier: order.sequence,
            earlier_use: used(how),
            later: sequence,
            later_use,
            address,
            bytes: end.min(stop) - address,
        });
    }

    /// Records that the host reads or writes pinned memory. A device never accesses other host
    /// memory.
    pub(crate) fn host_accessed(
        &mut self,
        memory: &Memory,
        sequence: u64,
        range: (u64, u64),
        how: How,
    ) {
        let pinned = memory.host.pinned_parts(range);
        if !self.is_on() || pinned.is_empty() {
            return;
        }
        self.note_call(sequence, CallName::Fixed(HOST_ACCESS), RaceActor::Host);
        let order = self.host_order(sequence);
        let found = &mut self.found;
        let epoch = Epoch::new(HOST, sequence, how);
        for part in pinned {
            self.shadow.access(part, None, epoch, &order, |clash| {
                note(found, clash, clash.key, sequence, used(how));
            });
        }
    }

    /// Records that a host call frees the memory of a range whose addresses are also its keys in
    /// the shadow. The host must know that every user of the memory has completed.
    pub(crate) fn freed(
        &mut self,
        (call, sequence): (&'static str, u64),
        kind: RangeKind,
        (address, bytes): (u64, u64),
    ) {
        if !self.is_on() {
            return;
        }
        self.note_call(sequence, CallName::Fixed(call), RaceActor::Host);
        let order = self.host_order(sequence);
        let epoch = Epoch::new(HOST, sequence, How::WRITE);
        let found = &mut self.found;
        self.shadow.compare((address, bytes), epoch, &order, |clash| {
            note(found, clash, clash.key, sequence, RaceUse::End);
        });
        self.shadow.forget((address, bytes));
        guard!(
            "sim.free-remembered",
            self.note_change((address, bytes), sequence, RaceUse::End, Some(kind))
        );
    }

    /// Records that a call gives a device its first access to mapped memory, in pages at these
    /// addresses.
    pub(crate) fn mapped(
        &mut self,
        (call, sequence): (&'static str, u64),
        pages: &[u64],
        page_bytes: u64,
    ) {
        if !self.is_on() || pages.is_empty() {
            return;
        }
        self.note_call(sequence, CallName::Fixed(call), RaceActor::Host);
        for &page in pages {
            guard!(
                "sim.mapping-noted",
                self.note_change((page, page_bytes), sequence, RaceUse::Map, None)
            );
        }
    }

    /// Records that a call is about to unmap pages of addresses.
    pub(crate) fn unmapping(
        &mut self,
        memory: &Memory,
        (call, sequence): (&'static str, u64),
        pages: &[u64],
    ) {
        if !self.is_on() || pages.is_empty() {
            return;
        }
        self.note_call(sequence, CallName::Fixed(call), RaceActor::Host);
        let order = self.host_order(sequence);
        let page_bytes = self.shadow.page_bytes();
        self.each_page(memory, pages, |races, key, page| {
            for user in races.shadow.unmapped(key, page) {
                if guard!("sim.unmapped-under", !order.is_after(user), else false) {
                    races.unmapped_under(user.sequence(), sequence, (key, page * page_bytes));
                }
            }
        });
        let granularity = memory.virtual_memory.granularity();
        for &page in pages {
            guard!(
                "sim.unmapping-remembered",
                self.note_change((page, granularity), sequence, RaceUse::End, None)
            );
        }
    }

    /// Reports that a page was unmapped under an operation that the host does not know to be
    /// complete.
    fn unmapped_under(&mut self, earlier: u64, later: u64, (key, address): (u64, u64)) {
        let later_use = RaceUse::End;
        let touched = self.shadow.touched_by(key, earlier);
        // Earlier accesses that later ones cover are no longer known, so the whole page is named.
        let whole = (0, self.shadow.page_bytes(), RaceUse::Use);
        let some = touched.iter().map(|&(offset, bytes, how)| (offset, bytes, used(how)));
        let whole = Some(whole).filter(|_| touched.is_empty());
        for (offset, bytes, earlier_use) in some.chain(whole) {
            let address = address + offset;
            self.find(Found { earlier, earlier_use, later, later_use, address, bytes });
        }
    }

    /// Calls `visit` with the key and the page number of each shadow page inside the virtual memory
    /// pages at these addresses.
    fn each_page(
        &mut self,
        memory: &Memory,
        pages: &[u64],
        mut visit: impl FnMut(&mut Self, u64, u64),
    ) {
        let page_bytes = self.shadow.page_bytes();
        for &start in pages {
            let Some(piece) = memory.piece_at(Viewer::ANY, start) else { continue };
            for offset in (0..piece.bytes).step_by(page_bytes as usize) {
                visit(self, piece.key + offset, (start + offset) / page_bytes);
            }
        }
    }

    /// Records that a launch uses a module's kernels.
    pub(crate) fn uses_module(&mut self, module: u64, order: &Order) {
        let users: &mut Accesses = self.modules.entry(module).or_default();
        users.retain(|user| user.actor() != order.actor);
        let user = Epoch::new(order.actor, order.sequence, How::READ);
        guard!("sim.launch-uses-module", users.push(user));
    }

    /// Forgets a module that ended with its context. The end of the context is reported instead.
    pub(crate) fn forget_module(&mut self, module: u64) {
        self.modules.remove(&module);
    }

    pub(crate) fn unloaded(&mut self, call: (&'static str, u64), module: u64) {
        let users = self.modules.remove(&module).unwrap_or_default();
        self.all_ended(call, &users);
    }

    /// Records that a call ends a device's context. The host must know that every user of the
    /// context has completed.
    pub(crate) fn context_ended(&mut self, call: (&'static str, u64), device: u32) {
        let users: Accesses = (1u16..)
            .zip(&self.actors[1..])
            .filter(|(_, actor)| actor.device == device && actor.last > 0)
            .map(|(number, actor)| Epoch::new(number, actor.last, How::READ))
            .collect();
        self.all_ended(call, &users);
        self.device_stopped(device);
    }

    fn all_ended(&mut self, (call, sequence): (&'static str, u64), users: &[Epoch]) {
        let order = self.host_order(sequence);
        let late: Accesses = users.iter().copied().filter(|&user| !order.is_after(user)).collect();
        if !self.is_on() || late.is_empty() {
            return;
        }
        self.note_call(sequence, CallName::Fixed(call), RaceActor::Host);
        for user in late {
            self.find(Found {
                earlier: user.sequence(),
                earlier_use: RaceUse::Use,
                later: sequence,
                later_use: RaceUse::End,
                address: 0,
                bytes: 0,
            });
        }
    }

    fn note_change(
        &mut self,
        (start, bytes): (u64, u64),
        sequence: u64,
        used: RaceUse,
        kind: Option<RangeKind>,
    ) {
        if self.changes.len() == CHANGES_MAX {
            self.changes.pop_front();
            self.unseen += 1;
        }
        match self.changes.back_mut() {
            Some(last) if last.sequence == sequence && last.end == start => last.end += bytes,
            _ => self.changes.push_back(Change { start, end: start + bytes, sequence, used, kind }),
        }
    }

    fn find(&mut self, found: Found) {
        add(&mut self.found, found);
    }

    /// Whether the history has grown enough for a sweep.
    pub(crate) fn is_large(&self) -> bool {
        self.shadow.segments() > self.sweep_at
            || self.calls.len() > self.forget_calls_at
            || self.changes.len() > self.forget_changes_at
    }

    /// Forgets accesses that come before everything that may still be compared. `pending` are the
    /// operations that have not run.
    pub(crate) fn sweep<'a>(&mut self, pending: impl Iterator<Item = &'a Order> + Clone) {
        let oldest = pending.clone().map(|order| order.sequence).min().unwrap_or(u64::MAX);
        let mut floor: Vec<u64> =
            (0..self.actors.len()).map(|actor| self.host.of(actor as u16)).collect();
        let mut wanted = Vec::new();
        for order in pending {
            wanted.push(order.sequence);
            for (known, actor) in floor.iter_mut().zip(0..) {
                if actor != order.actor {
                    let most = guard!("sim.pending-keeps-past", order.clock.of(actor), else *known);
                    *known = (*known).min(most);
                }
            }
        }
        self.shadow.retain(|epoch| match epoch.actor() {
            HOST => guard!("sim.host-access-kept", epoch.sequence() >= oldest, else false),
            actor => epoch.sequence() > floor[usize::from(actor)],
        });
        if self.shadow.segments() > SEGMENTS_MAX {
            self.shadow.retain(|_| false);
            self.unseen += 1;
        }
        self.changes.retain(|change| guard!("sim.ends-kept", change.sequence > oldest, else false));
        self.forget_calls(wanted);
        self.sweep_at = (self.shadow.segments() * 2).max(SWEEP_AT);
        self.forget_calls_at = (self.calls.len() * 2).max(SWEEP_AT);
        self.forget_changes_at = (self.changes.len() * 2).max(CHANGES_AT);
    }

    /// Forgets calls that no report can name any more, except the `wanted` ones.
    fn forget_calls(&mut self, mut wanted: Vec<u64>) {
        wanted.extend(self.actors.iter().flat_map(|actor| [actor.last, actor.before]));
        wanted.extend(self.changes.iter().map(|change| change.sequence));
        self.shadow.each(|sequence| wanted.push(sequence));
        wanted.extend(self.modules.values().flatten().map(|user| user.sequence()));
        wanted.sort_unstable();
        wanted.dedup();
        self.calls.retain(|call| wanted.binary_search(&call.sequence).is_ok());
    }

    pub(crate) fn aborts(&self) -> bool {
        self.check == RaceCheck::Abort
    }
}

#[cold]
fn note(found: &mut Vec<Found>, clash: Clash, address: u64, later: u64, later_use: RaceUse) {
    let earlier_use = used(clash.earlier.how());
    let (earlier, bytes) = (clash.earlier.sequence(), clash.bytes);
    add(found, Found { earlier, earlier_use, later, later_use, address, bytes });
}

/// Adds a race, or extends the race of the same two accesses that ends where the new one begins.
fn add(found: &mut Vec<Found>, new: Found) {
    let sides = |one: &Found| (one.earlier, one.earlier_use, one.later, one.later_use);
    let is_joined =
        |one: &&mut Found| sides(one) == sides(&new) && one.address + one.bytes == new.address;
    if let Some(known) = found.iter_mut().rev().find(is_joined) {
        known.bytes += new.bytes;
        return;
    }
    let pieces = found.iter().filter(|known| sides(known) == sides(&new)).count();
    if pieces < PIECES_MAX && found.len() < FOUND_MAX {
        found.push(new);
    }
}
