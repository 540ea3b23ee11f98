//! A model whose layers lie on all devices, run from an async runtime, on the simulated device (H17 to H20).

use crate::common::levels::run_level;
use crate::common::machine;
use crate::common::pipeline::{Plan, run};
use cuda_sim::{SimConfig, SimDriver};
use kv_multigpu::DeviceRegistry;

const PLAN: Plan =
    Plan { layers: 48, passes: 60, lanes: 6, words: 96, peer_access: true, leak_bytes: 0 };

/// Runs the plan, closes every device, and looks at what the machine says.
fn runs_clean(devices: u32, plan: Plan) {
    let (sim, registry) = machine(devices, plan.peer_access);
    let free = |registry: &DeviceRegistry| -> Vec<u64> {
        let devices = (0..registry.count()).map(|ordinal| registry.device(ordinal).unwrap());
        devices
            .map(|device| {
                device.free_retired().unwrap();
                device.memory_info().unwrap().0
            })
            .collect()
    };
    let before = free(&registry);
    let seen = run(&registry, plan).unwrap();
    assert_eq!(seen.compared, (plan.passes - plan.passes / 5) as u64);
    assert!(seen.migrations > 0, "no task went on in another thread: {seen:?}");
    assert_eq!(free(&registry), before, "memory leaked");
    let closed = registry.close_all();
    assert_eq!(closed.devices.len(), devices as usize);
    assert!(closed.is_complete(), "{closed:?}");
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
    assert!(sim.check_leaks().is_clean(), "{}", sim.check_leaks());
}

#[test]
fn devices_with_and_without_peer_access() {
    for (devices, passes) in [(2, PLAN.passes), (8, 20)] {
        for peer_access in [true, false] {
            println!("{devices} devices, peer access {peer_access}");
            runs_clean(devices, Plan { passes, peer_access, ..PLAN });
        }
    }
}

#[test]
fn five_devices_whose_kernels_run_from_ptx() {
    let (sim, registry) = machine(5, true);
    sim.prefer_ptx(true);
    run(&registry, Plan { passes: 5, lanes: 2, words: 40, ..PLAN }).unwrap();
    assert!(registry.close_all().is_complete());
    assert!(sim.instructions() > 0 && sim.findings().is_empty(), "{:?}", sim.findings());
}

#[test]
fn many_seeds_of_the_devices_own_order() {
    for seed in 0..10 {
        let config = SimConfig { devices: 3, seed, ..SimConfig::default() };
        let sim = SimDriver::new(config).unwrap();
        sim.register_kernels(&[crate::common::kernel::REFERENCE]);
        let registry = DeviceRegistry::new(std::sync::Arc::new(sim.clone())).unwrap();
        run(&registry, Plan { passes: 8, lanes: 4, words: 32, ..PLAN }).unwrap();
        assert!(registry.close_all().is_complete(), "seed {seed}");
        assert!(sim.findings().is_empty(), "seed {seed}: {:?}", sim.findings());
    }
}

/// What the trial on GPUs does, and that it is no excuse for a leak.
#[test]
fn passes_that_leak_never_leave_the_memory_as_it_was() {
    let plan = Plan { passes: 40, ..PLAN };
    let (_sim, registry) = machine(3, true);
    let level = run_level(&registry, plan).unwrap();
    assert_eq!(level.runs, 1, "the simulated driver keeps nothing: {level:?}");
    let levels = run_level(&registry, Plan { leak_bytes: 512, ..plan }).unwrap_err();
    let falls = levels.windows(2).all(|pair| {
        pair[0][..2] == pair[1][..2] && pair[0][2] - pair[1][2] == 512 * plan.passes as u64
    });
    assert!(falls, "{levels:?}");
}
