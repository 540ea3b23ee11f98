//! Much pinned memory, in equal slabs that become usable one after the other.

mod schedule;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use cuda_driver::host_pages::{HostMemory, HostPages, PageKind, PinError};
use cuda_driver::{Device, DeviceError, PinnedBuffer, guard};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::StagingError;
use crate::slab::{DEFAULT_MEMORY, SlabMemory};
use schedule::Schedule;

/// Bytes that one thread populates at a time, in about 10 ms: whole huge pages.
const PIECE_BYTES: u64 = 16 << 20;

/// How long no slab is registered after each. The driver holds a lock while it registers memory, 11 ms
/// for 512 MiB, and without a pause a thread that enqueues copies waits for many slabs in turn.
const PAUSE: Duration = Duration::from_micros(200);

/// Size and making of [`PinnedSlabs`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SlabsOptions {
    /// Bytes of one block. No block lies in two slabs.
    pub block_bytes: u64,
    /// Blocks wanted. Slabs are equal, so there can be room for a few more.
    pub blocks: u64,
    /// Most bytes of a slab, which holds at least one block; more than
    /// 64 GiB counts as that. Large slabs are few and are all
    /// pinned sooner. A small slab is more often unused and can be given back, and while one is
    /// registered, which takes about 20 ms per GiB, other calls of the driver may wait.
    pub slab_bytes_max: u64,
    /// The source of the memory.
    pub memory: HostMemory,
    /// Threads that pin in the background, at most [`THREADS_MAX`](SlabsOptions::THREADS_MAX). With
    /// 0, only calls of [`PinnedSlabs::pin_next`] pin, on the caller's thread.
    pub threads: usize,
}

impl SlabsOptions {
    /// Default for the most bytes of a slab, pinned in 34 ms by 16 threads.
    pub const SLAB_BYTES: u64 = 512 << 20;

    /// Most bytes of a slab, which is registered by one call.
    pub(crate) const SLAB_BYTES_MAX: u64 = 64 << 30;

    /// Most slabs: the system maps each, and maps no more than about twice as many for a process.
    pub(crate) const SLABS_MAX: u64 = 1 << 15;

    /// Most threads.
    pub const THREADS_MAX: usize = 64;

    /// `blocks` blocks of `block_bytes` bytes in huge pages on the device's memory node as far as the
    /// system has both, pinned by 16 threads or by as many as the machine has cores.
    #[must_use]
    pub fn new(block_bytes: u64, blocks: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            block_bytes,
            blocks,
            slab_bytes_max: Self::SLAB_BYTES,
            memory: DEFAULT_MEMORY,
            threads: cores.min(16),
        }
    }

    /// Blocks of a slab.
    fn blocks_per_slab(&self) -> Result<u64, StagingError> {
        let &Self { block_bytes, blocks, slab_bytes_max, threads, .. } = self;
        let possible = (1..=Self::SLAB_BYTES_MAX).contains(&block_bytes)
            && blocks.checked_mul(block_bytes).is_some_and(|bytes| bytes <= isize::MAX as u64)
            && threads <= Self::THREADS_MAX;
        if !possible {
            return Err(StagingError::SlabOptions { block_bytes, blocks, threads });
        }
        let most = (slab_bytes_max.min(Self::SLAB_BYTES_MAX) / block_bytes).max(1);
        let slabs = blocks.div_ceil(most);
        // Of equal length, so that the last slab is not nearly empty.
        Ok(if slabs == 0 { most } else { blocks.div_ceil(slabs) })
    }
}

