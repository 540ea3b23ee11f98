//! Handles dropped wherever a program may drop them, on the simulated device (H18).

use std::process::Command;

use crate::common::{drops, machine};

/// Says that this process is one that a test started for itself.
const CHILD: &str = "KV_DROPS_CHILD";

#[test]
fn handles_may_be_dropped_anywhere() {
    for &(name, place) in drops::PLACES {
        for peer_access in [true, false] {
            println!("{name}");
            let (sim, registry) = machine(2, peer_access);
            drops::check(&registry, place);
            assert!(registry.close_all().is_complete(), "{name}");
            assert!(sim.findings().is_empty(), "{name}: {:?}", sim.findings());
            assert!(sim.check_leaks().is_clean(), "{name}: {}", sim.check_leaks());
        }
    }
}

#[test]
fn handles_may_be_dropped_by_the_end_of_the_process() {
    if std::env::var_os(CHILD).is_some() {
        let (_sim, registry) = machine(2, true);
        let device = registry.device(0).unwrap();
        drops::keep_in_this_thread(drops::Everything::of(&device));
        // Runs the destructors of this thread's locals, which hold the last handles.
        drop((device, registry));
        std::process::exit(7);
    }
    let name = "drops::handles_may_be_dropped_by_the_end_of_the_process";
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program).args(["--exact", name]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}
