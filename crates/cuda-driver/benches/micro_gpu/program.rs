//! Timing of single calls and operations, on any driver.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::{
    AccessDesc, AllocationProp, Device, Driver, DriverResult, HostAllocFlags, Kernel, Module,
    Stream,
};

use super::kernels::PTX;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// How much is done of everything.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// Bytes of a copy that is long; a multiple of 16 MiB.
    pub(crate) big: u64,
    /// Operations of a loop; a multiple of 8.
    pub(crate) count: u64,
    /// How often each is timed, after one round that warms up.
    pub(crate) rounds: usize,
    /// The same of what takes a few milliseconds at most.
    pub(crate) rounds_of_short: usize,
}

impl Scale {
    /// The same with one round of everything, for where time is the same in every round.
    pub(crate) const fn once(self) -> Self {
        Self { rounds: 1, rounds_of_short: 1, ..self }
    }

    /// For a GPU of 12 GiB or more, and as much host memory.
    pub(crate) const FULL: Self = Self { big: GIB, count: 2048, rounds: 11, rounds_of_short: 51 };
}

/// Whether a profile that was fitted on the same machine knows the answer already.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// The profile was fitted to this very measurement.
    Fitted,
    /// The profile was fitted to its parts, or to other sizes.
    Predicted,
}

/// One figure.
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) kind: Kind,
    pub(crate) nanos: f64,
    /// Bytes that pass in this time.
    pub(crate) bytes: Option<u64>,
}

impl Row {
    pub(crate) fn micros(&self) -> String {
        format!("{:.2}", self.nanos / 1e3)
    }

    pub(crate) fn rate(&self) -> String {
        self.bytes.map_or(String::new(), |bytes| format!("{:.1}", bytes as f64 / self.nanos))
    }
}

/// What is timed of virtual memory, in this order.
pub(crate) const PAGE_CALLS: [&str; 9] = [
    "reserve 64 GiB",
    "page: create",
    "page: map",
    "page: set access",
    "page: unmap",
    "page: set access, all in one call",
    "page: unmap, all in one call",
    "page: release",
    "free the reservation",
];

/// A device, a stream, and a clock.
pub(crate) struct Program {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) scale: Scale,
    start: Instant,
}

impl Program {
    pub(crate) fn new(driver: Arc<dyn Driver>, scale: Scale) -> Outcome<Self> {
        let device = Device::open(driver, 0)?;
        let stream = Stream::new(&device)?;
        Ok(Self { device, stream, scale, start: Instant::now() })
    }

    pub(crate) fn now(&self) -> Duration {
        self.device.virtual_now().unwrap_or_else(|| self.start.elapsed())
    }

    /// Nanoseconds of `work`, by `count`: the median of the rounds after one that warms up.
    pub(crate) fn median(&self, count: u64, mut work: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
        self.median_of(count, || {
            let begun = self.now();
            work()?;
            Ok(self.now().saturating_sub(begun))
        })
    }

    /// Likewise of the time that `work` itself tells.
    pub(crate) fn median_of(
        &self,
        count: u64,
        mut work: impl FnMut() -> Outcome<Duration>,
    ) -> Outcome<f64> {
        let mut times = Vec::with_capacity(self.scale.rounds);
        for round in 0..=self.scale.rounds {
            let time = work()?.as_nanos() as f64 / count as f64;
            if round > 0 {
                times.push(time);
            }
        }
        Ok(middle(times))
    }

    /// Nanoseconds that each more of `work` takes by its own account, from `few` to `many`, one after
    /// the other in each round.
    pub(crate) fn slope(
        &self,
        [few, many]: [u64; 2],
        work: impl Fn(u64) -> Outcome<f64>,
    ) -> Outcome<f64> {
        let mut times: [Vec<f64>; 2] = Default::default();
        for round in 0..=self.scale.rounds {
            for (times, count) in times.iter_mut().zip([few, many]) {
                let nanos = work(count)?;
                if round > 0 {
                    times.push(nanos);
                }
            }
        }
        let [short, long] = times.map(middle);
        Ok(((long - short) / (many - few) as f64).max(0.0))
    }

    /// `count` times the same call, without what the handles do around it.
    pub(crate) fn calls(
        &self,
        count: u64,
        mut call: impl FnMut(&dyn Driver) -> DriverResult<()>,
    ) -> Outcome<f64> {
        self.median(count, || {
            Ok(self.device.run(|driver| (0..count).try_for_each(|_| call(driver)))?)
        })
    }

