//! One GPU in this process: its context, its health, and the memory waiting to be freed on it.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use crate::guard;

use crate::alive::Tally;
use crate::close::{Left, Loss, destroy, free_all, refused};
use crate::current::{Bound, Keeping};
use crate::messages::one_line_debug;
use crate::opened::{self, Noted};
use crate::span::LastUses;
use crate::{
    DeviceAttribute, DeviceInfo, Driver, DriverError, DriverResult, ErrorCode, HostAccess,
    HostRegion, LiveHandles, Stream, site,
};

/// Why an operation on a device did not happen.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver refused the call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The device has had an error from which its context cannot recover; the call was not made.
    #[error("the device is lost since {first}")]
    Poisoned {
        /// The first such error: the cause, with the call that met it.
        first: DriverError,
    },
    /// The stream is of another context than the object that it was given for, and so usually of
    /// another GPU. The call was not made.
    #[error("{call} of an object of GPU {device} was given a stream of GPU {stream}")]
    OtherDevice {
        /// The driver's name of the call.
        call: &'static str,
        /// Ordinal of the object's device, whose streams the call takes.
        device: i32,
        /// Ordinal of the stream's device.
        stream: i32,
    },
}

one_line_debug!(DeviceError);

impl DeviceError {
    /// The driver's answer: this call's, or the one that poisoned the device. For a call that was
    /// not made, the answer that the driver has for it.
    #[must_use]
    pub fn driver_error(&self) -> DriverError {
        match *self {
            Self::Driver(error) | Self::Poisoned { first: error } => error,
            Self::OtherDevice { call, device, .. } => {
                DriverError::new(call, ErrorCode::INVALID_HANDLE).on_device(device)
            }
        }
    }

    /// Whether the device ran out of memory: an expected outcome, unlike the loss of a device.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Driver(error) if error.code == ErrorCode::OUT_OF_MEMORY)
    }
}

/// Memory whose owner was dropped. Freeing it waits for the device, so a drop only adds it to this
/// list.
#[derive(Debug)]
pub(crate) enum Retired {
    Device(u64, LastUses),
    Host(u64),
    /// Registered at its first address.
    Registered(Box<dyn HostRegion>),
    /// This crate's memory of a copy that could not be waited for.
    Lent(Box<[u8]>),
    /// A module, since unloading waits, or an object that certainly was not destroyed when its last
    /// handle was dropped.
    Object(Object),
}

/// The outcome of the one call that ends an object.
pub(crate) enum Ended {
    /// It was made.
    Done,
    /// It certainly did nothing, and may be repeated.
    Not(DeviceError),
    /// It may have been made: the object's number may be another's by now.
    Perhaps(DeviceError),
}

/// A driver object whose last handle is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Object {
    Stream(u64),
    Event(u64),
    Module(u64),
    GraphExec(u64),
    /// Reserved addresses: the first, and the length.
    Addresses(u64, u64),
    PhysicalMemory(u64),
}

/// A GPU, on one context. A cheap handle: clones are the same device.
///
/// Every operation through a handle of this crate binds the device's context on the calling thread
/// and restores the context that was current before. So handles may be used and dropped on any
/// thread. For many operations on one thread, [`while_current`](Device::while_current) keeps the
/// context current.
///
/// # Health
/// The first sticky error ([`ErrorCode::is_sticky`](crate::ErrorCode::is_sticky)) poisons the
/// device: later operations fail at once with that cause and do not reach the driver. Clean-up is
/// always tried, and its errors on a lost device are not reported.
#[derive(Clone)]
pub struct Device {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) ordinal: i32,
    /// # Invariants
    /// Valid until `end`: retained by `open`, or kept by `adopt`'s caller.
    pub(crate) context: u64,
    /// Until `end`: the context's entry in the list of contexts that this process has opened.
    pub(crate) noted: Option<Noted>,
    /// Whether the context is ours to release, and was not released yet.
    pub(crate) retained: bool,
    info: DeviceInfo,
    pub(crate) loss: OnceLock<Loss>,
    pub(crate) retired: Mutex<Vec<Retired>>,
    /// Held by the thread that frees what was retired. A thread that needs that memory waits,
    /// because memory that is taken from the list and not yet free is neither here nor there.
    freeing: Mutex<()>,
    /// How often something retired was freed.
    freed: AtomicU64,
    /// The driver's answer for the first dropped object that may be left.
    pub(crate) given_up: OnceLock<DriverError>,
    tally: Tally,
    pub(crate) owner: Owner,
}

