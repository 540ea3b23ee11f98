//! A tier over several files, each with a thread of its own.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cuda_driver::guard;
use kv_pool::{BlockHash, GroupId};
use kv_tier::{BlockSink, BlockSource, LowerTier};
use parking_lot::Mutex;

use crate::folder::{self, Ready};
use crate::io::{Backend, FileIo, RingFile, ThreadFile};
use crate::layout::Geometry;
use crate::random::random;
use crate::slot_file::{Old, Place, SlotFile, Waiting, check_rules, judge, waiting};
use crate::slots::Key;
use crate::stats::DiskStats;
use crate::{BackendChoice, DiskOptions, Keys, OpenError};

/// Files, at most.
const FILES_MAX: usize = 256;

/// How long a thread waits for the disk before it looks for new orders.
const LOOK: Duration = Duration::from_micros(100);

/// How long a thread waits where only time can go on: for a rate.
const PAUSE: Duration = Duration::from_millis(1);

/// How long a thread that is to end waits for what is open.
const LAST: Duration = Duration::from_secs(2);

/// How much longer a thread is waited for, which may be in a call of the system.
const GRACE: Duration = Duration::from_millis(500);

/// A tier of files. Blocks are striped over the files by name, and each file has a thread.
///
/// Dropping it ends the threads: what waits is given up, and what is open at the disk is waited for, so that the files are
/// unlocked and all lent memory is back. A disk that does not answer is waited for two seconds: then its thread is left
/// to itself, and its file stays locked until the system has ended what is open.
#[derive(Debug)]
pub struct DiskTier {
    stripes: Vec<Stripe>,
    watch: DiskWatch,
    survivors: Vec<Key>,
    keys: Option<Arc<dyn Keys>>,
}

/// Shows what a tier does, wherever the tier itself has gone.
#[derive(Clone, Debug)]
pub struct DiskWatch {
    stats: Arc<[Mutex<DiskStats>]>,
    backends: Arc<[FileReport]>,
}

/// How a file is reached.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FileReport {
    /// By what calls.
    pub backend: Backend,
    /// Whether reads and writes pass by the page cache.
    pub direct: bool,
    /// Its slots.
    pub slots: u64,
    /// Bytes of each.
    pub slot_bytes: u64,
}

#[derive(Debug)]
struct Stripe {
    orders: Option<Sender<Order>>,
    /// What the file has dropped.
    dropped: Arc<Mutex<Vec<Key>>>,
    thread: Option<JoinHandle<()>>,
    /// Closed when the thread has given up its file.
    ended: Receiver<()>,
}

#[derive(Debug)]
enum Order {
    Store(Vec<Waiting>),
    Load(Vec<BlockSink>),
    Forget(Vec<Key>),
    ForgetKey(u64),
    Clear,
}

