//! The program that measures moves compares every byte that a way brings: with any of its ways made to do
//! nothing it fails, on simulated devices.

#[allow(dead_code, reason = "`main` is for the program alone")]
#[path = "../../benches/moves_gpu/main.rs"]
mod moves_gpu;

use std::thread;

use moves_gpu::{Idle, open, run};

#[test]
fn a_way_that_moves_nothing_is_noticed_whichever_it_is() {
    let all = Idle::none();
    run(&open(true).unwrap(), &all);
    assert!(all.seen() > 30, "{} ways", all.seen());
    for way in 0..all.seen() {
        // On a thread of its own: what a failed run leaks counts against one thread's bound.
        let failed = thread::spawn(move || run(&open(true).unwrap(), &Idle::way(way))).join();
        let payload = failed.expect_err("a way that does nothing went unnoticed");
        let message = payload.downcast_ref::<String>().cloned().unwrap_or_default();
        assert!(message.contains("brought other bytes"), "way {way}: {message:?}");
    }
}
