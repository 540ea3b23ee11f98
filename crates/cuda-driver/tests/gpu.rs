//! The scenarios of every driver, on a GPU, and trials for NVIDIA's driver alone.
//!
//! Without a device every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it fails. Trials that
//! need two devices are listed as ignored without a second one, required or not.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "it/common/mod.rs"]
mod common;

use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use common::conformance::{self, Case, Needs, Subject};
use common::{Scenario, contents, kernel, open, pairs, pattern, scenarios, traps};
use cuda_driver::{
    AccessDesc, AddressRange, CopyError, CudaDriver, Device, DeviceBuffer, Driver, ErrorCode,
    HostAllocFlags, Module, ModuleError, PhysicalMemory, PinnedBuffer, ResidencyError, Stream,
    interop,
};
use cudarc::driver::CudaContext;
use libtest_mimic::{Arguments, Failed, Trial};

/// Needs one device.
const SINGLE: &[(&str, Scenario)] = &[
    ("the_compilers_log_names_the_line", the_compilers_log_names_the_line),
    ("two_loads_share_contexts_and_streams", two_loads_share_contexts_and_streams),
    ("cudarc_context_and_stream_are_adopted", cudarc_context_and_stream_are_adopted),
    ("cudarc_objects_are_kept_alive", cudarc_objects_are_kept_alive),
    ("cudarc_uses_mapped_memory_and_frees_none", cudarc_uses_mapped_memory_and_frees_none),
    ("dropped_memory_outlives_a_running_copy", dropped_memory_outlives_a_running_copy),
];

fn main() {
    let required = std::env::var_os("KV_REQUIRE_GPU").is_some_and(|value| value == "1");
    let missing = CudaDriver::load().is_err();
    let single = scenarios::ALL
        .iter()
        .chain(SINGLE)
        .chain(traps::SINGLE)
        .map(|&(name, scenario)| trial(name, scenario).with_ignored_flag(missing && !required));
    let alone = !has_pair();
    let pairs = pairs::ALL.iter().chain(traps::PAIRS).map(|&(name, scenario)| {
        // One device is what is required; a second is a luxury.
        trial(name, scenario).with_ignored_flag(alone)
    });
    let cases = conformance::all().filter_map(|case| {
        let skip = if matches!(case.needs, Needs::Pair | Needs::PairProcess) {
            alone
        } else {
            missing && !required
        };
        conformance_trial(case).map(|trial| trial.with_ignored_flag(skip))
    });
    let mut arguments = Arguments::from_args();
    // They share a device, and its memory.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, single.chain(pairs).chain(cases).collect()).exit();
}

/// The trial of a scenario; a trap that snaps would lose the device, so it has its own process.
fn trial(name: &'static str, scenario: Scenario) -> Trial {
    let trap = name.starts_with("trap_") && std::env::var_os(CHILD).is_none();
    Trial::test(name, move || {
        if trap {
            return run_in_child(name, "0,1");
        }
        keep_context(false);
        scenario(&CudaDriver::probe().map_err(|error| Failed::from(format!("{error:?}")))?);
        Ok(())
    })
}

/// Names the devices that CUDA shows a process.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// Says that this process is one that a trial started for itself.
const CHILD: &str = "KV_CONFORMANCE_CHILD";

/// The trial of a case, unless only the simulated device can show it.
fn conformance_trial(case: &'static Case) -> Option<Trial> {
    // The devices that a process of its own gets to see: the fewer, the sooner it is up.
    let own_process = match case.needs {
        Needs::Simulation(_) => return None,
        Needs::Process => Some("0"),
        Needs::PairProcess => Some("0,1"),
        Needs::Device | Needs::Pair => None,
    };
    let child = std::env::var_os(CHILD).is_some();
    // Cases about contexts need one that begins and ends; of a pair, they are let access each other.
    let about_contexts = [conformance::contexts::CASES, conformance::contexts::UNBOUND]
        .iter()
        // By name: a constant table has an address of its own wherever it is used.
        .any(|table| table.iter().any(|other| other.name == case.name));
    let keep = case.needs == Needs::Device && !about_contexts && !child;
    Some(Trial::test(case.name, move || {
        if let Some(devices) = own_process.filter(|_| !child) {
            return run_in_child(case.name, devices);
        }
        keep_context(keep);
        let driver = CudaDriver::probe().map_err(|error| Failed::from(format!("{error:?}")))?;
        (case.run)(&Subject { driver, sim: None });
        Ok(())
    }))
}

/// Keeps the primary context of device 0 from one trial to the next, or gives it back: to make it anew for each
/// of hundreds takes a quarter of a second every time, and longer where there are more devices.
fn keep_context(keep: bool) {
    static KEPT: Mutex<Option<Device>> = Mutex::new(None);
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    match (keep, &*kept) {
        (true, None) => {
            *kept = CudaDriver::probe().ok().and_then(|driver| Device::open(driver, 0).ok());
        }
        (false, Some(_)) => *kept = None,
        _ => {}
    }
}