impl DiskTier {
    /// Opens or makes the files. May take time: their tables are read, side by side.
    ///
    /// # Errors
    /// [`OpenError`]. All files are looked at before one is made or changed: if any is refused, all are as they were. One that the
    /// system refuses later leaves others that were made.
    pub fn open(options: &DiskOptions) -> Result<Self, OpenError> {
        let folders = &options.folders;
        if folders.is_empty() {
            return Err(OpenError::NoFolder);
        }
        if folders.len() > FILES_MAX {
            return Err(OpenError::TooManyFolders { folders: folders.len(), max: FILES_MAX });
        }
        let slot_bytes = Geometry::slot_bytes_for(options.record_bytes);
        let too_small =
            || OpenError::TooSmall { bytes: options.bytes / folders.len() as u64, slot_bytes };
        let geometry = options.geometry().ok_or_else(too_small)?;
        check_rules(&options.rules)?;
        let found = folders.iter().enumerate();
        let found = found.map(|(stripe, folder)| folder::find(folder, stripe, options));
        let found = found.collect::<Result<Vec<_>, _>>()?;
        let new_number = || random().map(u128::from_le_bytes);
        let new_number = || new_number().map_err(OpenError::system("reading random numbers"));
        // The first file says which others belong to it.
        let first = found.first().and_then(|found| found.heading?.ok());
        let set = first.map_or_else(new_number, |heading| Ok(heading.set))?;
        let stripes = u16::try_from(folders.len()).unwrap_or(u16::MAX);
        let mut places = Vec::new();
        for (found, stripe) in found.iter().zip(0..) {
            let (file, found_bytes) = (new_number()?, found.bytes);
            let place = Place { geometry, stripe, stripes, set, file, found_bytes, is_new: true };
            let old = found.heading.map_or(Ok(Old::Nothing), |heading| {
                judge(heading, &place, &options.rules).map_err(|error| error.at(&found.path))
            })?;
            places.push(Place { is_new: !matches!(old, Old::Kept(_)), ..place });
        }
        let anew = found.iter().zip(&places).filter(|(_, place)| place.is_new);
        folder::check_room(anew.map(|(found, _)| found), options, geometry.bytes())?;
        let mut ready = Vec::new();
        for (found, place) in found.into_iter().zip(places) {
            let (path, anew) = (found.path.clone(), place.is_new.then_some(geometry.bytes()));
            let prepared = folder::prepare(found, options, anew);
            ready.push((prepared.map_err(|error| error.at(&path))?, place));
        }
        let opened: Vec<_> = std::thread::scope(|scope| {
            let opens: Vec<_> = ready
                .into_iter()
                .map(|(ready, place)| scope.spawn(move || open_one(ready, &place, options)))
                .collect();
            opens.into_iter().map(|open| open.join()).collect()
        });
        let mut files = Vec::new();
        for opened in opened {
            let died = || OpenError::system("opening a file")(io::ErrorKind::Other.into());
            files.push(opened.unwrap_or_else(|_| Err(died()))?);
        }
        Self::start(files, options.rules.keys.clone())
    }

    fn start(
        files: Vec<(SlotFile, FileReport)>,
        keys: Option<Arc<dyn Keys>>,
    ) -> Result<Self, OpenError> {
        let watch = DiskWatch {
            stats: files.iter().map(|(file, _)| Mutex::new(file.stats())).collect(),
            backends: files.iter().map(|(_, report)| *report).collect(),
        };
        let mut tier =
            Self { stripes: Vec::new(), watch: watch.clone(), survivors: Vec::new(), keys };
        for (at, (mut file, _)) in files.into_iter().enumerate() {
            file.survivors(&mut tier.survivors);
            let (orders, received) = mpsc::channel();
            let (watch, dropped) = (watch.clone(), file.dropped());
            let thread = std::thread::Builder::new().name(format!("kv-disk-{at}"));
            let (ends, ended) = mpsc::channel::<()>();
            let thread = thread.spawn(move || {
                run(file, &received, &watch.stats[at]);
                drop(ends);
            });
            let thread = thread.map_err(OpenError::system("starting a thread"))?;
            let (orders, thread) = (Some(orders), Some(thread));
            tier.stripes.push(Stripe { orders, dropped, thread, ended });
        }
        Ok(tier)
    }

    /// Shows what the tier does from now on, also when it has been given away.
    #[must_use]
    pub fn watch(&self) -> DiskWatch {
        self.watch.clone()
    }

    /// Forgets all blocks that are encrypted with a key of this number. They are
    /// [reported](LowerTier::poll) as dropped.
    pub fn forget_key(&mut self, number: u64) {
        (0..self.stripes.len()).for_each(|at| self.send(at, Order::ForgetKey(number)));
    }

    fn stripe_of(&self, name: BlockHash) -> usize {
        // The pool of a file spreads names by their low bits.
        ((name.to_u128() >> 64) % self.stripes.len() as u128) as usize
    }

