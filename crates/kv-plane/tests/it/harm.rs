//! Each protection of the data plane is disabled, and an engine that checks all it reads must see
//! the harm.
//!
//! Every scenario runs twice, identical except for the defect: without the defect nothing is
//! corrupt, with it the corruption shows. So the checks of a replay are known to detect these
//! defects.

use crate::prelude::*;
use cuda_sim::RaceCheck;

/// Whether the protection is enabled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Protection {
    In,
    Out,
}

struct Machine {
    sim: SimDriver,
    engine: Engine,
}

impl Machine {
    /// An engine with its layers on `devices` simulated devices.
    fn new(seed: u64, devices: u32) -> Self {
        let (granularity, races) = (4 << 10, RaceCheck::Report);
        let config = SimConfig { seed, devices, granularity, races, ..SimConfig::default() };
        let sim = SimDriver::new(config).unwrap();
        sim.register_kernels(kv_kernels::references());
        sim.register_kernels(kv_stage::references());
        let driver = Arc::new(sim.clone());
        let open = |ordinal| Device::open(driver.clone(), ordinal).unwrap();
        let devices: Vec<Device> = (0..devices as i32).map(open).collect();
        let engine = Engine::new(&streams(&devices), options(shape(3, 64, 4), 32, 8));
        Self { sim, engine }
    }

    fn admit(&mut self, prompt: &Prompt) -> Live {
        self.engine.admit(prompt).unwrap()
    }

    fn parts(&self) -> &[Part] {
        self.engine.cache.parts()
    }

    fn hold(&self) {
        self.parts().iter().for_each(|part| self.sim.hold(part.compute().raw()));
    }

    fn release_hold(&self) {
        self.parts().iter().for_each(|part| self.sim.release_hold(part.compute().raw()));
    }

    /// Number of wrong blocks read, in all steps so far.
    #[track_caller]
    fn corrupt(&mut self) -> u64 {
        self.engine.drain().unwrap();
        assert!(self.engine.verified > 0);
        // The device saw no failure. The bytes and the unordered accesses show the defect.
        let findings = self.sim.findings();
        assert!(findings.iter().all(|one| one.kind == FindingKind::Race), "{findings:?}");
        self.engine.corrupt
    }
}

/// Runs `scenario`, which returns the number of corrupt blocks read, on one device and on two,
/// under several schedules, with the protection and without it.
#[track_caller]
fn assert_protected(scenario: fn(&mut Machine, Protection) -> u64) {
    for devices in [1, 2] {
        for seed in 0..8 {
            let mut machine = Machine::new(seed, devices);
            let guarded = scenario(&mut machine, Protection::In);
            assert_eq!(guarded, 0, "on {devices} devices with seed {seed}");
            assert_eq!(machine.sim.races(), []);
            let harmed = scenario(&mut Machine::new(seed, devices), Protection::Out);
            assert!(harmed > 0, "not seen on {devices} devices with seed {seed}");
        }
    }
}

#[test]
fn a_staging_buffer_reused_before_its_event_is_seen() {
    assert_protected(|machine, protection| {
        if protection == Protection::Out {
            machine.parts().iter().for_each(|part| part.staging().sabotage_reuse_before_event());
        }
        let mut first = machine.admit(&Prompt::new(1, 13));
        let mut second = machine.admit(&Prompt::new(2, 13));
        // The host is a step ahead of blocked devices.
        machine.hold();
        machine.engine.run(&mut [&mut first]).unwrap();
        machine.engine.run(&mut [&mut second]).unwrap();
        machine.release_hold();
        machine.corrupt()
    });
}

#[test]
fn a_block_that_two_requests_claimed_is_seen() {
    assert_protected(|machine, protection| {
        if protection == Protection::Out {
            machine.engine.pool().sabotage_peek_then_claim();
        }
        let mut first = machine.admit(&Prompt::new(1, 13));
        let mut second = machine.admit(&Prompt::new(2, 13));
        let same = first.sequence.block(GroupId(0), 0) == second.sequence.block(GroupId(0), 0);
        assert_eq!(same, protection == Protection::Out);
        machine.engine.run(&mut [&mut first, &mut second]).unwrap();
        machine.corrupt()
    });
}

#[test]
fn a_transfer_that_ignores_the_skip_is_seen() {
    assert_protected(|machine, protection| {
        let system = Prompt::new(1, 8);
        let mut first = machine.admit(&system.then(2, 5));
        machine.engine.run(&mut [&mut first]).unwrap();
        // It shares two blocks. Its chunk has invalid data for them.
        let mut second = machine.admit(&system.then(3, 5));
        assert_eq!(second.sequence.cached_tokens(), 8);
        let ignore = protection == Protection::Out;
        machine.parts().iter().for_each(|part| part.kernels().sabotage_ignore_skip(ignore));
        machine.engine.run(&mut [&mut second, &mut first]).unwrap();
        machine.corrupt()
    });
}