/// Runs one trial in a process of its own, which sees these devices: what it does to them ends with it.
fn run_in_child(name: &str, devices: &str) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.args(["--exact", name]).env(CHILD, "1");
    if std::env::var_os(VISIBLE).is_none() {
        command.env(VISIBLE, devices);
    }
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(Failed::from(format!("{}:\n{}", output.status, String::from_utf8_lossy(&said))))
}

/// Whether devices 0 and 1 can access each other's memory.
fn has_pair() -> bool {
    CudaDriver::load().is_ok_and(|driver| {
        [(0, 1), (1, 0)].iter().all(|&(a, b)| driver.device_can_access_peer(a, b) == Ok(true))
    })
}

fn the_compilers_log_names_the_line(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let nonsense = kernel::PTX.replace("mad.lo.u32 %r6", "mad.lo.u32 %nowhere");
    let ModuleError::Load { log, source } = Module::load(&device, &nonsense).unwrap_err() else {
        panic!("a module was asked for");
    };
    assert_eq!(source.driver_error().code, ErrorCode::INVALID_PTX, "{log}");
    assert!(log.contains("nowhere") && log.contains("line"), "{log}");
    let ModuleError::Load { log, source } = Module::load(&device, "no PTX at all").unwrap_err()
    else {
        panic!("a module was asked for");
    };
    let refusals = [ErrorCode::INVALID_PTX, ErrorCode::INVALID_IMAGE];
    assert!(refusals.contains(&source.driver_error().code), "{source:?}: {log}");
    for binary in ["\x7fELF", "", "\n"] {
        assert!(Module::load(&device, binary).is_err(), "{binary:?}");
    }
    assert_eq!(device.poison(), None);
    Module::load(&device, kernel::PTX).unwrap();
}

fn two_loads_share_contexts_and_streams(driver: &Arc<dyn Driver>) {
    let other = CudaDriver::probe().unwrap();
    let theirs = open(&other, 0);
    let their_stream = Stream::new(&theirs).unwrap();
    // SAFETY: `theirs` is dropped after what is made of its context here.
    let device = unsafe { Device::adopt(Arc::clone(driver), theirs.context()) }.unwrap();
    // SAFETY: likewise.
    let stream = unsafe { Stream::adopt(&device, their_stream.raw()) }.unwrap();
    let buffer = DeviceBuffer::alloc(&device, 4096).unwrap();
    stream.fill(buffer.span(), 8).unwrap();
    their_stream.synchronize().unwrap();
    assert_eq!(contents(&stream, &buffer), [8; 4096]);
    // Its own handles of the context are the way: the owner of memory knows the work of its own driver object.
    let refused = CopyError::OtherDriver { stream: their_stream.raw() };
    assert_eq!(their_stream.fill(buffer.span(), 9), Err(refused));
    drop((buffer, stream, device));
    their_stream.synchronize().unwrap();
}

fn cudarc_context_and_stream_are_adopted(driver: &Arc<dyn Driver>) {
    let theirs = CudaContext::new(0).unwrap();
    let their_stream = theirs.new_stream().unwrap();
    let (context, raw) = (theirs.cu_ctx() as u64, their_stream.cu_stream() as u64);
    // SAFETY: cudarc's context is dropped after what is made of it here.
    let device = unsafe { Device::adopt(Arc::clone(driver), context) }.unwrap();
    // SAFETY: likewise.
    let stream = unsafe { Stream::adopt(&device, raw) }.unwrap();
    assert_eq!(open(driver, 0).context(), device.context(), "cudarc uses the primary context");
    let buffer = DeviceBuffer::alloc(&device, 4096).unwrap();
    let data = pattern(4, 4096);
    stream.upload(buffer.span(), &data).unwrap();
    let current = driver.ctx_get_current().unwrap();
    assert!(contents(&stream, &buffer) == data);
    drop((buffer, stream, device));
    assert_eq!(driver.ctx_get_current(), Ok(current), "cudarc's binding was left alone");
    // Still cudarc's own, and in order.
    let slice = their_stream.clone_htod(&data).unwrap();
    assert!(their_stream.clone_dtoh(&slice).unwrap() == data);
    drop((slice, their_stream, theirs));
    // SAFETY: 0 unbinds what cudarc bound, for the trials that follow on this thread.
    unsafe { driver.ctx_set_current(0) }.unwrap();
}

