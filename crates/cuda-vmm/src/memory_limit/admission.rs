//! Asks the device for its free memory before creating any, and keeps some of it free.

use cuda_driver::guard;
use cuda_driver::messages::one_line_debug;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use cuda_driver::{Device, DeviceError};
use parking_lot::Mutex;

/// The memory of a device, as seen by the whole machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MemoryFigures {
    /// Number of bytes that could be allocated now.
    pub free_bytes: u64,
    /// Total bytes of the device.
    pub total_bytes: u64,
    /// Bytes held by other processes, if the probe knows.
    pub others_bytes: Option<u64>,
}

/// A source of memory figures of a device.
///
/// It is a trait so that a program can use its own source, such as a cluster's agent, and a test
/// its own figures.
pub trait MemoryProbe: fmt::Debug + Send + Sync {
    /// The current figures of `device`. Called without a lock of the policy, and several times for
    /// one request if others create memory meanwhile. The pool that asks may be growing: a call that
    /// waits for a growth of the same pool would wait for ever.
    ///
    /// # Errors
    /// The device's error.
    fn figures(&self, device: &Device) -> Result<MemoryFigures, DeviceError>;
}

/// Asks the driver (`cuMemGetInfo`). The driver counts the memory of all processes, but not by
/// process.
#[derive(Clone, Copy, Debug, Default)]
struct DriverProbe;

impl MemoryProbe for DriverProbe {
    fn figures(&self, device: &Device) -> Result<MemoryFigures, DeviceError> {
        let (free_bytes, total_bytes) = device.memory_info()?;
        Ok(MemoryFigures { free_bytes, total_bytes, others_bytes: None })
    }
}

/// Whether memory may be created, with all figures behind the answer.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
pub struct Verdict {
    /// Requested bytes.
    pub wanted_bytes: u64,
    /// Free bytes of the device.
    pub free_bytes: u64,
    /// Bytes that were admitted before and may not exist yet.
    pub pending_bytes: u64,
    /// Bytes that must stay free.
    pub keep_free_bytes: u64,
    /// Bytes held by other processes, if the probe knows.
    pub others_bytes: Option<u64>,
}

impl Verdict {
    /// Whether the memory may be created.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.short_by() == 0
    }

    /// Number of missing bytes; 0 if there is enough.
    #[must_use]
    pub fn short_by(&self) -> u64 {
        let Self { wanted_bytes, free_bytes, pending_bytes, keep_free_bytes, .. } = *self;
        // Added in 128 bits, so that no figure can overflow.
        let needed =
            u128::from(wanted_bytes) + u128::from(pending_bytes) + u128::from(keep_free_bytes);
        let short = needed.saturating_sub(free_bytes.into());
        u64::try_from(short).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted_bytes, free_bytes, pending_bytes, keep_free_bytes, others_bytes } = self;
        write!(
            f,
            "{wanted_bytes} bytes wanted, {free_bytes} free, {keep_free_bytes} to be kept free"
        )?;
        if *pending_bytes > 0 {
            write!(f, ", {pending_bytes} promised to others")?;
        }
        match others_bytes {
            Some(bytes) => write!(f, "; other processes hold {bytes}"),
            None => Ok(()),
        }
    }
}

