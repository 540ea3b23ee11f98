//! Runs over several nodes that find each other by etcd: see the head of `kv-remote/tests/etcd/main.rs` for where it is found.

use std::path::Path;

use kv_remote::etcd::{EtcdOptions, Membership};
use kv_testkit::etcd::{Etcd, until};
use libtest_mimic::Trial;

use crate::common::nodes::{good, run};

/// A trial with etcd's program.
type With = (&'static str, fn(&Path));

pub(crate) fn trials() -> Vec<Trial> {
    let program = std::env::var_os("KV_ETCD");
    let required = std::env::var_os("KV_REQUIRE_ETCD").is_some_and(|value| value == "1");
    let trials: [With; 2] = [
        ("etcd::nodes_find_each_other_and_one_that_dies_is_a_member_no_more", a_node_dies),
        ("etcd::nodes_go_on_while_etcd_is_away", etcd_is_away),
    ];
    let with = trials.into_iter().map(|(name, run)| {
        let path = program.clone();
        let trial = Trial::test(name, move || {
            run(Path::new(&path.ok_or("KV_ETCD names no program")?));
            Ok(())
        });
        trial.with_ignored_flag(program.is_none() && !required)
    });
    let without = Trial::test("etcd::an_etcd_of_no_use_is_refused", || {
        an_etcd_of_no_use_is_refused();
        Ok(())
    });
    with.chain([without]).collect()
}

fn changes(report: &serde_json::Value) -> Vec<u64> {
    let reports = report["reports"].as_array().unwrap();
    reports.iter().map(|of| of["member_changes"].as_u64().unwrap()).collect()
}

fn a_node_dies(program: &Path) {
    let etcd = Etcd::start(program);
    let more = ["--nodes", "3", "--etcd", etcd.endpoint(), "--drill", "kill-node=1@100"];
    let report = good(6, &more);
    assert!(report["remote_hits"].as_u64().unwrap() > 0, "{report}");
    assert!(changes(&report).iter().all(|count| *count > 0), "{report}");
}

fn etcd_is_away(program: &Path) {
    let mut etcd = Etcd::start(program);
    let endpoint = etcd.endpoint().to_owned();
    let looks = EtcdOptions::new(vec![endpoint.clone()], "/kv-replay/");
    let looks = Membership::follow(looks, |_| true).unwrap();
    let runs = std::thread::spawn(move || good(8, &["--nodes", "3", "--etcd", &endpoint]));
    // Their keys are of a longer prefix, the run's.
    until("nodes are listed", || looks.stats().foreign >= 3 || runs.is_finished());
    etcd.stop();
    etcd.start_again();
    let report = runs.join().unwrap();
    assert_eq!(report["requests"], 64, "no request is lost");
    assert!(changes(&report).iter().all(|count| *count > 0), "{report}");
}

fn an_etcd_of_no_use_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = run(folder.path(), 1, &["--nodes", "2", "--etcd", "127.0.0.1:2379"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(errors.contains("expected http://HOST:PORT"), "{errors}");
    assert!(report.is_none());
}
