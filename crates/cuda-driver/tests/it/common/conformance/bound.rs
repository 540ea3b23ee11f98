//! A current context, and objects in it that are released by their drop.
//!
//! A rule of the suite makes these calls safe in a case: a case passes handles that it made and did
//! not destroy, and device ranges that are not Rust's memory. A case that breaks the rule runs on
//! the simulated device only, which looks handles up and follows none. If the real driver is known
//! to look them up too, the case runs there in a process of its own.

use std::cell::Cell;
use std::ops::Deref;

use cuda_driver::{
    AccessDesc, AllocationProp, BatchCopy, Driver, DriverResult, ErrorCode, Granularity,
    HostAllocFlags, HostRegisterFlags, KernelArgs, LaunchConfig, PeerCopy,
};

use super::Subject;
use crate::common::kernel;

/// A device's primary context, current on this thread until it is dropped.
pub(crate) struct Bound<'s> {
    subject: &'s Subject,
    pub(crate) device: i32,
    pub(crate) context: u64,
    lost: Cell<bool>,
}

impl Subject {
    /// Makes the primary context of device 0 current.
    pub(crate) fn bind(&self) -> Bound<'_> {
        self.bind_device(0)
    }

    /// Makes the primary context of a device current.
    pub(crate) fn bind_device(&self, device: i32) -> Bound<'_> {
        let context = self.driver.device_primary_ctx_retain(device).unwrap();
        let bound = Bound { subject: self, device, context, lost: Cell::new(false) };
        bound.make_current();
        bound
    }
}

impl Deref for Bound<'_> {
    type Target = dyn Driver;

    fn deref(&self) -> &(dyn Driver + 'static) {
        &*self.subject.driver
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let _ = self.ctx_set_current(self.context);
        let sound = self.ctx_synchronize();
        // SAFETY: 0 unbinds.
        let unbound = unsafe { self.driver().ctx_set_current(0) };
        // SAFETY: what the case made of the context is gone before its `Bound`.
        let released = unsafe { self.driver().device_primary_ctx_release(self.device) };
        if !std::thread::panicking() && !self.lost.get() {
            assert_eq!((sound, unbound, released), (Ok(()), Ok(()), Ok(())), "the case did harm");
        }
    }
}

/// The calls that are `unsafe` in the trait, under the rule of the suite.
macro_rules! calls {
    ($($call:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {
        impl Bound<'_> {
            $(#[allow(dead_code, reason = "all calls, whether or not a case makes them")]
            pub(crate) fn $call(&self, $($arg: $type),*) -> DriverResult<$answer> {
                // SAFETY: the rule of the suite, at the top of this file.
                unsafe { self.driver().$call($($arg),*) }
            })*
        }
    };
}

calls! {
    device_primary_ctx_release(device: i32) -> ();
    ctx_set_current(context: u64) -> ();
    ctx_enable_peer_access(context: u64) -> ();
    ctx_disable_peer_access(context: u64) -> ();
    stream_destroy(stream: u64) -> ();
    stream_synchronize(stream: u64) -> ();
    stream_query(stream: u64) -> bool;
    stream_wait_event(stream: u64, event: u64) -> ();
    stream_get_ctx(stream: u64) -> u64;
    event_destroy(event: u64) -> ();
    event_record(event: u64, stream: u64) -> ();
    event_query(event: u64) -> bool;
    event_synchronize(event: u64) -> ();
    event_elapsed_time(start: u64, end: u64) -> f32;
    mem_free(address: u64) -> ();
    mem_free_host(host: u64) -> ();
    memcpy_dtod_async(destination: u64, source: u64, bytes: u64, stream: u64) -> ();
    memcpy_peer_async(copy: PeerCopy, stream: u64) -> ();
    memcpy_batch_async(copies: &[BatchCopy], stream: u64) -> ();
    memset_d8_async(destination: u64, value: u8, bytes: u64, stream: u64) -> ();
    // Host addresses: live memory of the case, or none that exists.
    memcpy_htod_async(destination: u64, host: u64, bytes: u64, stream: u64) -> ();
    memcpy_dtoh_async(host: u64, source: u64, bytes: u64, stream: u64) -> ();
    mem_host_register(host: u64, bytes: u64, flags: HostRegisterFlags) -> ();
    mem_host_unregister(host: u64) -> ();
    mem_release(handle: u64) -> ();
    mem_map(address: u64, bytes: u64, offset: u64, handle: u64) -> ();
    module_unload(module: u64) -> ();
    module_get_function(module: u64, name: &str) -> u64;
    launch_kernel(function: u64, config: &LaunchConfig, args: &KernelArgs, stream: u64) -> ();
    stream_begin_capture(stream: u64) -> ();
    stream_end_capture(stream: u64) -> u64;
    graph_destroy(graph: u64) -> ();
    graph_add_kernel_node(graph: u64, function: u64, config: &LaunchConfig, args: &KernelArgs) -> u64;
    graph_instantiate(graph: u64) -> u64;
    graph_exec_destroy(exec: u64) -> ();
    graph_launch(exec: u64, stream: u64) -> ();
}

/// Something made in a context, given back when dropped.
pub(crate) struct Owned<'b> {
    bound: &'b Bound<'b>,
    value: u64,
    give_back: fn(&Bound<'_>, u64) -> DriverResult<()>,
}

impl Deref for Owned<'_> {
    type Target = u64;

    fn deref(&self) -> &u64 {
        &self.value
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        let _ = self.bound.ctx_set_current(self.bound.context);
        let answer = (self.give_back)(self.bound, self.value);
        if !std::thread::panicking() && !self.bound.lost.get() {
            assert_eq!(answer, Ok(()));
        }
    }
}

