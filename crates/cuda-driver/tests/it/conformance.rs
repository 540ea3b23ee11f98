//! The conformance suite and the scenarios, on the simulated driver, under several schedules.

use std::collections::HashSet;
use std::sync::Arc;

use crate::common::conformance::{self, Case, Needs, Subject};
use crate::common::{Scenario, kernel, pairs, scenarios, traps};
use cuda_driver::{CountingDriver, Driver};
use cuda_sim::{FindingKind, RaceCheck, SimConfig, SimDriver};

fn machine(devices: u32, seed: u64) -> SimDriver {
    let races = RaceCheck::Report;
    let config = SimConfig { devices, seed, races, ..SimConfig::default() };
    let sim = SimDriver::new(config).unwrap();
    sim.register_kernels(&[kernel::REFERENCE]);
    sim
}

/// Runs each scenario on machines of its own; nothing may be seen to go wrong or left behind.
fn run_all(all: &[(&str, Scenario)], devices: u32) {
    for &(name, scenario) in all {
        for seed in 0..5 {
            let sim = machine(devices, seed);
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

#[test]
fn the_traps_of_other_handles_are_not_in_ours() {
    run_all(traps::SINGLE, 2);
    run_all(traps::PAIRS, 2);
}

/// Cases that show what the device does by what nothing orders: when a held stream's work reads, that
/// a driver does not wait, and what two devices do to one word.
const MEANT_TO_RACE: [&str; 5] = [
    "additions_of_two_devices_at_the_scope_of_one_may_be_lost",
    "additions_of_two_devices_in_memory_of_the_host_may_be_lost",
    "a_batch_reads_pinned_memory_when_it_runs",
    "a_graph_runs_in_its_stream",
    "unregistering_does_not_wait_for_another_device",
];

/// Runs a case on a machine of its own and says what is wrong with the outcome.
fn run_case(case: &Case, seed: u64) -> Result<(), String> {
    let sim = machine(2, seed);
    let subject = Subject { driver: Arc::new(sim.clone()), sim: Some(sim.clone()) };
    let run = std::panic::AssertUnwindSafe(|| (case.run)(&subject));
    std::panic::catch_unwind(run).map_err(|_| "failed".to_owned())?;
    let findings = sim.findings();
    let of = |kind| findings.iter().find(|finding| finding.kind == kind);
    if let Some(finding) = of(FindingKind::CannotComplete) {
        return Err(finding.to_string());
    }
    match (of(FindingKind::Race), MEANT_TO_RACE.contains(&case.name)) {
        (Some(race), false) => return Err(race.to_string()),
        (None, true) => return Err("nothing raced".to_owned()),
        _ => {}
    }
    let leaks = sim.check_leaks();
    if leaks.is_clean() { Ok(()) } else { Err(leaks.to_string()) }
}

#[test]
fn every_case_passes_on_the_simulated_driver() {
    let mut failures = Vec::new();
    for case in conformance::all() {
        for seed in 0..5 {
            println!("{}, seed {seed}", case.name);
            if let Err(why) = run_case(case, seed) {
                failures.push(format!("{}, seed {seed}: {why}", case.name));
                break;
            }
        }
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn there_are_at_least_150_cases_of_different_names() {
    let shared = |needs| !matches!(needs, Needs::Simulation(_));
    let on_both = conformance::all().filter(|case| shared(case.needs)).count();
    let cases = conformance::all().count();
    println!("{cases} cases, {on_both} of them on every driver");
    assert!(on_both >= 150, "{on_both}");
    let scenarios = [scenarios::ALL, pairs::ALL, traps::SINGLE, traps::PAIRS];
    let scenarios = scenarios.into_iter().flatten().map(|&(name, _)| name);
    let names: Vec<_> = conformance::all().map(|case| case.name).chain(scenarios).collect();
    let different: HashSet<_> = names.iter().collect();
    assert_eq!(different.len(), names.len());
}

#[test]
fn a_case_of_the_simulation_says_why() {
    for case in conformance::all() {
        if let Needs::Simulation(reason) = case.needs {
            assert!(!reason.is_empty(), "{}", case.name);
        }
    }
}