/// Pinned host memory in equal slabs, pinned in order by background threads and usable as it comes.
///
/// The threads populate a slab together, piece by piece. One of them registers it, while the others
/// populate the next; calls of other threads to the driver wait for at most one slab. The threads end
/// when there is nothing left to pin. The owner learns by [`poll`](PinnedSlabs::poll) which slabs are
/// usable. A slab stays pinned while anyone holds its `Arc`.
///
/// Dropping this value does not wait. Threads finish the call that they are in, and what they made is
/// freed like all dropped memory: by [`Device::free_retired`], or by the next allocation on the
/// device. Until then, they own a handle of the device. [`close`](PinnedSlabs::close) waits for them.
///
/// # A refusal
/// When the system or the driver refuses a slab, the slabs before it stay, and those after it are
/// given up. No more are pinned until [`resize`](PinnedSlabs::resize) is called.
#[derive(Debug)]
pub struct PinnedSlabs {
    shared: Arc<Shared>,
    /// The leading slabs.
    slabs: Vec<Arc<PinnedBuffer>>,
    blocks_per_slab: u64,
    slabs_wanted: usize,
    threads: usize,
    /// Those that were started, except some that have ended.
    started: Vec<JoinHandle<()>>,
    /// The value of `Shared::news` up to which slabs were taken over.
    seen: u64,
}

/// What the owner shares with its threads.
#[derive(Debug)]
struct Shared {
    device: Device,
    memory: HostMemory,
    /// Whether pages are to be huge, and their memory node; none where the driver allocates.
    pages: Option<(bool, Option<u32>)>,
    block_bytes: u64,
    slab_bytes: u64,
    /// Never held during a driver call. A slab is mapped under it, in microseconds, so that the
    /// other threads join in populating this slab instead of mapping more.
    line: Mutex<Line>,
    /// Notified when `news` has grown, and when a thread ends.
    changed: Condvar,
    /// Grows, under the lock, when there is something for the owner to take. `Release`, beside the
    /// owner's `Acquire`: the slabs themselves are handed over under the lock.
    news: AtomicU64,
    /// The owner is gone. Alone it orders nothing: threads look at it under the lock, and one that
    /// sees it late makes one slab more, which is dropped with this struct.
    stopped: AtomicBool,
}

#[derive(Debug)]
struct Line {
    schedule: Schedule<Option<HostPages>, Arc<PinnedBuffer>>,
    /// The first refusal that the owner has not seen.
    refusal: Option<PinError>,
    /// Slabs were given back, and are to be unregistered.
    frees: bool,
    /// Threads that have not ended.
    threads: usize,
    /// Number of waits in `close` and `pin_all`.
    #[cfg(test)]
    waiting: usize,
}

#[derive(Debug)]
enum Job {
    Slab(schedule::Job<Option<HostPages>>),
    /// Frees what the device has retired.
    Free,
}

impl PinnedSlabs {
    /// Starts pinning. Returns at once: nothing is pinned yet.
    ///
    /// # Errors
    /// [`StagingError`].
    pub fn new(device: &Device, options: &SlabsOptions) -> Result<Self, StagingError> {
        let mut slabs = Self::unstarted(device, options)?;
        slabs.resize(options.blocks)?;
        Ok(slabs)
    }

    /// The same without blocks so far: pinning starts with the first [`resize`](Self::resize). Slabs are as
    /// large as the [number of blocks](SlabsOptions::blocks) of the options makes them.
    ///
    /// # Errors
    /// [`StagingError`].
    pub fn unstarted(device: &Device, options: &SlabsOptions) -> Result<Self, StagingError> {
        let &SlabsOptions { block_bytes, memory, threads, .. } = options;
        let blocks_per_slab = options.blocks_per_slab()?;
        let slab_bytes = blocks_per_slab * block_bytes;
        let (pages, pieces) = match memory {
            HostMemory::Pages(pages) => {
                (Some((pages.huge, pages.node_for(device))), slab_bytes.div_ceil(PIECE_BYTES))
            }
            _ => (None, 1),
        };
        let line = Line {
            schedule: Schedule::new(pieces),
            refusal: None,
            frees: false,
            threads: 0,
            #[cfg(test)]
            waiting: 0,
        };
        let shared = Shared {
            device: device.clone(),
            memory,
            pages,
            block_bytes,
            slab_bytes,
            line: Mutex::new(line),
            changed: Condvar::new(),
            news: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
        };
        Ok(Self {
            shared: Arc::new(shared),
            slabs: Vec::new(),
            blocks_per_slab,
            slabs_wanted: 0,
            threads,
            started: Vec::new(),
            seen: 0,
        })
    }

