//! Runs over several nodes: every byte is right, blocks of other nodes are used, and a node that dies or sleeps holds nobody up.

use crate::common::nodes::{good, good_hosted, run};

#[test]
fn nodes_use_each_others_blocks_and_every_byte_is_right() {
    let report = good(4, &["--nodes", "3"]);
    assert_eq!(report["requests"], 32);
    assert!(report["remote_hits"].as_u64().unwrap() > 0, "{report}");
    assert!(report["remote_blocks_read"].as_u64() >= report["remote_hits"].as_u64());
    assert_eq!(report["reports"].as_array().unwrap().len(), 3);
    assert!(report["remote_misses_stale"].is_u64());
}

#[test]
fn nodes_find_blocks_in_each_others_host_memory_and_every_byte_is_right() {
    let report = good_hosted(&["--nodes", "3"]);
    assert!(report["remote_hosted"].as_u64().unwrap() > 0, "{report}");
    assert!(report["remote_hits"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn a_node_that_dies_or_sleeps_while_its_host_memory_is_read_holds_nobody_up() {
    let drills = [
        "--drill",
        "kill-node=1@150",
        "--drill",
        "stop-node=2@100:600",
        "--drill",
        "part-node=0@900:300",
    ];
    let report = good_hosted(&[&["--nodes", "3"][..], &drills].concat());
    let lost = report["killed"].as_array().unwrap().len() as u64 * 4 * 41 / 3;
    assert!(report["requests"].as_u64().unwrap() + lost + 1 >= 4 * 41, "{report}");
}

#[test]
fn a_node_that_is_killed_costs_its_own_requests_only() {
    let report = good(6, &["--nodes", "3", "--drill", "kill-node=1@150"]);
    let killed = report["killed"].as_array().unwrap().len();
    assert_eq!(report["reports"].as_array().unwrap().len(), 3 - killed);
    assert_eq!(report["requests"], if killed == 1 { 32 } else { 48 });
}

#[test]
fn a_node_that_sleeps_past_its_leases_goes_on_and_so_do_the_others() {
    let report = good(
        6,
        &["--nodes", "3", "--drill", "stop-node=2@100:600", "--drill", "stop-node=0@900:400"],
    );
    assert_eq!(report["requests"], 48, "no request is lost");
}

#[test]
fn a_node_that_is_parted_for_a_while_goes_on_and_so_do_the_others() {
    let report = good(6, &["--nodes", "3", "--drill", "part-node=1@0:700"]);
    assert_eq!(report["requests"], 48, "no request is lost");
    assert_eq!(report["parted"], serde_json::json!([1]));
}

/// Prompts of a run that is split, how many of them came from the nodes that compute them, and its report.
fn split(turns: usize, more: &[&str]) -> (u64, u64, serde_json::Value) {
    let split = ["--prefill-nodes", "2", "--decode-nodes", "2"];
    let report = good(turns, &[&split[..], more].concat());
    let of = |name: &str| report[name].as_u64().unwrap();
    // Of those that go on with them.
    let cancelled = report["reports"].as_array().unwrap().iter();
    let cancelled = cancelled.filter(|node| !node["handover_ms"].is_null());
    let cancelled: u64 = cancelled.map(|node| node["handover_cancelled"].as_u64().unwrap()).sum();
    let told = of("handed_over") + of("handover_recomputed") + cancelled;
    assert_eq!(told, of("requests"), "{report}");
    (of("requests"), of("handed_over"), report)
}

#[test]
fn prompts_are_computed_on_some_nodes_and_continued_on_others() {
    let (requests, handed_over, report) = split(3, &[]);
    assert_eq!((requests, handed_over), (24, 24), "each of them: {report}");
}

#[test]
fn prompts_that_do_not_come_are_computed_where_they_go_on() {
    // A node that computes prompts is killed, another one stopped: who waits for it goes on.
    let soon = ["--handover-ms", "1000"];
    let killed =
        [&soon[..], &["--drill", "kill-node=0@0", "--drill", "stop-node=1@10:400"]].concat();
    let (requests, handed_over, _) = split(4, &killed);
    assert_eq!(requests, 32);
    assert!(handed_over < 32, "{handed_over}");
    // One that goes on with them is killed: those that compute them go on.
    let killed = [&soon[..], &["--drill", "kill-node=2@20", "--cancel", "20"]].concat();
    let (requests, ..) = split(2, &killed);
    assert!(requests == 8 || requests == 16, "{requests}");
}

#[test]
fn options_that_nodes_have_no_meaning_for_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (more, text) in [
        (&["--nodes", "2", "--host-blocks", "0"][..], "--host-blocks"),
        (&["--nodes", "2", "--drill", "kill-node=2@0"], "node 2 of a drill is not one of 2"),
        (&["--nodes", "2", "--workers", "2"], "cannot be used with"),
        (&["--drill", "kill-node=0@0"], "--nodes"),
        (&["--prefill-nodes", "2"], "--decode-nodes"),
        (&["--prefill-nodes", "0", "--decode-nodes", "2"], "--prefill-nodes"),
        (&["--prefill-nodes", "1", "--decode-nodes", "1", "--fork", "2"], "--fork"),
    ] {
        let (output, report) = run(folder.path(), 1, more);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {errors}");
        assert!(errors.contains(text), "{more:?}: {errors}");
        assert!(report.is_none());
    }
}
