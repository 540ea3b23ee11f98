//! Opening a file of slots: what it says of itself is compared with what it should be, and its table is read.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::guard;

use super::SlotFile;
use crate::error::Hostility;
use crate::io::{Act, Buffer, Ended, FileIo, Io, PAGE_BYTES};
use crate::layout::{
    ENTRIES_A_PAGE, ENTRY_BYTES, Entry, EntryFault, Geometry, Heading, HeadingFault, bytes_of,
};
use crate::limits::{Daily, Rate};
use crate::random::random;
use crate::slots::{Kept, Slots};
use crate::stats::DiskStats;
use crate::table::Table;
use crate::{Keep, Mismatch, OpenError, SlotRules};

/// Operations of each kind at a time, at most.
pub(crate) const DEPTH_MAX: u32 = 1024;

/// Generations that are set aside for a life of the process. There are enough for 2^24 lives.
const GENERATIONS: u64 = 1 << 40;

/// Bytes of a piece of the table that is read at a time, and how many are.
const PIECE_BYTES: usize = 1 << 20;
const PIECES: usize = 8;

/// How long one operation may take while a file is opened.
const PATIENCE: Duration = Duration::from_secs(60);

/// Which file of a set is opened, and what it has to be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    /// Its slots.
    pub geometry: Geometry,
    /// Its number in the set.
    pub stripe: u16,
    /// Files of the set.
    pub stripes: u16,
    /// The number of the set that a new file is to have: random.
    pub set: u128,
    /// The number that a new file is to have: random.
    pub file: u128,
    /// Bytes of the file as it was found.
    pub found_bytes: u64,
    /// Whether the file was made just now, and holds zeros.
    pub is_new: bool,
}

impl SlotFile {
    /// Opens a file of slots. May take time: the table is read.
    ///
    /// # Errors
    /// [`OpenError`]. A file that is refused is as it was.
    pub fn open(
        mut io: Box<dyn FileIo>,
        place: &Place,
        rules: &SlotRules,
    ) -> Result<Self, OpenError> {
        check_rules(rules)?;
        if !place.geometry.is_valid() || place.stripe >= place.stripes {
            let Geometry { slots, slot_bytes } = place.geometry;
            return Err(OpenError::TooSmall {
                bytes: slots.saturating_mul(slot_bytes),
                slot_bytes,
            });
        }
        let (heading, is_old) = heading_of(&mut *io, place, rules)?;
        let mut file = Self::new(io, heading, rules)?;
        if is_old && rules.keep == Keep::Content {
            file.read_table()?;
        } else if !place.is_new && rules.keys.is_some() {
            // Nobody knows whose names are in the table.
            let pages = heading.geometry.table_pages();
            (0..pages).for_each(|page| file.table.touch(page, None));
        }
        Ok(file)
    }

    fn new(
        mut io: Box<dyn FileIo>,
        heading: Heading,
        rules: &SlotRules,
    ) -> Result<Self, OpenError> {
        let slot_bytes = heading.geometry.slot_bytes as usize;
        let [reads, writes] = [rules.read_depth, rules.write_depth].map(|depth| depth as usize);
        let mut read_buffers = io.buffers(2 * reads + writes, slot_bytes);
        let write_buffers = read_buffers.split_off((2 * reads).min(read_buffers.len()));
        Ok(Self {
            slots: Slots::new(heading.geometry.slots, rules.policy)?,
            heading,
            table: Table::default(),
            heading_due: 0,
            heading_open: false,
            loads: VecDeque::new(),
            stores: VecDeque::new(),
            jobs: HashMap::new(),
            next_token: 0,
            next_generation: first_generation(&heading)?,
            read_buffers,
            write_buffers,
            read_rate: Rate::new(rules.read_bytes_per_second),
            write_rate: Rate::new(rules.write_bytes_per_second),
            daily: Daily::new(rules.write_bytes_per_day),
            punching: HashSet::new(),
            parked: HashMap::new(),
            punching_all: false,
            punches: rules.punches,
            failures: 0,
            off: None,
            stuck: false,
            direct: true,
            dropped: Arc::default(),
            survivors: Vec::new(),
            stats: DiskStats::default(),
            reads_open: 0,
            ended: VecDeque::new(),
            reaped: Vec::new(),
            rules: rules.clone(),
            io,
        })
    }

