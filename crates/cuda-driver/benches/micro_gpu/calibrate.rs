//! Fits the simulated machine's profile to this machine, from measurements of one thing each.
//!
//! Rates are slopes between two sizes, and set-up times are slopes between two counts, so that the
//! fixed costs of a program cancel. The rate of a queue is measured by events, from a long copy
//! that keeps the stream busy while all work is enqueued, to the end. Both sides of a slope are
//! measured in turns, so that a machine that becomes slower affects both.

use std::cell::RefCell;
use std::time::Duration;

use cuda_driver::{
    BatchCopy, Device, DeviceBuffer, DeviceError, Driver, DriverResult, ErrorCode, Event,
    HostAllocFlags, Kernel, KernelArgs, LaunchConfig, PinnedBuffer, Stream,
};
use cuda_sim::{Curve, Profile, Rate};

use super::kernels::PTX;
use super::program::{KIB, MIB, Outcome, Program};

/// Bytes of a copy whose time is its set-up for the most part.
const SMALL: u64 = 4 * KIB;

/// From one place of a small copy to the next: no two are on one page.
const STRIDE: u64 = 2 * MIB;

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
        fit.link()?;
        fit.batches()?;
        fit.device_memory()?;
        fit.kernels()?;
        fit.both_ways()?;
        fit.event_waits()?;
        // Calls cost more once the engines of a context have been in use.
        fit.calls()?;
        fit.copy_calls()?;
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
    fn slope(&self, counts: [u64; 2], work: impl Fn(u64) -> Outcome<()>) -> Outcome<f64> {
        self.program.slope(counts, |count| {
            let begun = self.program.now();
            work(count)?;
            self.device().synchronize()?;
            Ok(self.program.now().saturating_sub(begun).as_nanos() as f64)
        })
    }

    /// How many bytes pass, from a quarter of a long operation and the whole.
    fn rate(&self, whole: u64, work: impl Fn(u64) -> Outcome<()>) -> Outcome<Rate> {
        Ok(rate(self.slope([whole / 4, whole], work)?))
    }

    /// Nanoseconds that each more of `work` takes the stream, by events: it is enqueued while the
    /// stream is kept busy.
    fn drained(&self, counts: [u64; 2], work: impl Fn(u64) -> Outcome<()>) -> Outcome<f64> {
        let begun = Event::with_timing(self.device())?;
        let ended = Event::with_timing(self.device())?;
        self.program.slope(counts, |count| {
            self.stall()?;
            begun.record(self.stream)?;
            work(count)?;
            ended.record(self.stream)?;
            ended.synchronize()?;
            Ok(f64::from(ended.elapsed_ms_since(&begun)?) * 1e6)
        })
    }

    /// What each operation takes of a queue that is worked off; `operation` is given its number.
    fn queued(&self, operation: impl Fn(u64) -> Outcome<()>) -> Outcome<f64> {
        let count = self.program.scale.count;
        self.drained([count / 8, count / 4], |count| (0..count).try_for_each(&operation))
    }

    /// What a call takes the host in a loop of as many as a queue holds, from an idle device on.
    fn burst(&self, call: impl Fn(&dyn Driver) -> DriverResult<()>) -> Outcome<Duration> {
        // The smallest queue that is known holds 1,024.
        let count = self.program.scale.count / 4;
        let nanos = self.program.median_of(count, || {
            self.device().synchronize()?;
            Ok(self.device().run(|driver| {
                let begun = self.program.now();
                (0..count).try_for_each(|_| call(driver))?;
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
        Ok(())
    }

    fn copy_calls(&mut self) -> Outcome<()> {
        let (stream, big) = (self.stream.raw(), self.program.scale.big);
        let (memory, host) = (self.memory.address(), self.host[0].host_address());
        // SAFETY: device memory, and pinned memory that nothing on the host accesses here; so below.
        let down =
            |driver: &dyn Driver| unsafe { driver.memcpy_htod_async(memory, host, SMALL, stream) };
        self.profile.htod_call = self.burst(down)?;
        // SAFETY: as above.
        let up =
            |driver: &dyn Driver| unsafe { driver.memcpy_dtoh_async(host, memory, SMALL, stream) };
        self.profile.dtoh_call = self.burst(up)?;
        let other = memory + big;
        // SAFETY: both places are in the buffer, which is alive.
        let copy =
            |driver: &dyn Driver| unsafe { driver.memcpy_dtod_async(other, memory, SMALL, stream) };
        self.profile.dtod_call = self.burst(copy)?;
        // SAFETY: the place is in the buffer, which is alive.
        let fill =
            |driver: &dyn Driver| unsafe { driver.memset_d8_async(memory, 1, SMALL, stream) };
        self.profile.fill_call = self.burst(fill)?;
        Ok(())
    }

    /// Where the small copy of that number lies.
    fn place(&self, index: u64) -> u64 {
        index * STRIDE % self.program.scale.big
    }

    fn small_down(&self, index: u64) -> Outcome<()> {
        let at = self.place(index);
        let to = self.memory.span().slice(at, SMALL)?;
        Ok(self.stream.copy_to_device(to, &self.host[0], at)?)
    }

    fn small_up(&self, stream: &Stream, index: u64) -> Outcome<()> {
        let at = self.place(index);
        let from = self.memory.span().slice(self.program.scale.big + at, SMALL)?;
        Ok(stream.copy_to_host(&self.host[1], at, from)?)
    }

    fn link(&mut self) -> Outcome<()> {
        let big = self.program.scale.big;
        let [down, up] = &self.host;
        let memory = self.memory.span();
        let to_device = |bytes| Ok(self.stream.copy_to_device(memory.slice(0, bytes)?, down, 0)?);
        let to_host = |bytes| Ok(self.other.copy_to_host(up, 0, memory.slice(big, bytes)?)?);
        let sizes = [big / 16, big];
        let [htod, dtoh] = [self.slope(sizes, to_device)?, self.slope(sizes, to_host)?];
        let both = self.slope(sizes, |bytes| {
            to_device(bytes)?;
            to_host(bytes)
        })?;
        let htod_setup = self.queued(|index| self.small_down(index))?;
        let dtoh_setup = self.queued(|index| self.small_up(self.stream, index))?;
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

    /// What each copy of a batch takes; a driver that has no batches keeps the profile's number.
    fn batches(&mut self) -> Outcome<()> {
        let count = self.program.scale.count;
        let [from, to] = [self.memory.address(), self.host[1].host_address()];
        let copies: Vec<BatchCopy> = (0..count / 4)
            .map(|index| (index * SMALL, SMALL))
            .map(|(at, bytes)| BatchCopy { destination: to + at, source: from + at, bytes })
            .collect();
        let batch = |driver: &dyn Driver, count: u64| {
            let copies = &copies[..count as usize];
            // SAFETY: device memory, and pinned memory that nothing on the host accesses here; the
            // stream is live.
            unsafe { driver.memcpy_batch_async(copies, self.stream.raw()) }
        };
        match self.device().run(|driver| batch(driver, 1)) {
            Err(DeviceError::Driver(error)) if error.code == ErrorCode::NOT_SUPPORTED => {
                return Ok(());
            }
            answer => answer?,
        }
        let each = self.drained([count / 8, count / 4], |count| {
            Ok(self.device().run(|driver| batch(driver, count))?)
        })?;
        self.profile.batch_setup = time(each - nanos_of(self.profile.dtoh, SMALL));
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
        let setup = self.queued(|index| {
            let at = self.place(index);
            let [to, from] = [memory.slice(at, SMALL)?, memory.slice(big + at, SMALL)?];
            Ok(self.stream.copy_on_device(to, from)?)
        })?;
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
        // SAFETY: the kernel has no parameters and touches no memory.
        let launch = |_| Ok(unsafe { nothing.launch(self.stream, &one, &args) }?);
        let overhead = self.queued(launch)?;
        self.profile.kernel_load = rate(load);
        self.profile.kernel_store = rate(both - load);
        self.profile.kernel_host_load = rate(host_load);
        self.profile.kernel_host_store = rate(host_store);
        self.profile.kernel_overhead = time(overhead);
        Ok(())
    }

    /// What copies in both directions share of their set-up: half of what a copy each way takes.
    fn both_ways(&mut self) -> Outcome<()> {
        let count = self.program.scale.count;
        let (fork, join) = (Event::new(self.device())?, Event::new(self.device())?);
        let pair = self.drained([count / 8, count / 4], |pairs| {
            fork.record(self.stream)?;
            self.other.wait(&fork)?;
            for index in 0..pairs {
                self.small_down(index)?;
                self.small_up(&self.other, index)?;
            }
            join.record(&self.other)?;
            Ok(self.stream.wait(&join)?)
        })?;
        let profile = &mut self.profile;
        // Where they share nothing, a pair takes what the longer copy takes, and half of that is short
        // enough to predict the same.
        profile.shared_setup = time(pair / 2.0).min(profile.htod_setup).min(profile.dtoh_setup);
        Ok(())
    }

    /// What a stream takes to go on after an event: small copies on one, each awaited by a kernel on
    /// another, each awaited by the next copy.
    fn event_waits(&mut self) -> Outcome<()> {
        let count = self.program.scale.count;
        let nothing = self.program.kernel("nothing")?;
        let (one, args) = (LaunchConfig::linear(1, 32), KernelArgs::new());
        let (there, back) = (Event::new(self.device())?, Event::new(self.device())?);
        let round = self.drained([count / 16, count / 8], |rounds| {
            for index in 0..rounds {
                self.small_down(index)?;
                there.record(self.stream)?;
                self.other.wait(&there)?;
                // SAFETY: the kernel has no parameters and touches no memory.
                unsafe { nothing.launch(&self.other, &one, &args) }?;
                back.record(&self.other)?;
                self.stream.wait(&back)?;
            }
            Ok(())
        })?;
        let profile = &mut self.profile;
        let copy = nanos(profile.htod_setup) + nanos_of(profile.htod, SMALL);
        profile.event_wait_latency = time((round - copy - nanos(profile.kernel_overhead)) / 2.0);
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
            nanos(profile.htod_call) + nanos(profile.htod_setup) + nanos_of(profile.htod, SMALL);
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
        let sizes = [MIB, 4 * MIB, 16 * MIB, 256 * MIB];
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
            program.scale.rounds,
            |driver| driver.mem_alloc(2 * MIB),
            // SAFETY: the memory was allocated just now.
            |driver, memory| unsafe { driver.mem_free(memory) },
        )?;
        let [load, _] = program.alloc_and_free(
            program.scale.rounds,
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
