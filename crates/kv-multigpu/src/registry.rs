//! The registry: the instance and the state of each physical GPU.

use cuda_driver::guard;
use std::sync::Arc;

use cuda_driver::{
    CloseError, Closed, Device, DeviceError, Driver, DriverError, LiveHandles, Loss,
};
use parking_lot::Mutex;

use crate::health::{CloseReport, DeviceEntry, DeviceState, Drained};
use crate::identity::{DeviceDirectory, DeviceKind, DeviceUuid, kind_of_name};

/// The reason why a device was refused or not closed, or a text names none.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The device does not exist.
    #[error("no device {ordinal}: the driver reports {count}")]
    NoSuchDevice {
        /// Requested ordinal.
        ordinal: i32,
        /// Number of devices that the driver reports.
        count: i32,
    },
    /// The GPU already has an instance on another context.
    #[error(
        "GPU {ordinal} is in use on context {registered:#x}, so {adopted:#x} cannot be adopted"
    )]
    OtherContext {
        /// CUDA's ordinal of the GPU.
        ordinal: i32,
        /// The context of the registered instance.
        registered: u64,
        /// The context to be adopted.
        adopted: u64,
    },
    /// The driver did not list its devices.
    #[error("the driver did not list its devices")]
    Driver(#[from] DriverError),
    /// The device could not be opened.
    #[error("device {ordinal} could not be opened")]
    Open {
        /// Requested ordinal.
        ordinal: i32,
        /// The cause.
        #[source]
        source: DeviceError,
    },
    /// The context could not be adopted.
    #[error("context {context:#x} could not be adopted")]
    Adopt {
        /// The context passed in.
        context: u64,
        /// The cause.
        #[source]
        source: DeviceError,
    },
    /// The device is being drained or closed, and is not handed out.
    #[error("device {ordinal} is being drained or closed, and is not handed out")]
    Draining {
        /// Requested ordinal.
        ordinal: i32,
    },
    /// The device is not open.
    #[error("device {ordinal} is not open")]
    NotOpen {
        /// Requested ordinal.
        ordinal: i32,
    },
    /// The device was closed after it had been lost. [`DeviceRegistry::reopen`] opens it again.
    #[error("device {ordinal} was lost and closed: {first}")]
    Lost {
        /// Requested ordinal.
        ordinal: i32,
        /// The first error, with the call that returned it.
        first: DriverError,
    },
    /// Waiting for the device's work failed, although the device is not lost.
    #[error("device {ordinal} could not be drained")]
    Drain {
        /// Requested ordinal.
        ordinal: i32,
        /// The cause.
        #[source]
        source: DeviceError,
    },
    /// A handle made from it is alive. The device is drained, and can be closed later.
    #[error("device {ordinal} cannot be closed while it is in use: {alive}")]
    InUse {
        /// Requested ordinal.
        ordinal: i32,
        /// The live handles.
        alive: LiveHandles,
    },
    /// The device is closed, but the driver refused a part of the clean-up.
    #[error("device {ordinal} is closed, and a part of its clean-up was refused")]
    Refused {
        /// Requested ordinal.
        ordinal: i32,
        /// The first refusal.
        #[source]
        source: DriverError,
    },
    /// Text that is no UUID of a device.
    #[error("{text:?} is no UUID such as GPU-00112233-4455-6677-8899-aabbccddeeff")]
    Uuid {
        /// The text.
        text: String,
    },
}

cuda_driver::messages::one_line_debug!(RegistryError);

/// The registry's instance of a GPU.
#[derive(Debug)]
enum Instance {
    Open(Device),
    /// Not handed out any more.
    Draining(Device),
    /// A call is closing it, outside the lock.
    Closing,
    Closed {
        lost: Option<Loss>,
    },
}

impl Instance {
    fn device(&self) -> Option<&Device> {
        match self {
            Self::Open(device) | Self::Draining(device) => Some(device),
            Self::Closing | Self::Closed { .. } => None,
        }
    }

    fn loss(&self) -> Option<Loss> {
        match self {
            Self::Closed { lost } => *lost,
            _ => self.device().and_then(Device::loss),
        }
    }
}

/// A GPU that was opened at least once.
#[derive(Debug)]
struct KnownGpu {
    uuid: [u8; 16],
    ordinal: i32,
    instance: Instance,
    /// The loss of an earlier instance: the first, for there are others where the GPU was opened again.
    earlier: Option<Loss>,
}

