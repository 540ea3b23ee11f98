//! The figures that are predicted and measured: single calls, operations, and programs of several.

use cuda_driver::{
    Device, DeviceBuffer, Driver, Event, HostAllocFlags, KernelArgs, LaunchConfig, PeerCopy,
    PinnedBuffer, Stream,
};

use super::program::Kind::{Fitted, Predicted};
use super::program::{KIB, Kind, MIB, Outcome, PAGE_CALLS, Program, Row, size};

/// Bytes of a copy in a loop, at most.
const SLOT: u64 = 2 * MIB;

/// How often something short is done that is done alone, each time with a wait.
const TURNS: u64 = 8;

fn push(
    rows: &mut Vec<Row>,
    kind: Kind,
    what: impl Into<String>,
    nanos: f64,
    bytes: impl Into<Option<u64>>,
) {
    rows.push(Row { what: what.into(), kind, nanos, bytes: bytes.into() });
}

impl Program {
    /// Every figure, in the same order on every driver.
    pub(crate) fn rows(&self, devices: i32) -> Outcome<Vec<Row>> {
        let mut rows = Vec::new();
        self.big_copies(&mut rows)?;
        self.loops_of_copies(&mut rows)?;
        self.both_ways(&mut rows)?;
        self.device_work(&mut rows)?;
        self.events(&mut rows)?;
        self.streams_with_events(&mut rows)?;
        self.kernels(&mut rows)?;
        for (mib, count) in [(2, 64), (16, 16), (32, 8), (64, 4)] {
            self.page_rows(&mut rows, mib * MIB, count)?;
        }
        self.host_memory(&mut rows)?;
        if devices > 1 {
            self.peers(&mut rows)?;
        }
        Ok(rows)
    }

    fn big_copies(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let big = self.scale.big;
        let pinned = || PinnedBuffer::alloc(&self.device, big, HostAllocFlags::CACHED);
        let (down, up) = (pinned()?, pinned()?);
        let memory = DeviceBuffer::alloc(&self.device, 2 * big)?;
        let [to, from] = [memory.span().slice(0, big)?, memory.span().slice(big, big)?];
        let other = Stream::new(&self.device)?;
        self.stream.fill(memory.span(), 1)?;
        let nanos = self.median(1, || {
            self.stream.copy_to_device(to, &down, 0)?;
            Ok(self.stream.synchronize()?)
        })?;
        let name = size(big);
        push(rows, Fitted, format!("host to device, {name} pinned"), nanos, big);
        let nanos = self.median(1, || {
            self.stream.copy_to_host(&up, 0, from)?;
            Ok(self.stream.synchronize()?)
        })?;
        push(rows, Fitted, format!("device to host, {name} pinned"), nanos, big);
        let nanos = self.median(1, || {
            self.stream.copy_to_device(to, &down, 0)?;
            other.copy_to_host(&up, 0, from)?;
            Ok(self.device.synchronize()?)
        })?;
        push(rows, Fitted, format!("both at once, {name} each, bytes one way"), nanos, big);
        let part = big / 64;
        let nanos = self.median(1, || {
            for offset in (0..big).step_by(part as usize) {
                self.stream.copy_to_device(to.slice(offset, part)?, &down, offset)?;
                other.copy_to_host(&up, offset, from.slice(offset, part)?)?;
            }
            Ok(self.device.synchronize()?)
        })?;
        let what = format!("both at once, 64 copies of {} each, bytes one way", size(part));
        push(rows, Predicted, what, nanos, big);
        Ok(())
    }

    /// Room for the loops of copies, on the host and on the device; and how many places there are.
    fn places(&self) -> Outcome<(PinnedBuffer, DeviceBuffer, u64)> {
        // Large blocks would need 4 GiB on both sides, so places are used again.
        let places = self.scale.count.min(256);
        let host = PinnedBuffer::alloc(&self.device, places * SLOT, HostAllocFlags::CACHED)?;
        let memory = DeviceBuffer::alloc(&self.device, places * SLOT)?;
        self.stream.fill(memory.span(), 1)?;
        self.stream.synchronize()?;
        Ok((host, memory, places))
    }

