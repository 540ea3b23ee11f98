//! A machine with a bound context, and short forms of the calls that tests use most.

use std::cell::{Cell, RefCell};

use cuda_driver::reference::{KernelReference, ReferenceError};
use cuda_driver::{
    AccessDesc, AllocationProp, Driver, DriverResult, ErrorCode, HostAllocFlags, KernelArgs,
    LaunchConfig,
};
use cuda_sim::{Pace, RaceCheck, SimConfig, SimDriver};

/// The default page size.
pub const PAGE: u64 = 2 << 20;

/// PTX with the entries that [`REFERENCES`] implement, and one entry without a reference.
pub const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry copy_bytes(.param .u64 a, .param .u64 b, .param .u64 n) { ret; }
.visible .entry add_one(.param .u64 a) { ret; }
.visible .entry note(.param .u64 list, .param .u32 number) { ret; }
.visible .entry unknown_kernel() { ret; }
";

/// `copy_bytes(to, from, n)`, `add_one(to)`, and `note(list, number)` of [`Notes`].
pub const REFERENCES: &[KernelReference] = &[
    KernelReference {
        name: "copy_bytes",
        run: |memory, _, args| {
            let word = |index| args.get::<u64>(index).ok_or(ReferenceError::Argument { index });
            let data = memory.load(word(1)?, word(2)?)?.into_owned();
            Ok(memory.store(word(0)?, &data)?)
        },
    },
    KernelReference {
        name: "add_one",
        run: |memory, _, args| {
            let address = args.get::<u64>(0).ok_or(ReferenceError::Argument { index: 0 })?;
            let value = memory.load(address, 1)?[0];
            Ok(memory.store(address, &[value + 1])?)
        },
    },
    KernelReference {
        name: "note",
        run: |_, _, args| {
            let list = args.get::<u64>(0).ok_or(ReferenceError::Argument { index: 0 })?;
            let number = args.get::<u32>(1).ok_or(ReferenceError::Argument { index: 1 })?;
            NOTED.with_borrow_mut(|noted| noted.push((list, number)));
            Ok(())
        },
    },
];

thread_local! {
    /// The lists and numbers of the `note` kernels that ran on this thread, in order.
    static NOTED: RefCell<Vec<(u64, u32)>> = const { RefCell::new(Vec::new()) };
    static LISTS: Cell<u64> = const { Cell::new(0) };
}

/// Numbers of the kernels that have run, in order. The simulated device runs them on the thread that
/// calls it, and they touch no memory.
pub struct Notes {
    function: u64,
    list: u64,
}

impl Notes {
    pub fn new(sim: &SimDriver) -> Self {
        sim.register_kernels(REFERENCES);
        let list = LISTS.get();
        LISTS.set(list + 1);
        Self { function: kernel(sim, "note"), list }
    }

    /// Enqueues a kernel that does nothing but tell that it ran.
    pub fn enqueue(&self, sim: &SimDriver, stream: u64, number: u32) {
        let args = KernelArgs::new().arg(self.list).arg(number);
        launch(sim, self.function, &args, stream).unwrap();
    }

    pub fn numbers(&self) -> Vec<u32> {
        let of_list = |&(list, number): &(u64, u32)| (list == self.list).then_some(number);
        NOTED.with_borrow(|noted| noted.iter().filter_map(of_list).collect())
    }
}

/// A machine of `config` with device 0's context bound here.
pub fn machine(config: SimConfig) -> SimDriver {
    let sim = SimDriver::new(config).unwrap();
    sim.register_kernels(REFERENCES);
    bind(&sim, 0);
    sim
}

/// A machine with this seed. Many tests check how a device may order unordered work, so races are
/// findings and do not end the test.
pub fn seeded(seed: u64) -> SimDriver {
    machine(SimConfig { seed, races: RaceCheck::Report, ..SimConfig::default() })
}

/// A machine at `pace`, regardless of the suite's pace.
pub fn paced(pace: Pace, seed: u64) -> SimDriver {
    machine(SimConfig { seed, pace, races: RaceCheck::Report, ..SimConfig::default() })
}

/// Retains the context of `device` and binds it on this thread.
pub fn bind(sim: &SimDriver, device: i32) -> u64 {
    let context = sim.device_primary_ctx_retain(device).unwrap();
    set_current(sim, context).unwrap();
    context
}

pub fn set_current(sim: &SimDriver, context: u64) -> DriverResult<()> {
    // SAFETY: the simulated driver looks up handles, and dereferences none.
    unsafe { sim.ctx_set_current(context) }
}

pub fn code<T: std::fmt::Debug>(result: DriverResult<T>) -> ErrorCode {
    result.unwrap_err().code
}

pub fn prop(device: i32) -> AllocationProp {
    AllocationProp::on(device)
}

/// Kernel `name` in a new module.
pub fn kernel(sim: &SimDriver, name: &str) -> u64 {
    let module = sim.module_load_data(PTX, &mut String::new()).unwrap();
    // SAFETY: the module was loaded just now.
    unsafe { sim.module_get_function(module, name) }.unwrap()
}