    pub(crate) fn kernel(&self, name: &str) -> Outcome<Kernel> {
        Ok(Module::load(&self.device, PTX)?.kernel(name)?)
    }

    /// `count` pages: nanoseconds of each of [`PAGE_CALLS`].
    pub(crate) fn pages(&self, page: u64, count: u64) -> Outcome<[f64; PAGE_CALLS.len()]> {
        let mut times: [Vec<f64>; PAGE_CALLS.len()] = Default::default();
        for round in 0..=self.scale.rounds_of_short {
            let laps = self.device.run(|driver| self.page_laps(driver, page, count))?;
            if round > 0 {
                times.iter_mut().zip(laps).for_each(|(times, lap)| times.push(lap));
            }
        }
        Ok(times.map(middle))
    }

    fn page_laps(
        &self,
        driver: &dyn Driver,
        page: u64,
        count: u64,
    ) -> DriverResult<[f64; PAGE_CALLS.len()]> {
        let prop = AllocationProp::on(0);
        let access = [AccessDesc { device: 0 }];
        let mut last = self.now();
        let mut lap = |calls: u64| {
            let now = self.now();
            let nanos = now.saturating_sub(last).as_nanos() as f64 / calls as f64;
            last = now;
            nanos
        };
        let base = driver.mem_address_reserve(64 * GIB, 0, 0)?;
        let reserved = lap(1);
        let handles = (0..count).map(|_| driver.mem_create(page, prop));
        let handles: Vec<u64> = handles.collect::<Result<_, _>>()?;
        let created = lap(count);
        let places = || (0..count).map(|index| base + index * page).zip(&handles);
        // SAFETY: the handles were created above and are released below.
        let map = |address, handle| unsafe { driver.mem_map(address, page, 0, handle) };
        places().try_for_each(|(address, &handle)| map(address, handle))?;
        let mapped = lap(count);
        places().try_for_each(|(address, _)| driver.mem_set_access(address, page, &access))?;
        let opened = lap(count);
        places().try_for_each(|(address, _)| driver.mem_unmap(address, page))?;
        let unmapped = lap(count);
        places().try_for_each(|(address, &handle)| map(address, handle))?;
        lap(1);
        driver.mem_set_access(base, count * page, &access)?;
        let opened_all = lap(count);
        driver.mem_unmap(base, count * page)?;
        let unmapped_all = lap(count);
        // SAFETY: each handle is released once and used no more.
        handles.iter().try_for_each(|&handle| unsafe { driver.mem_release(handle) })?;
        let released = lap(count);
        driver.mem_address_free(base, 64 * GIB)?;
        let freed = lap(1);
        Ok([reserved, created, mapped, opened, unmapped, opened_all, unmapped_all, released, freed])
    }

    /// Nanoseconds of allocating pinned memory, and of freeing it.
    pub(crate) fn pinned(&self, bytes: u64) -> Outcome<[f64; 2]> {
        let Scale { rounds, rounds_of_short, .. } = self.scale;
        self.alloc_and_free(
            if bytes <= 16 * MIB { rounds_of_short } else { rounds },
            |driver| driver.mem_host_alloc(bytes, HostAllocFlags::CACHED),
            |driver, host| {
                // SAFETY: the memory was allocated just now, and nothing refers to it.
                unsafe { driver.mem_free_host(host) }
            },
        )
    }

    /// Nanoseconds of a call that allocates, and of one that frees.
    pub(crate) fn alloc_and_free(
        &self,
        rounds: usize,
        alloc: impl Fn(&dyn Driver) -> DriverResult<u64>,
        free: impl Fn(&dyn Driver, u64) -> DriverResult<()>,
    ) -> Outcome<[f64; 2]> {
        let mut times: [Vec<f64>; 2] = Default::default();
        for round in 0..=rounds {
            let (took, gave) = self.device.run(|driver| {
                let begun = self.now();
                let memory = alloc(driver)?;
                let allocated = self.now();
                free(driver, memory)?;
                Ok((allocated - begun, self.now() - allocated))
            })?;
            if round > 0 {
                times[0].push(took.as_nanos() as f64);
                times[1].push(gave.as_nanos() as f64);
            }
        }
        Ok(times.map(middle))
    }
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// A size in the largest unit that it is a whole number of.
pub(crate) fn size(bytes: u64) -> String {
    let units = [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")];
    let fits = units.into_iter().find(|&(unit, _)| bytes >= unit && bytes.is_multiple_of(unit));
    fits.map_or(format!("{bytes} B"), |(unit, name)| format!("{} {name}", bytes / unit))
}
