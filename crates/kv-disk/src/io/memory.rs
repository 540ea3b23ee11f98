//! A file in memory that does everything wrong that a disk can, by a plan or at random, and that can crash.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::{Act, Backend, Ended, FileIo, Io, check};

/// Bytes that a disk writes whole or not at all.
const SECTOR: usize = 512;

/// What can go wrong with an operation.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum DiskFault {
    /// It ends with an error, and does nothing.
    Fails,
    /// It ends with an error, and half of a write was made.
    FailsHalfway,
    /// It does half of its bytes, and says so.
    Short,
    /// It does half of its sectors, and says that it did all.
    Torn,
    /// A write does nothing, and says that it did all. A read leaves the buffer as it was.
    Lost,
    /// One bit of its bytes is changed.
    BitFlip,
    /// It goes to the part of the file behind its own.
    Misplaced,
    /// It ends after the operations that are begun in the next calls.
    Late,
    /// A write finds the disk full.
    Full,
    /// A write finds that the file system has become read-only.
    ReadOnly,
    /// The system refuses to move the bytes of a [body](super::Body) without a copy.
    Memory,
}

impl DiskFault {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Fails,
        Self::FailsHalfway,
        Self::Short,
        Self::Torn,
        Self::Lost,
        Self::BitFlip,
        Self::Misplaced,
        Self::Late,
        Self::Full,
        Self::ReadOnly,
        Self::Memory,
    ];

    /// Whether an operation that it befalls may say that it went well and did not.
    #[must_use]
    pub fn lies(self) -> bool {
        matches!(self, Self::Torn | Self::Lost | Self::BitFlip | Self::Misplaced)
    }
}

/// Which operations go wrong.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    /// Operations, counted from 0 in the order that they begin in, and what befalls each.
    pub at: Vec<(u64, DiskFault)>,
    /// Of a hundred other operations, how many go wrong at random.
    pub percent: u8,
    /// Whether operations end in a random order.
    pub reorders: bool,
    /// What everything random comes from.
    pub seed: u64,
}

/// The bytes of a [`MemoryFile`], which stay when the file is dropped.
#[derive(Clone, Debug, Default)]
pub struct Image(Arc<Mutex<Vec<u8>>>);

impl Image {
    /// So many zeros.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self::of(vec![0; bytes])
    }

    /// These bytes.
    #[must_use]
    pub fn of(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(bytes)))
    }

    /// A copy of the bytes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().clone()
    }

    /// Changes the bytes.
    pub fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        change(&mut self.0.lock());
    }
}

/// What becomes of open writes when a [`MemoryFile`] is dropped, as when its process is killed or power fails.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Crash {
    /// None of them is made.
    #[default]
    Nothing,
    /// All of them are.
    All,
    /// Some of their sectors are, at random.
    Sectors,
}

/// A file in memory, for tests of what a disk does to a store.
#[derive(Debug)]
pub struct MemoryFile {
    image: Image,
    plan: FaultPlan,
    crash: Crash,
    begun: Arc<AtomicU64>,
    random: u64,
    calls: u64,
    open: Vec<Open>,
}

#[derive(Debug)]
struct Open {
    io: Io,
    /// The number of the call of `ended` before which it does not end.
    from: u64,
    fault: Option<DiskFault>,
}

impl MemoryFile {
    /// A file of these bytes.
    #[must_use]
    pub fn new(image: &Image, plan: FaultPlan, crash: Crash) -> Self {
        let random = plan.seed ^ 0x6b76_2d64_6973_6b21;
        Self {
            image: image.clone(),
            plan,
            crash,
            begun: Arc::default(),
            random,
            calls: 0,
            open: Vec::new(),
        }
    }

    /// How many operations were begun, also when the file has been given away.
    #[must_use]
    pub fn operations(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.begun)
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    fn fault_of(&mut self, number: u64) -> Option<DiskFault> {
        if let Some((_, fault)) = self.plan.at.iter().find(|(at, _)| *at == number) {
            return Some(*fault);
        }
        let percent = u64::from(self.plan.percent);
        if percent == 0 || self.next() % 100 >= percent {
            return None;
        }
        let which = self.next() % DiskFault::ALL.len() as u64;
        // A disk that is full or read-only ends a run: rarely.
        match DiskFault::ALL[which as usize] {
            DiskFault::Full | DiskFault::ReadOnly if !self.next().is_multiple_of(16) => None,
            fault => Some(fault),
        }
    }

