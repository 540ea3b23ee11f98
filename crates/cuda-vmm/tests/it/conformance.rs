//! The scenarios that every device must pass, on the simulated device, under several schedules.

use crate::common::{machine_with, scenarios};

#[test]
fn every_scenario_passes_on_the_simulated_device() {
    for &(name, scenario) in scenarios::ALL {
        for seed in 0..10 {
            let machine = machine_with(1, seed);
            scenario(&machine.device);
            let findings = machine.sim.findings();
            assert!(findings.is_empty(), "{name}, seed {seed}: {findings:?}");
            machine.assert_clean();
        }
    }
}