impl KnownGpu {
    /// Of this instance and of earlier ones.
    fn losses(&self) -> impl Iterator<Item = (i32, Loss)> {
        self.earlier.into_iter().chain(self.instance.loss()).map(|loss| (self.ordinal, loss))
    }
}

/// Hands out one instance per physical GPU of a driver.
///
/// An instance stays open until it is closed or the registry is dropped, so its identity is stable. One lock guards
/// the list. It is held while a device is opened, so two threads that open a device at once get the same instance. It
/// is never held while a device is waited for, drained or closed.
#[derive(Debug)]
pub struct DeviceRegistry {
    driver: Arc<dyn Driver>,
    directory: Option<Arc<dyn DeviceDirectory>>,
    count: i32,
    /// GPUs, in the order in which they were opened.
    known: Mutex<Vec<KnownGpu>>,
}

impl DeviceRegistry {
    /// A registry over `driver`, without open devices.
    ///
    /// # Errors
    /// [`RegistryError::Driver`] if the driver does not report the number of devices.
    pub fn new(driver: Arc<dyn Driver>) -> Result<Self, RegistryError> {
        Self::make(driver, None)
    }

    /// Like [`new`](DeviceRegistry::new), with the machine's own list of devices: `topology::Nvml`
    /// (feature `nvml`), or another one.
    ///
    /// # Errors
    /// Like [`new`](DeviceRegistry::new). An empty directory is not an error.
    pub fn with_directory(
        driver: Arc<dyn Driver>,
        directory: Arc<dyn DeviceDirectory>,
    ) -> Result<Self, RegistryError> {
        Self::make(driver, Some(directory))
    }

    fn make(
        driver: Arc<dyn Driver>,
        directory: Option<Arc<dyn DeviceDirectory>>,
    ) -> Result<Self, RegistryError> {
        let count = driver.device_get_count()?;
        Ok(Self { driver, directory, count, known: Mutex::new(Vec::new()) })
    }

    /// Number of devices, opened or not.
    #[must_use]
    pub fn count(&self) -> i32 {
        self.count
    }

    /// The driver of the devices.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The instance of device `ordinal`, opened on its primary context at the first call.
    ///
    /// A lost device is handed out like any other until it is drained. Every operation on it
    /// returns the error that lost it.
    ///
    /// # Errors
    /// [`RegistryError::NoSuchDevice`]; [`RegistryError::Open`] with the driver's error;
    /// [`RegistryError::Draining`] and [`RegistryError::Lost`] for a device that is drained, or was
    /// closed after its loss.
    pub fn device(&self, ordinal: i32) -> Result<Device, RegistryError> {
        let uuid = self.uuid(ordinal)?;
        self.instance_of((ordinal, uuid), false)
    }

    /// The open instance of a GPU, opened if there is none; a lost one anew only if `again`.
    fn instance_of(
        &self,
        (ordinal, uuid): (i32, [u8; 16]),
        again: bool,
    ) -> Result<Device, RegistryError> {
        // Opening a device takes a fraction of a second, once. The lock is not on the step path.
        let mut known = self.known.lock();
        let index = known.iter().position(|known| known.uuid == uuid);
        match index.map(|index| &known[index].instance) {
            None | Some(Instance::Closed { lost: None }) => {}
            Some(Instance::Open(device)) => return Ok(device.clone()),
            Some(Instance::Draining(_) | Instance::Closing) => {
                return Err(RegistryError::Draining { ordinal });
            }
            Some(Instance::Closed { lost: Some(_) }) if again => {}
            Some(Instance::Closed { lost: Some(loss) }) => {
                return Err(RegistryError::Lost { ordinal, first: loss.error });
            }
        }
        let device = self.open(ordinal)?;
        guard!("multigpu.one-instance", register(&mut known, &device));
        Ok(device)
    }

    /// Opens a device again that was closed after it had been lost. The [first loss](Self::first_loss) in the process is
    /// remembered.
    ///
    /// # Errors
    /// Like [`device`](DeviceRegistry::device); [`RegistryError::Open`] if the driver reports that
    /// the device is lost for the process. It counts as lost then, as before.
    pub fn reopen(&self, ordinal: i32) -> Result<Device, RegistryError> {
        let uuid = self.uuid(ordinal)?;
        self.instance_of((ordinal, uuid), true)
    }

