//! One instance per GPU, drops anywhere, layers on two GPUs, and how far a fault reaches.
//!
//! Without a device every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it fails. Trials that need
//! two devices are listed as ignored without a second one, unless `KV_REQUIRE_PAIR=1`.
//! `KV_MULTIGPU_PASSES` is how many forward passes the long trial runs (10,000).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "a long trial says what it has seen")]

#[path = "it/common/mod.rs"]
mod common;

use std::process::{Command, Output};
use std::sync::{Arc, OnceLock};

use common::levels::{Level, free_bytes, run_level};
use common::pipeline::{Plan, run};
use common::{drops, kernel, links, moving, serving};
use cuda_driver::{CudaDriver, Device, DeviceBuffer, Driver, ErrorCode, Stream};
use cudarc::driver::CudaContext;
use kv_multigpu::moves::{MoverConfig, Route};
use kv_multigpu::threads::{DeviceThread, DeviceThreadOptions};
use kv_multigpu::{DeviceRegistry, DeviceState, RegistryError};
use libtest_mimic::{Arguments, Failed, Trial};

type Run = fn(&DeviceRegistry);

/// Need one device.
const SINGLE: &[(&str, Run)] = &[
    ("all_threads_get_the_same_instance", all_threads_get_the_same_instance),
    ("cudarc_shares_the_instances_context", cudarc_shares_the_instances_context),
    ("the_list_of_the_machine_knows_every_device", the_list_of_the_machine_knows_every_device),
    (
        "the_process_ends_with_handles_in_a_thread_local",
        the_process_ends_with_handles_in_a_thread_local,
    ),
    ("the_process_ends_under_a_busy_thread", the_process_ends_under_a_busy_thread),
    ("a_closed_device_is_opened_anew", a_closed_device_is_opened_anew),
    (
        "hidden_and_renumbered_devices_keep_their_identity",
        hidden_and_renumbered_devices_keep_their_identity,
    ),
];

/// Need two.
const PAIRS: &[(&str, Run)] = &[
    ("links_are_told", links::are_told),
    ("layers_on_all_gpus_without_peer_access", layers_on_all_gpus_without_peer_access),
    ("layers_on_all_gpus_with_peer_access", layers_on_all_gpus_with_peer_access),
    ("a_leak_of_each_pass_is_noticed", a_leak_of_each_pass_is_noticed),
    (
        "a_fault_is_traced_to_its_device_and_closes_quietly",
        a_fault_is_traced_to_its_device_and_closes_quietly,
    ),
    (
        "a_fault_of_another_process_leaves_this_one_serving",
        a_fault_of_another_process_leaves_this_one_serving,
    ),
    ("of_a_process_for_each_gpu_the_others_go_on", of_a_process_for_each_gpu_the_others_go_on),
];

/// Says what a process that a trial started for itself is to do.
const CHILD: &str = "KV_MULTIGPU_CHILD";