    fn loops_of_copies(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let count = self.scale.count;
        let (host, memory, places) = self.places()?;
        // The set-up of a copy was fitted to the smallest size.
        let kind = |kib| if kib == 4 { Fitted } else { Predicted };
        for kib in [4, 16, 32, 64, 128, 512, 2048] {
            let bytes = kib * KIB;
            let nanos = self.median(count, || {
                for index in 0..count {
                    let offset = index % places * SLOT;
                    let to = memory.span().slice(offset, bytes)?;
                    self.stream.copy_to_device(to, &host, offset)?;
                }
                Ok(self.stream.synchronize()?)
            })?;
            let what = format!("loop of {count} copies to the device, {}", size(bytes));
            push(rows, kind(kib), what, nanos, bytes);
        }
        for kib in [4, 16, 64, 512, 2048] {
            let bytes = kib * KIB;
            let nanos = self.median(count, || {
                for index in 0..count {
                    let offset = index % places * SLOT;
                    let from = memory.span().slice(offset, bytes)?;
                    self.stream.copy_to_host(&host, offset, from)?;
                }
                Ok(self.stream.synchronize()?)
            })?;
            let what = format!("loop of {count} copies to the host, {}", size(bytes));
            push(rows, kind(kib), what, nanos, bytes);
        }
        for kib in [64, 2048] {
            let to = memory.span().slice(0, kib * KIB)?;
            let nanos = self.turns(TURNS, |_| Ok(self.stream.copy_to_device(to, &host, 0)?))?;
            let what = format!("one copy to the device and a wait, {}", size(kib * KIB));
            push(rows, Predicted, what, nanos, kib * KIB);
        }
        Ok(())
    }

    /// Blocks that lie scattered on both sides, to the device and to the host at once.
    fn both_ways(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let (count, bytes) = (self.scale.count / 2, 16 * KIB);
        let (host, memory, places) = self.places()?;
        let other = Stream::new(&self.device)?;
        // An odd factor takes every place of a power of two before the first comes again.
        let place = |index: u64, factor: u64| index * factor % places * SLOT;
        let nanos = self.median(count, || {
            for index in 0..count {
                let to = memory.span().slice(place(index, 37), bytes)?;
                self.stream.copy_to_device(to, &host, place(index, 101))?;
                let from = memory.span().slice(place(index, 53) + MIB, bytes)?;
                other.copy_to_host(&host, place(index, 29) + MIB, from)?;
            }
            Ok(self.device.synchronize()?)
        })?;
        let what = format!("{count} scattered copies of 16 KiB each way at once, a pair");
        push(rows, Predicted, what, nanos, bytes);
        Ok(())
    }

    /// What each of so many operations takes with a wait for it.
    fn turns(&self, turns: u64, operation: impl Fn(u64) -> Outcome<()>) -> Outcome<f64> {
        self.median(turns, || {
            (0..turns).try_for_each(|turn| {
                operation(turn)?;
                Ok(self.stream.synchronize()?)
            })
        })
    }

