//! The order of copies between device and host memory, taken out, and the harm seen by an engine
//! that checks every byte it reads.
//!
//! Every scenario runs twice. With the protection no byte is corrupt. Without it the corruption
//! shows, by every way of the blocks.

use cuda_sim::{RaceCheck, SimConfig, SimDriver};
use kv_cache::TransportChoice;
use kv_kernels::link::Transport;

use crate::common::engine::{Engine, Prompt, by, options, shape, streams};
use crate::machine::{open, sim};

/// Whether the protection is taken out.
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
    /// An engine with 16 blocks on the devices, of which a prompt of 55 tokens takes 14, and 64 on the host.
    fn new(seed: u64, devices: u32, choice: TransportChoice) -> Self {
        let (granularity, races) = (4 << 10, RaceCheck::Report);
        let config = SimConfig { seed, devices, granularity, races, ..SimConfig::default() };
        let sim = sim(config);
        let devices = open(&sim, devices);
        let options = by(choice, options(shape(3, 64, 4), 16, 64));
        Self { sim, engine: Engine::new(&streams(&devices), options) }
    }

    /// Serves a prompt that needs nearly all device blocks, and lets it go.
    fn serve(&mut self, seed: u32) {
        let mut live = self.engine.admit(&Prompt::new(seed, 55)).unwrap();
        self.engine.run(&mut [&mut live]).unwrap();
        drop(live);
    }

    fn serve_all(&mut self, seeds: &[u32]) {
        for &seed in seeds {
            self.serve(seed);
            self.engine.drain().unwrap();
        }
    }

    /// Holds the copies still, or lets them go on.
    fn hold_copies(&self, hold: bool) {
        for part in self.engine.cache.parts() {
            for stream in part.sabotage_transfers().each_ref().map(cuda_driver::Stream::raw) {
                if hold { self.sim.hold(stream) } else { self.sim.release_hold(stream) }
            }
        }
    }

    /// Holds the copies to host memory still, or lets them go on.
    fn hold_out(&self, hold: bool) {
        for part in self.engine.cache.parts() {
            let [out, _] = part.sabotage_transfers().each_ref().map(cuda_driver::Stream::raw);
            if hold { self.sim.hold(out) } else { self.sim.release_hold(out) }
        }
    }

    /// Blocks that were read and did not hold what they should.
    #[track_caller]
    fn corrupt(&mut self) -> u64 {
        self.engine.drain().unwrap();
        assert!(self.engine.verified > 0);
        let stats = self.engine.decided();
        assert!(stats.offloaded_blocks > 0 && stats.onboarded_blocks > 0, "{stats:?}");
        self.engine.corrupt
    }
}

/// Plays `scenario`, which answers how many corrupt blocks were read, on one device and on two and
/// under several schedules, with the protection and without it: whether what is left is then a race, or
/// ordered, but not as it should be.
#[track_caller]
fn assert_protected(
    choices: &[TransportChoice],
    is_race: bool,
    scenario: impl Fn(&mut Machine, Protection) -> u64,
) {
    for &choice in choices {
        for (seed, devices) in [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)] {
            let mut machine = Machine::new(seed, devices, choice);
            let guarded = scenario(&mut machine, Protection::In);
            assert_eq!(guarded, 0, "{choice} on {devices} devices with seed {seed}");
            assert_eq!(machine.sim.findings(), []);
            let mut machine = Machine::new(seed, devices, choice);
            let harmed = scenario(&mut machine, Protection::Out);
            assert!(harmed > 0, "{choice} not seen on {devices} devices with seed {seed}");
            machine.sim.run_all();
            assert_eq!(!machine.sim.races().is_empty(), is_race, "{:?}", machine.sim.races());
        }
    }
}

#[test]
fn a_step_that_does_not_wait_for_its_blocks_is_seen() {
    assert_protected(&TransportChoice::ALL, true, |machine, protection| {
        machine.serve_all(&[1, 2, 1, 2]);
        if protection == Protection::Out {
            machine.engine.cache.sabotage_worker().sabotage_ignore_copies();
        }
        // Whatever the devices do next, the copies are late.
        machine.hold_copies(true);
        let mut live = machine.engine.admit(&Prompt::new(1, 55)).unwrap();
        assert!(live.sequence.onboarded_blocks() > 0);
        machine.engine.run(&mut [&mut live]).unwrap();
        if protection == Protection::Out {
            // The step waits for nothing, and runs to its end.
            machine.sim.run_all();
        }
        machine.hold_copies(false);
        drop(live);
        machine.corrupt()
    });
}

