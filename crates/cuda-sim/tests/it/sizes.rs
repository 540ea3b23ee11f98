//! Every size, count and time that the crate takes, at 0, 1, a normal value, its maximum, and
//! values where sums or products overflow. Each gives a value or a typed error, in bounded memory.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "calls that are safe for one reason")]
#![allow(clippy::reversed_empty_ranges, reason = "an empty range is one of the sizes")]

use std::time::Duration;

use crate::common::{bind, machine, prop};
use cuda_driver::{
    AccessDesc, BatchCopy, DeviceAttribute, Driver, ErrorCode, Granularity, HostAllocFlags,
    HostRegisterFlags, KernelArgs, LaunchConfig, PeerCopy,
};
use cuda_sim::{
    Curve, ExploreLimits, Pace, Profile, RaceCheck, Rate, Script, SimConfig, SimDriver, explore,
    explore_random, replay,
};

const SIZES: [u64; 17] = [
    0,
    1,
    4095,
    4096,
    1 << 20,
    2 << 20,
    (2 << 20) + 1,
    1 << 30,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    1 << 40,
    1 << 46,
    1 << 47,
    1 << 63,
    u64::MAX - 4095,
    u64::MAX,
];

const COUNTS: [u32; 8] = [0, 1, 2, 32, 33, 65_536, 1 << 31, u32::MAX];

/// Builds a machine with some values from `SIZES`, and uses it briefly if it was built.
fn try_config(config: SimConfig) {
    let Ok(sim) = SimDriver::new(config) else { return };
    bind(&sim, 0);
    let _ = sim.mem_get_info();
    let stream = sim.stream_create(false).unwrap();
    for bytes in SIZES {
        if let Ok(memory) = sim.mem_alloc(bytes) {
            // SAFETY: the simulated driver checks addresses and sizes.
            let _ = unsafe { sim.memset_d8_async(memory, 1, bytes.min(1 << 20), stream) };
            // SAFETY: as above.
            unsafe { sim.stream_synchronize(stream) }.unwrap();
            // SAFETY: the memory was allocated above, and is not used again.
            unsafe { sim.mem_free(memory) }.unwrap();
        }
        if let Ok(address) = sim.mem_address_reserve(bytes, 0, 0) {
            sim.mem_address_free(address, bytes).unwrap();
        }
        if let Ok(handle) = sim.mem_create(bytes, prop(0)) {
            // SAFETY: the handle was created just now.
            unsafe { sim.mem_release(handle) }.unwrap();
        }
    }
    let _ = (sim.virtual_now(), sim.config(), format!("{sim:?}"));
    assert!(sim.device_used_bytes(0) == 0 && sim.device_used_bytes(u32::MAX) == 0);
}

#[test]
fn configurations() {
    let base = SimConfig::default;
    for count in COUNTS {
        try_config(SimConfig { devices: count, ..base() });
        try_config(SimConfig { peer_group: count, devices: 2, ..base() });
        try_config(SimConfig { compute_capability: (count, count), ..base() });
        try_config(SimConfig { compute_capability: (9, count), ..base() });
    }
    for size in SIZES {
        try_config(SimConfig { device_bytes: size, ..base() });
        try_config(SimConfig { device_bytes: size, granularity: 4096, ..base() });
        try_config(SimConfig { device_bytes: 1 << 46, granularity: size, ..base() });
        try_config(SimConfig { pinned_bytes: size, ..base() });
        try_config(SimConfig { seed: size, ..base() });
    }
    try_config(SimConfig { name: "x".repeat(1 << 20), track_initialised: false, ..base() });
}

#[test]
fn profiles() {
    let extremes = [Duration::ZERO, Duration::from_nanos(1), Duration::MAX];
    for rate in SIZES.map(Rate::mb_per_s) {
        for bytes in SIZES {
            let _ = (rate.time(bytes), rate.to_string());
        }
        for time in extremes {
            for percent in COUNTS {
                let curves = [vec![], vec![(0, time)], vec![(u64::MAX, time), (0, Duration::MAX)]];
                for points in curves {
                    let curve = Curve::new(&points);
                    let _ = SIZES.map(|bytes| curve.at(bytes));
                }
                let curve = Curve::new(&[(1, time), (u64::MAX, Duration::ZERO)]);
                let profile = Profile {
                    htod: rate,
                    pageable: rate,
                    fill: rate,
                    kernel_load: rate,
                    duplex_percent: percent,
                    set_access_many_percent: percent,
                    unmap_many_percent: percent,
                    htod_setup: time,
                    shared_setup: time,
                    fill_call: time,
                    other_call: time,
                    start_latency: time,
                    wait_latency: time,
                    kernel_overhead: time,
                    unmap: curve.clone(),
                    pinned_alloc: curve.clone(),
                    peer: curve,
                    ..Profile::h100()
                };
                let is_text = (1..=1_000_000).contains(&percent);
                assert_eq!(Profile::parse(&profile.to_string()).is_ok(), is_text);
                run_with_profile(profile);
            }
        }
    }
    for copy_engines in COUNTS {
        run_with_profile(Profile { copy_engines, ..Profile::h100() });
    }
    for text in
        ["", "=", "htod = 0 GB/s", "htod = 99999999999999999999999 GB/s", "copy_engines = -1"]
    {
        let _ = Profile::parse(text);
    }
}