    fn device_work(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let big = self.scale.big;
        let memory = DeviceBuffer::alloc(&self.device, 8 * big)?;
        self.stream.fill(memory.span(), 1)?;
        for (bytes, count, kind) in [(4 * big, 1, Fitted), (MIB, 100, Predicted)] {
            let [to, from] = [memory.span().slice(0, bytes)?, memory.span().slice(4 * big, bytes)?];
            let nanos = self.median(count, || {
                for _ in 0..count {
                    self.stream.copy_on_device(to, from)?;
                }
                Ok(self.stream.synchronize()?)
            })?;
            let name = size(bytes);
            let what = format!("{count} copies on the device, {name}, bytes read and written");
            push(rows, kind, what, nanos, 2 * bytes);
        }
        let first = memory.span().slice(0, big)?;
        for (bytes, turns, kind) in [(big, 1, Fitted), (big / 64, TURNS, Predicted)] {
            let nanos =
                self.turns(turns, |_| Ok(self.stream.fill(first.slice(0, bytes)?, 2)?))?;
            push(rows, kind, format!("fill, {}", size(bytes)), nanos, bytes);
        }
        for (name, count) in [("read_words", 4), ("copy_words", 4)] {
            let bytes = big;
            let kernel = self.kernel(name)?;
            let to = memory.address() + 4 * big;
            let args = KernelArgs::new().arg(first.address()).arg(bytes / 16).arg(to);
            let nanos = self.median(count, || {
                for _ in 0..count {
                    // SAFETY: the arguments are those of the kernel, and name device memory alone.
                    unsafe {
                        kernel.launch(&self.stream, &LaunchConfig::linear(2048, 256), &args)
                    }?;
                }
                Ok(self.stream.synchronize()?)
            })?;
            let what = format!("{count} times kernel {name}, {}, bytes read", size(bytes));
            push(rows, Fitted, what, nanos, bytes);
        }
        for name in ["read_words", "copy_words"] {
            let (kernel, bytes) = (self.kernel(name)?, big / 32);
            let nanos = self.turns(TURNS, |turn| {
                // Elsewhere each time: a GPU's cache holds 32 MiB, and the model has no cache.
                let [from, to] = [0, 4 * big].map(|at| memory.address() + at + turn * bytes);
                let args = KernelArgs::new().arg(from).arg(bytes / 16).arg(to);
                // SAFETY: as above.
                Ok(unsafe { kernel.launch(&self.stream, &LaunchConfig::linear(2048, 256), &args) }?)
            })?;
            let what = format!("one kernel {name} and a wait, {}, bytes read", size(bytes));
            push(rows, Predicted, what, nanos, bytes);
        }
        let begun = Event::with_timing(&self.device)?;
        let ended = Event::with_timing(&self.device)?;
        begun.record(&self.stream)?;
        self.stream.copy_on_device(memory.span().slice(4 * big, big)?, first)?;
        ended.record(&self.stream)?;
        ended.synchronize()?;
        let nanos = f64::from(ended.elapsed_ms_since(&begun)?) * 1e6;
        push(rows, Fitted, format!("copy on the device, {}, by events", size(big)), nanos, 2 * big);
        drop(memory);
        self.device.free_retired()?;
        Ok(())
    }

    fn events(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let event = Event::new(&self.device)?;
        let (raw, stream) = (event.raw(), self.stream.raw());
        // SAFETY: event and stream are live, and of this driver.
        let nanos = self.calls(1000, |driver| unsafe { driver.event_record(raw, stream) })?;
        push(rows, Fitted, "event record", nanos, None);
        self.device.synchronize()?;
        let nanos = self.calls(1000, |driver| {
            // SAFETY: the event is live, and of this driver.
            unsafe { driver.event_query(raw) }.map(drop)
        })?;
        push(rows, Fitted, "event query", nanos, None);
        Ok(())
    }

    /// Rounds as a cache makes them: blocks come to the device on one stream, another waits for them,
    /// copies them on and sends others to the host.
    fn streams_with_events(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let (host, memory, places) = self.places()?;
        let other = Stream::new(&self.device)?;
        let (arrived, done) = (Event::new(&self.device)?, Event::new(&self.device)?);
        let span = |index: u64, at: u64, bytes: u64| {
            memory.span().slice(index % places * SLOT + at, bytes)
        };
        let rounds = self.scale.count / 8;
        for bytes in [64 * KIB, 512 * KIB] {
            let nanos = self.median(rounds, || {
                for index in 0..rounds {
                    let offset = index % places * SLOT;
                    self.stream.copy_to_device(span(index, 0, bytes)?, &host, offset)?;
                    arrived.record(&self.stream)?;
                    other.wait(&arrived)?;
                    other.copy_on_device(span(index, MIB, bytes)?, span(index, 0, bytes)?)?;
                    other.copy_to_host(&host, offset + MIB, span(index, MIB, bytes)?)?;
                    done.record(&other)?;
                    self.stream.wait(&done)?;
                }
                Ok(self.device.synchronize()?)
            })?;
            let what = format!("{} to the device, on it, and back, by two streams", size(bytes));
            push(rows, Predicted, what, nanos, bytes);
        }
        Ok(())
    }

    fn kernels(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let kernel = self.kernel("nothing")?;
        let (one, args) = (LaunchConfig::linear(1, 32), KernelArgs::new());
        let nanos = self.median(1000, || {
            for _ in 0..1000 {
                // SAFETY: the kernel has no parameters and touches no memory.
                unsafe { kernel.launch(&self.stream, &one, &args) }?;
            }
            Ok(self.stream.synchronize()?)
        })?;
        push(rows, Predicted, "loop of 1,000 empty kernels", nanos, None);
        let nanos = self.median(100, || {
            for _ in 0..100 {
                // SAFETY: as above.
                unsafe { kernel.launch(&self.stream, &one, &args) }?;
                self.stream.synchronize()?;
            }
            Ok(())
        })?;
        push(rows, Fitted, "empty kernel and a wait", nanos, None);
        Ok(())
    }