pub fn launch(sim: &SimDriver, function: u64, args: &KernelArgs, stream: u64) -> DriverResult<()> {
    // SAFETY: the references check the number and sizes of their arguments and every access. Tests
    // pass only addresses of device memory, and of pinned memory to which no Rust reference exists.
    unsafe { sim.launch_kernel(function, &LaunchConfig::linear(1, 32), args, stream) }
}

/// Launches `copy_bytes`.
pub fn launch_copy(
    sim: &SimDriver,
    (to, from): (u64, u64),
    bytes: u64,
    stream: u64,
) -> DriverResult<()> {
    let args = KernelArgs::new().arg(to).arg(from).arg(bytes);
    launch(sim, kernel(sim, "copy_bytes"), &args, stream)
}

pub fn pinned(sim: &SimDriver, bytes: u64) -> u64 {
    sim.mem_host_alloc(bytes, HostAllocFlags::CACHED).unwrap()
}

/// Writes live pinned memory from the host.
pub fn host_write(host: u64, data: &[u8]) {
    // SAFETY: tests pass ranges of live pinned memory, to which no Rust reference exists.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), host as *mut u8, data.len()) };
}

pub fn host_read(host: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: as in `host_write`.
    unsafe { std::ptr::copy_nonoverlapping(host as *const u8, data.as_mut_ptr(), bytes) };
    data
}

pub fn upload_async(
    sim: &SimDriver,
    to: u64,
    host: u64,
    bytes: u64,
    stream: u64,
) -> DriverResult<()> {
    // SAFETY: tests pass host ranges that stay alive until the copy has run.
    unsafe { sim.memcpy_htod_async(to, host, bytes, stream) }
}

/// Copies a slice, which is pageable memory.
pub fn upload(sim: &SimDriver, to: u64, data: &[u8], stream: u64) -> DriverResult<()> {
    upload_async(sim, to, data.as_ptr() as u64, data.len() as u64, stream)
}

pub fn download(sim: &SimDriver, from: u64, bytes: usize, stream: u64) -> DriverResult<Vec<u8>> {
    let mut data = vec![0; bytes];
    // SAFETY: `data` is pageable, so the copy is over when the call returns.
    unsafe { sim.memcpy_dtoh_async(data.as_mut_ptr() as u64, from, bytes as u64, stream) }?;
    Ok(data)
}

pub fn copy(sim: &SimDriver, to: u64, from: u64, bytes: u64, stream: u64) -> DriverResult<()> {
    // SAFETY: only device addresses; a wrong one gives an error.
    unsafe { sim.memcpy_dtod_async(to, from, bytes, stream) }
}

pub fn fill(sim: &SimDriver, to: u64, value: u8, bytes: u64, stream: u64) -> DriverResult<()> {
    // SAFETY: as in `copy`.
    unsafe { sim.memset_d8_async(to, value, bytes, stream) }
}

pub fn sync(sim: &SimDriver, stream: u64) -> DriverResult<()> {
    // SAFETY: handles are looked up.
    unsafe { sim.stream_synchronize(stream) }
}

pub fn record(sim: &SimDriver, event: u64, stream: u64) -> DriverResult<()> {
    // SAFETY: handles are looked up.
    unsafe { sim.event_record(event, stream) }
}

pub fn wait(sim: &SimDriver, stream: u64, event: u64) -> DriverResult<()> {
    // SAFETY: handles are looked up.
    unsafe { sim.stream_wait_event(stream, event) }
}

pub fn query(sim: &SimDriver, event: u64) -> DriverResult<bool> {
    // SAFETY: handles are looked up.
    unsafe { sim.event_query(event) }
}

pub fn free(sim: &SimDriver, address: u64) -> DriverResult<()> {
    // SAFETY: addresses are looked up, and the host holds no reference to device memory.
    unsafe { sim.mem_free(address) }
}

pub fn free_host(sim: &SimDriver, host: u64) -> DriverResult<()> {
    // SAFETY: addresses are looked up, and tests hold no references to pinned memory.
    unsafe { sim.mem_free_host(host) }
}

/// A reservation of `pages` pages.
pub fn reserve(sim: &SimDriver, pages: u64) -> u64 {
    sim.mem_address_reserve(pages * PAGE, 0, 0).unwrap()
}

/// `mem_map`, for any handle.
pub fn map(
    sim: &SimDriver,
    address: u64,
    bytes: u64,
    offset: u64,
    handle: u64,
) -> DriverResult<()> {
    // SAFETY: handles are looked up.
    unsafe { sim.mem_map(address, bytes, offset, handle) }
}

/// `mem_release`, for any handle.
pub fn release(sim: &SimDriver, handle: u64) -> DriverResult<()> {
    // SAFETY: handles are looked up.
    unsafe { sim.mem_release(handle) }
}

/// Maps a page of device 0 at `address`, with access for device 0. Returns its handle.
pub fn map_page(sim: &SimDriver, address: u64) -> u64 {
    let handle = sim.mem_create(PAGE, prop(0)).unwrap();
    map(sim, address, PAGE, 0, handle).unwrap();
    sim.mem_set_access(address, PAGE, &[AccessDesc { device: 0 }]).unwrap();
    handle
}