/// How many devices of this process were lost.
static LOSSES: AtomicU64 = AtomicU64::new(0);

/// The host program's object behind an adopted handle, held to keep it alive.
pub(crate) struct Owner(Option<Box<dyn Any + Send + Sync>>);

impl Owner {
    /// The host program keeps the object alive.
    pub(crate) const ELSEWHERE: Self = Self(None);

    #[cfg(feature = "cuda")]
    pub(crate) fn of(object: impl Any + Send + Sync) -> Self {
        Self(Some(Box::new(object)))
    }

    /// Drops the object. Its destructor may bind another context on this thread; the current one is
    /// restored.
    pub(crate) fn let_go(&mut self, driver: &dyn Driver) {
        let Some(object) = self.0.take() else { return };
        let before = driver.ctx_get_current();
        drop(object);
        if let Ok(before) = before
            && driver.ctx_get_current() != Ok(before)
        {
            // SAFETY: as in the destructor of `Bound`: it was current on this thread a moment ago.
            let restored = unsafe { driver.ctx_set_current(before) };
            if let Err(error) = restored {
                tracing::warn!(%error, "the previous context could not be restored");
            }
        }
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "kept" } else { "elsewhere" })
    }
}

/// Whose context a device uses.
enum Context {
    /// The primary one, retained for the device.
    Retained(u64),
    /// The host program's.
    Adopted(u64, Owner),
}

impl Device {
    /// Opens device `ordinal` on its primary context, which this handle retains.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with `INVALID_DEVICE` for an unknown ordinal, or another error of
    /// the driver.
    pub fn open(driver: Arc<dyn Driver>, ordinal: i32) -> Result<Self, DeviceError> {
        let on_device = |error: DriverError| error.on_device(ordinal);
        let info = driver.device_get_info(ordinal).map_err(on_device)?;
        let context = driver.device_primary_ctx_retain(ordinal).map_err(on_device)?;
        Ok(Self::from_parts(driver, ordinal, Context::Retained(context), info))
    }

    /// Uses a context that the host program already has, such as cudarc's `CudaContext`.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] when the context cannot be bound.
    ///
    /// # Safety
    /// - `context` is a live `CUcontext` of `driver`'s library;
    /// - it stays alive until the last clone of the result, and the last handle made from it, is
    ///   dropped.
    pub unsafe fn adopt(driver: Arc<dyn Driver>, context: u64) -> Result<Self, DeviceError> {
        // SAFETY: the caller promises the same.
        unsafe { Self::adopt_of(driver, context, Owner::ELSEWHERE) }
    }

    /// # Safety
    /// - As [`adopt`](Device::adopt), as long as `owner` is held.
    pub(crate) unsafe fn adopt_of(
        driver: Arc<dyn Driver>,
        context: u64,
        owner: Owner,
    ) -> Result<Self, DeviceError> {
        // SAFETY: the caller passes a live context of this driver.
        let bound = unsafe { Bound::enter(&*driver, context) }?;
        let ordinal = driver.ctx_get_device();
        drop(bound);
        let ordinal = ordinal?;
        let info = driver.device_get_info(ordinal)?;
        Ok(Self::from_parts(driver, ordinal, Context::Adopted(context, owner), info))
    }

    fn from_parts(
        driver: Arc<dyn Driver>,
        ordinal: i32,
        context: Context,
        info: DeviceInfo,
    ) -> Self {
        let (context, retained, owner) = match context {
            Context::Retained(context) => (context, true, Owner::ELSEWHERE),
            Context::Adopted(context, owner) => (context, false, owner),
        };
        let noted = Some(opened::note(&*driver, context));
        Self {
            inner: Arc::new(Inner {
                driver,
                ordinal,
                context,
                noted,
                retained,
                info,
                loss: OnceLock::new(),
                retired: Mutex::new(Vec::new()),
                freeing: Mutex::new(()),
                freed: AtomicU64::new(0),
                given_up: OnceLock::new(),
                tally: Tally::default(),
                owner,
            }),
        }
    }

