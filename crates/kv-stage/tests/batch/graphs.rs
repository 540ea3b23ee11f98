//! Captured graphs over a batch, on the simulated device.

use cuda_driver::Module;

use crate::machine::COPY_PTX;
use crate::model::small;
use crate::replay::{Gathers, Replay};
use crate::steps::machine;

#[test]
fn a_graph_replayed_for_hundreds_of_steps_reads_each_step() {
    for gathers in [Gathers::InTheGraph, Gathers::BeforeTheGraph] {
        for (ptx, steps) in [(true, 16), (false, 400)] {
            let machine = machine(3, ptx);
            let module = Module::load(&machine.device, COPY_PTX).unwrap();
            let kernel = module.kernel("copy_bytes").unwrap();
            let mut replay = Replay::new(&machine.device, &kernel, &small(), gathers, 5);
            replay.run(steps);
            assert_eq!(machine.sim.findings(), [], "{gathers:?}, ptx {ptx}");
        }
    }
}