    /// Takes in the entries of the table that are of this file, model and epoch.
    fn read_table(&mut self) -> Result<(), OpenError> {
        let Heading { geometry, .. } = self.heading;
        let mut records = Vec::new();
        let no_memory = |_| OpenError::NoMemory { slots: geometry.slots };
        records.try_reserve_exact(geometry.slots as usize).map_err(no_memory)?;
        records.resize(geometry.slots as usize, None);
        let table_bytes = geometry.table_pages() * PAGE_BYTES as u64;
        let pieces = (0..table_bytes).step_by(PIECE_BYTES);
        let pieces = pieces.map(|at| (at, (table_bytes - at).min(PIECE_BYTES as u64) as usize));
        let mut left: VecDeque<_> = pieces.collect();
        let piece = PIECE_BYTES.min(table_bytes as usize);
        let mut spare: Vec<_> = left.iter().take(PIECES).map(|_| Buffer::new(piece)).collect();
        let mut ended = Vec::new();
        let started = Instant::now();
        let mut progress = started;
        while !left.is_empty() || self.io.open() > 0 {
            while let (Some(&(at, bytes)), Some(buffer)) = (left.front(), spare.pop()) {
                left.pop_front();
                let offset = geometry.table_page(0) + at;
                self.io.begin(Io {
                    token: at,
                    act: Act::Read,
                    offset,
                    bytes,
                    buffer: Some(buffer),
                    body: None,
                });
            }
            self.io.ended(Duration::from_secs(1), &mut ended);
            if progress.elapsed() > PATIENCE {
                let timed_out = io::Error::from(io::ErrorKind::TimedOut);
                return Err(OpenError::system("reading the table")(timed_out));
            }
            for Ended { io, result } in ended.drain(..) {
                progress = Instant::now();
                let Some(mut buffer) = io.buffer else { continue };
                // What could not be read is not there.
                let read = result.unwrap_or(0).min(buffer.len());
                self.read_entries(io.token, &buffer.bytes()[..read], io.bytes, &mut records);
                buffer.bytes_mut().fill(0);
                spare.push(buffer);
            }
        }
        self.survivors = self.slots.restore(&records);
        // Of two records of a block, the table is to have one.
        for (slot, _) in (0..).zip(&records).filter(|(_, record)| record.is_some()) {
            if self.slots.kept(slot).is_none() {
                self.touch(slot, None);
            }
        }
        self.stats.survivors = self.survivors.len() as u64;
        tracing::debug!(survivors = self.survivors.len(), elapsed = ?started.elapsed(), "table read");
        Ok(())
    }

    fn read_entries(&mut self, at: u64, read: &[u8], bytes: usize, records: &mut [Option<Kept>]) {
        let first = at / ENTRY_BYTES as u64;
        let whole = read.chunks_exact(ENTRY_BYTES);
        // Entries that did not come are as bad as those that are spoilt, and are not to come back when they can be read.
        let missing = first + whole.len() as u64..first + (bytes / ENTRY_BYTES) as u64;
        self.stats.discarded += missing.end - missing.start;
        guard!(
            "disk.rewrites-pages-not-read",
            missing.for_each(|slot| self.table.touch(slot / ENTRIES_A_PAGE, None))
        );
        for (slot, bytes) in (first..).zip(whole) {
            let Some(record) = records.get_mut(slot as usize) else { return };
            match Entry::parse(bytes) {
                Ok(entry) if self.is_own(&entry, slot) => {
                    let Entry { name, group, generation, length, head, sum, key, .. } = entry;
                    *record = Some(Kept { name, group, generation, length, head, sum, key });
                }
                Err(EntryFault::Empty) => {}
                Ok(_) | Err(_) => {
                    self.stats.discarded += 1;
                    // It may have a name that is to be forgotten with its key.
                    guard!(
                        "disk.rewrites-entries-not-believed",
                        self.table.touch(slot / ENTRIES_A_PAGE, None)
                    );
                }
            }
        }
    }