fn main() {
    if let Some(part) = std::env::var_os(CHILD) {
        return child(part.to_str().unwrap());
    }
    let is_set = |name| std::env::var_os(name).is_some_and(|value| value == "1");
    let count = CudaDriver::load().map(|driver| driver.device_get_count().unwrap());
    let count = count.unwrap_or(0);
    let skip_single = count < 1 && !is_set("KV_REQUIRE_GPU");
    let skip_pairs = count < 2 && !is_set("KV_REQUIRE_PAIR");
    let trial = |&(name, run): &(&'static str, Run)| Trial::test(name, move || with_registry(run));
    let single = SINGLE.iter().map(|it| trial(it).with_ignored_flag(skip_single));
    let pairs = PAIRS.iter().map(|it| trial(it).with_ignored_flag(skip_pairs));
    let places = drops::PLACES.iter().map(|&(name, place)| {
        let trial = Trial::test(format!("handles_are_dropped_{name}"), move || {
            with_registry(|registry| drops::check(registry, place))
        });
        trial.with_ignored_flag(skip_pairs)
    });
    let moves =
        moving_trials().chain(all_pairs_trials()).map(|trial| trial.with_ignored_flag(skip_pairs));
    let mut arguments = Arguments::from_args();
    // They share devices, and their memory.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, single.chain(places).chain(pairs).chain(moves).collect()).exit();
}

/// Every scenario of moves, in both directions, from device to device and through the host.
fn moving_trials() -> impl Iterator<Item = Trial> {
    let direct = MoverConfig { prefer: Route::Push, ..MoverConfig::default() };
    let host = MoverConfig { prefer: Route::Host, chunk_bytes: 64 << 10, chunks: 3, ..direct };
    let pull = MoverConfig { prefer: Route::Pull, ..direct };
    let ways = [
        ("directly", direct, [0, 1]),
        ("back", direct, [1, 0]),
        ("by_the_destination", pull, [0, 1]),
        ("by_host", host, [0, 1]),
    ];
    ways.into_iter().flat_map(|(way, config, ends)| {
        moving::ALL.iter().map(move |&(name, scenario)| {
            Trial::test(format!("{name}_{way}"), move || {
                with_registry(|registry| {
                    keep_contexts(registry);
                    let [from, to] = ends.map(|ordinal| registry.device(ordinal).unwrap());
                    scenario(&from, &to, config);
                })
            })
        })
    })
}

/// Every ordered pair of all devices at once, by each way: twelve of four devices.
fn all_pairs_trials() -> impl Iterator<Item = Trial> {
    let load = moving::Load {
        rounds: 4,
        tensor_bytes: (16 << 20) + 3,
        planes: 2,
        blocks: 256,
        block_bytes: 16 << 10,
    };
    [Route::Push, Route::Pull, Route::Host].into_iter().map(move |prefer| {
        Trial::test(format!("all_pairs_move_at_once_by_{prefer:?}").to_lowercase(), move || {
            with_registry(|registry| {
                keep_contexts(registry);
                let devices = (0..registry.count()).map(|i| registry.device(i).unwrap());
                let devices: Vec<_> = devices.collect();
                let config = MoverConfig { prefer, chunk_bytes: 1 << 20, ..MoverConfig::default() };
                let ways = moving::all_pairs_at_once(&devices, config, &load);
                println!("{ways:?}");
                for ([from, to], route) in ways {
                    let reaches = [(from, to), (to, from)]
                        .map(|(near, far)| devices[near].can_access(&devices[far]).unwrap());
                    let direct = reaches[usize::from(prefer == Route::Pull)];
                    assert_eq!(route, if direct { prefer } else { Route::Host });
                }
            })
        })
    })
}

/// Keeps the primary contexts from here to the end: each trial of moves would make them anew, which takes
/// longer than the moves. Those before it are about contexts, too, and about access that was not enabled.
fn keep_contexts(registry: &DeviceRegistry) {
    static KEPT: OnceLock<Vec<Device>> = OnceLock::new();
    KEPT.get_or_init(|| {
        let open = |ordinal| Device::open(Arc::clone(registry.driver()), ordinal).unwrap();
        (0..registry.count()).map(open).collect()
    });
}

fn with_registry(run: impl FnOnce(&DeviceRegistry)) -> Result<(), Failed> {
    let driver = CudaDriver::probe().map_err(|error| Failed::from(format!("{error:?}")))?;
    run(&DeviceRegistry::new(driver).unwrap());
    Ok(())
}

fn start(part: &str) -> Output {
    child_process(part).output().unwrap()
}

fn child_process(part: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(CHILD, part);
    command
}

/// What a process says that ended as it should: with code 0, and nobody panicked.
fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{}: {text}", output.status);
    assert!(!text.contains("panicked"), "{text}");
    text
}

fn child(part: &str) {
    let registry = DeviceRegistry::new(CudaDriver::probe().unwrap()).unwrap();
    match part {
        "thread_local" => {
            let device = registry.device(0).unwrap();
            drops::keep_in_this_thread(drops::Everything::of(&device));
            // `main` returns, and then the thread's locals go, with the last handles.
        }
        "busy" => leave_a_busy_thread(&registry),
        "fault" => fault(&registry),
        "leak" => leak(&registry),
        "serve" => serving::serve(&registry, SERVING),
        "fault_alone" => {
            plant(&registry.device(0).unwrap());
        }
        "identities" => println!("{}", identities(&listed(registry.driver())).join("\n")),
        part => panic!("no part {part:?}"),
    }
    drop(registry);
}

fn all_threads_get_the_same_instance(registry: &DeviceRegistry) {
    for ordinal in 0..registry.count() {
        let first = registry.device(ordinal).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let device = registry.device(ordinal).unwrap();
                    assert!(device == first);
                    Stream::new(&device).unwrap().synchronize().unwrap();
                });
            }
        });
        for other in 0..ordinal {
            assert!(registry.device(other).unwrap() != first);
        }
    }
}

fn cudarc_shares_the_instances_context(registry: &DeviceRegistry) {
    registry.driver().device_primary_ctx_retain(0).unwrap();
    let theirs = CudaContext::new(0).unwrap();
    // SAFETY: a live context, retained above and not released before the process ends.
    let adopted = unsafe { registry.adopt(theirs.cu_ctx() as u64) }.unwrap();
    assert!(registry.device(0).unwrap() == adopted);
    let again = CudaContext::new(0).unwrap();
    // SAFETY: as above.
    assert!(unsafe { registry.adopt(again.cu_ctx() as u64) }.unwrap() == adopted);
    Stream::new(&adopted).unwrap().synchronize().unwrap();
    drop((theirs, again));
    // SAFETY: 0 unbinds what cudarc bound, for the trials that follow on this thread.
    unsafe { registry.driver().ctx_set_current(0) }.unwrap();
}