/// Copies in both directions, a fill and two waits on a machine with two devices.
fn run_with_profile(profile: Profile) {
    let config = SimConfig { devices: 2, profile, ..SimConfig::default() };
    let Ok(sim) = SimDriver::new(config) else { return };
    bind(&sim, 0);
    let [device, other] = [(); 2].map(|()| sim.mem_alloc(1 << 16).unwrap());
    let host = sim.mem_host_alloc(1 << 16, HostAllocFlags::CACHED).unwrap();
    let streams = [(); 2].map(|()| sim.stream_create(false).unwrap());
    // SAFETY: the memory belongs to this machine, and no other code uses it.
    unsafe {
        sim.memset_d8_async(device, 1, 1 << 16, streams[0]).unwrap();
        sim.memcpy_htod_async(device, host, 1 << 15, streams[0]).unwrap();
        sim.memcpy_dtoh_async(host + (1 << 15), other, 1 << 15, streams[1]).unwrap();
    }
    sim.ctx_synchronize().unwrap();
    let _ = sim.virtual_now();
}

#[test]
fn explorations() {
    let program = |sim: &SimDriver| {
        bind(sim, 0);
        let device = sim.mem_alloc(4).map_err(|error| error.to_string())?;
        for _ in 0..2 {
            let stream = sim.stream_create(false).map_err(|error| error.to_string())?;
            // SAFETY: the memory was allocated above.
            unsafe { sim.memset_d8_async(device, 1, 4, stream) }
                .map_err(|error| error.to_string())?;
        }
        // SAFETY: the memory was allocated above, and is not used again.
        unsafe { sim.mem_free(device) }.map_err(|error| error.to_string())
    };
    // The streams race on purpose.
    let config = SimConfig { races: RaceCheck::Off, ..SimConfig::default() };
    for schedules_max in [0, 1, u64::MAX] {
        for choices_max in [0, 1, usize::MAX] {
            let limits = ExploreLimits { schedules_max, choices_max };
            let found = explore(&config, limits, program).unwrap();
            assert!(found.failure.is_none() && found.explored <= schedules_max);
        }
    }
    let fails = |_: &SimDriver| Err("as told".to_owned());
    for seeds in [0..0, 5..1, 0..u64::MAX, u64::MAX - 1..u64::MAX] {
        let found = explore_random(&config, seeds.clone(), fails).unwrap();
        assert_eq!(found.failure.is_some(), !seeds.is_empty());
    }
    for text in ["-", "4294967295", "0.4294967295.1"] {
        let script: Script = text.parse().unwrap();
        let _ = replay(&config, &script, program).unwrap();
    }
    for text in ["4294967296", "", ".", "0..1"] {
        assert!(text.parse::<Script>().is_err());
    }
}

