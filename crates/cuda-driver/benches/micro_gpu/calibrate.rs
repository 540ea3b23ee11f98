//! Fits the simulated machine's profile to this machine, from measurements of one thing each.
//!
//! Rates are slopes between two sizes and set-up times are slopes between two counts, so that what a
//! program begins and ends with falls out. What a queue is worked off at is seen behind a long copy
//! that keeps the stream busy until all is enqueued.

use std::cell::RefCell;
use std::time::Duration;

use cuda_driver::{
    Device, DeviceBuffer, Driver, DriverResult, Event, HostAllocFlags, Kernel, KernelArgs,
    LaunchConfig, PinnedBuffer, Stream,
};
use cuda_sim::{Curve, Profile, Rate};

use super::kernels::PTX;
use super::program::{KIB, MIB, Outcome, Program};

/// Bytes of a copy whose time is its set-up for the most part.
const SMALL: u64 = 4 * KIB;

/// Calls of a burst, fewer than any queue holds.
const BURST: u64 = 64;

/// What is measured: two buffers on each side, and what is known so far.
struct Fit<'p> {
    program: &'p Program,
    stream: &'p Stream,
    host: [PinnedBuffer; 2],
    memory: DeviceBuffer,
    other: Stream,
    profile: Profile,
}

impl Program {
    /// The profile of this machine. What cannot be seen from here stays as in `base`: the number of
    /// copy engines, the making of a context, and how `start_latency` and `wait_latency` share what
    /// they take together; without a second device, copies between devices.
    pub(crate) fn fit(&self, base: &Profile, devices: i32) -> Outcome<Profile> {
        let big = self.scale.big;
        let pinned = || PinnedBuffer::alloc(&self.device, big, HostAllocFlags::CACHED);
        let mut fit = Fit {
            program: self,
            stream: &self.stream,
            host: [pinned()?, pinned()?],
            memory: DeviceBuffer::alloc(&self.device, 2 * big)?,
            other: Stream::new(&self.device)?,
            profile: Profile { name: self.device.info().name.clone(), ..base.clone() },
        };
        fit.stream.fill(fit.memory.span(), 1)?;
        fit.device().synchronize()?;
        fit.calls()?;
        fit.link()?;
        fit.device_memory()?;
        fit.kernels()?;
        fit.latencies(base)?;
        fit.virtual_memory()?;
        fit.allocations()?;
        if devices > 1 {
            fit.profile.peer = curve(&self.peer_sizes(), |bytes| {
                self.peer_copies(bytes, |copies| fit.slope([20, 40], copies))
            })?;
        }
        Ok(fit.profile)
    }
}