    /// Takes over the slabs that were pinned since the last call; returns the number of usable slabs.
    ///
    /// Costs one atomic load if there are none. Never waits: a slab that a thread is just handing
    /// over is taken by a later call.
    ///
    /// # Errors
    /// The [`PinError`] of a refusal, once; see [`PinnedSlabs`]. Slabs that came before it are taken
    /// over all the same.
    pub fn poll(&mut self) -> Result<usize, PinError> {
        let news = self.shared.news.load(Ordering::Acquire);
        if news != self.seen {
            let shared = Arc::clone(&self.shared);
            if let Some(mut line) = shared.line.try_lock() {
                self.take_over(&mut line)?;
            }
        }
        Ok(self.slabs.len())
    }

    /// Pins one more slab on this thread, with the background threads if there are any; returns
    /// whether there was one to begin or to join in.
    ///
    /// # Ordering
    /// Waits for no other thread, and for the device only where the driver does.
    ///
    /// # Errors
    /// Like [`poll`](PinnedSlabs::poll).
    #[track_caller]
    pub fn pin_next(&mut self) -> Result<bool, PinError> {
        let _site = cuda_driver::site::enter();
        let shared = Arc::clone(&self.shared);
        let settled = loop {
            let job = shared.next(&mut shared.line.lock());
            match job {
                Some(job @ Job::Slab(schedule::Job::Pin { .. })) => {
                    shared.carry_out(job);
                    shared.line.lock().schedule.rested();
                    break true;
                }
                Some(job) => shared.carry_out(job),
                None => break false,
            }
        };
        if settled && self.threads > 0 {
            // Threads may have ended while this one pinned the slab.
            self.restart_threads();
        }
        self.take_over(&mut shared.line.lock())?;
        Ok(settled)
    }

    /// Pins all slabs, on this thread too; returns when no more will come.
    ///
    /// # Ordering
    /// Waits for the background threads.
    ///
    /// # Errors
    /// Like [`poll`](PinnedSlabs::poll).
    #[track_caller]
    pub fn pin_all(&mut self) -> Result<usize, PinError> {
        while self.pin_next()? {}
        let shared = Arc::clone(&self.shared);
        let mut line = shared.line.lock();
        loop {
            self.take_over(&mut line)?;
            let alone = guard!("stage.pinning-all-waits", line.threads == 0, else true);
            if line.schedule.is_over() || alone {
                return Ok(self.slabs.len());
            }
            shared.wait(&mut line);
        }
    }

    /// Sets the number of blocks wanted. More are pinned in the background, or by
    /// [`pin_next`](PinnedSlabs::pin_next). With fewer, slabs that are not pinned yet are given up,
    /// and [`give_back`](PinnedSlabs::give_back) gives up others.
    ///
    /// A call ends the consequences of a refusal: the refused slab is tried again.
    ///
    /// # Errors
    /// [`StagingError`]; nothing is changed then, except with [`StagingError::Thread`]:
    /// [`pin_next`](PinnedSlabs::pin_next) pins the slabs that no thread pins.
    pub fn resize(&mut self, blocks: u64) -> Result<(), StagingError> {
        let slabs = blocks.div_ceil(self.blocks_per_slab);
        let block_bytes = self.shared.block_bytes;
        if slabs > SlabsOptions::SLABS_MAX {
            return Err(StagingError::TooManySlabs { slabs });
        }
        let Some(bytes) = slabs.checked_mul(self.shared.slab_bytes) else {
            return Err(StagingError::SlabOptions { block_bytes, blocks, threads: self.threads });
        };
        let wanted = slabs as usize;
        // Without this check, pinning slab by slab would continue until the system kills the
        // process.
        if let Some(host_bytes) = HostPages::host_bytes().filter(|&most| bytes > most) {
            return Err(StagingError::SlabMemory { bytes, host_bytes });
        }
        // No later call allocates.
        self.slabs.reserve_exact(wanted.saturating_sub(self.slabs.len()));
        self.slabs_wanted = wanted;
        let unwanted = self.shared.line.lock().schedule.resize(wanted);
        drop(unwanted);
        if wanted > self.slabs.len() { self.start_threads(self.threads) } else { Ok(()) }
    }