    /// The driver object of this device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.inner.driver
    }

    /// CUDA's ordinal of the device in this process.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.inner.ordinal
    }

    /// The raw context, to hand to other libraries.
    #[must_use]
    pub fn context(&self) -> u64 {
        self.inner.context
    }

    /// Name, UUID, size and bus of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// Time on the host's clock of a simulated machine, for predictions; `None` on a GPU.
    #[must_use]
    pub fn virtual_now(&self) -> Option<Duration> {
        self.inner.driver.virtual_now()
    }

    /// The error that poisoned the device, if one did.
    #[must_use]
    pub fn poison(&self) -> Option<DriverError> {
        self.inner.loss.get().map(|loss| loss.error)
    }

    /// The error that poisoned the device, and the number of that loss within the process.
    #[must_use]
    pub fn loss(&self) -> Option<Loss> {
        self.inner.loss.get().copied()
    }

    /// The live objects made from the device.
    #[must_use]
    pub fn alive(&self) -> LiveHandles {
        let retired = self.inner.retired.lock().len();
        self.inner.tally.alive(Arc::strong_count(&self.inner), retired)
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.inner.tally
    }

    /// Runs driver calls with this device's context bound, and restores the context that was
    /// current before.
    ///
    /// A sticky error poisons the device. Other crates make calls without a handle in this crate in
    /// this way.
    ///
    /// # Errors
    /// [`DeviceError::Poisoned`] without running `calls` when the device is lost; otherwise the
    /// error of `calls`.
    #[track_caller]
    pub fn run<T>(
        &self,
        calls: impl FnOnce(&dyn Driver) -> DriverResult<T>,
    ) -> Result<T, DeviceError> {
        if let Some(first) = guard!("driver.lost-asked-nothing", self.poison(), else None) {
            return Err(DeviceError::Poisoned { first });
        }
        self.clean_up(calls)
    }

    /// As [`run`](Device::run), also on a poisoned device: for freeing and unmapping.
    ///
    /// # Errors
    /// What the calls returned.
    #[track_caller]
    pub fn clean_up<T>(
        &self,
        calls: impl FnOnce(&dyn Driver) -> DriverResult<T>,
    ) -> Result<T, DeviceError> {
        let _site = guard!("driver.site-of-caller", site::enter(), else site::leave());
        let driver = &*self.inner.driver;
        // SAFETY: the context is alive as long as `inner` (its invariant).
        let result = unsafe { Bound::enter(driver, self.inner.context) }.and_then(|bound| {
            let result = calls(driver);
            drop(bound);
            result
        });
        result.map_err(|error| self.met(error))
    }

    /// Keeps this device's context current on the calling thread while `work` runs. Within `work`,
    /// operations of this device's handles make no driver call for their context, and those of
    /// other devices make two. Elsewhere each operation makes three, or one if the context is
    /// current already.
    ///
    /// Use it for the loop of a thread that drives a device, and for many operations in a row. It
    /// affects no other thread. After `work`, also after a panic, the context that was current
    /// before is current again.
    ///
    /// Other libraries that run on this thread within `work` may make another context current, as
    /// long as they restore this one, as PyTorch's device guards do. If they do not, later
    /// operations within `work` act on the other context. The end of `work` checks this, and logs
    /// an error.
    ///
    /// # Errors
    /// When the context cannot be bound; `work` was not called then.
    pub fn while_current<T>(&self, work: impl FnOnce() -> T) -> Result<T, DeviceError> {
        // SAFETY: the context is alive as long as `inner` (its invariant), which `self` holds.
        let keeping = unsafe { Keeping::enter(&*self.inner.driver, self.inner.context) };
        let keeping = keeping.map_err(|error| self.met(error))?;
        let done = work();
        drop(keeping);
        Ok(done)
    }

    /// An error of a call on this device, with the device's ordinal in its message.
    fn named(&self, error: DriverError) -> DriverError {
        error.on_device(self.inner.ordinal)
    }

    /// Converts an error of a call. A sticky error poisons the device.
    fn met(&self, error: DriverError) -> DeviceError {
        let error = self.named(error);
        if guard!("driver.first-loss-kept", error.code.is_sticky(), else false) {
            let first = self.inner.lose(error);
            if first != error {
                return DeviceError::Poisoned { first };
            }
        }
        DeviceError::Driver(error)
    }

    /// As [`run`](Device::run), for a call that uses objects of `others` too. A sticky error of such a call may be
    /// the loss of another device, which does not lose this one.
    #[track_caller]
    pub(crate) fn run_with<T>(
        &self,
        others: &[&Device],
        calls: impl FnOnce(&dyn Driver) -> DriverResult<T>,
    ) -> Result<T, DeviceError> {
        let lost = || others.iter().find_map(|other| other.poison());
        if let Some(first) = guard!("driver.other-lost", lost(), else None) {
            return Err(DeviceError::Poisoned { first });
        }
        let mut answer = Ok(());
        let result = self.run(|driver| match calls(driver) {
            Ok(result) => Ok(Some(result)),
            Err(error) => {
                answer = Err(error);
                Ok(None)
            }
        })?;
        match (result, answer) {
            (Some(result), _) => Ok(result),
            (None, Err(error)) => Err(self.met_with(others, error)),
            (None, Ok(())) => unreachable!("a call without a result has an error"),
        }
    }

    /// What an error of a call means that used objects of `others` too. A sticky error does not say whose it is, so
    /// each device is asked.
    #[track_caller]
    pub(crate) fn met_with(&self, others: &[&Device], error: DriverError) -> DeviceError {
        if error.code.is_sticky() {
            let is_other = |other: &&&Device| !self.shares_context(other);
            let is_other =
                |other: &&&Device| guard!("driver.whose-loss", is_other(other), else false);
            for other in others.iter().filter(is_other) {
                let _ = other.memory_info();
                if let Some(first) = other.poison()
                    && guard!("driver.both-lost", self.memory_info().is_ok(), else true)
                {
                    return DeviceError::Poisoned { first };
                }
            }
        }
        self.met(error)
    }

    /// Refuses objects of another driver object. This driver would follow their handles, which are
    /// not its own.
    pub(crate) fn check_driver(
        &self,
        other: &Device,
        call: &'static str,
        code: ErrorCode,
    ) -> DriverResult<()> {
        if self.is_of_driver(other) {
            Ok(())
        } else {
            Err(self.named(DriverError::new(call, code)))
        }
    }

    /// Refuses a stream of another driver object, or of another context: of two default streams,
    /// which have one number, the driver would take the wrong one.
    pub(crate) fn check_stream(
        &self,
        stream: &Stream,
        call: &'static str,
    ) -> Result<(), DeviceError> {
        let other = stream.device();
        self.check_driver(other, call, ErrorCode::INVALID_HANDLE)?;
        match guard!("driver.own-context", self.shares_context(other), else true) {
            true => Ok(()),
            false => {
                let (device, stream) = (self.ordinal(), other.ordinal());
                Err(DeviceError::OtherDevice { call, device, stream })
            }
        }
    }

    /// Whether both are on one context of one driver object: what is made from the one may be used with the other.
    ///
    /// Two GPUs never share a context. Two handles of one GPU may be on two contexts, and the contexts of two driver
    /// objects may have one number.
    #[must_use]
    pub fn shares_context(&self, other: &Device) -> bool {
        self.inner.context == other.inner.context
            && guard!("driver.two-drivers", self.is_of_driver(other), else true)
    }

    /// Whether both devices are of one driver object.
    pub(crate) fn is_of_driver(&self, other: &Device) -> bool {
        let [ours, theirs] = [self, other].map(|device| Arc::as_ptr(&device.inner.driver));
        // Compared by address, since one driver's table of methods may exist twice.
        std::ptr::addr_eq(ours, theirs)
    }

    /// A device attribute.
    ///
    /// # Errors
    /// What the driver answers.
    #[track_caller]
    pub fn attribute(&self, attribute: DeviceAttribute) -> Result<i32, DeviceError> {
        self.run(|driver| driver.device_get_attribute(self.inner.ordinal, attribute))
    }

    /// Free and total memory, in bytes.
    ///
    /// # Errors
    /// What the driver answers.
    #[track_caller]
    pub fn memory_info(&self) -> Result<(u64, u64), DeviceError> {
        self.run(|driver| driver.mem_get_info())
    }

    /// Waits for all work of the device's context.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.run(|driver| driver.ctx_synchronize())
    }

    /// Tells the driver, with the caller's line, that the host is about to access memory that
    /// devices can reach too: see [`Driver::host_access`]. [`PinnedBuffer`](crate::PinnedBuffer)
    /// does so itself. Code that accesses its bytes by address calls this. An access of no bytes is
    /// ignored.
    #[track_caller]
    pub fn host_access(&self, access: HostAccess) {
        if access.bytes > 0 {
            let _site = site::enter();
            self.inner.driver.host_access(access);
        }
    }

    /// Adds memory whose owner was dropped to the list that [`free_retired`](Device::free_retired)
    /// frees.
    pub(crate) fn retire(&self, memory: Retired) {
        self.inner.retired.lock().push(memory);
    }

    /// Makes the call that ends an object, and returns its outcome.
    #[track_caller]
    pub(crate) fn end(&self, call: impl FnOnce(&dyn Driver) -> DriverResult<()>) -> Ended {
        let mut made = false;
        let answer = self.clean_up(|driver| {
            made = true;
            call(driver)
        });
        match answer {
            Ok(()) => Ended::Done,
            Err(error)
                if guard!("driver.unbound-not-made", made, else true)
                    && !error.driver_error().code.is_of_call_not_made() =>
            {
                Ended::Perhaps(error)
            }
            Err(error) => Ended::Not(error),
        }
    }

    /// Destroys an object, and returns the driver's answer. An object that certainly was not
    /// destroyed is tried again with the memory of dropped buffers. An object that may have been
    /// destroyed is given up.
    ///
    /// # Safety
    /// - The object is live, of this device, and its last handle is being dropped.
    #[track_caller]
    pub(crate) unsafe fn destroy(&self, object: Object) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        match self.end(|driver| unsafe { destroy(driver, object) }) {
            Ended::Done => Ok(()),
            Ended::Not(error) if !error.driver_error().code.is_sticky() => {
                guard!("driver.object-again", self.retire(Retired::Object(object)));
                Err(error)
            }
            Ended::Not(error) | Ended::Perhaps(error) => {
                self.give_up(error.driver_error(), "an object may not have been destroyed");
                Err(error)
            }
        }
    }

    /// Remembers that a dropped object may be left, for [`close`](Device::close) to report.
    pub(crate) fn give_up(&self, error: DriverError, what: &'static str) {
        refused(error, what);
        if !error.code.is_sticky() {
            let _ = self.inner.given_up.set(error);
        }
    }

    /// Frees the memory of dropped buffers and modules, and returns their number. Objects that were
    /// not destroyed when they were dropped are tried once more, and count too. Their context could
    /// not be bound, or the driver said that the call did nothing.
    ///
    /// Dropping a buffer or a module frees nothing, because `cuMemFree`, `cuMemFreeHost` and
    /// `cuModuleUnload` wait for the device. Allocating calls this first if there is anything, and so does dropping the
    /// last handle of the device.
    ///
    /// # Ordering
    /// May wait for all work of the device, and for another thread that is in this call: what was
    /// dropped before the call is free when it returns.
    ///
    /// # Errors
    /// The first refusal; every other buffer is freed all the same. An object whose call certainly
    /// did nothing waits for the next attempt. Another refused object is given up, and is never freed
    /// a second time: it may be gone, since the driver may return the error of earlier work.
    #[track_caller]
    pub fn free_retired(&self) -> Result<usize, DeviceError> {
        // Bounded by the driver's calls, which wait for the device's work. The regions are dropped
        // behind it, since their destructors are the host program's code.
        let freeing = guard!("driver.freeing-waited", Some(self.inner.freeing.lock()), else None);
        let retired = std::mem::take(&mut *self.inner.retired.lock());
        if retired.is_empty() {
            return Ok(0);
        }
        let count = retired.len();
        let mut left = Left { retired, regions: Vec::new() };
        // Where the context cannot be bound, all is left.
        let freed = self.clean_up(|driver| free_all(driver, &mut left));
        guard!("driver.unbound-kept", self.inner.retired.lock().extend(left.retired));
        // Relaxed: whoever compares the number has waited for the lock.
        self.inner.freed.fetch_add(1, Relaxed);
        drop(freeing);
        drop(left.regions);
        freed.map(|()| count)
    }
}

