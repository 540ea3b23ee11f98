//! Barriers in shared memory, and the bulk copies whose bytes they count.
//!
//! Such a copy happens as late as it may: when somebody asks whether its barrier is complete, or
//! waits for its group, or when the block ends.

use super::super::op::{Access, MemoryBarrierOp};
use super::SHARED_WINDOW;
use super::block::Block;
use super::conflicts::StretchId;
use super::meeting::{Came, gather};
use super::observation::{ObservationKind, Ran, Trouble};
use super::spaces::{Accessor, Spaces};

/// Bytes that a bulk copy moves at a time, and that its addresses and its size are multiples of.
const STEP: u32 = 16;

/// A bulk copy that has not happened yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingBulk {
    pub(super) thread: usize,
    pub(super) to: Access,
    pub(super) from: Access,
    pub(super) destination: u64,
    pub(super) origin: u64,
    pub(super) bytes: u32,
    /// The barrier that counts its bytes, or the group of its thread.
    pub(super) until: Until,
}

/// What completes with a copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum Until {
    Barrier(Access, u64),
    Group(u32),
}

/// The state of a barrier, as it lies in eight bytes of shared memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Counts {
    phase: bool,
    expected: u32,
    pending: u32,
    /// Bytes that are still to come; negative where they came before they were expected.
    bytes: i32,
}

const COUNT_BITS: u32 = 20;
const COUNT_MAX: u32 = (1 << COUNT_BITS) - 1;
const BYTE_BITS: u32 = 22;

impl Counts {
    fn of(word: u64) -> Self {
        let count = |shift: u32| (word >> shift) as u32 & COUNT_MAX;
        Self {
            phase: word >> 63 == 1,
            expected: count(0),
            pending: count(COUNT_BITS),
            bytes: ((word >> (2 * COUNT_BITS)) as i32) << (32 - BYTE_BITS) >> (32 - BYTE_BITS),
        }
    }

    fn word(self) -> u64 {
        let bytes = self.bytes as u64 & ((1 << BYTE_BITS) - 1);
        u64::from(self.phase) << 63
            | bytes << (2 * COUNT_BITS)
            | u64::from(self.pending) << COUNT_BITS
            | u64::from(self.expected)
    }

    /// Begins the next phase if nothing is missing of this one.
    fn advance(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase = !self.phase;
            self.pending = self.expected;
        }
    }
}

/// Who arrived at a barrier in memory.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// The phase that `came` are of.
    phase: bool,
    came: Vec<Came>,
    /// What came before the phases that are complete; empty while there are none.
    known: Vec<StretchId>,
}

impl Arrivals {
    /// Notes that the barrier is in this phase now.
    fn turn(&mut self, phase: bool, threads: usize) {
        if self.phase != phase {
            self.phase = phase;
            self.known.resize(threads, 0);
            gather(&mut self.known, &self.came);
            self.came.clear();
        }
    }
}

/// The offset in shared memory of a barrier, whose address may be a generic one.
fn offset(address: u64) -> u64 {
    address.checked_sub(SHARED_WINDOW).unwrap_or(address)
}

impl Spaces<'_> {
    fn barrier(&mut self, at: &Access, address: u64, by: Accessor) -> Ran<Counts> {
        let mut data = [0; 16];
        self.load(at, address, 8, by, &mut data)?;
        let mut word = [0; 8];
        word.copy_from_slice(&data[..8]);
        Ok(Counts::of(u64::from_le_bytes(word)))
    }

    fn set_barrier(&mut self, at: &Access, address: u64, by: Accessor, counts: Counts) -> Ran<()> {
        self.store(at, address, &counts.word().to_le_bytes(), by)
    }

    /// Adds to the bytes that a barrier waits for, or takes from them.
    fn count_bytes(&mut self, at: &Access, address: u64, by: Accessor, bytes: i64) -> Ran<()> {
        let mut counts = self.barrier(at, address, by)?;
        let sum = i64::from(counts.bytes) + bytes;
        if sum.unsigned_abs() >= 1 << (BYTE_BITS - 1) {
            let detail = format!("a barrier in memory that waits for {sum} bytes");
            return Err(Trouble::new(ObservationKind::Barrier, detail));
        }
        counts.bytes = sum as i32;
        if bytes < 0 {
            counts.advance();
        }
        self.set_barrier(at, address, by, counts)
    }
}