    fn is_own(&self, entry: &Entry, slot: u64) -> bool {
        let Heading { file, model, epoch, geometry, ceiling, .. } = self.heading;
        let is_here = (entry.file, entry.model, entry.slot) == (file, model, slot);
        is_here
            && guard!("disk.believes-its-epoch-alone", entry.epoch == epoch, else true)
            && bytes_of(entry.length, entry.head).is_some_and(|bytes| bytes <= geometry.slot_bytes)
            && entry.generation < ceiling - GENERATIONS
            && entry.key == self.key_of((entry.group, entry.name))
    }
}

/// Refuses depths that cannot be, and rates at which nothing ever goes.
pub(crate) fn check_rules(rules: &SlotRules) -> Result<(), OpenError> {
    let rates = [("reads", rules.read_bytes_per_second), ("writes", rules.write_bytes_per_second)];
    let stands = rates.into_iter().find(|(_, rate)| *rate == Some(0));
    if let Some((act, _)) = guard!("disk.refuses-rates-of-nothing", stands, else None) {
        return Err(OpenError::Rate { act });
    }
    let (reads, writes, max) = (rules.read_depth, rules.write_depth, DEPTH_MAX);
    let fits = [reads, writes].iter().all(|depth| (1..=max).contains(depth));
    if fits { Ok(()) } else { Err(OpenError::Depth { reads, writes, max }) }
}

/// The first generation of a life: above all earlier ones, and not the same in two lives that begin with copies of one file.
fn first_generation(heading: &Heading) -> Result<u64, OpenError> {
    let random = random().map(u64::from_le_bytes);
    let random = random.map_err(OpenError::system("reading random numbers"))?;
    Ok(heading.ceiling - GENERATIONS
        + guard!("disk.counts-each-life-apart", random % (GENERATIONS / 2), else 0))
}

/// The heading that the file has now, and whether what is in the file counts.
fn heading_of(
    io: &mut dyn FileIo,
    place: &Place,
    rules: &SlotRules,
) -> Result<(Heading, bool), OpenError> {
    let mut buffer = Buffer::new(2 * PAGE_BYTES);
    let found = if place.is_new {
        None
    } else {
        let read =
            one(io, Act::Read, 0, &mut buffer).map_err(OpenError::system("reading the heading"))?;
        buffer.bytes_mut()[read..].fill(0);
        let (first, second) = buffer.bytes().split_at(PAGE_BYTES);
        Some(Heading::newer(first, second))
    };
    let old = match found {
        None => Old::Nothing,
        Some(found) => judge(found, place, rules)?,
    };
    let mut heading = match old {
        Old::Kept(next) => next,
        old => Heading {
            set: place.set,
            file: place.file,
            stripe: place.stripe,
            stripes: place.stripes,
            model: rules.model,
            sealed: rules.seals(),
            geometry: place.geometry,
            epoch: 1,
            ceiling: GENERATIONS,
            // Newer than the one that it takes the place of.
            sequence: old.sequence(),
        },
    };
    // Both places are written, so that one that is spoilt later loses nothing, and nothing of an older file is left.
    for _ in 0..2 {
        heading.sequence += 1;
        let mut page = Buffer::new(PAGE_BYTES);
        page.bytes_mut().copy_from_slice(&heading.to_page());
        let written = one(io, Act::Write, heading.place(), &mut page);
        let written = written.and_then(|bytes| match bytes {
            PAGE_BYTES => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        });
        written.map_err(OpenError::system("writing the heading"))?;
    }
    Ok((heading, matches!(old, Old::Kept(_))))
}

/// What becomes of what a file says of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Old {
    /// There is nothing.
    Nothing,
    /// The content counts: the heading of the next life.
    Kept(Heading),
    /// The content is given up, with this heading if it can be read.
    Wiped(Option<Heading>),
}

impl Old {
    fn sequence(&self) -> u64 {
        match self {
            Self::Wiped(Some(old)) => old.sequence.min(u64::MAX / 2),
            _ => 1,
        }
    }
}