impl<'s> Bound<'s> {
    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.subject.driver
    }

    pub(crate) fn make_current(&self) {
        // SAFETY: the context is retained until this is dropped.
        unsafe { self.driver().ctx_set_current(self.context) }.unwrap();
    }

    /// Says that the device is lost from here on, so that giving back fails.
    pub(crate) fn expect_loss(&self) {
        self.lost.set(true);
    }

    fn own<'b>(
        &'b self,
        made: DriverResult<u64>,
        give_back: fn(&Bound<'_>, u64) -> DriverResult<()>,
    ) -> Owned<'b>
    where
        's: 'b,
    {
        Owned { bound: self, value: made.unwrap(), give_back }
    }

    pub(crate) fn alloc(&self, bytes: u64) -> Owned<'_> {
        self.own(self.mem_alloc(bytes), |bound, address| bound.mem_free(address))
    }

    pub(crate) fn pinned(&self, bytes: u64) -> Owned<'_> {
        self.own(self.mem_host_alloc(bytes, HostAllocFlags::CACHED), |bound, host| {
            bound.mem_free_host(host)
        })
    }

    pub(crate) fn blocking_stream(&self) -> Owned<'_> {
        self.own(self.stream_create(true), |bound, stream| bound.stream_destroy(stream))
    }

    pub(crate) fn stream(&self) -> Owned<'_> {
        self.own(self.stream_create(false), |bound, stream| bound.stream_destroy(stream))
    }

    pub(crate) fn event(&self) -> Owned<'_> {
        self.own(self.event_create(false), |bound, event| bound.event_destroy(event))
    }

    pub(crate) fn timer(&self) -> Owned<'_> {
        self.own(self.event_create(true), |bound, event| bound.event_destroy(event))
    }

    pub(crate) fn module(&self) -> Owned<'_> {
        self.module_of(kernel::PTX)
    }

    /// A module of this text.
    pub(crate) fn module_of(&self, ptx: &str) -> Owned<'_> {
        let mut log = String::new();
        let made = self.module_load_data(ptx, &mut log);
        assert!(made.is_ok(), "{log}\n{ptx}");
        self.own(made, |bound, module| bound.module_unload(module))
    }

    pub(crate) fn graph(&self) -> Owned<'_> {
        self.own(self.graph_create(), |bound, graph| bound.graph_destroy(graph))
    }

    /// What can be launched of `graph`.
    pub(crate) fn instance(&self, graph: u64) -> Owned<'_> {
        self.own(self.graph_instantiate(graph), |bound, exec| bound.graph_exec_destroy(exec))
    }

    /// The device's property of physical memory.
    pub(crate) fn prop(&self) -> AllocationProp {
        AllocationProp::on(self.device)
    }

    /// The least page of virtual memory.
    pub(crate) fn page(&self) -> u64 {
        self.mem_get_allocation_granularity(self.prop(), Granularity::Minimum).unwrap()
    }

    /// Physical memory of `pages` pages.
    pub(crate) fn physical(&self, pages: u64) -> Owned<'_> {
        let made = self.mem_create(pages * self.page(), self.prop());
        self.own(made, |bound, handle| bound.mem_release(handle))
    }

    /// Reserved addresses of `pages` pages.
    pub(crate) fn range(&self, pages: u64) -> Range<'_> {
        let bytes = pages * self.page();
        let base = self.mem_address_reserve(bytes, 0, 0).unwrap();
        Range { bound: self, base, bytes, page: self.page() }
    }

    /// Read-write access of the device.
    pub(crate) fn access(&self) -> [AccessDesc; 1] {
        [AccessDesc { device: self.device }]
    }

    /// `bytes` bytes from `address` on, read by way of the stream 0.
    pub(crate) fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut seen = vec![0; bytes];
        let host = seen.as_mut_ptr().expose_provenance() as u64;
        self.memcpy_dtoh_async(host, address, bytes as u64, 0).unwrap();
        self.stream_synchronize(0).unwrap();
        seen
    }

    /// Writes `data` at `address` by way of the stream 0.
    pub(crate) fn write(&self, address: u64, data: &[u8]) {
        let host = data.as_ptr().expose_provenance() as u64;
        self.memcpy_htod_async(address, host, data.len() as u64, 0).unwrap();
        self.stream_synchronize(0).unwrap();
    }

    /// Keeps everything that is enqueued on `stream` from now on from running.
    pub(crate) fn stall(&self, stream: u64) -> Stall<'_> {
        let how = match &self.subject.sim {
            Some(sim) => {
                sim.hold(stream);
                // As on hardware, where a kernel is what holds the stream.
                let memory = self.mem_alloc(64).unwrap();
                self.memset_d8_async(memory, 0, 64, stream).unwrap();
                How::Held { stream, memory }
            }
            None => self.launch_stall(stream),
        };
        Stall { bound: self, how }
    }

    fn launch_stall(&self, stream: u64) -> How {
        let flag = self.mem_host_alloc(4, HostAllocFlags::CACHED).unwrap();
        set_flag(flag, 0);
        let module = self.module_load_data(WAIT_FOR_FLAG, &mut String::new()).unwrap();
        let function = self.module_get_function(module, "wait_for_flag").unwrap();
        let args = KernelArgs::new().arg(self.mem_host_get_device_pointer(flag).unwrap());
        self.launch_kernel(function, &LaunchConfig::linear(1, 1), &args, stream).unwrap();
        How::Waiting { flag, module }
    }
}

