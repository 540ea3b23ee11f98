//! Access of one device to another one's memory, and copies between them.

use crate::guard;

use crate::{
    CopyError, Device, DeviceError, DeviceSpan, DriverResult, ErrorCode, Event, PeerAttribute,
    PeerCopy, Stream, site,
};

/// `CU_STREAM_LEGACY`: this stream and 0 are the same one, and belong to the current context.
const STREAM_LEGACY: u64 = 1;

impl Device {
    /// Whether work of this device can be allowed to access memory of `peer` directly.
    ///
    /// # Errors
    /// What the driver answers.
    #[track_caller]
    pub fn can_access(&self, peer: &Device) -> Result<bool, DeviceError> {
        self.check_driver(peer, "cuDeviceCanAccessPeer", ErrorCode::INVALID_DEVICE)?;
        self.run(|driver| driver.device_can_access_peer(self.ordinal(), peer.ordinal()))
    }

    /// An attribute of the way from this device to `peer`.
    ///
    /// # Errors
    /// `INVALID_DEVICE` for a device and itself; what the driver answers.
    #[track_caller]
    pub fn peer_attribute(
        &self,
        peer: &Device,
        attribute: PeerAttribute,
    ) -> Result<i32, DeviceError> {
        self.check_driver(peer, "cuDeviceGetP2PAttribute", ErrorCode::INVALID_DEVICE)?;
        let (from, to) = (self.ordinal(), peer.ordinal());
        self.run(|driver| driver.device_get_p2p_attribute(attribute, from, to))
    }

    /// Allows work of this device to access memory of `peer`, until either context ends. A second
    /// call is no error. This covers `cuMemAlloc` memory; mappings name their devices themselves.
    ///
    /// No method takes the access back, because other parts of the process may need it.
    ///
    /// # Errors
    /// `PEER_ACCESS_UNSUPPORTED` where [`can_access`](Device::can_access) is false.
    #[track_caller]
    pub fn enable_access_to(&self, peer: &Device) -> Result<(), DeviceError> {
        self.check_driver(peer, "cuCtxEnablePeerAccess", ErrorCode::INVALID_CONTEXT)?;
        let enabled = self.run(|driver| {
            // SAFETY: a live context of this driver object: `peer` keeps it for this call.
            unsafe { driver.ctx_enable_peer_access(peer.context()) }
        });
        match enabled {
            Err(error)
                if error.driver_error().code == ErrorCode::PEER_ACCESS_ALREADY_ENABLED
                    && self.poison().is_none() =>
            {
                Ok(())
            }
            other => other,
        }
    }
}

impl Stream {
    /// Makes later work of this stream wait for the present work of `other`, by a record of
    /// `event`, an event of `other`'s device. The streams may be of different devices.
    ///
    /// Equals a record and a [`wait`](Stream::wait), with one context bound for both calls, and
    /// none if the context of either device is current already.
    ///
    /// # Ordering
    /// Waits on the device, not on the host. Later records of `event` do not change this wait.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for a stream or an event of another driver object; [`DeviceError::OtherDevice`] for an
    /// event of another context than `other`; [`DeviceError::Poisoned`] when either device is lost, which does not
    /// lose the other.
    #[track_caller]
    pub fn wait_for(&self, other: &Stream, event: &Event) -> Result<(), DeviceError> {
        let _site = site::enter();
        let (here, there) = (self.device(), other.device());
        for device in [there, event.device()] {
            let checked = here.check_driver(device, "cuEventRecord", ErrorCode::INVALID_HANDLE);
            guard!("driver.wait-own-driver", checked?);
        }
        event.device().check_stream(other, "cuEventRecord")?;
        if self.raw().min(other.raw()) <= STREAM_LEGACY {
            event.record(other)?;
            return self.wait(event);
        }
        if let Some(first) = here.poison().or(there.poison()) {
            return Err(DeviceError::Poisoned { first });
        }
        let current = here.driver().ctx_get_current()?;
        let bound = if current == there.context() { there } else { here };
        // Either context may be bound: the driver finds the context of a created stream, and of an
        // event, by its handle.
        let (mut recorded, mut waited): (DriverResult<()>, DriverResult<()>) = (Ok(()), Ok(()));
        bound.run(|driver| {
            // SAFETY: both handles are live (invariants of `raw`), and of this driver object.
            recorded = unsafe { driver.event_record(event.raw(), other.raw()) };
            if recorded.is_ok() {
                // SAFETY: as above.
                waited = unsafe { driver.stream_wait_event(self.raw(), event.raw()) };
            }
            Ok(())
        })?;
        match (recorded, waited) {
            (Ok(()), Ok(())) => Ok(()),
            (Err(error), _) => there.run(|_| Err(error)),
            (_, Err(error)) => Err(here.met_with(&[event.device()], error)),
        }
    }

    /// Enqueues a copy from memory of device `from` to memory of device `to`. It goes through host
    /// memory of the driver if neither device can access the other.
    ///
    /// # Ordering
    /// The copy is ordered by this stream only, which may be of either device.
    ///
    /// # Errors
    /// [`CopyError::Lengths`] when the spans differ in length; `INVALID_CONTEXT` for a device of
    /// another driver object; [`DeviceError::Poisoned`] when either device is lost, which does not lose the other.
    #[track_caller]
    pub fn copy_between(
        &self,
        (to, destination): (&Device, DeviceSpan),
        (from, source): (&Device, DeviceSpan),
    ) -> Result<(), CopyError> {
        const CALL: &str = "cuMemcpyPeerAsync";
        let bytes = source.bytes();
        if destination.bytes() != bytes {
            let destination = destination.bytes();
            return Err(CopyError::Lengths { destination, source_bytes: bytes });
        }
        let device = self.device();
        for end in [from, to] {
            device
                .check_driver(end, CALL, ErrorCode::INVALID_CONTEXT)
                .map_err(DeviceError::Driver)?;
        }
        if bytes == 0 {
            return Ok(());
        }
        let _uses = (destination.used_by(self)?, source.used_by(self)?);
        let copy = PeerCopy {
            destination: destination.address(),
            destination_context: to.context(),
            source: source.address(),
            source_context: from.context(),
            bytes,
        };
        let copied = device.run_with(&[from, to], |driver| {
            // SAFETY: contexts and stream are live, kept by their handles, and of this driver object;
            // both spans are device memory, whose owners wait for this call (`DeviceSpan`).
            let copied = unsafe { driver.memcpy_peer_async(copy, self.raw()) };
            copied.map_err(|error| error.of_bytes(bytes))
        });
        Ok(copied?)
    }
}