/// The reason why nothing was admitted.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
pub(crate) enum AdmissionError {
    /// The device has too little free memory. This is an expected outcome.
    #[error("too little memory is free")]
    NoHeadroom(#[source] Verdict),
    /// The device could not be queried.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Decides, before memory is created, whether the device can spare it.
///
/// The handle is cheap: clones share the policy. Pools that share a policy never overdraw the
/// device together, however many threads ask at once: admitted bytes count until they exist, page
/// by page.
///
/// # Cost
/// One call of the probe for each batch of created pages, none for reused pages.
#[derive(Clone, Debug)]
pub struct AdmissionPolicy {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Bytes that stay free on a device.
    keep_free_bytes: u64,
    probe: Arc<dyn MemoryProbe>,
    /// The promises by device ordinal. Locked while a page is created, so that the page is counted
    /// either here or as created, and never while the probe is asked, which is a caller's code.
    pending: Mutex<BTreeMap<i32, Promises>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Promises {
    /// Admitted bytes that do not exist yet.
    pending_bytes: u64,
    /// Admitted bytes that were ever created. Wraps.
    created_bytes: u64,
}

impl AdmissionPolicy {
    /// Creates a policy that asks the driver. `keep_free_bytes` bytes stay free on each device, for the framework's own
    /// allocations and other users.
    #[must_use]
    pub fn new(keep_free_bytes: u64) -> Self {
        Self::with_probe(keep_free_bytes, Arc::new(DriverProbe))
    }

    /// Creates a policy that asks `probe`.
    #[must_use]
    pub fn with_probe(keep_free_bytes: u64, probe: Arc<dyn MemoryProbe>) -> Self {
        let pending = Mutex::new(BTreeMap::new());
        Self { inner: Arc::new(Inner { keep_free_bytes, probe, pending }) }
    }

    /// The answer for `wanted_bytes` on `device` now. For people and logs: it promises nothing.
    ///
    /// # Errors
    /// The probe's error.
    pub fn judge(&self, device: &Device, wanted_bytes: u64) -> Result<Verdict, DeviceError> {
        let figures = self.inner.probe.figures(device)?;
        Ok(self.judge_by(figures, wanted_bytes, self.promises(device).pending_bytes))
    }

    fn promises(&self, device: &Device) -> Promises {
        self.inner.pending.lock().get(&device.ordinal()).copied().unwrap_or_default()
    }

    /// Promises `wanted_bytes` to the caller, until the bytes exist or the result is dropped.
    pub(crate) fn admit(
        &self,
        device: &Device,
        wanted_bytes: u64,
    ) -> Result<Admitted, AdmissionError> {
        loop {
            let before = self.promises(device).created_bytes;
            let mut figures = self.inner.probe.figures(device)?;
            let mut pending = self.inner.pending.lock();
            let promises = pending.entry(device.ordinal()).or_default();
            // The figures may be older than these bytes.
            let since = promises.created_bytes.wrapping_sub(before);
            let free_bytes = figures.free_bytes;
            figures.free_bytes =
                guard!("vmm.overtaken-figures", free_bytes.saturating_sub(since), else free_bytes);
            let verdict = self.judge_by(figures, wanted_bytes, promises.pending_bytes);
            if verdict.is_admitted() {
                promises.pending_bytes += wanted_bytes;
                let (policy, ordinal) = (self.clone(), device.ordinal());
                return Ok(Admitted { policy, ordinal, bytes: wanted_bytes });
            }
            if since == 0 {
                return Err(AdmissionError::NoHeadroom(verdict));
            }
            // Asked again: the figures may also count them. Each time another caller has got memory.
        }
    }

    fn judge_by(&self, figures: MemoryFigures, wanted_bytes: u64, pending_bytes: u64) -> Verdict {
        Verdict {
            wanted_bytes,
            free_bytes: figures.free_bytes,
            pending_bytes,
            keep_free_bytes: self.inner.keep_free_bytes,
            others_bytes: figures.others_bytes,
        }
    }
}

/// Bytes promised to one caller; see [`AdmissionPolicy::admit`].
#[derive(Debug)]
#[must_use = "dropping it gives the promise up"]
pub(crate) struct Admitted {
    policy: AdmissionPolicy,
    ordinal: i32,
    bytes: u64,
}

impl Admitted {
    /// Creates `bytes` of the promised bytes. No other caller asks between their creation and the
    /// end of their promise, so none counts them twice.
    pub(crate) fn create<T, E>(
        &mut self,
        bytes: u64,
        create: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let policy = self.policy.clone();
        // Held across one driver call. Only callers that create memory wait for the lock.
        let mut pending = policy.inner.pending.lock();
        let created = create()?;
        self.keep(&mut pending, bytes);
        if let Some(promises) = pending.get_mut(&self.ordinal) {
            promises.created_bytes = promises.created_bytes.wrapping_add(bytes);
        }
        Ok(created)
    }

    /// Ends the promise of `bytes`.
    fn keep(&mut self, pending: &mut BTreeMap<i32, Promises>, bytes: u64) {
        let kept = bytes.min(self.bytes);
        self.bytes -= kept;
        if let Some(Promises { pending_bytes, .. }) = pending.get_mut(&self.ordinal) {
            *pending_bytes = pending_bytes.saturating_sub(kept);
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let policy = self.policy.clone();
        let mut pending = policy.inner.pending.lock();
        let left = self.bytes;
        self.keep(&mut pending, left);
    }
}

one_line_debug!(Verdict, AdmissionError);

#[cfg(test)]
mod tests {
    use cuda_driver::PhysicalMemory;
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn memory_is_promised_or_created_and_never_both() {
        const PAGE: u64 = 64 << 10;
        let config =
            SimConfig { device_bytes: 8 * PAGE, granularity: PAGE, ..SimConfig::default() };
        let device = Device::open(Arc::new(SimDriver::new(config).unwrap()), 0).unwrap();
        let policy = AdmissionPolicy::new(PAGE);
        let mut admitted = policy.admit(&device, 4 * PAGE).unwrap();
        for created in 0..4 {
            // Seven pages except the headroom: three are left to other users, whatever exists by
            // now.
            let verdict = policy.judge(&device, 3 * PAGE).unwrap();
            assert!(verdict.is_admitted(), "{verdict}");
            assert_eq!(verdict.pending_bytes, (4 - created) * PAGE);
            assert!(!policy.judge(&device, 3 * PAGE + 1).unwrap().is_admitted());
            let page = admitted.create(PAGE, || PhysicalMemory::create(&device, PAGE)).unwrap();
            let _ = page.leak();
        }
        drop(admitted);
        assert_eq!(policy.judge(&device, 3 * PAGE).unwrap().pending_bytes, 0);
    }

    #[test]
    fn a_verdict_says_what_it_rests_on() {
        let verdict = Verdict {
            wanted_bytes: 10,
            free_bytes: 30,
            pending_bytes: 4,
            keep_free_bytes: 17,
            others_bytes: Some(5),
        };
        assert_eq!((verdict.is_admitted(), verdict.short_by()), (false, 1));
        assert_eq!(
            verdict.to_string(),
            "10 bytes wanted, 30 free, 17 to be kept free, 4 promised to others; \
             other processes hold 5"
        );
        let enough = Verdict { pending_bytes: 3, others_bytes: None, ..verdict };
        assert!(enough.is_admitted());
        assert_eq!(
            enough.to_string(),
            "10 bytes wanted, 30 free, 17 to be kept free, 3 promised to others"
        );
        let huge = Verdict { wanted_bytes: u64::MAX, keep_free_bytes: u64::MAX, ..verdict };
        assert_eq!((huge.is_admitted(), huge.short_by()), (false, u64::MAX));
    }
}
