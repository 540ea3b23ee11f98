//! Where handles may be dropped: each place with one of every kind, none of which may leave anything
//! behind, disturb the thread's own context or panic (H18).

use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cuda_driver::{
    AccessDesc, AddressRange, Device, DeviceBuffer, Driver, Event, HostAllocFlags, Kernel,
    PhysicalMemory, PinnedBuffer, Stream,
};
use kv_multigpu::DeviceRegistry;
use kv_multigpu::threads::{DeviceThread, DeviceThreadOptions};

use super::kernel;

const BYTES: u64 = 4 << 20;

/// A place to drop something in.
type Place = fn(&DeviceRegistry, Everything);

/// Every place, by name. They need two devices.
pub(crate) const PLACES: &[(&str, Place)] = &[
    ("on_a_thread_without_a_context", on_a_thread_without_a_context),
    ("with_another_device_current", with_another_device_current),
    ("after_a_task_has_migrated", after_a_task_has_migrated),
    ("in_a_runtime", in_a_runtime),
    ("during_unwinding", during_unwinding),
    ("by_a_destructor_of_a_thread_local", by_a_destructor_of_a_thread_local),
    ("on_another_devices_thread", on_another_devices_thread),
    ("with_a_cancelled_task", with_a_cancelled_task),
    ("after_the_registry", after_the_registry),
];

/// One handle of every kind, with work under way.
pub(crate) struct Everything {
    // Dropped in this order: what is used before what uses it, and the mapping is given up first.
    mapped: Mapped,
    _device: DeviceBuffer,
    _pinned: PinnedBuffer,
    _kernel: Kernel,
    _event: Event,
    _stream: Stream,
}

/// Mapped memory, unmapped when it is dropped.
struct Mapped {
    range: AddressRange,
    _memory: PhysicalMemory,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Only copies of other memory are under way.
        self.range.unmap(0, self.range.bytes()).unwrap();
    }
}

impl Everything {
    pub(crate) fn of(device: &Device) -> Self {
        let page = PhysicalMemory::granularity(device).unwrap();
        let range = AddressRange::reserve(device, page).unwrap();
        let memory = PhysicalMemory::create(device, page).unwrap();
        range.map(0, &memory).unwrap();
        range.set_access(0, page, &[AccessDesc { device: device.ordinal() }]).unwrap();
        let everything = Self {
            mapped: Mapped { range, _memory: memory },
            _device: DeviceBuffer::alloc(device, BYTES).unwrap(),
            _pinned: PinnedBuffer::alloc(device, 1 << 20, HostAllocFlags::CACHED).unwrap(),
            _kernel: kernel::load(device),
            _event: Event::new(device).unwrap(),
            _stream: Stream::new(device).unwrap(),
        };
        let (stream, buffer) = (&everything._stream, everything._device.span());
        stream.fill(buffer, 1).unwrap();
        for _ in 0..16 {
            let [left, right] = [0, BYTES / 2].map(|offset| buffer.slice(offset, BYTES / 2));
            stream.copy_on_device(left.unwrap(), right.unwrap()).unwrap();
        }
        stream.copy_to_device(buffer.slice(0, 1 << 20).unwrap(), &everything._pinned, 0).unwrap();
        everything._event.record(stream).unwrap();
        assert_eq!(device.alive().handles(), 7);
        everything
    }
}

/// Drops one handle of every kind of device 0 in `place`, and looks for what is left of it.
pub(crate) fn check(registry: &DeviceRegistry, place: Place) {
    let device = registry.device(0).unwrap();
    let driver = Arc::clone(device.driver());
    // What a driver makes once and keeps is made now.
    drop(Everything::of(&device));
    device.free_retired().unwrap();
    let (before, _) = device.memory_info().unwrap();
    let current = driver.ctx_get_current().unwrap();
    let everything = Everything::of(&device);
    assert!(device.memory_info().unwrap().0 + BYTES <= before);
    place(registry, everything);
    assert_eq!(driver.ctx_get_current(), Ok(current), "the thread's context was changed");
    assert_eq!(device.alive().handles(), 0, "alive: {}", device.alive());
    device.free_retired().unwrap();
    assert_eq!(device.memory_info().unwrap().0, before, "memory leaked");
    assert_eq!(device.poison(), None);
}

/// Runs `code` on a thread of its own, which must end as it began, and end well.
fn on_a_thread<T: Send>(code: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(code).join()).unwrap()
}

