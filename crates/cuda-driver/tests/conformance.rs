//! The scenarios that every driver must pass, on the simulated one, under several schedules.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "a failure is preceded by the scenario's name")]

mod common;

use std::sync::Arc;

use common::{Scenario, kernel, pairs, scenarios};
use cuda_driver::{CountingDriver, Driver};
use cuda_sim::{SimConfig, SimDriver};

/// Runs each scenario on machines of its own; nothing may be seen to go wrong or left behind.
fn run_all(all: &[(&str, Scenario)], devices: u32) {
    for &(name, scenario) in all {
        for seed in 0..5 {
            let config = SimConfig { devices, seed, ..SimConfig::default() };
            let sim = SimDriver::new(config).unwrap();
            sim.register_kernels(&[kernel::REFERENCE]);
            let counting = Arc::new(CountingDriver::new(Arc::new(sim.clone())));
            let driver: Arc<dyn Driver> = counting.clone();
            println!("{name}, seed {seed}");
            scenario(&driver);
            drop(driver);
            let findings = sim.findings();
            assert!(findings.is_empty(), "{name}, seed {seed}: {findings:?}");
            assert!(sim.check_leaks().is_clean(), "{name}, seed {seed}: {}", sim.check_leaks());
            let (counted, made) = (counting.calls(), sim.calls());
            assert!(counted.keys().all(|call| counted[call] == made[call]), "{counted:?} {made:?}");
        }
    }
}

#[test]
fn every_scenario_passes_on_the_simulated_driver() {
    run_all(scenarios::ALL, 3);
}

#[test]
fn every_scenario_of_two_devices_passes_on_the_simulated_driver() {
    run_all(pairs::ALL, 2);
}