impl Block<'_, '_> {
    /// Executes an operation on a barrier in memory. False when the thread waits for it.
    pub(super) fn memory_barrier(
        &mut self,
        thread: usize,
        op: MemoryBarrierOp,
        by: Accessor,
    ) -> Ran<bool> {
        match op {
            MemoryBarrierOp::Init { at, count } => {
                let count = self.register(thread, count) as u32;
                if !(1..=COUNT_MAX).contains(&count) {
                    let detail = format!("a barrier in memory of {count} arrivals");
                    return Err(Trouble::new(ObservationKind::Barrier, detail));
                }
                let counts = Counts { phase: false, expected: count, pending: count, bytes: 0 };
                let address = self.place_of(thread, at);
                self.arrivals.remove(&offset(address));
                self.spaces.set_barrier(&at, address, by, counts)?;
            }
            MemoryBarrierOp::Invalidate { at } => {
                let counts = Counts { phase: false, expected: 0, pending: 0, bytes: 0 };
                self.spaces.set_barrier(&at, self.place_of(thread, at), by, counts)?;
            }
            MemoryBarrierOp::Expect { at, bytes } => {
                let bytes = self.register(thread, bytes) as u32;
                self.spaces.count_bytes(&at, self.place_of(thread, at), by, bytes.into())?;
            }
            MemoryBarrierOp::Complete { at, bytes } => {
                let bytes = i64::from(self.register(thread, bytes) as u32);
                self.spaces.count_bytes(&at, self.place_of(thread, at), by, -bytes)?;
            }
            MemoryBarrierOp::Arrive { at, d, count, bytes } => {
                let count = self.register(thread, count) as u32;
                let bytes = self.register(thread, bytes) as u32;
                let token = self.arrive(thread, at, (count, bytes), by)?;
                self.set_register(thread, d, token);
            }
            MemoryBarrierOp::Test { at, d, phase, parity } => {
                let address = self.place_of(thread, at);
                self.land_for(address, by)?;
                let counts = self.spaces.barrier(&at, address, by)?;
                let phase = self.register(thread, phase);
                let awaited = if parity { phase & 1 == 1 } else { phase >> 63 == 1 };
                let complete = counts.phase != awaited;
                self.set_register(thread, d, complete.into());
                if complete {
                    self.follow(thread, address, counts.phase);
                }
                return Ok(complete);
            }
        }
        Ok(true)
    }

    fn arrive(
        &mut self,
        thread: usize,
        at: Access,
        (count, bytes): (u32, u32),
        by: Accessor,
    ) -> Ran<u64> {
        let address = self.place_of(thread, at);
        if bytes > 0 {
            self.spaces.count_bytes(&at, address, by, bytes.into())?;
        }
        let mut counts = self.spaces.barrier(&at, address, by)?;
        let token = counts.word();
        if count == 0 || count > counts.pending {
            let detail = format!(
                "{count} arrivals at a barrier in memory that waits for {} of {}",
                counts.pending, counts.expected
            );
            return Err(Trouble::new(ObservationKind::Barrier, detail));
        }
        let (came, threads) = (self.come(thread), self.threads.len());
        let arrivals = self.arrivals.entry(offset(address)).or_default();
        arrivals.turn(counts.phase, threads);
        arrivals.came.push(came);
        counts.pending -= count;
        counts.advance();
        arrivals.turn(counts.phase, threads);
        self.spaces.set_barrier(&at, address, by, counts)?;
        Ok(token)
    }

    /// Orders a thread after all that arrived at the barrier before its present phase.
    fn follow(&mut self, thread: usize, address: u64, phase: bool) {
        let threads = self.threads.len();
        let Some(arrivals) = self.arrivals.get_mut(&offset(address)) else { return };
        arrivals.turn(phase, threads);
        let mut known = arrivals.known.clone();
        if !known.is_empty() {
            let came = self.come(thread);
            gather(&mut known, [&came]);
            self.known[thread] = Some(known.into());
        }
    }

    pub(super) fn place_of(&self, thread: usize, access: Access) -> u64 {
        self.register(thread, access.base).wrapping_add_signed(access.offset)
    }

    /// Notes a bulk copy, which happens later.
    pub(super) fn begin_bulk(
        &mut self,
        thread: usize,
        (to, from): (Access, Access),
        bytes: u32,
        barrier: Option<Access>,
    ) -> Ran<()> {
        let (destination, origin) = (self.place_of(thread, to), self.place_of(thread, from));
        for number in [destination, origin, bytes.into()] {
            if !number.is_multiple_of(STEP.into()) {
                let detail = format!(
                    "a bulk copy of {bytes} bytes from {origin:#x} to {destination:#x}, which are \
                     not all multiples of {STEP}"
                );
                return Err(Trouble::new(ObservationKind::Misaligned, detail));
            }
        }
        let until = match barrier {
            Some(at) => Until::Barrier(at, self.place_of(thread, at)),
            None => Until::Group(self.threads[thread].bulk_groups),
        };
        self.bulks.push(PendingBulk { thread, to, from, destination, origin, bytes, until });
        Ok(())
    }

    /// Makes the copies happen whose bytes the barrier at `address` counts.
    fn land_for(&mut self, address: u64, by: Accessor) -> Ran<()> {
        let wanted = offset(address);
        self.land(by, |bulk| matches!(bulk.until, Until::Barrier(_, at) if offset(at) == wanted))
    }

    /// Makes a thread's copies of all groups before `done` happen.
    pub(super) fn land_groups(&mut self, thread: usize, done: u32, by: Accessor) -> Ran<()> {
        self.land(by, |bulk| {
            bulk.thread == thread && matches!(bulk.until, Until::Group(group) if group < done)
        })
    }

    /// Makes the chosen copies happen.
    pub(super) fn land(&mut self, by: Accessor, chosen: impl Fn(&PendingBulk) -> bool) -> Ran<()> {
        let (ready, rest) = std::mem::take(&mut self.bulks).into_iter().partition(chosen);
        self.bulks = rest;
        let ready: Vec<PendingBulk> = ready;
        for bulk in ready {
            for offset in (0..bulk.bytes).step_by(STEP as usize) {
                let (mut data, offset) = ([0; 16], u64::from(offset));
                self.spaces.load(&bulk.from, bulk.origin + offset, STEP, by, &mut data)?;
                self.spaces.store(&bulk.to, bulk.destination + offset, &data, by)?;
            }
            if let Until::Barrier(at, address) = bulk.until {
                self.spaces.count_bytes(&at, address, by, -i64::from(bulk.bytes))?;
            }
        }
        Ok(())
    }
}