#[test]
fn what_a_test_may_ask() {
    let sim = machine(SimConfig { devices: 2, ..SimConfig::default() });
    let (stream, event) = (sim.stream_create(false).unwrap(), sim.event_create(true).unwrap());
    let memory = sim.mem_alloc(4096).unwrap();
    for size in SIZES {
        sim.hold(size);
        sim.release_hold(size);
        sim.delay_event(size, size);
        sim.delay_event(event, size);
        // SAFETY: handles and memory of this machine.
        unsafe {
            sim.memset_d8_async(memory, 1, 4096, stream).unwrap();
            sim.event_record(event, stream).unwrap();
            sim.event_query(event).unwrap();
            sim.event_synchronize(event).unwrap();
        }
        sim.fail_nth("cuNoSuchCall", size, ErrorCode::UNKNOWN);
        sim.fail_nth("cuMemGetInfo", size, ErrorCode::UNKNOWN);
        let _ = sim.mem_get_info();
        sim.lose_device(u32::MAX, size, ErrorCode::ILLEGAL_ADDRESS);
        sim.advance_host(Duration::from_nanos(size));
        sim.compute(0, Duration::from_nanos(size));
        sim.compute(size, Duration::MAX);
        sim.keep_times(usize::try_from(size).unwrap());
        let _ = sim.take_times();
        for device in COUNTS {
            let _ = sim.device_used_bytes(device);
            for address in SIZES.map(|offset| memory.wrapping_add(offset)) {
                let _ = sim.is_initialised(device, address, size);
            }
        }
    }
    sim.advance_host(Duration::MAX);
    sim.advance_host(Duration::MAX);
    sim.compute(0, Duration::MAX);
    for pace in [Pace::Timed, Pace::Fastest, Pace::Slowest, Pace::OneBehind, Pace::Random] {
        sim.set_pace(pace);
        try_config(SimConfig { pace, ..SimConfig::default() });
    }
    sim.lose_device(0, u64::MAX, ErrorCode::ILLEGAL_ADDRESS);
    assert!(sim.ctx_synchronize().is_ok());
}

#[test]
fn memory_calls() {
    let sim = machine(SimConfig { devices: 2, ..SimConfig::default() });
    let memory = sim.mem_alloc(1 << 16).unwrap();
    let host = sim.mem_host_alloc(1 << 16, HostAllocFlags::CACHED).unwrap();
    let page = sim.mem_get_allocation_granularity(prop(0), Granularity::Minimum).unwrap();
    let range = sim.mem_address_reserve(4 * page, 0, 0).unwrap();
    for a in SIZES {
        if let Ok(address) = sim.mem_alloc(a) {
            // SAFETY: it was allocated just now.
            unsafe { sim.mem_free(address) }.unwrap();
        }
        if let Ok(address) = sim.mem_host_alloc(a.min(1 << 47), HostAllocFlags::CACHED) {
            // SAFETY: it was allocated just now.
            unsafe { sim.mem_free_host(address) }.unwrap();
        }
        if let Ok(handle) = sim.mem_create(a, prop(0)) {
            // SAFETY: the simulated driver looks up handles and ranges.
            unsafe {
                let _ = sim.mem_map(range, a, 0, handle);
                let _ = sim.mem_unmap(range, a);
                sim.mem_release(handle).unwrap();
            }
        }
        // SAFETY: as above. Registered ranges without memory are only recorded.
        unsafe {
            let _ = sim.mem_free(a);
            let _ = sim.mem_free_host(a);
            let _ = sim.mem_release(a);
            let _ = sim.mem_host_unregister(a);
        }
        let _ = (sim.mem_host_get_device_pointer(a), sim.pointer_get_attributes(a));
        for b in SIZES {
            if let Ok(address) = sim.mem_address_reserve(a, b, 0) {
                sim.mem_address_free(address, a).unwrap();
            }
            if let Ok(address) = sim.mem_address_reserve(page, 0, a.wrapping_add(b)) {
                sim.mem_address_free(address, page).unwrap();
            }
            let _ = sim.mem_address_free(a, b);
            let _ = sim.mem_set_access(range.wrapping_add(a), b, &[AccessDesc { device: 0 }]);
            // SAFETY: ranges without memory are refused and never accessed. All other sizes and
            // addresses belong to the two live allocations.
            unsafe {
                let _ = sim.mem_unmap(range.wrapping_add(a), b);
                let _ = sim.mem_map(range.wrapping_add(a), b, a, 0x9999);
                let _ = sim.memset_d8_async(memory.wrapping_add(a), 1, b, 0);
                let _ = sim.memcpy_dtod_async(memory.wrapping_add(a), memory, b, 0);
                let _ = sim.memcpy_dtod_async(memory, memory.wrapping_add(a), b, 0);
                let copy =
                    BatchCopy { destination: memory.wrapping_add(a), source: host, bytes: b };
                let _ = sim.memcpy_batch_async(&[copy], 0);
            }
        }
    }
    for device in [i32::MIN, -1, 0, 1, 2, i32::MAX] {
        let _ = (sim.device_get_info(device), sim.device_can_access_peer(device, device));
        let _ = sim.device_get_attribute(device, DeviceAttribute::PCI_BUS_ID);
        let _ = sim.device_primary_ctx_retain(device);
        let _ = sim.mem_create(page, prop(device));
    }
    sim.ctx_synchronize().unwrap();
}