/// By NVML, where the build and the machine have it, and by CUDA alone elsewhere.
fn the_list_of_the_machine_knows_every_device(registry: &DeviceRegistry) {
    for entry in registry.report().unwrap() {
        assert!(entry.total_bytes > 1 << 30, "{entry:?}");
        assert_eq!(entry.uuid.to_string().parse(), Ok(entry.uuid));
    }
    #[cfg(feature = "nvml")]
    if kv_multigpu::topology::Nvml::load().is_loaded() {
        let report = listed(registry.driver()).report().unwrap();
        let indices: std::collections::BTreeSet<_> =
            report.iter().map(|entry| entry.nvml_index.unwrap()).collect();
        assert_eq!(indices.len(), report.len(), "two devices have one index: {report:?}");
    }
}

/// The registry of a build with NVML, or the one that there is.
fn listed(driver: &Arc<dyn Driver>) -> DeviceRegistry {
    #[cfg(feature = "nvml")]
    let registry = {
        let directory = Arc::new(kv_multigpu::topology::Nvml::load());
        DeviceRegistry::with_directory(Arc::clone(driver), directory)
    };
    #[cfg(not(feature = "nvml"))]
    let registry = DeviceRegistry::new(Arc::clone(driver));
    registry.unwrap()
}

/// What of a device does not depend on CUDA's ordinals, in their order.
fn identities(registry: &DeviceRegistry) -> Vec<String> {
    let line = |entry: kv_multigpu::DeviceEntry| {
        format!("{} {} {:?}", entry.uuid, entry.pci_bus_id, entry.nvml_index)
    };
    registry.report().unwrap().into_iter().map(line).collect()
}

/// Other processes see the devices the other way round, one of them alone, or one that is named by UUID.
fn hidden_and_renumbered_devices_keep_their_identity(registry: &DeviceRegistry) {
    let mut all = identities(&listed(registry.driver()));
    let seen = |visible: &str| {
        let output = child_process("identities").env("CUDA_VISIBLE_DEVICES", visible).output();
        said(&output.unwrap()).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    // As this process was told to call them, or by their places.
    let mut names: Vec<String> = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(names) => names.split(',').map(str::to_owned).collect(),
        Err(_) => (0..all.len()).map(|ordinal| ordinal.to_string()).collect(),
    };
    for (name, identity) in names.iter().zip(&all) {
        assert_eq!(seen(name), [identity.as_str()]);
        assert_eq!(seen(identity.split(' ').next().unwrap()), [identity.as_str()]);
    }
    names.reverse();
    all.reverse();
    assert_eq!(seen(&names.join(",")), all);
}

fn the_process_ends_with_handles_in_a_thread_local(_: &DeviceRegistry) {
    said(&start("thread_local"));
}

/// `main` returns while a device's thread, which nobody closed, is in the driver.
fn leave_a_busy_thread(registry: &DeviceRegistry) {
    let device = registry.device(0).unwrap();
    let thread = DeviceThread::spawn(&device, DeviceThreadOptions::default()).unwrap();
    let (begun, is_begun) = std::sync::mpsc::channel();
    let task = thread.submit(move |device: &Device| {
        let (stream, buffer) =
            (Stream::new(device).unwrap(), DeviceBuffer::alloc(device, 1 << 20).unwrap());
        begun.send(()).unwrap();
        while stream.fill(buffer.span(), 1).is_ok() && stream.synchronize().is_ok() {}
    });
    task.unwrap().detach();
    is_begun.recv().unwrap();
}

fn the_process_ends_under_a_busy_thread(_: &DeviceRegistry) {
    for _ in 0..5 {
        said(&start("busy"));
    }
}

fn a_closed_device_is_opened_anew(registry: &DeviceRegistry) {
    for _ in 0..3 {
        let device = registry.device(0).unwrap();
        let buffer = DeviceBuffer::alloc(&device, 4096).unwrap();
        Stream::new(&device).unwrap().upload(buffer.span(), &[1; 4096]).unwrap();
        drop((device, buffer));
        assert_eq!(registry.close(0).unwrap().freed, 0, "draining frees it");
    }
}

const PLAN: Plan =
    Plan { layers: 48, passes: 0, lanes: 12, words: 4096, peer_access: true, leak_bytes: 0 };