    /// Gives up slabs beyond the wanted number, from the last one on, as long as nobody else holds
    /// them; returns their number.
    ///
    /// A thread then unregisters them. With no threads they are freed like all dropped memory.
    ///
    /// # Ordering
    /// Does not wait. The thread waits for all devices before it unregisters memory.
    pub fn give_back(&mut self) -> usize {
        let before = self.slabs.len();
        let mut line = self.shared.line.lock();
        while self.slabs.len() > self.slabs_wanted
            && let Some(slab) = self.slabs.pop_if(
                |slab| guard!("stage.held-slabs-stay", Arc::get_mut(slab).is_some(), else true),
            )
        {
            line.schedule.give_back();
            // A drop adds the memory to the list of its device, and frees nothing.
            drop(slab);
        }
        let given = before - self.slabs.len();
        line.frees |= given > 0 && self.threads > 0;
        let frees = line.frees;
        drop(line);
        if frees && let Err(error) = self.start_threads(1) {
            tracing::warn!(%error, "slabs that were given back are freed by the next allocation");
        }
        given
    }

    /// Gives up all slabs, and frees those that nobody else holds.
    ///
    /// # Ordering
    /// Waits on the host for the threads, each at most for one slab, and for all devices.
    ///
    /// # Errors
    /// [`DeviceError`] if the device refuses to free memory. A lost device is not an error here:
    /// nothing uses the memory any more.
    #[track_caller]
    pub fn close(mut self) -> Result<(), DeviceError> {
        let shared = Arc::clone(&self.shared);
        shared.stopped.store(true, Ordering::Relaxed);
        #[cfg(test)]
        {
            shared.line.lock().waiting += 1;
        }
        let started = &mut self.started;
        for thread in guard!("stage.closed-slabs-join", started.drain(..), else started.drain(..0))
        {
            if thread.join().is_err() {
                tracing::error!("a thread that pinned slabs has panicked");
            }
        }
        let unwanted = shared.line.lock().schedule.cut(0);
        drop(unwanted);
        self.slabs.clear();
        let freed = shared.device.free_retired().map(drop);
        if shared.device.poison().is_some() { Ok(()) } else { freed }
    }

    /// The usable slabs, from the first one on.
    #[must_use]
    pub fn slabs(&self) -> &[Arc<PinnedBuffer>] {
        &self.slabs
    }

    /// Blocks of each slab: block `b` lies in slab `b / blocks_per_slab`.
    #[must_use]
    pub fn blocks_per_slab(&self) -> u64 {
        self.blocks_per_slab
    }

    /// Number of slabs wanted.
    #[must_use]
    pub fn slabs_wanted(&self) -> usize {
        self.slabs_wanted
    }

    /// The kinds of pages of the usable slabs.
    #[must_use]
    pub fn memory(&self) -> SlabMemory {
        let mut memory = SlabMemory::default();
        for slab in &self.slabs {
            memory.add(SlabMemory::of(slab, &self.shared.device));
        }
        memory
    }

    fn take_over(&mut self, line: &mut Line) -> Result<(), PinError> {
        self.seen = self.shared.news.load(Ordering::Relaxed);
        self.slabs.extend(line.schedule.take_pinned());
        line.refusal.take().map_or(Ok(()), Err)
    }

    /// Starts threads again if there is something left to pin.
    fn restart_threads(&mut self) {
        if self.shared.line.lock().schedule.is_over() {
            return;
        }
        if let Err(error) = self.start_threads(self.threads) {
            tracing::warn!(%error, "slabs are pinned by fewer threads");
        }
    }

