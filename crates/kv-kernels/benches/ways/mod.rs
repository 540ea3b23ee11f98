//! The ways that a benchmark times: each starts from wiped memory, is timed, and must then have given
//! every byte. What does nothing is fast, and is found.
//!
//! `KV_DEVICE=sim` runs a benchmark on the simulated device, on little memory, to see that it runs. Before each
//! way it then looks at the bytes too, which must be wrong while the way has done nothing.

#![allow(dead_code, reason = "each benchmark uses a part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytemuck::NoUninit;
use cuda_driver::{CudaDriver, Device, DeviceBuffer, DeviceSpan, Event, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::references;

/// Timings of which the median is taken.
pub(crate) const TIMINGS: usize = 7;

/// Where a benchmark runs, and how many ways it has timed.
pub(crate) struct Ways {
    pub(crate) device: Device,
    pub(crate) is_sim: bool,
    seen: AtomicUsize,
}

impl Ways {
    /// What the environment asks for.
    pub(crate) fn of_environment() -> Result<Self, String> {
        if std::env::var_os("KV_DEVICE").is_some_and(|name| name == "sim") {
            return Self::on_sim();
        }
        let driver = CudaDriver::load().map_err(|error| error.to_string())?;
        let device = Device::open(Arc::new(driver), 0);
        let device = device.map_err(|error| format!("{error}: {error:?}"))?;
        Ok(Self { device, is_sim: false, seen: AtomicUsize::new(0) })
    }

    /// The simulated device.
    pub(crate) fn on_sim() -> Result<Self, String> {
        let sim = SimDriver::new(SimConfig::default()).map_err(|error| error.to_string())?;
        sim.register_kernels(references());
        let device = Device::open(Arc::new(sim), 0).map_err(|error| error.to_string())?;
        Ok(Self { device, is_sim: true, seen: AtomicUsize::new(0) })
    }

    /// How many ways there were.
    pub(crate) fn count(&self) -> usize {
        self.seen.load(Relaxed)
    }

    /// One of two, for a GPU or for the simulated device.
    pub(crate) fn either<T>(&self, on_gpu: T, on_sim: T) -> T {
        if self.is_sim { on_sim } else { on_gpu }
    }

    /// Times `run`, however `time` calls it, and holds it to the bytes that `is_right` looks at: all that
    /// it writes, which the caller has wiped. Looking changes nothing that `run` reads.
    pub(crate) fn timed<T>(
        &self,
        name: &str,
        mut run: impl FnMut(),
        time: impl FnOnce(&mut dyn FnMut()) -> T,
        is_right: impl Fn() -> bool,
    ) -> T {
        self.seen.fetch_add(1, Relaxed);
        assert!(!self.is_sim || !is_right(), "{name}: right bytes of a way that did nothing");
        let timed = time(&mut run);
        self.device.synchronize().unwrap();
        assert!(is_right(), "{name}: wrong bytes");
        timed
    }

    /// Seconds of one `enqueue` of `repeats`, by events: the median of the timings, after a first.
    pub(crate) fn seconds(&self, stream: &Stream, repeats: u64, enqueue: &mut dyn FnMut()) -> f64 {
        self.median(|| {
            let [start, end] = [0, 1].map(|_| Event::with_timing(&self.device).unwrap());
            start.record(stream).unwrap();
            for _ in 0..self.either(repeats, 1) {
                enqueue();
            }
            end.record(stream).unwrap();
            end.synchronize().unwrap();
            f64::from(end.elapsed_ms_since(&start).unwrap()) / 1e3 / self.either(repeats, 1) as f64
        })
    }

    /// The median of the timings, after a first that warms up.
    pub(crate) fn median(&self, mut timing: impl FnMut() -> f64) -> f64 {
        timing();
        let count = self.either(TIMINGS, 1);
        let mut timings: Vec<f64> = (0..count).map(|_| timing()).collect();
        timings.sort_by(f64::total_cmp);
        timings[count / 2]
    }

    /// Device memory with these values.
    pub(crate) fn upload<T: NoUninit>(&self, stream: &Stream, values: &[T]) -> DeviceBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let buffer = DeviceBuffer::alloc(&self.device, bytes.len() as u64).unwrap();
        stream.upload(buffer.span(), bytes).unwrap();
        buffer
    }

    /// Bytes of the device, after the stream's work.
    pub(crate) fn download(&self, stream: &Stream, span: DeviceSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.bytes() as usize];
        stream.download(&mut bytes, span).unwrap();
        bytes
    }
}

/// Whether `is_right` holds of all things, looked at by all of the host's threads.
pub(crate) fn all<T: Sync>(things: &[T], is_right: impl Fn(usize, &T) -> bool + Sync) -> bool {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = things.len().div_ceil(threads).max(1);
    let is_right = &is_right;
    std::thread::scope(|scope| {
        let looks = things.chunks(each).enumerate().map(|(part, things)| {
            scope.spawn(move || {
                things.iter().enumerate().all(|(n, thing)| is_right(part * each + n, thing))
            })
        });
        let looks: Vec<_> = looks.collect();
        looks.into_iter().all(|look| look.join().unwrap())
    })
}

/// `words` words that hardly ever repeat.
pub(crate) fn noise(words: u64, seed: u64) -> Vec<u64> {
    (seed << 40..(seed << 40) + words).map(mix).collect()
}

pub(crate) fn mix(value: u64) -> u64 {
    let mixed = (value ^ (value >> 31)).wrapping_mul(0x7FB5_D329_728E_A185);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x81DA_DEF4_BC2D_D44D)
}

/// The numbers below `count` in random order.
pub(crate) fn shuffled(count: u64) -> Vec<u64> {
    let mut values: Vec<u64> = (0..count).collect();
    let mut random = 1u64;
    for i in (1..values.len()).rev() {
        random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        values.swap(i, (random >> 33) as usize % (i + 1));
    }
    values
}