#[test]
fn host_ranges() {
    let sim = machine(SimConfig { devices: 2, ..SimConfig::default() });
    let context = sim.ctx_get_current().unwrap();
    let memory = sim.mem_alloc(1 << 16).unwrap();
    for bytes in SIZES.into_iter().filter(|&bytes| bytes > 1 << 47 || bytes == 0) {
        // SAFETY: no host memory is so large. The sizes are refused before any memory is accessed.
        unsafe {
            let _ = sim.memcpy_htod_async(memory, 4096, bytes, 0);
            let _ = sim.memcpy_dtoh_async(4096, memory, bytes, 0);
            let _ = sim.mem_host_register(4096, bytes, HostRegisterFlags::default());
        }
        let copy = PeerCopy {
            destination: memory,
            destination_context: context,
            source: memory,
            source_context: context,
            bytes,
        };
        // SAFETY: the simulated driver checks both ranges.
        let _ = unsafe { sim.memcpy_peer_async(copy, 0) };
    }
    sim.ctx_synchronize().unwrap();
}

const HEADER: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

/// Launches the kernel `k` of a module with every edge value of a launch's geometry.
fn launch_all(text: &str) {
    let sim = machine(SimConfig::default());
    sim.limit_instructions(1 << 10, 1 << 12);
    let Ok(module) = sim.module_load_data(text, &mut String::new()) else { return };
    // SAFETY: the module was loaded above.
    let Ok(function) = (unsafe { sim.module_get_function(module, "k") }) else { return };
    for grid in COUNTS {
        for block in [0, 1, 1024, 1025, u32::MAX] {
            for shared_bytes in [0, 48 << 10, u32::MAX] {
                for axis in 0..3 {
                    let (mut grids, mut blocks) = ([1; 3], [1; 3]);
                    (grids[axis], blocks[axis]) = (grid, block);
                    let config = LaunchConfig { grid: grids, block: blocks, shared_bytes };
                    // SAFETY: the kernel takes no arguments and touches no memory.
                    let _ = unsafe { sim.launch_kernel(function, &config, &KernelArgs::new(), 0) };
                    let _ = sim.ctx_synchronize();
                    if sim.ctx_synchronize().is_err() {
                        return;
                    }
                }
            }
        }
    }
    for size in COUNTS {
        let config = LaunchConfig { grid: [1; 3], block: [size; 3], shared_bytes: 0 };
        // SAFETY: as above.
        let _ = unsafe { sim.launch_kernel(function, &config, &KernelArgs::new(), 0) };
        let config = LaunchConfig { grid: [size; 3], block: [1; 3], shared_bytes: 0 };
        // SAFETY: as above.
        let _ = unsafe { sim.launch_kernel(function, &config, &KernelArgs::new(), 0) };
    }
    let _ = sim.ctx_synchronize();
    let config =
        LaunchConfig { grid: [i32::MAX as u32, 65_535, 65_535], ..LaunchConfig::linear(1, 1) };
    // SAFETY: as above.
    let _ = unsafe { sim.launch_kernel(function, &config, &KernelArgs::new(), 0) };
    let _ = sim.ctx_synchronize();
}

#[test]
fn launches() {
    launch_all(&format!("{HEADER}.entry k() {{ ret; }}"));
    launch_all(&format!("{HEADER}.entry k() {{ .reg .b64 %r<60000>; mov.u64 %r1, 1; ret; }}"));
    for bytes in SIZES {
        for space in ["local", "shared", "global", "const"] {
            let declared = format!(".{space} .align 8 .b8 room[{bytes}];");
            launch_all(&format!("{HEADER}{declared}.entry k() {{ ret; }}"));
            launch_all(&format!("{HEADER}.entry k() {{ {declared} ret; }}"));
            let declared = format!(".{space} .align {bytes} .b8 room[{bytes}][{bytes}];");
            launch_all(&format!("{HEADER}{declared}.entry k() {{ {declared} ret; }}"));
        }
        launch_all(&format!("{HEADER}.entry k(.param .align {bytes} .b8 p[{bytes}]) {{ ret; }}"));
        launch_all(&format!("{HEADER}.entry k() {{ .reg .b32 %r<{bytes}>; ret; }}"));
        launch_all(&format!("{HEADER}.entry k() .maxntid {bytes}, {bytes}, {bytes} {{ ret; }}"));
        launch_all(&format!("{HEADER}.entry k() .reqntid {bytes} {{ ret; }}"));
    }
}
