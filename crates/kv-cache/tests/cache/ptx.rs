//! The scenarios once more with the kernels as they are, their PTX run thread by thread, rather than
//! with their CPU references.

use crate::common::scenarios;
use crate::machine::{Machine, small};

#[test]
fn scenarios_hold_with_the_kernels_own_ptx() {
    for (seed, &(name, scenario)) in (0..).zip(scenarios::ALL) {
        let machine = Machine::new(seed, 1, small());
        machine.sim.prefer_ptx(true);
        scenario(&machine.rig);
        assert_eq!(machine.sim.findings(), [], "{name}");
        machine.assert_clean();
    }
}