    fn divide<T>(&self, blocks: Vec<T>, name: impl Fn(&T) -> BlockHash) -> Vec<Vec<T>> {
        let mut parts: Vec<_> = self.stripes.iter().map(|_| Vec::new()).collect();
        for block in blocks {
            parts[self.stripe_of(name(&block))].push(block);
        }
        parts
    }

    fn send_parts<T>(&self, parts: Vec<Vec<T>>, order: impl Fn(Vec<T>) -> Order) {
        let parts = parts.into_iter().enumerate().filter(|(_, part)| !part.is_empty());
        parts.for_each(|(at, part)| self.send(at, order(part)));
    }

    fn send(&self, at: usize, order: Order) {
        // Without its thread, an order is dropped, and its blocks have failed.
        if let Some(orders) = self.stripes.get(at).and_then(|stripe| stripe.orders.as_ref()) {
            drop(orders.send(order));
        }
    }
}

fn open_one(
    ready: Ready,
    place: &Place,
    options: &DiskOptions,
) -> Result<(SlotFile, FileReport), OpenError> {
    let Ready { path, file, direct } = ready;
    let io = backend(file, options).map_err(OpenError::system("setting up the file"));
    let opened = io.and_then(|io| SlotFile::open(io, place, &options.rules));
    let file = opened.map_err(|error| error.at(&path))?;
    let (backend, Geometry { slots, slot_bytes }) = (file.backend(), place.geometry);
    tracing::info!(%backend, direct, slots, "a file of slots");
    Ok((file, FileReport { backend, direct, slots, slot_bytes }))
}

fn backend(file: File, options: &DiskOptions) -> io::Result<Box<dyn FileIo>> {
    let rules = &options.rules;
    let depth = rules.read_depth.saturating_add(rules.write_depth);
    let threads = depth.clamp(1, 32) as usize;
    match options.backend {
        BackendChoice::Threads => return Ok(Box::new(ThreadFile::new(file, threads)?)),
        BackendChoice::Ring => return Ok(Box::new(RingFile::new(file, ring_depth(depth))?)),
        BackendChoice::Best => {}
    }
    // The lock belongs to the file, whichever handle it is reached by.
    let other = file.try_clone()?;
    match RingFile::new(file, ring_depth(depth)) {
        Ok(ring) => Ok(Box::new(ring)),
        Err(error) => {
            tracing::warn!(%error, "io_uring is refused; threads read and write instead");
            Ok(Box::new(ThreadFile::new(other, threads)?))
        }
    }
}

/// Beside slots, pages of the table are written.
fn ring_depth(depth: u32) -> u32 {
    depth.saturating_mul(2).saturating_add(8).min(4096)
}

