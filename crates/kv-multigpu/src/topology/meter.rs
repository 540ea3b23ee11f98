//! Measured links: copies between two devices, timed once for each pair.

use cuda_driver::guard;
use std::collections::HashMap;

use cuda_driver::{Device, DeviceBuffer, Event, Stream};
use parking_lot::Mutex;

use crate::place::{GPUS_MAX, Link, LinkMatrix};

use crate::moves::{Held, MoveError, MoveOrder, Mover, MoverConfig};

/// Size of the short copy, which gives the latency. The long copy gives the speed.
const SHORT_BYTES: u64 = 4 << 10;
const LONG_BYTES: u64 = 64 << 20;

/// Number of copies of each size; the fastest counts.
const ROUNDS: usize = 5;

/// Measures links on request and remembers them by the UUIDs of both ends.
///
/// Times come from events on the receiver, so on simulated devices they are virtual.
#[derive(Debug, Default)]
pub struct LinkMeter {
    known: Mutex<HashMap<[[u8; 16]; 2], Link>>,
}

impl LinkMeter {
    /// A meter without measurements.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The earlier measurement from one device to another, if any.
    #[must_use]
    pub fn known(&self, from: [u8; 16], to: [u8; 16]) -> Option<Link> {
        self.known.lock().get(&[from, to]).copied()
    }

    /// The link from `from` to `to`, over the path of a [`Mover`]. Measures it if it is not known.
    ///
    /// # Ordering
    /// Waits on the host for its own copies. They share the link with all other traffic, so measure
    /// before work begins. Takes up to 64 MiB on both devices, and frees it.
    ///
    /// # Errors
    /// The errors of a mover.
    #[track_caller]
    pub fn measure(&self, from: &Device, to: &Device) -> Result<Link, MoveError> {
        let _site = cuda_driver::site::enter();
        let ends = [from.info().uuid, to.info().uuid];
        if let Some(link) = self.known(ends[0], ends[1]) {
            return Ok(link);
        }
        let link = time_copies(from, to)?;
        self.known.lock().insert(ends, link);
        Ok(link)
    }

    /// The links between all of `devices`, for a placement.
    ///
    /// # Errors
    /// Like [`measure`](LinkMeter::measure); [`MoveError::Zero`] or [`MoveError::TooMany`] for a
    /// number of devices that no placement supports, before anything is measured.
    #[track_caller]
    pub fn matrix(&self, devices: &[Device]) -> Result<LinkMatrix, MoveError> {
        let _site = cuda_driver::site::enter();
        let many = || {
            let (count, most) = (devices.len() as u64, GPUS_MAX as u64);
            MoveError::TooMany { what: "devices of a matrix", count, most }
        };
        match devices.len() {
            0 => return Err(MoveError::Zero { what: "devices of a matrix" }),
            count if count > GPUS_MAX => return Err(many()),
            _ => {}
        }
        let mut measured = HashMap::new();
        for (i, from) in devices.iter().enumerate() {
            for (j, to) in devices.iter().enumerate().filter(|&(j, _)| j != i) {
                measured.insert((i, j), self.measure(from, to)?);
            }
        }
        let none = Link { latency_ns: 0, bytes_per_second: 1 };
        let link = |i, j| measured.get(&(i, j)).copied().unwrap_or(none);
        LinkMatrix::from_fn(devices.len(), link).map_err(|_| many())
    }

    /// Drops all measurements: after the machine changed, or was busy while measured.
    pub fn forget(&self) {
        self.known.lock().clear();
    }
}

fn time_copies(from: &Device, to: &Device) -> Result<Link, MoveError> {
    let config = MoverConfig { tables: 0, ..MoverConfig::default() };
    let mut mover = Mover::new(from, to, config)?;
    let (after, on) = (Stream::new(from)?, Stream::new(to)?);
    // A device with little memory is measured with smaller copies.
    let least = from.memory_info()?.0.min(to.memory_info()?.0);
    let bytes = (least / 4).clamp(2 * SHORT_BYTES, LONG_BYTES);
    let (near, far) = (DeviceBuffer::alloc(from, bytes)?, DeviceBuffer::alloc(to, bytes)?);
    after.fill(near.span(), 0)?;
    let (start, end) = (Event::with_timing(to)?, Event::with_timing(to)?);
    let mut quickest = |bytes: u64| -> Result<u64, MoveError> {
        let mut best = u64::MAX;
        for _ in 0..ROUNDS {
            let source = Held::new(from, near.span().slice(0, bytes)?, ());
            let destination = Held::new(to, far.span().slice(0, bytes)?, ());
            after.synchronize()?;
            start.record(&on)?;
            let order = MoveOrder { after: &after, on: &on };
            // Held until the wait below, even on failure.
            let moved = mover.move_tensor(source, destination, order).map_err(|f| f.error)?;
            end.record(&on)?;
            end.synchronize()?;
            drop(moved);
            let nanos = f64::from(end.elapsed_ms_since(&start)?) * 1e6;
            best = best.min(nanos as u64);
        }
        Ok(best)
    };
    let times = quickest(SHORT_BYTES).and_then(|short| Ok((short, quickest(bytes)?)));
    // A copy that failed half-way must end before the buffers are dropped, and with it the memory
    // that the mover keeps for it.
    let settled = guard!("multigpu.meter-settles", mover.settle(), else Ok(()));
    let (short, long) = times?;
    settled?;
    near.free()?;
    far.free()?;
    let speed = u128::from(bytes - SHORT_BYTES) * 1_000_000_000
        / u128::from(long.saturating_sub(short).max(1));
    Ok(Link {
        latency_ns: short,
        bytes_per_second: u64::try_from(speed).unwrap_or(u64::MAX).max(1),
    })
}