    /// Starts threads until there are `wanted`.
    fn start_threads(&mut self, wanted: usize) -> Result<(), StagingError> {
        self.started.retain(|thread| !thread.is_finished());
        // Held until all are started: a thread that populates memory keeps the system from mapping
        // the stacks of others.
        let mut line = self.shared.line.lock();
        while line.threads < wanted {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new()
                .name("kv-stage-pin".to_owned())
                .spawn(move || Worker { shared, left: false }.work())
                .map_err(|error| StagingError::Thread(error.kind()))?;
            self.started.push(started);
            line.threads += 1;
        }
        Ok(())
    }
}

impl Drop for PinnedSlabs {
    fn drop(&mut self) {
        guard!("stage.dropped-slabs-stop", self.shared.stopped.store(true, Ordering::Relaxed));
    }
}

/// A background thread's part of [`Line::threads`].
struct Worker {
    shared: Arc<Shared>,
    left: bool,
}

impl Worker {
    fn work(mut self) {
        loop {
            let mut line = self.shared.line.lock();
            let Some(job) = self.shared.next(&mut line) else {
                // In the same hold of the lock, so that whoever adds work later sees that this thread
                // does not do it.
                line.threads -= 1;
                self.left = true;
                drop(line);
                self.shared.changed.notify_all();
                return;
            };
            drop(line);
            let pins = matches!(job, Job::Slab(schedule::Job::Pin { .. }));
            self.shared.carry_out(job);
            if pins {
                std::thread::sleep(PAUSE);
                self.shared.line.lock().schedule.rested();
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a panic.
        if !self.left {
            self.shared.line.lock().threads -= 1;
            self.shared.changed.notify_all();
        }
    }
}

impl Shared {
    /// The next job.
    fn next(&self, line: &mut Line) -> Option<Job> {
        if self.stopped.load(Ordering::Relaxed) {
            return None;
        }
        if std::mem::take(&mut line.frees) {
            return Some(Job::Free);
        }
        match line.schedule.next(|| self.open()) {
            Ok(job) => job.map(Job::Slab),
            Err(error) => {
                self.tell(line, Some(error));
                None
            }
        }
    }

    /// Maps a slab; `None` where the driver allocates it.
    fn open(&self) -> Result<Option<HostPages>, PinError> {
        let Some((huge, node)) = self.pages else { return Ok(None) };
        match HostPages::map_unpopulated(self.slab_bytes, huge, node) {
            Ok(pages) => Ok(Some(pages)),
            Err(PinError::Unsupported) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn carry_out(&self, job: Job) {
        match job {
            Job::Slab(schedule::Job::Populate { serial, piece, memory }) => {
                let offset = piece * PIECE_BYTES;
                let bytes = PIECE_BYTES.min(self.slab_bytes - offset);
                let populated = memory.as_ref().as_ref().map(|pages| pages.populate(offset, bytes));
                drop(memory);
                self.line.lock().schedule.ended(serial, populated.unwrap_or(Ok(())));
            }
            Job::Slab(schedule::Job::Pin { serial, memory, refused }) => {
                let pinned = self.pin(memory, refused).map(Arc::new);
                let mut line = self.line.lock();
                let (settled, unwanted) = line.schedule.settle(serial, pinned);
                if let Some(settled) = settled {
                    self.tell(&mut line, settled.err());
                }
                drop(line);
                drop(unwanted);
            }
            Job::Free => {
                if let Err(error) = self.device.free_retired() {
                    tracing::warn!(%error, "slabs that were given back were not freed");
                }
            }
        }
    }

    /// Pins a slab whose pages are populated, or of which a piece was `refused`.
    fn pin(
        &self,
        memory: Arc<Option<HostPages>>,
        refused: Option<PinError>,
    ) -> Result<PinnedBuffer, PinError> {
        let kind = memory.as_ref().as_ref().map(|pages| pages.granted().pages);
        match (self.pages, refused, kind) {
            // Pages that are set aside can be refused late. The system has others.
            (Some((huge, node)), Some(_), Some(PageKind::Huge)) => {
                drop(memory);
                let pages = HostPages::map(self.slab_bytes, huge, node)?;
                PinnedBuffer::pin_pages(&self.device, pages)
            }
            (_, Some(refused), _) => Err(refused),
            // Every piece has ended, and its memory was dropped before that.
            (_, None, _) => match Arc::into_inner(memory).flatten() {
                Some(pages) => PinnedBuffer::pin_pages(&self.device, pages),
                None => PinnedBuffer::pin(&self.device, self.slab_bytes, self.memory),
            },
        }
    }

    /// Tells the owner that there is something to take.
    fn tell(&self, line: &mut Line, refusal: Option<PinError>) {
        line.refusal = line.refusal.or(refusal);
        // Partner of the load in `poll`.
        self.news.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    fn wait(&self, line: &mut MutexGuard<'_, Line>) {
        #[cfg(test)]
        {
            line.waiting += 1;
        }
        self.changed.wait(line);
    }
}

#[cfg(test)]
mod tests {
    use cuda_driver::CountingDriver;
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    /// Slabs of a page, of which a thread pins the first while another thread does `work`. The
    /// pinning goes on when that thread waits, or has finished without.
    fn while_pinning(slabs: u64, work: impl FnOnce(PinnedSlabs) + Send + 'static) -> SimDriver {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let gate = Arc::new(Mutex::new(()));
        let (at_gate, shut) = (Arc::clone(&gate), gate.lock());
        let counting = CountingDriver::watched(Arc::new(sim.clone()), move |call| {
            if call == "cuMemHostRegister" {
                drop(at_gate.lock());
            }
        });
        let counting = Arc::new(counting);
        let device = Device::open(Arc::clone(&counting) as Arc<_>, 0).unwrap();
        let options =
            SlabsOptions { slab_bytes_max: 4096, threads: 1, ..SlabsOptions::new(4096, slabs) };
        let slabs = PinnedSlabs::new(&device, &options).unwrap();
        let shared = Arc::clone(&slabs.shared);
        while !counting.calls().contains_key("cuMemHostRegister") {
            std::thread::yield_now();
        }
        let other = std::thread::spawn(move || work(slabs));
        while shared.line.lock().waiting == 0 && !other.is_finished() {
            std::thread::yield_now();
        }
        drop(shut);
        other.join().unwrap();
        sim
    }

    #[test]
    fn close_waits_for_the_slab_that_is_being_pinned_and_leaves_nothing() {
        let sim = while_pinning(2, |slabs| slabs.close().unwrap());
        assert_eq!((sim.pinned_bytes(), sim.calls()["cuMemHostRegister"]), (0, 1));
    }

    #[test]
    fn a_thread_unregisters_slabs_that_were_given_back() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let options =
            SlabsOptions { slab_bytes_max: 4096, threads: 2, ..SlabsOptions::new(4096, 3) };
        let mut slabs = PinnedSlabs::new(&device, &options).unwrap();
        let join = |slabs: &mut PinnedSlabs| {
            slabs.started.drain(..).for_each(|thread| thread.join().unwrap());
        };
        join(&mut slabs);
        assert_eq!(slabs.poll(), Ok(3));
        slabs.resize(1).unwrap();
        assert_eq!((slabs.give_back(), slabs.give_back()), (2, 0));
        join(&mut slabs);
        assert_eq!(sim.pinned_bytes(), 4096);
    }

    #[test]
    fn pinning_everything_waits_for_the_slab_that_another_thread_pins() {
        let sim = while_pinning(1, |mut slabs| {
            assert_eq!(slabs.pin_all(), Ok(1));
            slabs.close().unwrap();
        });
        assert_eq!((sim.pinned_bytes(), sim.calls()["cuMemHostRegister"]), (0, 1));
    }
}