/// A reservation. Unmaps and frees itself.
pub(crate) struct Range<'b> {
    bound: &'b Bound<'b>,
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) page: u64,
}

impl Range<'_> {
    /// Address of page `index`.
    pub(crate) fn at(&self, index: u64) -> u64 {
        self.base + index * self.page
    }

    /// Maps all of `handle`, of `pages` pages, at page `index`.
    pub(crate) fn map(&self, index: u64, pages: u64, handle: u64) -> DriverResult<()> {
        self.bound.mem_map(self.at(index), pages * self.page, 0, handle)
    }

    /// Maps and gives the device access.
    pub(crate) fn map_usable(&self, index: u64, pages: u64, handle: u64) {
        self.map(index, pages, handle).unwrap();
        self.give_access(index, pages).unwrap();
    }

    pub(crate) fn give_access(&self, index: u64, pages: u64) -> DriverResult<()> {
        self.bound.mem_set_access(self.at(index), pages * self.page, &self.bound.access())
    }

    pub(crate) fn unmap(&self, index: u64, pages: u64) -> DriverResult<()> {
        self.bound.mem_unmap(self.at(index), pages * self.page)
    }
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        let _ = self.bound.ctx_set_current(self.bound.context);
        let rest = self.bound.ctx_synchronize();
        let unmapped = self.bound.mem_unmap(self.base, self.bytes);
        let freed = self.bound.mem_address_free(self.base, self.bytes);
        if !std::thread::panicking() && !self.bound.lost.get() {
            assert_eq!((rest, unmapped, freed), (Ok(()), Ok(()), Ok(())));
        }
    }
}

/// A stream held still, until this is released or dropped.
pub(crate) struct Stall<'b> {
    bound: &'b Bound<'b>,
    how: How,
}

enum How {
    Held { stream: u64, memory: u64 },
    Waiting { flag: u64, module: u64 },
}

impl Stall<'_> {
    /// Lets the stream go on.
    pub(crate) fn release(self) {}
}

impl Drop for Stall<'_> {
    fn drop(&mut self) {
        let _ = self.bound.ctx_set_current(self.bound.context);
        match self.how {
            How::Held { stream, memory } => {
                if let Some(sim) = &self.bound.subject.sim {
                    sim.release_hold(stream);
                }
                let _ = self.bound.ctx_synchronize();
                let _ = self.bound.mem_free(memory);
            }
            How::Waiting { flag, module } => {
                set_flag(flag, 1);
                let _ = self.bound.ctx_synchronize();
                let _ = self.bound.module_unload(module);
                let _ = self.bound.mem_free_host(flag);
            }
        }
    }
}

/// Writes the word that the stalling kernel reads.
fn set_flag(flag: u64, value: u32) {
    let place = std::ptr::with_exposed_provenance_mut::<u32>(flag as usize);
    // SAFETY: pinned memory of 4 bytes, page aligned, freed only after the last call of this; its
    // one reader is a kernel, so that no Rust reference to it exists.
    unsafe { place.write_volatile(value) };
}

/// Allocates nothing, reads one word until it is set, and gives up after two seconds.
const WAIT_FOR_FLAG: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry wait_for_flag(
    .param .u64 flag
)
{
    .reg .pred %p<3>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<6>;

    ld.param.u64 %rd1, [flag];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u64 %rd3, %globaltimer;
    add.u64 %rd4, %rd3, 2000000000;
LOOP:
    ld.volatile.global.u32 %r1, [%rd2];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    mov.u64 %rd5, %globaltimer;
    setp.lt.u64 %p2, %rd5, %rd4;
    @%p2 bra LOOP;
DONE:
    ret;
}
";

/// Holds a launch of the test kernel to a code.
#[track_caller]
pub(crate) fn launch_answers(bound: &Bound<'_>, config: LaunchConfig, code: Option<ErrorCode>) {
    let module = bound.module();
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let memory = bound.alloc(4096);
    let args = KernelArgs::new().arg(*memory).arg(5u32).arg(64u32);
    let answer = bound.launch_kernel(function, &config, &args, 0).map_err(|error| error.code);
    assert_eq!(answer, code.map_or(Ok(()), Err), "{config:?}");
    bound.ctx_synchronize().unwrap();
}