    /// Registers a context that the host program already has as the instance of its GPU.
    ///
    /// # Errors
    /// [`RegistryError::OtherContext`] when the GPU has an instance on another context, because the registry allows one
    /// instance for each GPU. [`RegistryError::Draining`] while the GPU's instance is drained or closed.
    ///
    /// # Safety
    /// - `context` is a live `CUcontext` of the driver's library, and outlives the registry and
    ///   every handle made from the device.
    pub unsafe fn adopt(&self, context: u64) -> Result<Device, RegistryError> {
        // SAFETY: the caller promises a live context that outlives the device.
        let device = unsafe { Device::adopt(Arc::clone(&self.driver), context) }
            .map_err(|source| RegistryError::Adopt { context, source })?;
        let ordinal = device.ordinal();
        let mut known = self.known.lock();
        match known
            .iter()
            .find(|known| known.uuid == device.info().uuid)
            .map(|known| &known.instance)
        {
            None | Some(Instance::Closed { .. }) => {}
            Some(Instance::Open(registered)) if registered.context() == context => {
                return Ok(registered.clone());
            }
            Some(Instance::Open(registered)) => {
                let registered = registered.context();
                return Err(RegistryError::OtherContext { ordinal, registered, adopted: context });
            }
            Some(Instance::Draining(_) | Instance::Closing) => {
                return Err(RegistryError::Draining { ordinal });
            }
        }
        register(&mut known, &device);
        Ok(device)
    }

    /// One device: its identity, its state, and its live handles.
    ///
    /// # Errors
    /// [`RegistryError::NoSuchDevice`], [`RegistryError::Driver`].
    pub fn entry(&self, ordinal: i32) -> Result<DeviceEntry, RegistryError> {
        self.check(ordinal)?;
        let info = self.driver.device_get_info(ordinal)?;
        let place = self.directory.as_ref().and_then(|directory| directory.find(info.uuid));
        let kind = place.map_or_else(|| kind_of_name(&info.name), |place| place.kind);
        let (state, alive) = self.state(info.uuid);
        Ok(DeviceEntry {
            ordinal,
            uuid: DeviceUuid { is_mig: kind == DeviceKind::Mig, bytes: info.uuid },
            name: info.name,
            pci_bus_id: info.pci_bus_id,
            total_bytes: info.total_bytes,
            kind,
            nvml_index: place.map(|place| place.nvml_index),
            state,
            alive,
        })
    }

    /// Every device, opened or not.
    ///
    /// # Errors
    /// [`RegistryError::Driver`].
    pub fn report(&self) -> Result<Vec<DeviceEntry>, RegistryError> {
        (0..self.count).map(|ordinal| self.entry(ordinal)).collect()
    }

    /// Checks whether an open device is lost, before a request finds out (one `cuMemGetInfo`).
    ///
    /// # Errors
    /// [`RegistryError::NoSuchDevice`], [`RegistryError::Driver`].
    #[track_caller]
    pub fn probe(&self, ordinal: i32) -> Result<DeviceState, RegistryError> {
        let _site = cuda_driver::site::enter();
        let uuid = self.uuid(ordinal)?;
        let device = self.find(uuid, |instance| instance.device().cloned());
        if let Some(device) = device {
            // An error other than a loss says nothing about health.
            let _ = device.memory_info();
        }
        Ok(self.state(uuid).0)
    }

    /// The first loss in this process: the device's ordinal and the error.
    #[must_use]
    pub fn first_loss(&self) -> Option<(i32, DriverError)> {
        let known = self.known.lock();
        let losses = known.iter().flat_map(KnownGpu::losses);
        losses.min_by_key(|(_, loss)| loss.order).map(|(ordinal, loss)| (ordinal, loss.error))
    }

    /// Stops handing the device out, waits for its work, and frees the memory of dropped buffers. A lost device is not
    /// waited for, and its clean-up reports no refusals. Other devices are not touched.
    ///
    /// # Ordering
    /// Waits on the host for all work of the device's context.
    ///
    /// # Errors
    /// [`RegistryError::NotOpen`], [`RegistryError::NoSuchDevice`]; [`RegistryError::Drain`] if
    /// waiting for the work failed. The loss of the device is not an error here.
    #[track_caller]
    pub fn drain(&self, ordinal: i32) -> Result<Drained, RegistryError> {
        let _site = cuda_driver::site::enter();
        let uuid = self.uuid(ordinal)?;
        let device = self.set_draining(uuid).ok_or(RegistryError::NotOpen { ordinal })?;
        let waited = device.synchronize();
        let freed = device.alive().retired;
        let outcome = waited.and_then(|()| device.free_retired().map(drop));
        if device.poison().is_some() {
            // Also tried on a lost device, where refusals only repeat the loss.
            let _ = device.free_retired();
        }
        let lost = device.poison();
        // The registry's instance, and the handle here.
        let mut alive = device.alive();
        alive.devices = alive.devices.saturating_sub(1);
        match outcome {
            Err(source) if lost.is_none() => Err(RegistryError::Drain { ordinal, source }),
            _ => Ok(Drained::new(lost, freed, alive)),
        }
    }