/// Runs `code` with device 1 current on this thread, as code of the host program would have it.
fn with_second_current<T>(registry: &DeviceRegistry, code: impl FnOnce() -> T) -> T {
    let second = registry.device(1).unwrap();
    let driver: &dyn Driver = &**second.driver();
    let before = driver.ctx_get_current().unwrap();
    // SAFETY: the context lives as long as `second`, which outlives the call below.
    unsafe { driver.ctx_set_current(second.context()) }.unwrap();
    let result = code();
    assert_eq!(driver.ctx_get_current(), Ok(second.context()), "the context was changed");
    // SAFETY: it was current before.
    unsafe { driver.ctx_set_current(before) }.unwrap();
    result
}

fn on_a_thread_without_a_context(registry: &DeviceRegistry, everything: Everything) {
    on_a_thread(|| {
        assert_eq!(registry.driver().ctx_get_current(), Ok(0));
        drop(everything);
        assert_eq!(registry.driver().ctx_get_current(), Ok(0));
    });
}

fn with_another_device_current(registry: &DeviceRegistry, everything: Everything) {
    with_second_current(registry, || drop(everything));
}

/// Is ready the second time it is asked.
struct Yield(bool);

impl Future for Yield {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.0, true) { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// The task begins on one thread, with its device current, and ends on another one, with the other
/// device current.
fn after_a_task_has_migrated(registry: &DeviceRegistry, everything: Everything) {
    let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
        let owned = everything;
        Yield(false).await;
        drop(owned);
    });
    let first = registry.device(0).unwrap();
    assert_eq!(on_a_thread(|| first.run(|_| Ok(poll(&mut task).is_pending()))), Ok(true));
    on_a_thread(|| with_second_current(registry, || assert!(poll(&mut task).is_ready())));
}

fn poll(task: &mut Pin<Box<dyn Future<Output = ()> + Send>>) -> Poll<()> {
    task.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

fn in_a_runtime(_: &DeviceRegistry, everything: Everything) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).build().unwrap();
    runtime.block_on(async {
        let task = tokio::spawn(async move {
            let owned = everything;
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            drop(owned);
        });
        task.await.unwrap();
    });
}

/// The panic comes while device 1 is current for a call, and goes through the handles.
fn during_unwinding(registry: &DeviceRegistry, everything: Everything) {
    let second = registry.device(1).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        second.run(|_| -> Result<(), cuda_driver::DriverError> {
            let _owned = everything;
            std::panic::panic_any("planted");
        })
    }));
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"planted"));
}

thread_local! {
    static KEPT: RefCell<Option<Everything>> = const { RefCell::new(None) };
}

/// Leaves it to the thread to drop it, when the thread has run to its end.
pub(crate) fn keep_in_this_thread(everything: Everything) {
    KEPT.with_borrow_mut(|kept| *kept = Some(everything));
}

fn by_a_destructor_of_a_thread_local(_: &DeviceRegistry, everything: Everything) {
    // Joined by hand: a scope ends before the destructors of its threads' locals have run.
    std::thread::spawn(|| keep_in_this_thread(everything)).join().unwrap();
}

fn on_another_devices_thread(registry: &DeviceRegistry, everything: Everything) {
    let second = registry.device(1).unwrap();
    let thread = DeviceThread::spawn(&second, DeviceThreadOptions::default()).unwrap();
    let task = thread.submit(move |second: &Device| {
        drop(everything);
        second.driver().ctx_get_current() == Ok(second.context())
    });
    assert_eq!(task.unwrap().wait(), Ok(true));
    thread.close().unwrap();
}

fn with_a_cancelled_task(registry: &DeviceRegistry, everything: Everything) {
    let first = registry.device(0).unwrap();
    let thread = DeviceThread::spawn(&first, DeviceThreadOptions::default()).unwrap();
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let busy = thread.submit(move |_| gate.recv().is_err()).unwrap();
    let waiting = thread.submit(move |_| drop(everything)).unwrap();
    with_second_current(registry, || waiting.cancel().unwrap());
    drop(go);
    assert_eq!(busy.wait(), Ok(true));
    thread.close().unwrap();
}

/// Of a second registry, so that the handles are the last of its device.
fn after_the_registry(registry: &DeviceRegistry, everything: Everything) {
    let other = DeviceRegistry::new(Arc::clone(registry.driver())).unwrap();
    let device = other.device(0).unwrap();
    let last = Stream::new(&device).unwrap();
    drop((other, device, everything));
    on_a_thread(|| {
        last.synchronize().unwrap();
        with_second_current(registry, || drop(last));
    });
}