impl Device {
    /// Makes a call that allocates, when what was dropped is free. Waits for another thread that frees only if
    /// memory is short without it.
    #[track_caller]
    pub(crate) fn allocate<T>(
        &self,
        calls: impl Fn(&dyn Driver) -> DriverResult<T>,
    ) -> Result<T, DeviceError> {
        let _site = site::enter();
        if guard!("driver.frees-own-needs", !self.inner.retired.lock().is_empty(), else true) {
            self.free_retired()?;
        }
        let freed = self.inner.freed.load(Relaxed);
        let answer = self.run(&calls);
        if !answer.as_ref().is_err_and(DeviceError::is_out_of_memory) {
            return answer;
        }
        self.free_retired()?;
        let is_more = self.inner.freed.load(Relaxed) != freed;
        if guard!("driver.short-tries-again", is_more, else false) {
            self.run(calls)
        } else {
            answer
        }
    }
}

impl Inner {
    /// Poisons the device with `error`, unless it was poisoned before, and returns the first error.
    fn lose(&self, error: DriverError) -> DriverError {
        self.loss.get_or_init(|| Loss { error, order: LOSSES.fetch_add(1, Relaxed) }).error
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("driver", &self.inner.driver.name())
            .field("ordinal", &self.inner.ordinal)
            .field("name", &self.inner.info.name)
            .field("poison", &self.poison())
            .finish()
    }
}

impl PartialEq for Device {
    /// Whether both are handles of the same device instance.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Device {}