    fn page_rows(&self, rows: &mut Vec<Row>, page: u64, count: u64) -> Outcome<()> {
        for (name, nanos) in PAGE_CALLS.iter().zip(self.pages(page, count)?) {
            let Some(call) = name.strip_prefix("page: ") else {
                // What is of no page is the same for every page.
                if page == 2 * MIB {
                    push(rows, Fitted, *name, nanos, None);
                }
                continue;
            };
            // Fitted: calls for one page, of three sizes; for many pages, of the smallest.
            let is_fitted =
                if name.ends_with("in one call") { page == 2 * MIB } else { page != 32 * MIB };
            let kind = if is_fitted { Fitted } else { Predicted };
            push(rows, kind, format!("{} page: {call}", size(page)), nanos, None);
        }
        Ok(())
    }

    fn host_memory(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        for mib in [1, 2, 4, 8, 16, 64, 256] {
            let kind = if [1, 4, 16, 256].contains(&mib) { Fitted } else { Predicted };
            for (call, nanos) in ["allocate", "free"].into_iter().zip(self.pinned(mib * MIB)?) {
                push(rows, kind, format!("{call} {mib} MiB of pinned memory"), nanos, None);
            }
        }
        Ok(())
    }

    fn peers(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let fitted = self.peer_sizes();
        let between = [256 * KIB, 4 * MIB, 64 * MIB];
        let last = fitted.last().copied().unwrap_or_default();
        let mut sizes = fitted.clone();
        sizes.extend(between.into_iter().filter(|&bytes| bytes < last));
        sizes.sort_unstable();
        for bytes in sizes {
            let nanos = self.peer_copies(bytes, |copy| {
                self.median(20, || {
                    copy(20)?;
                    Ok(self.stream.synchronize()?)
                })
            })?;
            let kind = if fitted.contains(&bytes) { Fitted } else { Predicted };
            push(rows, kind, format!("copy between devices, {}", size(bytes)), nanos, bytes);
        }
        Ok(())
    }

    /// Sizes of copies between devices that a profile is fitted to.
    pub(crate) fn peer_sizes(&self) -> Vec<u64> {
        let sizes = [64 * KIB, MIB, 16 * MIB, 256 * MIB];
        sizes.into_iter().filter(|&bytes| bytes <= self.scale.big).collect()
    }

    /// Gives `time` what enqueues so many copies of `bytes` bytes from device 0 to device 1.
    pub(crate) fn peer_copies(
        &self,
        bytes: u64,
        time: impl FnOnce(&dyn Fn(u64) -> Outcome<()>) -> Outcome<f64>,
    ) -> Outcome<f64> {
        let other = Device::open(self.device.driver().clone(), 1)?;
        let here = DeviceBuffer::alloc(&self.device, bytes)?;
        let there = DeviceBuffer::alloc(&other, bytes)?;
        self.stream.fill(here.span(), 1)?;
        self.stream.synchronize()?;
        let copy = PeerCopy {
            destination: there.address(),
            destination_context: other.context(),
            source: here.address(),
            source_context: self.device.context(),
            bytes,
        };
        let stream = self.stream.raw();
        let enqueue = |count: u64| {
            let all = |driver: &dyn Driver| {
                // SAFETY: both buffers are device memory of these contexts, and alive.
                (0..count).try_for_each(|_| unsafe { driver.memcpy_peer_async(copy, stream) })
            };
            Ok(self.device.run(all)?)
        };
        time(&enqueue)
    }

    /// Lets device 0 reach device 1 directly, where it can.
    pub(crate) fn enable_peer(&self, devices: i32) -> Outcome<Option<Device>> {
        if devices < 2 || !self.device.driver().device_can_access_peer(0, 1)? {
            return Ok(None);
        }
        let other = Device::open(self.device.driver().clone(), 1)?;
        // SAFETY: the context is that of `other`, which the caller keeps alive while it matters.
        self.device.run(|driver| unsafe { driver.ctx_enable_peer_access(other.context()) })?;
        Ok(Some(other))
    }
}
