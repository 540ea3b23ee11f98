//! Two devices: access of one to the other's memory, and copies between them.

use crate::{
    CopyError, Device, DeviceError, DeviceSpan, ErrorCode, PeerAttribute, PeerCopy, Stream,
};

impl Device {
    /// Whether work of this device can be let access memory of `peer` directly.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn can_access(&self, peer: &Device) -> Result<bool, DeviceError> {
        self.check_driver(peer, "cuDeviceCanAccessPeer", ErrorCode::INVALID_DEVICE)?;
        self.run(|driver| driver.device_can_access_peer(self.ordinal(), peer.ordinal()))
    }

    /// An attribute of the way from this device to `peer`.
    ///
    /// # Errors
    /// `INVALID_DEVICE` for a device and itself; what the driver answers.
    pub fn peer_attribute(
        &self,
        peer: &Device,
        attribute: PeerAttribute,
    ) -> Result<i32, DeviceError> {
        self.check_driver(peer, "cuDeviceGetP2PAttribute", ErrorCode::INVALID_DEVICE)?;
        let (from, to) = (self.ordinal(), peer.ordinal());
        self.run(|driver| driver.device_get_p2p_attribute(attribute, from, to))
    }

    /// Lets work of this device access memory of `peer`, from now until either context is gone; no
    /// error if it may already. Holds for `cuMemAlloc` memory; mappings name their devices
    /// themselves.
    ///
    /// Nothing here takes the access back: others of the process may count on it.
    ///
    /// # Errors
    /// `PEER_ACCESS_UNSUPPORTED` where [`can_access`](Device::can_access) is false.
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
    /// Enqueues a copy from memory of device `from` to memory of device `to`, through host memory of
    /// the driver where neither can access the other.
    ///
    /// # Ordering
    /// In the order of this stream, which may be of either device, and of nothing else.
    ///
    /// # Errors
    /// [`CopyError::Lengths`] when the spans differ in length; `INVALID_CONTEXT` for a device of
    /// another driver object; [`DeviceError::Poisoned`] when either device is lost.
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
            if let Some(first) = end.poison() {
                return Err(DeviceError::Poisoned { first }.into());
            }
        }
        if bytes == 0 {
            return Ok(());
        }
        let copy = PeerCopy {
            destination: destination.address(),
            destination_context: to.context(),
            source: source.address(),
            source_context: from.context(),
            bytes,
        };
        // SAFETY: contexts and stream are live, kept by their handles, and of this driver object;
        // both spans are device memory (invariant of `DeviceSpan`).
        Ok(device.run(|driver| unsafe { driver.memcpy_peer_async(copy, self.raw()) })?)
    }
}