/// Decides what becomes of a file that is there, or refuses it. Changes nothing.
pub(crate) fn judge(
    found: Result<Heading, HeadingFault>,
    place: &Place,
    rules: &SlotRules,
) -> Result<Old, OpenError> {
    let path = PathBuf::new;
    let refused = match found {
        // Wiping is for our own files.
        Err(HeadingFault::Foreign) if guard!("disk.wipes-its-own-alone", true, else false) => {
            return Err(OpenError::Hostile { path: path(), reason: Hostility::Foreign });
        }
        Err(fault) => OpenError::Heading { path: path(), source: fault },
        Ok(old) => match fits(&old, place, rules).and_then(|()| next_life(old, rules)) {
            Ok(next) => return Ok(Old::Kept(next)),
            Err(error) => error,
        },
    };
    match rules.mismatch {
        Mismatch::Refuse => Err(refused),
        Mismatch::Wipe => Ok(Old::Wiped(found.ok())),
    }
}

fn fits(old: &Heading, place: &Place, rules: &SlotRules) -> Result<(), OpenError> {
    if old.model != rules.model {
        let (path, found, expected) = (PathBuf::new(), old.model, rules.model);
        return Err(OpenError::Model { path, found, expected });
    }
    // Without keys, its entries would not be believed, and would be taken out of the table.
    let is_for_keys = old.sealed && !rules.seals();
    if guard!("disk.refuses-files-of-keys", is_for_keys, else false) {
        return Err(OpenError::NoKeys { path: PathBuf::new() });
    }
    if old.geometry != place.geometry || place.found_bytes < place.geometry.bytes() {
        let (bytes, of) = (place.found_bytes, |of: Geometry| (of.slots, of.slot_bytes));
        let (found, expected) = (of(old.geometry), of(place.geometry));
        return Err(OpenError::Geometry { path: PathBuf::new(), bytes, found, expected });
    }
    if (old.stripe, old.stripes) != (place.stripe, place.stripes) || old.set != place.set {
        let Heading { stripe, stripes, .. } = *old;
        let (expected, count) = (place.stripe, place.stripes);
        let path = PathBuf::new();
        return Err(OpenError::Stripe { path, stripe, stripes, expected, count });
    }
    Ok(())
}

/// The heading of a file whose process begins anew: its generations are all new.
fn next_life(old: Heading, rules: &SlotRules) -> Result<Heading, OpenError> {
    let spent = || OpenError::Heading { path: PathBuf::new(), source: HeadingFault::Field };
    let ceiling = old.ceiling.checked_add(GENERATIONS).ok_or_else(spent)?;
    let epoch = old.epoch.checked_add(u64::from(rules.keep == Keep::Nothing));
    let epoch = epoch.filter(|&epoch| epoch < u64::MAX).ok_or_else(spent)?;
    if old.sequence >= u64::MAX / 2 {
        return Err(spent());
    }
    Ok(Heading { ceiling, epoch, sealed: rules.seals(), ..old })
}

/// Carries out one operation, and waits for it.
fn one(io: &mut dyn FileIo, act: Act, offset: u64, buffer: &mut Buffer) -> io::Result<usize> {
    let bytes = buffer.len();
    let taken = std::mem::replace(buffer, Buffer::new(0));
    io.begin(Io { token: 0, act, offset, bytes, buffer: Some(taken), body: None });
    let (began, mut ended) = (Instant::now(), Vec::new());
    while ended.is_empty() {
        io.ended(Duration::from_secs(1), &mut ended);
        if ended.is_empty() && began.elapsed() > PATIENCE {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    let Some(Ended { io, result }) = ended.pop() else { return Ok(0) };
    if let Some(back) = io.buffer {
        *buffer = back;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_somebody_else_is_refused_by_one_that_wipes() {
        let geometry = Geometry { slots: 4, slot_bytes: 8192 };
        let (stripe, stripes, set, file, found_bytes) = (0, 1, 1, 2, geometry.bytes());
        let place = Place { geometry, stripe, stripes, set, file, found_bytes, is_new: false };
        let rules = SlotRules { mismatch: Mismatch::Wipe, ..SlotRules::new(b"a model") };
        let judged = |fault| judge(Err(fault), &place, &rules);
        let foreign = judged(HeadingFault::Foreign);
        let reason = Hostility::Foreign;
        assert!(matches!(foreign, Err(OpenError::Hostile { reason: of, .. }) if of == reason));
        assert!(matches!(judged(HeadingFault::Checksum), Ok(Old::Wiped(None))));
    }
}
