//! Captured graphs over a batch, on the simulated device.

use super::model::small;
use super::replay::{Gathers, Replay};
use super::steps::machine;

#[test]
fn a_graph_replayed_for_hundreds_of_steps_reads_each_step() {
    for gathers in [Gathers::InTheGraph, Gathers::BeforeTheGraph] {
        for (ptx, steps, seed) in [(true, 16, 0), (false, 400, 1), (false, 200, 2), (false, 200, 3)]
        {
            let machine = machine(seed, ptx);
            let kernel = machine.copy_kernel();
            let mut replay = Replay::new(&machine.device, kernel, &small(), gathers, seed);
            replay.run(steps);
            assert_eq!(machine.sim.findings(), [], "{gathers:?}, ptx {ptx}, seed {seed}");
        }
    }
}