    /// Hands a draining device out again.
    ///
    /// # Errors
    /// [`RegistryError::NotOpen`], [`RegistryError::NoSuchDevice`].
    pub fn resume(&self, ordinal: i32) -> Result<Device, RegistryError> {
        let uuid = self.uuid(ordinal)?;
        let mut known = self.known.lock();
        let instance =
            known.iter_mut().find(|known| known.uuid == uuid).map(|known| &mut known.instance);
        let instance = instance.filter(|instance| instance.device().is_some());
        let instance = instance.ok_or(RegistryError::NotOpen { ordinal })?;
        let Some(device) = instance.device().cloned() else {
            return Err(RegistryError::NotOpen { ordinal });
        };
        *instance = Instance::Open(device.clone());
        Ok(device)
    }

    /// Drains the device and releases its context: to the driver, or to the host program if it was
    /// adopted. Other devices are not affected.
    ///
    /// # Ordering
    /// As [`drain`](DeviceRegistry::drain).
    ///
    /// # Errors
    /// [`RegistryError::InUse`] with the live handles; the device is drained then and can be
    /// closed later.
    #[track_caller]
    pub fn close(&self, ordinal: i32) -> Result<Closed, RegistryError> {
        let _site = cuda_driver::site::enter();
        let none = RegistryError::NoSuchDevice { ordinal, count: self.count };
        let uuid = self.uuid(ordinal).map_err(|_| none)?;
        // A device that could not be drained is closed nevertheless. Its work ends with the
        // context.
        let _ = guard!("multigpu.close-drains", self.drain(ordinal).ok(), else None);
        let device = self.take(uuid).ok_or(RegistryError::NotOpen { ordinal })?;
        let loss = device.loss();
        let (instance, outcome) = match device.close() {
            Ok(closed) => (Instance::Closed { lost: loss }, Ok(closed)),
            Err(CloseError::InUse { device, alive }) => {
                (Instance::Draining(device), Err(RegistryError::InUse { ordinal, alive }))
            }
            Err(CloseError::Refused(source)) => {
                (Instance::Closed { lost: loss }, Err(RegistryError::Refused { ordinal, source }))
            }
            Err(_) => (Instance::Closed { lost: loss }, Err(RegistryError::NotOpen { ordinal })),
        };
        self.put(uuid, instance);
        outcome
    }

    /// Closes every open device. First all are drained, so that no copy between two devices is
    /// running. Then they are closed, the last opened first. Every step is taken even if an earlier
    /// one failed.
    ///
    /// # Ordering
    /// Waits on the host for all work of all open devices.
    #[track_caller]
    pub fn close_all(&self) -> CloseReport {
        let _site = cuda_driver::site::enter();
        let open = |known: &KnownGpu| known.instance.device().map(|_| known.ordinal);
        let mut ordinals: Vec<i32> = self.known.lock().iter().filter_map(open).collect();
        for &ordinal in &ordinals {
            // A device that could not be drained is reported when it is closed.
            let _ = self.drain(ordinal);
        }
        ordinals.reverse();
        let devices = ordinals.into_iter().map(|ordinal| (ordinal, self.close(ordinal)));
        CloseReport { devices: devices.collect() }
    }

    fn open(&self, ordinal: i32) -> Result<Device, RegistryError> {
        Device::open(Arc::clone(&self.driver), ordinal)
            .map_err(|source| RegistryError::Open { ordinal, source })
    }

    fn check(&self, ordinal: i32) -> Result<(), RegistryError> {
        if ordinal < 0 || ordinal >= self.count {
            return Err(RegistryError::NoSuchDevice { ordinal, count: self.count });
        }
        Ok(())
    }

    fn uuid(&self, ordinal: i32) -> Result<[u8; 16], RegistryError> {
        self.check(ordinal)?;
        Ok(self.driver.device_get_info(ordinal)?.uuid)
    }

    fn find<T>(&self, uuid: [u8; 16], answer: impl FnOnce(&Instance) -> Option<T>) -> Option<T> {
        let known = self.known.lock();
        known.iter().find(|known| known.uuid == uuid).and_then(|known| answer(&known.instance))
    }