impl Fit<'_> {
    fn device(&self) -> &Device {
        &self.program.device
    }

    /// Nanoseconds that each more of `work` takes, all work of the device awaited.
    fn slope(&self, [few, many]: [u64; 2], work: impl Fn(u64) -> Outcome<()>) -> Outcome<f64> {
        let [short, long] = [few, many].map(|count| {
            self.program.median(1, || {
                work(count)?;
                Ok(self.device().synchronize()?)
            })
        });
        Ok(((long? - short?) / (many - few) as f64).max(0.0))
    }

    /// How many bytes pass, from a quarter of a long operation and the whole.
    fn rate(&self, whole: u64, work: impl Fn(u64) -> Outcome<()>) -> Outcome<Rate> {
        Ok(rate(self.slope([whole / 4, whole], work)?))
    }

    /// What each operation takes of a queue that is worked off: `operation` is enqueued behind `stall`.
    fn queued(
        &self,
        stall: impl Fn() -> Outcome<()>,
        operation: impl Fn() -> Outcome<()>,
    ) -> Outcome<f64> {
        let count = self.program.scale.count;
        self.slope([count / 8, count / 4], |count| {
            stall()?;
            (0..count).try_for_each(|_| operation())
        })
    }

    /// What a call takes the host, from an idle device on.
    fn burst(&self, call: impl Fn(&dyn Driver) -> DriverResult<()>) -> Outcome<Duration> {
        let nanos = self.program.median_of(BURST, || {
            self.device().synchronize()?;
            Ok(self.device().run(|driver| {
                let begun = self.program.now();
                (0..BURST).try_for_each(|_| call(driver))?;
                Ok(self.program.now().saturating_sub(begun))
            })?)
        })?;
        self.device().synchronize()?;
        Ok(time(nanos))
    }

    fn calls(&mut self) -> Outcome<()> {
        let (program, stream) = (self.program, self.stream.raw());
        let event = Event::new(self.device())?;
        let raw = event.raw();
        // SAFETY: event and stream are live, and of this driver.
        let recorded = program.calls(1000, |driver| unsafe { driver.event_record(raw, stream) })?;
        self.device().synchronize()?;
        // SAFETY: the event is live, and of this driver.
        let query = |driver: &dyn Driver| unsafe { driver.event_query(raw) }.map(drop);
        let queried = program.calls(1000, query)?;
        // SAFETY: the stream is live, and of this driver.
        let wait = |driver: &dyn Driver| unsafe { driver.stream_synchronize(stream) };
        let other = program.calls(1000, wait)?;
        let context = program.calls(1000, |driver| driver.ctx_get_current().map(drop))?;
        self.profile.event_record_call = time(recorded);
        self.profile.query_call = time(queried);
        self.profile.other_call = time(other);
        self.profile.context_call = time(context);
        let (to, from) = (self.memory.address(), self.host[0].host_address());
        // SAFETY: device memory, and pinned memory that nothing on the host accesses here.
        let copy =
            |driver: &dyn Driver| unsafe { driver.memcpy_htod_async(to, from, SMALL, stream) };
        self.profile.copy_call = self.burst(copy)?;
        Ok(())
    }

    fn link(&mut self) -> Outcome<()> {
        let big = self.program.scale.big;
        let [down, up] = &self.host;
        let memory = self.memory.span();
        let to_device = |bytes| Ok(self.stream.copy_to_device(memory.slice(0, bytes)?, down, 0)?);
        let to_host = |bytes| Ok(self.other.copy_to_host(up, 0, memory.slice(big, bytes)?)?);
        let [htod, dtoh] =
            [self.slope([big / 4, big], to_device)?, self.slope([big / 4, big], to_host)?];
        let both = self.slope([big / 4, big], |bytes| {
            to_device(bytes)?;
            to_host(bytes)
        })?;
        let htod_setup = self.queued(|| to_device(big), || to_device(SMALL))?;
        let dtoh_setup = self.queued(|| to_host(big), || to_host(SMALL))?;
        let bytes = RefCell::new(vec![1; (big / 16) as usize]);
        let pageable = self.rate(big / 16, |count| {
            let bytes = bytes.borrow();
            Ok(self.stream.upload(memory.slice(0, count)?, &bytes[..count as usize])?)
        })?;
        let profile = &mut self.profile;
        profile.htod = rate(htod);
        profile.dtoh = rate(dtoh);
        profile.pageable = pageable;
        profile.htod_setup = time(htod_setup - htod * SMALL as f64);
        profile.dtoh_setup = time(dtoh_setup - dtoh * SMALL as f64);
        // The first to come is not slowed in the model; the second has its remainder alone.
        let slowed = htod / (htod + dtoh - both).max(htod / 2.0);
        profile.duplex_percent = percent(slowed).max(100);
        Ok(())
    }

    fn device_memory(&mut self) -> Outcome<()> {
        let big = self.program.scale.big;
        let memory = self.memory.span();
        let copy = |bytes| {
            Ok(self.stream.copy_on_device(memory.slice(0, bytes)?, memory.slice(big, bytes)?)?)
        };
        let dtod = self.slope([big / 4, big], copy)?;
        let fill = self.rate(big, |bytes| Ok(self.stream.fill(memory.slice(0, bytes)?, 1)?))?;
        let setup = self.queued(|| self.stall(), || copy(SMALL))?;
        self.profile.dtod = rate(dtod);
        self.profile.fill = fill;
        self.profile.dtod_setup = time(setup - dtod * SMALL as f64);
        Ok(())
    }

    /// Keeps the stream busy for as long as a long copy takes.
    fn stall(&self) -> Outcome<()> {
        let big = self.program.scale.big;
        Ok(self.stream.copy_to_device(self.memory.span().slice(0, big)?, &self.host[0], 0)?)
    }

    fn kernels(&mut self) -> Outcome<()> {
        let big = self.program.scale.big;
        let (read, copy) = (self.program.kernel("read_words")?, self.program.kernel("copy_words")?);
        let (from, to) = (self.memory.address(), self.memory.address() + big);
        let [host_from, host_to] = [self.host[0].device_address(), self.host[1].device_address()];
        let of = |kernel: &Kernel, (from, to): (u64, u64), whole: u64| {
            self.slope([whole / 4, whole], |bytes| {
                let args = KernelArgs::new().arg(from).arg(bytes / 16).arg(to);
                // SAFETY: the arguments are those of the kernel; they name device memory, or pinned
                // memory that nothing on the host accesses here.
                Ok(unsafe { kernel.launch(self.stream, &LaunchConfig::linear(2048, 256), &args) }?)
            })
        };
        let load = of(&read, (from, to), big)?;
        let both = of(&copy, (from, to), big)?;
        let host_load = of(&read, (host_from, to), big)?;
        let host_store = of(&copy, (from, host_to), big)?;

        let nothing = self.program.kernel("nothing")?;
        let (one, args) = (LaunchConfig::linear(1, 32), KernelArgs::new());
        let overhead = self.queued(
            || self.stall(),
            // SAFETY: the kernel has no parameters and touches no memory.
            || Ok(unsafe { nothing.launch(self.stream, &one, &args) }?),
        )?;
        self.profile.kernel_load = rate(load);
        self.profile.kernel_store = rate(both - load);
        self.profile.kernel_host_load = rate(host_load);
        self.profile.kernel_host_store = rate(host_store);
        self.profile.kernel_overhead = time(overhead);
        Ok(())
    }

    /// The launch call, and what a single operation takes beyond its own time.
    fn latencies(&mut self, base: &Profile) -> Outcome<()> {
        const COUNT: u64 = 100;
        let (program, stream) = (self.program, self.stream.raw());
        let load = |driver: &dyn Driver| driver.module_load_data(PTX, &mut String::new());
        let module = self.device().run(load)?;
        // SAFETY: the module is live.
        let function =
            |driver: &dyn Driver| unsafe { driver.module_get_function(module, "nothing") };
        let function = self.device().run(function)?;
        let (one, args) = (LaunchConfig::linear(1, 32), KernelArgs::new());
        // SAFETY: the function and the stream are live, and the kernel has no parameters.
        let launch =
            |driver: &dyn Driver| unsafe { driver.launch_kernel(function, &one, &args, stream) };
        let launch_call = self.burst(launch)?;
        // SAFETY: the stream is live.
        let wait = |driver: &dyn Driver| unsafe { driver.stream_synchronize(stream) };
        let launched = program.calls(COUNT, |driver| launch(driver).and_then(|()| wait(driver)))?;
        let (to, from) = (self.memory.address(), self.host[0].host_address());
        let copied = program.calls(COUNT, |driver| {
            // SAFETY: device memory, and pinned memory that nothing on the host accesses here.
            unsafe { driver.memcpy_htod_async(to, from, SMALL, stream) }?;
            wait(driver)
        })?;
        // SAFETY: the module is live, and nothing of it runs any more.
        self.device().run(|driver| unsafe { driver.module_unload(module) })?;

        let profile = &mut self.profile;
        profile.launch_call = launch_call;
        let own =
            nanos(profile.copy_call) + nanos(profile.htod_setup) + nanos_of(profile.htod, SMALL);
        let both = (copied - own).max(0.0);
        let [start, wait] = [base.start_latency, base.wait_latency].map(nanos);
        let share = if start + wait > 0.0 { start / (start + wait) } else { 0.5 };
        profile.start_latency = time(both * share);
        profile.wait_latency = time(both * (1.0 - share));
        let own = nanos(launch_call) + nanos(profile.kernel_overhead) + nanos(profile.wait_latency);
        profile.kernel_start_latency = time(launched - own);
        Ok(())
    }

    fn virtual_memory(&mut self) -> Outcome<()> {
        let pages = [(2 * MIB, 64), (16 * MIB, 16), (64 * MIB, 4)];
        let mut laps = Vec::new();
        for (page, count) in pages {
            laps.push((page, self.program.pages(page, count)?));
        }
        let of = |call: usize| {
            let points = laps.iter().map(|&(page, laps)| (page, time(laps[call])));
            Curve::new(&points.collect::<Vec<_>>())
        };
        let [reserved, _, _, opened, unmapped, opened_all, unmapped_all, _, freed] = laps[0].1;
        let profile = &mut self.profile;
        profile.reserve = time(reserved);
        profile.create = of(1);
        profile.map = of(2);
        profile.set_access = of(3);
        profile.unmap = of(4);
        profile.release = of(7);
        profile.address_free = time(freed);
        profile.set_access_many_percent = percent(opened_all / opened.max(1.0));
        profile.unmap_many_percent = percent(unmapped_all / unmapped.max(1.0));
        Ok(())
    }

    fn allocations(&mut self) -> Outcome<()> {
        let program = self.program;
        let sizes = [MIB, 16 * MIB, 256 * MIB];
        let mut times = Vec::new();
        for bytes in sizes {
            times.push(program.pinned(bytes)?);
        }
        let of = |call: usize| {
            let points = sizes.iter().zip(&times).map(|(&bytes, times)| (bytes, time(times[call])));
            Curve::new(&points.collect::<Vec<_>>())
        };
        self.profile.pinned_alloc = of(0);
        self.profile.pinned_free = of(1);
        let [alloc, free] = program.alloc_and_free(
            |driver| driver.mem_alloc(2 * MIB),
            // SAFETY: the memory was allocated just now.
            |driver, memory| unsafe { driver.mem_free(memory) },
        )?;
        let [load, _] = program.alloc_and_free(
            |driver| driver.module_load_data(PTX, &mut String::new()),
            // SAFETY: the module was loaded just now.
            |driver, module| unsafe { driver.module_unload(module) },
        )?;
        self.profile.device_alloc = time(alloc);
        self.profile.device_free = time(free);
        self.profile.module_load = time(load);
        Ok(())
    }
}

/// A curve through what `measure` says of each size.
fn curve(sizes: &[u64], measure: impl Fn(u64) -> Outcome<f64>) -> Outcome<Curve> {
    let points: Outcome<Vec<_>> =
        sizes.iter().map(|&bytes| Ok((bytes, time(measure(bytes)?)))).collect();
    Ok(Curve::new(&points?))
}

/// Whole nanoseconds, none below zero.
fn time(nanos: f64) -> Duration {
    Duration::from_nanos(nanos.max(0.0).round() as u64)
}

fn nanos(time: Duration) -> f64 {
    time.as_nanos() as f64
}

/// What `bytes` bytes take at `rate`.
fn nanos_of(rate: Rate, bytes: u64) -> f64 {
    rate.time(bytes).as_nanos() as f64
}

/// The rate at which a byte takes `nanos`.
fn rate(nanos: f64) -> Rate {
    // No card moves a byte in a nanosecond's millionth.
    Rate::mb_per_s((1000.0 / nanos.max(1e-6)).round() as u64)
}

/// A profile's percent: at least 1.
fn percent(share: f64) -> u32 {
    ((share * 100.0).round() as u32).clamp(1, 1_000_000)
}
