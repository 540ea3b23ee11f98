//! The scenarios once more with the kernels as they are, their PTX run thread by thread, rather than
//! with their CPU references.

use crate::prelude::*;

#[test]
fn scenarios_hold_with_the_kernels_own_ptx() {
    for (seed, (name, scenario)) in (0..).zip(scenarios::all()) {
        let machine = Machine::new(seed, 1, small());
        machine.sim.prefer_ptx(true);
        scenario(&machine.rig);
        // The last block of a suspended request is partly filled, and travels whole.
        let suspends = ["random_requests", "suspended"].iter().any(|word| name.contains(word));
        let is_of_it = |finding: &Finding| {
            let copied = finding.operation.starts_with("copy_blocks");
            suspends && copied && finding.kind == FindingKind::Uninitialised
        };
        let findings: Vec<_> =
            machine.sim.findings().into_iter().filter(|finding| !is_of_it(finding)).collect();
        assert_eq!(findings, [], "{name}");
        let Machine { sim, rig } = machine;
        drop(rig);
        let leaks = sim.check_leaks();
        assert!(leaks.is_clean(), "{name}: {leaks}");
    }
}