    /// Marks an open device as draining, and returns it.
    fn set_draining(&self, uuid: [u8; 16]) -> Option<Device> {
        let mut known = self.known.lock();
        let instance = &mut known.iter_mut().find(|known| known.uuid == uuid)?.instance;
        let device = instance.device().cloned()?;
        *instance = Instance::Draining(device.clone());
        Some(device)
    }

    /// Takes the instance out, so that it is closed outside the lock.
    fn take(&self, uuid: [u8; 16]) -> Option<Device> {
        let mut known = self.known.lock();
        let instance = &mut known.iter_mut().find(|known| known.uuid == uuid)?.instance;
        instance.device()?;
        match std::mem::replace(instance, Instance::Closing) {
            Instance::Open(device) | Instance::Draining(device) => Some(device),
            Instance::Closing | Instance::Closed { .. } => None,
        }
    }

    fn put(&self, uuid: [u8; 16], instance: Instance) {
        if let Some(known) = self.known.lock().iter_mut().find(|known| known.uuid == uuid) {
            known.instance = instance;
        }
    }

    fn state(&self, uuid: [u8; 16]) -> (DeviceState, LiveHandles) {
        let known = self.known.lock();
        let Some(this) = known.iter().find(|known| known.uuid == uuid) else {
            return (DeviceState::Unopened, LiveHandles::default());
        };
        let alive = this.instance.device().map(Device::alive).unwrap_or_default();
        let state = match (&this.instance, this.instance.loss()) {
            (Instance::Closed { .. }, loss) => DeviceState::Closed { lost: loss.map(|l| l.error) },
            (_, Some(loss)) => {
                DeviceState::Lost { first: loss.error, after: lost_before(&known, uuid, loss) }
            }
            (Instance::Open(_), None) => DeviceState::Open,
            (Instance::Draining(_) | Instance::Closing, None) => DeviceState::Draining,
        };
        (state, alive)
    }
}

/// The other device that was lost first by the error of `loss`, which is that of `uuid`, if it was lost before.
fn lost_before(known: &[KnownGpu], uuid: [u8; 16], loss: Loss) -> Option<i32> {
    let others = known.iter().filter(|known| known.uuid != uuid);
    let losses = others.flat_map(KnownGpu::losses);
    losses
        .filter(|(_, other)| other.error.code == loss.error.code && other.order < loss.order)
        .min_by_key(|(_, other)| other.order)
        .map(|(ordinal, _)| ordinal)
}

/// Adds an instance at the end of the list, replacing a closed one of the same GPU, whose loss is remembered.
fn register(known: &mut Vec<KnownGpu>, device: &Device) {
    let uuid = device.info().uuid;
    let losses = known.iter().filter(|known| known.uuid == uuid).flat_map(KnownGpu::losses);
    let first = losses.map(|(_, loss)| loss).min_by_key(|loss| loss.order);
    let earlier = guard!("multigpu.loss-remembered", first, else None);
    known.retain(|known| known.uuid != uuid);
    known.push(KnownGpu {
        uuid,
        ordinal: device.ordinal(),
        instance: Instance::Open(device.clone()),
        earlier,
    });
}

#[cfg(test)]
mod tests {
    use std::sync::{OnceLock, Weak};

    use cuda_driver::CountingDriver;
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    /// H17. While the driver opens a GPU for one thread, no other thread can check whether the GPU
    /// is in the list: the driver call itself checks that the list is locked.
    #[test]
    fn all_threads_get_the_same_instance() {
        let registry = Arc::new(OnceLock::<Weak<DeviceRegistry>>::new());
        let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
        let driver = Arc::new(CountingDriver::watched(Arc::new(sim), {
            let registry = Arc::clone(&registry);
            move |call| {
                if call == "cuDevicePrimaryCtxRetain" {
                    let registry = registry.get().and_then(Weak::upgrade).unwrap();
                    assert!(registry.known.try_lock().is_none(), "others may open it too");
                }
            }
        }));
        let made = Arc::new(DeviceRegistry::new(Arc::clone(&driver) as Arc<dyn Driver>).unwrap());
        registry.set(Arc::downgrade(&made)).unwrap();
        let seen: Vec<_> = std::thread::scope(|scope| {
            let open = |i| made.device(i % 2).unwrap();
            let threads: Vec<_> = (0..8).map(|i| scope.spawn(move || open(i))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (i, device) in seen.iter().enumerate() {
            assert!(*device == seen[i % 2], "thread {i} got another instance");
        }
        assert!(seen[0] != seen[1]);
        assert_eq!(driver.calls()["cuDevicePrimaryCtxRetain"], 2);
    }
}
