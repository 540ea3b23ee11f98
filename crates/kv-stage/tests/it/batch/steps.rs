//! Steps of random rows, tables and counts, beside the model.

use super::model::{Contents, Model, Sends, small, wide};
use crate::prelude::*;

pub(crate) fn machine(seed: u64, ptx: bool) -> Machine {
    let machine = Machine::new(seed);
    machine.sim.register_kernels(kv_stage::references());
    machine.sim.prefer_ptx(ptx);
    machine
}

pub(crate) fn write_sampled(machine: &Machine, model: &mut Model, expected: &Contents) {
    let sampled = model.sample(expected);
    let accepted = model.batch.buffers().accepted;
    machine.stream.upload(accepted, bytemuck::cast_slice(&sampled)).unwrap();
}

#[test]
fn every_step_is_what_was_staged_with_the_kernel_and_with_its_reference() {
    for (ptx, steps) in [(true, 60), (false, 600)] {
        for seed in 0..4 {
            let machine = machine(seed, ptx);
            let options = if seed == 3 { wide() } else { small() };
            let mut model = Model::new(&machine.device, options, 2, seed);
            assert_eq!(model.contents(&machine.stream), model.padding());
            for step in 0..steps {
                let expected = model.step(&machine.stream, Sends::All);
                let found = model.contents(&machine.stream);
                assert_eq!(found, expected, "ptx {ptx}, seed {seed}, step {step}");
                write_sampled(&machine, &mut model, &expected);
            }
            assert_eq!(machine.sim.findings(), []);
        }
    }
}

#[test]
fn a_step_gathered_apart_and_again_is_the_same() {
    for (ptx, steps) in [(true, 20), (false, 200)] {
        let machine = machine(1, ptx);
        let mut model = Model::new(&machine.device, small(), 2, 9);
        for step in 0..steps {
            let mut expected = model.step(&machine.stream, Sends::Inputs);
            model.batch.gather(&machine.stream).unwrap();
            assert_eq!(model.contents(&machine.stream), expected, "ptx {ptx}, step {step}");
            // Again, when the counts of the step are there: they are for the next step.
            write_sampled(&machine, &mut model, &expected);
            expected.accepted = model.contents(&machine.stream).accepted;
            model.batch.gather(&machine.stream).unwrap();
            assert_eq!(model.contents(&machine.stream), expected, "ptx {ptx}, step {step}, again");
        }
        assert_eq!(machine.sim.findings(), []);
    }
}
