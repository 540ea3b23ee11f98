//! The scenarios of every device, on simulated ones.

use crate::prelude::*;

/// Plays every scenario for some seeds of the device's scheduler.
fn play(devices: u32, shape: kv_kernels::KvShape) {
    for (name, scenario) in scenarios::all() {
        for seed in 0..4 {
            let machine = Machine::new(seed, devices, shape);
            scenario(&machine.rig);
            assert_eq!(machine.sim.findings(), [], "{name} with seed {seed}");
            machine.assert_clean();
        }
    }
}

#[test]
fn small_blocks() {
    play(1, small());
}

#[test]
fn blocks_that_straddle_pages() {
    // 3 KiB: three pages hold four blocks.
    play(1, shape(3, 64, 8));
}

#[test]
fn blocks_of_several_pages() {
    play(1, shape(2, 256, 16));
}

#[test]
fn layers_split_unevenly_over_two_devices() {
    play(2, shape(3, 64, 8));
}

#[test]
fn two_parts_on_one_device() {
    let mut machine = Machine::new(7, 1, shape(5, 32, 4));
    let device = machine.rig.devices[0].clone();
    machine.rig.devices.push(device);
    for (_, scenario) in scenarios::all() {
        scenario(&machine.rig);
    }
    machine.assert_clean();
}