/// The last handles of cudarc's objects are ours, and go on another thread than they came from.
fn cudarc_objects_are_kept_alive(driver: &Arc<dyn Driver>) {
    let theirs = CudaContext::new(0).unwrap();
    let their_stream = theirs.new_stream().unwrap();
    let device = interop::device(Arc::new(CudaDriver::load().unwrap()), &theirs).unwrap();
    let stream = interop::stream(&device, &their_stream).unwrap();
    assert_eq!(stream.raw(), their_stream.cu_stream() as u64);
    let standard = interop::stream(&device, &theirs.default_stream()).unwrap();
    drop((theirs, their_stream));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(driver.ctx_get_current(), Ok(0));
            let buffer = DeviceBuffer::alloc(&device, 4096).unwrap();
            stream.upload(buffer.span(), &pattern(5, 4096)).unwrap();
            standard.synchronize().unwrap();
            assert!(contents(&stream, &buffer) == pattern(5, 4096));
            drop((buffer, standard, stream, device));
            assert_eq!(driver.ctx_get_current(), Ok(0), "cudarc's destructors bind a context");
        });
    });
    // SAFETY: 0 unbinds what cudarc bound, for the trials that follow on this thread.
    unsafe { driver.ctx_set_current(0) }.unwrap();
}

fn cudarc_uses_mapped_memory_and_frees_none(driver: &Arc<dyn Driver>) {
    let theirs = CudaContext::new(0).unwrap();
    let their_stream = theirs.new_stream().unwrap();
    let device = interop::device(Arc::new(CudaDriver::load().unwrap()), &theirs).unwrap();
    let stream = interop::stream(&device, &their_stream).unwrap();
    let page = PhysicalMemory::granularity(&device).unwrap();
    let (range, memory) = (
        AddressRange::reserve(&device, page).unwrap(),
        PhysicalMemory::create(&device, page).unwrap(),
    );
    range.map(0, &memory).unwrap();
    range.set_access(0, page, &[AccessDesc { device: 0 }]).unwrap();
    let span = range.span(4096, 8192).unwrap();
    // SAFETY: 0 unbinds what cudarc bound.
    unsafe { driver.ctx_set_current(0) }.unwrap();
    // SAFETY: mapped until the end of this function, after cudarc's work; any bytes are `u32`s.
    let mut lent = unsafe { interop::lend::<u32>(&their_stream, span) }.unwrap();
    assert_eq!(lent.len(), 2048);
    assert_eq!(driver.ctx_get_current(), Ok(0), "lending leaves the thread as it was");
    their_stream.memcpy_htod(&[7u32; 2048], &mut lent.view_mut()).unwrap();
    assert_eq!(their_stream.clone_dtoh(&lent.slice(2000..)).unwrap(), [7; 48]);
    // SAFETY: 0 unbinds what cudarc bound.
    unsafe { driver.ctx_set_current(0) }.unwrap();
    drop(lent);
    assert_eq!(driver.ctx_get_current(), Ok(0), "taking back leaves the thread as it was");
    theirs.check_err().unwrap();
    // Still mapped, and with cudarc's bytes: nothing was freed.
    let mut seen = vec![0; 8192];
    stream.download(&mut seen, span).unwrap();
    assert!(seen.chunks(4).all(|word| word == 7u32.to_ne_bytes()));
    let odd = range.span(4098, 8).unwrap();
    // SAFETY: refused, for its alignment.
    let refused = unsafe { interop::lend::<u32>(&their_stream, odd) }.unwrap_err();
    assert!(matches!(refused, ResidencyError::Misaligned { align: 4, .. }));
    range.unmap(0, page).unwrap();
    drop((range, memory, stream, device, their_stream, theirs));
    // SAFETY: 0 unbinds what cudarc bound, for the trials that follow on this thread.
    unsafe { driver.ctx_set_current(0) }.unwrap();
}

/// The copies read and write memory whose handles are gone before they have run.
fn dropped_memory_outlives_a_running_copy(driver: &Arc<dyn Driver>) {
    const BYTES: u64 = 256 << 20;
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let kept = DeviceBuffer::alloc(&device, BYTES).unwrap();
    let mut pinned = PinnedBuffer::alloc(&device, BYTES, HostAllocFlags::CACHED).unwrap();
    let middle = DeviceBuffer::alloc(&device, BYTES).unwrap();
    for offset in (0..BYTES).step_by(1 << 20) {
        pinned.write_at(offset, &[(offset >> 20) as u8; 1 << 20]).unwrap();
    }
    for _ in 0..4 {
        stream.copy_to_device(middle.span(), &pinned, 0).unwrap();
    }
    stream.copy_on_device(kept.span(), middle.span()).unwrap();
    drop((pinned, middle));
    assert_eq!(device.free_retired(), Ok(2), "freeing waits for the copies");
    let seen = contents(&stream, &kept);
    assert!(seen.iter().enumerate().all(|(i, &byte)| byte == (i >> 20) as u8));
}