fn layers_on_all_gpus(registry: &DeviceRegistry, plan: Plan) {
    let start = std::time::Instant::now();
    let level = run_level(registry, plan);
    let elapsed = start.elapsed();
    let Level { seen, free, runs } =
        level.unwrap_or_else(|levels| panic!("memory leaked: {levels:?}"));
    assert_eq!(seen.compared, (plan.passes - plan.passes / 5) as u64);
    assert!(seen.migrations > 0, "no task went on in another thread: {seen:?}");
    println!("{plan:?}: {seen:?}, free {free:?} before and after run {runs}, {elapsed:.1?} in all");
    assert!(registry.close_all().is_complete());
}

fn layers_on_all_gpus_without_peer_access(registry: &DeviceRegistry) {
    layers_on_all_gpus(registry, Plan { passes: 1000, peer_access: false, ..PLAN });
}

fn layers_on_all_gpus_with_peer_access(registry: &DeviceRegistry) {
    let passes = std::env::var("KV_MULTIGPU_PASSES").map(|text| text.parse().unwrap());
    layers_on_all_gpus(registry, Plan { passes: passes.unwrap_or(10_000), ..PLAN });
}

/// In a process of its own, with which the memory goes.
fn leak(registry: &DeviceRegistry) {
    let plan = Plan { passes: 200, leak_bytes: 64 << 10, ..PLAN };
    let levels = run_level(registry, plan).unwrap_err();
    let last = (plan.layers - 1) % registry.count() as usize;
    assert!(levels.windows(2).all(|pair| pair[1][last] < pair[0][last]), "{levels:?}");
    println!("a leak of 64 KiB a pass: {levels:?}");
}

fn a_leak_of_each_pass_is_noticed(_: &DeviceRegistry) {
    print!("{}", said(&start("leak")));
}

/// Plants an illegal access; the error that the wait for it meets.
fn plant(device: &Device) -> cuda_driver::DriverError {
    let stream = Stream::new(device).unwrap();
    kernel::write_nowhere(&kernel::load(device), &stream).unwrap();
    let first = stream.synchronize().unwrap_err().driver_error();
    assert_eq!(first.code, ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(device.poison(), Some(first));
    first
}

/// In a process of its own, which is lost by it: NVIDIA's driver keeps no fault to one device.
fn fault(registry: &DeviceRegistry) {
    let second = registry.device(1).unwrap();
    let memory = DeviceBuffer::alloc(&second, 4096).unwrap();
    let first = plant(&registry.device(0).unwrap());
    let lost = DeviceState::Lost { first, after: None };
    assert_eq!(registry.entry(0).unwrap().state, lost);
    let state = registry.probe(1).unwrap();
    assert!(matches!(state, DeviceState::Lost { after: Some(0), .. }), "{state:?}");
    assert_eq!(registry.first_loss(), Some((0, first)));
    let drained = registry.drain(1).unwrap();
    assert_eq!(drained.alive.device_buffers, 1, "{drained:?}");
    drop((memory, second));
    let closed = registry.close_all();
    assert!(closed.is_complete() && closed.devices.len() == 2, "{closed:?}");
    for ordinal in [0, 1] {
        assert!(matches!(registry.device(ordinal), Err(RegistryError::Lost { .. })));
        let again = registry.reopen(ordinal).unwrap_err();
        assert!(matches!(again, RegistryError::Open { .. }), "{again:?}");
    }
}

fn a_fault_is_traced_to_its_device_and_closes_quietly(_: &DeviceRegistry) {
    said(&start("fault"));
}

/// What a process does for one order, with its one GPU.
const SERVING: Plan = Plan { passes: 100, ..PLAN };

fn of_a_process_for_each_gpu_the_others_go_on(registry: &DeviceRegistry) {
    serving::one_faults_and_the_others_go_on(registry, SERVING, || child_process("serve"));
}

/// Passes go on over both devices while other processes lose theirs on the first.
fn a_fault_of_another_process_leaves_this_one_serving(registry: &DeviceRegistry) {
    let plan = Plan { passes: 200, ..PLAN };
    run(registry, plan).unwrap();
    let before = free_bytes(registry);
    std::thread::scope(|scope| {
        let faults = scope.spawn(|| {
            for _ in 0..3 {
                said(&start("fault_alone"));
            }
        });
        while !faults.is_finished() {
            run(registry, plan).unwrap();
        }
        faults.join().unwrap();
    });
    assert_eq!(run(registry, plan).unwrap().compared, 160);
    assert_eq!(free_bytes(registry), before, "memory leaked");
    for entry in registry.report().unwrap() {
        assert_eq!(entry.state, DeviceState::Open, "{entry:?}");
    }
}