    fn carry_out(&mut self, io: &mut Io, fault: Option<DiskFault>) -> io::Result<usize> {
        check(io)?;
        let image = self.image.clone();
        let mut image = image.0.lock();
        let start = usize::try_from(io.offset).unwrap_or(usize::MAX).min(image.len());
        let whole = io.bytes.min(image.len() - start);
        let half = whole / 2 / SECTOR * SECTOR;
        let writes = io.act == Act::Write;
        let (start, does, says) = match fault {
            None | Some(DiskFault::Late) => (start, whole, Ok(whole)),
            Some(DiskFault::Memory) if io.body.is_some() => {
                return Err(io::Error::from_raw_os_error(libc::EFAULT));
            }
            Some(DiskFault::Memory) => (start, whole, Ok(whole)),
            Some(DiskFault::Full) if writes => (start, 0, Err(io::ErrorKind::StorageFull)),
            Some(DiskFault::ReadOnly) if writes => {
                (start, 0, Err(io::ErrorKind::ReadOnlyFilesystem))
            }
            Some(DiskFault::Full | DiskFault::ReadOnly | DiskFault::Fails) => {
                (start, 0, Err(io::ErrorKind::Other))
            }
            Some(DiskFault::FailsHalfway) => (start, half, Err(io::ErrorKind::Other)),
            Some(DiskFault::Short) => (start, half, Ok(half)),
            Some(DiskFault::Torn) => (start, half, Ok(whole)),
            Some(DiskFault::Lost) => (start, 0, Ok(whole)),
            Some(DiskFault::BitFlip) => (start, whole, Ok(whole)),
            Some(DiskFault::Misplaced) => {
                let moved = start + io.bytes;
                if moved + whole <= image.len() {
                    (moved, whole, Ok(whole))
                } else {
                    (start, 0, Ok(whole))
                }
            }
        };
        let part = &mut image[start..start + does];
        let mut moved = match io.act {
            Act::Read => part.to_vec(),
            Act::Write => gather(io, does),
            Act::Punch => vec![0; does],
            Act::Sync => Vec::new(),
        };
        if fault == Some(DiskFault::BitFlip) && !moved.is_empty() && io.act != Act::Punch {
            let bit = self.next() % (moved.len() as u64 * 8);
            moved[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        match io.act {
            Act::Read => scatter(io, &moved),
            Act::Write | Act::Punch => part.copy_from_slice(&moved),
            Act::Sync => {}
        }
        says.map_err(io::Error::from)
    }
}

/// The first bytes of an operation's memory.
fn gather(io: &Io, bytes: usize) -> Vec<u8> {
    let mut all = vec![0; bytes];
    let (first, rest) = all.split_at_mut(bytes.min(io.buffer_bytes()));
    if let Some(buffer) = &io.buffer {
        first.copy_from_slice(&buffer.bytes()[..first.len()]);
    }
    if let Some(body) = &io.body {
        let read = body.read(rest);
        debug_assert!(read, "`check` has compared the bytes with the body");
    }
    all
}

/// Puts bytes into an operation's memory, from its beginning on.
fn scatter(io: &mut Io, bytes: &[u8]) {
    let (first, rest) = bytes.split_at(bytes.len().min(io.buffer_bytes()));
    if let Some(buffer) = &mut io.buffer {
        buffer.bytes_mut()[..first.len()].copy_from_slice(first);
    }
    if let Some(body) = &mut io.body {
        let written = body.write(rest);
        debug_assert!(written, "`check` has compared the bytes with the body");
    }
}

impl FileIo for MemoryFile {
    fn backend(&self) -> Backend {
        Backend::Memory
    }

    fn begin(&mut self, io: Io) {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let fault = self.fault_of(number);
        let late = if fault == Some(DiskFault::Late) { 3 } else { 0 };
        let from = self.calls + late;
        self.open.push(Open { io, from, fault });
    }

    fn ended(&mut self, wait: Duration, ended: &mut Vec<Ended>) {
        self.calls += 1;
        // Time passes for a caller that waits.
        let all = !wait.is_zero() && !self.open.iter().any(|open| open.from < self.calls);
        let mut now = Vec::new();
        for open in std::mem::take(&mut self.open) {
            let ended = if all || open.from < self.calls { &mut now } else { &mut self.open };
            ended.push(open);
        }
        if self.plan.reorders {
            for at in (1..now.len()).rev() {
                let other = self.next() % (at as u64 + 1);
                now.swap(at, other as usize);
            }
            // Some end the next time.
            if now.len() > 1 && self.next().is_multiple_of(2) {
                self.open.extend(now.pop());
            }
        }
        for Open { mut io, fault, .. } in now {
            let result = self.carry_out(&mut io, fault);
            ended.push(Ended { io, result });
        }
    }

    fn open(&self) -> usize {
        self.open.len()
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        for Open { mut io, fault, .. } in std::mem::take(&mut self.open) {
            if io.act != Act::Write || self.crash == Crash::Nothing {
                continue;
            }
            if self.crash == Crash::All || fault.is_some() {
                // What it says is heard by nobody.
                let _ = self.carry_out(&mut io, fault);
                continue;
            }
            let bytes = gather(&io, io.bytes);
            let start = usize::try_from(io.offset).unwrap_or(usize::MAX);
            for (at, sector) in (start..).step_by(SECTOR).zip(bytes.chunks(SECTOR)) {
                let written = self.next().is_multiple_of(2);
                let mut image = self.image.0.lock();
                if let Some(part) = image.get_mut(at..at + sector.len()).filter(|_| written) {
                    part.copy_from_slice(sector);
                }
            }
        }
    }
}