#[test]
fn copies_in_another_order_than_they_were_decided_in_are_seen() {
    assert_protected(&TransportChoice::ALL, false, |machine, protection| {
        if protection == Protection::Out {
            machine.engine.cache.sabotage_worker().sabotage_send_backwards();
        }
        // Blocks leave before others come to the places that they had, in one step.
        machine.serve_all(&[1, 2, 1, 2, 1, 2]);
        machine.corrupt()
    });
}

#[test]
fn copies_of_two_directions_that_share_a_block_and_do_not_wait_are_seen() {
    assert_protected(&TransportChoice::ALL, true, |machine, protection| {
        if protection == Protection::Out {
            machine.engine.cache.sabotage_worker().sabotage_ignore_lanes();
        }
        // Blocks leave before others come to the places that they had, and those leave again.
        machine.serve_all(&[1, 2, 1, 2, 1, 2]);
        // The way out stands still while blocks come back.
        machine.hold_out(true);
        let mut live = machine.engine.admit(&Prompt::new(1, 55)).unwrap();
        assert!(live.sequence.onboarded_blocks() > 0);
        let step = machine.engine.begin().unwrap();
        machine.engine.cache.stage(&step, &mut [], |_, _| Ok(())).unwrap();
        machine.sim.run_all();
        machine.hold_out(false);
        machine.engine.cache.finish_step(step).unwrap();
        machine.engine.run(&mut [&mut live]).unwrap();
        drop(live);
        // What went out meanwhile comes back, and is read.
        machine.engine.drain().unwrap();
        machine.serve_all(&[2, 1, 2]);
        machine.corrupt()
    });
}

#[test]
fn a_list_of_blocks_written_again_before_it_is_read_is_seen() {
    // By two hops the kernel would leave the ring, which ends the device.
    let by_kernel = TransportChoice::Only(Transport::DirectKernel);
    assert_protected(&[TransportChoice::Quickest, by_kernel], true, |machine, protection| {
        if protection == Protection::Out {
            for part in machine.engine.cache.parts() {
                part.sabotage_lists().for_each(|lists| lists.sabotage_reuse_before_event());
            }
        }
        machine.serve_all(&[1, 2, 3]);
        // The host is a step ahead of copies that stand still: two lists wait to be read.
        machine.hold_copies(true);
        let mut first = machine.engine.admit(&Prompt::new(4, 20)).unwrap();
        machine.engine.run(&mut [&mut first]).unwrap();
        let mut second = machine.engine.admit(&Prompt::new(5, 20)).unwrap();
        machine.engine.run(&mut [&mut second]).unwrap();
        machine.hold_copies(false);
        drop((first, second));
        machine.engine.drain().unwrap();
        machine.serve_all(&[3, 2, 1, 4, 5]);
        machine.corrupt()
    });
}

#[test]
fn a_cache_that_is_dropped_under_its_copies_leaves_their_memory() {
    for choice in TransportChoice::ALL {
        for devices in [1, 2] {
            let mut machine = Machine::new(1, devices, choice);
            machine.serve_all(&[1]);
            machine.hold_copies(true);
            let step = machine.engine.begin().unwrap();
            drop(machine.engine.admit(&Prompt::new(2, 55)).unwrap());
            // No work waits for the copies, which write and read for long yet.
            machine.engine.cache.finish_step(step).unwrap();
            machine.sim.run_all();
            let held: Vec<u64> = machine
                .engine
                .cache
                .parts()
                .iter()
                .flat_map(|p| p.sabotage_transfers())
                .map(|s| s.raw())
                .collect();
            let Machine { sim, engine } = machine;
            drop(engine);
            held.into_iter().for_each(|stream| sim.release_hold(stream));
            sim.run_all();
            assert_eq!(sim.findings(), [], "{choice}");
            assert!(sim.check_leaks().mappings > 0, "{choice}");
        }
    }
}