fn run(mut file: SlotFile, orders: &Receiver<Order>, stats: &Mutex<DiskStats>) {
    let mut has_more = false;
    loop {
        let next = match orders.try_recv() {
            Ok(order) => Some(order),
            Err(TryRecvError::Disconnected) => break,
            Err(TryRecvError::Empty) if has_more || file.has_open() => None,
            Err(TryRecvError::Empty) => {
                let idle = file.is_idle();
                let next = if idle {
                    orders.recv().map_err(|_| RecvTimeoutError::Disconnected)
                } else {
                    orders.recv_timeout(PAUSE)
                };
                match next {
                    Ok(order) => Some(order),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
        };
        let wait = if next.is_some() { Duration::ZERO } else { LOOK };
        if let Some(order) = next {
            take(&mut file, order);
            // All that have come are looked at before one is begun: reads go first.
            while let Ok(order) = orders.try_recv() {
                take(&mut file, order);
            }
        }
        // One operation at a time: what comes meanwhile does not wait for all that came before.
        has_more = guard!("disk.looks-for-orders-between", file.turn(wait), else {
            file.work(wait);
            false
        });
        *stats.lock() = file.stats();
    }
    end(&mut file, stats);
}

/// Waits for what is open, and for what the table is to say.
fn end(file: &mut SlotFile, stats: &Mutex<DiskStats>) {
    file.give_up_waiting();
    let since = Instant::now();
    while guard!("disk.waits-when-dropped", !file.is_idle(), else false) && since.elapsed() < LAST {
        file.work(LOOK);
    }
    if !file.is_settled() {
        tracing::error!(
            "a file could not be told what was forgotten last, which may be found in it again: remove it"
        );
    }
    *stats.lock() = file.stats();
}

fn take(file: &mut SlotFile, order: Order) {
    match order {
        Order::Store(blocks) => file.queue(blocks),
        Order::Load(blocks) => file.load(blocks),
        Order::Forget(blocks) => file.forget(&blocks),
        Order::ForgetKey(number) => file.forget_key(number),
        Order::Clear => file.clear(),
    }
}

impl DiskWatch {
    /// Counts of all files together, as of the last time that each has done something.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        let mut sum = DiskStats::default();
        self.stats.iter().for_each(|file| sum += *file.lock());
        sum
    }

    /// How each file is reached.
    #[must_use]
    pub fn files(&self) -> &[FileReport] {
        &self.backends
    }
}

impl LowerTier for DiskTier {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        let keys = self.keys.as_deref();
        let blocks = blocks.into_iter().map(|source| waiting(keys, source)).collect();
        self.send_parts(self.divide(blocks, |(source, _)| source.name()), Order::Store);
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.send_parts(self.divide(blocks, BlockSink::name), Order::Load);
    }

    fn forget(&mut self, blocks: &[(GroupId, BlockHash)]) {
        self.send_parts(self.divide(blocks.to_vec(), |(_, name)| *name), Order::Forget);
    }

    fn clear(&mut self) {
        (0..self.stripes.len()).for_each(|at| self.send(at, Order::Clear));
    }

    fn poll(&mut self, dropped: &mut Vec<(GroupId, BlockHash)>) {
        self.stripes.iter().for_each(|stripe| dropped.append(&mut stripe.dropped.lock()));
    }

    fn survivors(&mut self, found: &mut Vec<(GroupId, BlockHash)>) {
        found.append(&mut self.survivors);
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.stripes.iter_mut().for_each(|stripe| stripe.orders = None);
        let since = Instant::now();
        for stripe in &mut self.stripes {
            let left = (LAST + GRACE).saturating_sub(since.elapsed());
            let ended = stripe.ended.recv_timeout(left) == Err(RecvTimeoutError::Disconnected);
            match stripe.thread.take() {
                // What it panicked with was printed, and its blocks have failed.
                Some(thread) if guard!("disk.leaves-a-hung-thread", ended, else true) => {
                    drop(thread.join());
                }
                // It is in a call of the system that does not come back.
                _ => tracing::error!("a disk does not answer: its thread is left to itself"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use kv_pool::{BlockId, Tier};
    use kv_tier::{Batch, Direction, HostBlocks, TicketId, Transfer};

    use super::*;
    use crate::SlotRules;
    use crate::io::memory::{Crash, DiskFault, FaultPlan, Image, MemoryFile};
    use crate::io::{Act, Ended, Io};
    use crate::layout::Heading;
    use crate::slot_file::Place;
    use crate::slot_file::golden::Host;

    /// A disk that answers until it is told not to.
    #[derive(Debug)]
    struct Hangs {
        file: MemoryFile,
        answers: Arc<AtomicBool>,
        /// Whether a call does not come back then, until it answers again.
        in_call: bool,
    }

    impl FileIo for Hangs {
        fn backend(&self) -> Backend {
            self.file.backend()
        }

        fn begin(&mut self, io: Io) {
            self.file.begin(io);
        }

        fn ended(&mut self, wait: Duration, ended: &mut Vec<Ended>) {
            while self.in_call && self.open() > 0 && !self.answers.load(Ordering::Acquire) {
                std::thread::park_timeout(LOOK);
            }
            if self.answers.load(Ordering::Acquire) {
                self.file.ended(wait, ended);
            }
        }

        fn open(&self) -> usize {
            self.file.open()
        }
    }

    /// A disk that stops after so many more operations, and where it was to read and write.
    #[derive(Debug)]
    struct Stops {
        file: MemoryFile,
        left: Arc<AtomicUsize>,
        begun: Arc<Mutex<Vec<(Act, u64)>>>,
    }

    impl FileIo for Stops {
        fn backend(&self) -> Backend {
            self.file.backend()
        }

        fn begin(&mut self, io: Io) {
            self.begun.lock().push((io.act, io.offset));
            self.file.begin(io);
        }

        fn ended(&mut self, wait: Duration, ended: &mut Vec<Ended>) {
            while self.left.load(Ordering::Acquire) == 0 && self.file.open() > 0 {
                std::thread::park_timeout(LOOK);
            }
            let before = ended.len();
            self.file.ended(wait, ended);
            self.left.fetch_sub(ended.len() - before, Ordering::AcqRel);
        }

        fn open(&self) -> usize {
            self.file.open()
        }
    }

    /// A tier over such a disk, with slots for so many blocks.
    struct Stopping {
        tier: DiskTier,
        left: Arc<AtomicUsize>,
        begun: Arc<Mutex<Vec<(Act, u64)>>>,
        geometry: Geometry,
        host: Arc<dyn HostBlocks>,
    }

    fn name(name: u128) -> BlockHash {
        BlockHash::from_u128(name)
    }

    fn end(batch: &Batch) {
        let wrong = loop {
            match batch.ended() {
                Some(wrong) => break wrong,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!(wrong, []);
    }

    impl Stopping {
        fn new(slots: u64) -> Self {
            let geometry = Geometry { slots, slot_bytes: 8192 };
            let found_bytes = geometry.bytes();
            let image = Image::new(found_bytes as usize);
            let (set, file, is_new) = (1, 2, true);
            let place = Place { geometry, stripe: 0, stripes: 1, set, file, found_bytes, is_new };
            let (left, begun) = (Arc::new(AtomicUsize::new(usize::MAX)), Arc::default());
            let file = MemoryFile::new(&image, FaultPlan::default(), Crash::Nothing);
            let stops = Stops { file, left: Arc::clone(&left), begun: Arc::clone(&begun) };
            let rules = SlotRules { write_depth: 1, ..SlotRules::new(b"") };
            let file = SlotFile::open(Box::new(stops), &place, &rules).unwrap();
            let report =
                FileReport { backend: Backend::Memory, direct: false, slots, slot_bytes: 8192 };
            let tier = DiskTier::start(vec![(file, report)], None).unwrap();
            Self { tier, left, begun, geometry, host: Arc::new(Host::new()) }
        }

        fn begin(&mut self, direction: Direction, names: &[u128]) -> Arc<Batch> {
            let (ticket, tier, group) = (TicketId(1), Tier::Third, GroupId(0));
            let blocks = names.iter().map(|&of| (name(of), BlockId::from(0))).collect();
            let transfer = Transfer { ticket, tier, group, direction, blocks };
            Batch::begin(&transfer, &self.host, 7, &mut self.tier)
        }

        /// Lets so many more operations end.
        fn go_on(&self, operations: usize) {
            self.left.store(operations, Ordering::Release);
        }
    }

    #[test]
    fn what_made_room_for_a_store_is_told_before_it_ends() {
        let mut disk = Stopping::new(2);
        end(&disk.begin(Direction::Store, &[1]));
        end(&disk.begin(Direction::Store, &[2]));
        disk.begun.lock().clear();
        disk.go_on(0);
        let store = disk.begin(Direction::Store, &[3]);
        while disk.begun.lock().is_empty() {
            std::thread::yield_now();
        }
        let mut dropped = Vec::new();
        disk.tier.poll(&mut dropped);
        assert_eq!((dropped, store.ended()), (vec![(GroupId(0), name(1))], None));
        disk.go_on(usize::MAX);
        end(&store);
    }

    #[test]
    fn a_load_does_not_wait_for_all_stores_that_came_before_it() {
        let mut disk = Stopping::new(16);
        end(&disk.begin(Direction::Store, &[1]));
        disk.begun.lock().clear();
        disk.go_on(1);
        let stores = disk.begin(Direction::Store, &[2, 3, 4, 5, 6, 7, 8, 9]);
        while disk.left.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
        let load = disk.begin(Direction::Load, &[1]);
        disk.go_on(usize::MAX);
        end(&load);
        end(&stores);
        let begun = disk.begun.lock();
        let read = begun.iter().position(|(act, _)| *act == Act::Read).unwrap();
        let slot = |(_, offset): &&(Act, u64)| *offset >= disk.geometry.slot(0);
        let before = begun[..read].iter().filter(slot).count();
        assert!(before < 4, "{before} blocks were written before the read: {begun:?}");
    }

    #[test]
    fn what_a_file_that_is_off_could_not_be_told_is_tried_again_when_its_tier_is_dropped() {
        let geometry = Geometry { slots: 4, slot_bytes: 8192 };
        let found_bytes = geometry.bytes();
        let image = Image::new(found_bytes as usize);
        let (set, file, is_new) = (1, 2, true);
        let place = Place { geometry, stripe: 0, stripes: 1, set, file, found_bytes, is_new };
        // The first heading that says that all is forgotten.
        let plan = FaultPlan { at: vec![(2, DiskFault::Full)], ..FaultPlan::default() };
        let file = MemoryFile::new(&image, plan, Crash::Nothing);
        let begun = file.operations();
        let file = SlotFile::open(Box::new(file), &place, &SlotRules::new(b"")).unwrap();
        let report =
            FileReport { backend: Backend::Memory, direct: false, slots: 4, slot_bytes: 8192 };
        let mut tier = DiskTier::start(vec![(file, report)], None).unwrap();
        tier.clear();
        drop(tier);
        let bytes = image.bytes();
        let heading = Heading::newer(&bytes[..4096], &bytes[4096..]).unwrap();
        assert_eq!((heading.epoch, begun.load(Ordering::Relaxed)), (2, 5));
    }

    #[test]
    fn a_tier_whose_disk_does_not_answer_is_dropped_all_the_same() {
        for in_call in [false, true] {
            let geometry = Geometry { slots: 4, slot_bytes: 8192 };
            let found_bytes = geometry.bytes();
            let image = Image::new(found_bytes as usize);
            let (set, file, is_new) = (1, 2, true);
            let place = Place { geometry, stripe: 0, stripes: 1, set, file, found_bytes, is_new };
            let answers = Arc::new(AtomicBool::new(true));
            let file = MemoryFile::new(&image, FaultPlan::default(), Crash::Nothing);
            let hangs = Hangs { file, answers: Arc::clone(&answers), in_call };
            let file = SlotFile::open(Box::new(hangs), &place, &SlotRules::new(b"")).unwrap();
            let report =
                FileReport { backend: Backend::Memory, direct: false, slots: 4, slot_bytes: 8192 };
            let mut tier = DiskTier::start(vec![(file, report)], None).unwrap();
            let watch = tier.watch();
            answers.store(false, Ordering::Release);
            // Both headings are to be written.
            tier.clear();
            let (dropped, is_dropped) = mpsc::channel();
            let drops = std::thread::spawn(move || {
                drop(tier);
                dropped.send(())
            });
            let returned = is_dropped.recv_timeout(Duration::from_secs(30));
            let threads = Arc::strong_count(&watch.stats) - 1;
            answers.store(true, Ordering::Release);
            assert_eq!(returned, Ok(()), "the drop waits for the disk");
            drops.join().unwrap().unwrap();
            // Its thread holds the watch, and ends when the disk answers at last.
            assert_eq!(threads, usize::from(in_call));
            while Arc::strong_count(&watch.stats) > 1 {
                std::thread::yield_now();
            }
        }
    }
}
