//! The same runs over several nodes, which read each other's memory by NIXL: see the head of `kv-nixl/tests/nixl.rs` for where the
//! library is found.

use libtest_mimic::Trial;

use crate::common::nodes::{good, good_hosted};

const NIXL: [&str; 4] = ["--nodes", "3", "--node-transfer", "nixl"];

pub(crate) fn trials() -> Vec<Trial> {
    let required = std::env::var_os("KV_REQUIRE_NIXL").is_some_and(|value| value == "1");
    let missing = kv_nixl::Library::open().is_err();
    let trials: [(&str, fn()); 4] = [
        ("nixl::nodes_use_each_others_blocks_and_every_byte_is_right", every_byte_is_right),
        ("nixl::a_node_that_is_killed_costs_its_own_requests_only", a_node_is_killed),
        ("nixl::nodes_read_each_others_host_memory", host_memory_is_read),
        ("nixl::nodes_that_sleep_or_are_parted_go_on", nodes_sleep_or_are_parted),
    ];
    let trials = trials.into_iter().map(|(name, run)| {
        let trial = Trial::test(name, move || {
            run();
            Ok(())
        });
        trial.with_ignored_flag(missing && !required)
    });
    trials.collect()
}

fn every_byte_is_right() {
    let report = good(4, &NIXL);
    assert_eq!(report["node_transfer"], "nixl");
    assert!(report["remote_hits"].as_u64().unwrap() > 0, "{report}");
}

fn host_memory_is_read() {
    let report = good_hosted(&NIXL);
    assert!(report["remote_hosted"].as_u64().unwrap() > 0, "{report}");
}

fn a_node_is_killed() {
    let report = good(6, &[&NIXL[..], &["--drill", "kill-node=1@400"]].concat());
    let killed = report["killed"].as_array().unwrap().len();
    assert_eq!(report["reports"].as_array().unwrap().len(), 3 - killed);
}

fn nodes_sleep_or_are_parted() {
    let drills = ["--drill", "stop-node=2@300:600", "--drill", "part-node=1@200:700"];
    let report = good(6, &[&NIXL[..], &drills].concat());
    assert_eq!(report["requests"], 48, "no request is lost");
}
