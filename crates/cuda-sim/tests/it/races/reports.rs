//! The contents of a report as data and as text, and the configured reactions to a race.

use std::process::Command;

use cuda_driver::Driver;
use cuda_sim::{FindingKind, Pace, Race, RaceActor, RaceCheck, RaceUse, SimConfig};
use serde_json::Value;

use crate::races::harness::{Run, config, run_at, without_waits};

/// Set in a child process that must meet a race and end.
const CHILD: &str = "RACES_TEST_CHILD";

fn two_fills(run: &Run) {
    let (a, b) = (run.stream(), run.stream());
    let memory = run.alloc(4096);
    run.fill(memory, 4096, a);
    run.record(run.event(), a);
    run.fill(memory + 100, 4, b);
}

fn host_reads(run: &Run) {
    let (host, memory) = (run.pinned(64), run.alloc(64));
    run.download(host, memory, 64, run.default_stream(0));
    run.host_reads(host, 64);
}

fn unload(run: &Run) {
    let (x, a) = (run.alloc(4096), run.stream());
    let (function, module) = run.kernel("store_words", a);
    run.launch_loaded("store_words", function, x, a);
    run.unload(module);
}

fn mapped_late(run: &Run) {
    let (address, page, a) = (run.addresses(), run.page(), run.stream());
    run.sim.hold(a.handle);
    run.ptx("store_words", address, a);
    run.map(address, page);
    run.set_access(address, &[0]);
    run.sim.release_hold(a.handle);
}

fn only_race(program: fn(&Run)) -> Race {
    let races = run_at(&without_waits(), Pace::Slowest, program).races();
    assert_eq!(races.len(), 1, "{races:#?}");
    races.into_iter().next().unwrap()
}

fn hex(value: &Value) -> u64 {
    u64::from_str_radix(value.as_str().unwrap().strip_prefix("0x").unwrap(), 16).unwrap()
}

fn check_access(json: &Value, access: &cuda_sim::RaceAccess) {
    assert_eq!(json["operation"], access.operation);
    let used = match access.used {
        RaceUse::Read => "read",
        RaceUse::Write => "write",
        RaceUse::Use => "use",
        RaceUse::Map => "map",
        RaceUse::End => "end",
        other => panic!("{other:?}"),
    };
    assert_eq!(json["use"], used);
    match access.actor {
        RaceActor::Host => {
            assert!(json["device"].is_null() && json["stream"].is_null());
        }
        RaceActor::Stream { device, stream } => {
            assert_eq!(json["device"], device);
            assert_eq!(hex(&json["stream"]), stream);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(json["thread"], *access.thread);
    assert_eq!(json["sequence"], access.sequence);
    let site = access.site.unwrap();
    assert_eq!(json["at"]["file"], site.at.file());
    assert_eq!(json["at"]["line"], site.at.line());
    assert!(json["through"].is_null());
}

/// Checks that every field of the JSON form equals the race's.
fn check_json(race: &Race) -> Value {
    let json: Value = serde_json::from_str(&race.to_json()).unwrap();
    check_access(&json["first"], &race.first);
    check_access(&json["second"], &race.second);
    assert_eq!(hex(&json["address"]), race.address);
    assert_eq!(json["bytes"], race.bytes);
    match race.memory {
        None => assert!(json["memory"].is_null()),
        Some(memory) => {
            assert_eq!(hex(&json["memory"]["base"]), memory.base);
            assert_eq!(json["memory"]["bytes"], memory.bytes);
            assert_eq!(json["memory"]["text"], memory.to_string());
        }
    }
    assert_eq!(json["missing"]["text"], race.mend());
    assert_eq!(json["missing"]["nearest"].as_str(), race.nearest_edge());
    assert_eq!(json["hazard"].as_str(), race.hazard);
    json["missing"].clone()
}

#[test]
fn a_race_as_data_has_all_that_the_race_has() {
    let race = only_race(two_fills);
    let missing = check_json(&race);
    assert_eq!(missing["kind"], "stream_wait");
    assert_eq!(Some(hex(&missing["record_on"])), race.first.actor.stream());
    assert_eq!(Some(hex(&missing["wait_on"])), race.second.actor.stream());
    assert!(missing["nearest"].is_string());

    let missing = check_json(&only_race(host_reads));
    assert_eq!(missing["kind"], "host_wait");
    assert_eq!(hex(&missing["stream"]), 0);

    let race = only_race(unload);
    assert_eq!((race.bytes, race.memory), (0, None));
    assert_eq!(check_json(&race)["kind"], "host_wait");

    let race = only_race(mapped_late);
    let missing = check_json(&race);
    assert_eq!(missing["kind"], "host_first");
    assert_eq!(Some(hex(&missing["stream"])), race.first.actor.stream());
}

#[test]
fn the_lines_are_those_of_the_calls() {
    let at = std::cell::Cell::new([0; 2]);
    let sim = run_at(&config(), Pace::Slowest, |run| {
        let (a, host, memory) = (run.stream(), run.pinned(64), run.alloc(64));
        let copy = line!() + 2;
        // SAFETY: the host only reports its access.
        unsafe { run.sim.memcpy_dtoh_async(host, memory, 64, a.handle) }.unwrap();
        let access = cuda_driver::HostAccess { address: host, bytes: 64, writes: false };
        run.sim.host_access(access);
        at.set([copy, line!() - 1]);
    });
    let race = &sim.races()[0];
    let lines = [&race.first, &race.second].map(|side| {
        let site = side.site.unwrap();
        assert_eq!(site.at.file(), file!());
        site.at.line()
    });
    assert_eq!(lines, at.get());
}

#[test]
fn threads_are_named() {
    let sim = run_at(&config(), Pace::Slowest, |run| {
        let (a, host, memory) = (run.stream(), run.pinned(64), run.alloc(64));
        run.download(host, memory, 64, a);
        let sim = run.sim.clone();
        let reader =
            std::thread::Builder::new().name("the \"reader\"\n".to_owned()).spawn(move || {
                sim.host_access(cuda_driver::HostAccess { address: host, bytes: 1, writes: false });
            });
        reader.unwrap().join().unwrap();
    });
    let race = &sim.races()[0];
    assert_eq!(Some(&*race.first.thread), std::thread::current().name());
    assert_eq!(&*race.second.thread, "the \"reader\"\n");
    check_json(race);
    let text = race.to_string();
    assert!(text.contains("called on thread the \"reader\"\n at "), "{text}");
    assert!(text.contains("enqueued by thread "), "{text}");
}

#[test]
fn a_finding_is_of_the_side_that_was_called_last() {
    let sim = run_at(&config(), Pace::Fastest, two_fills);
    let finding = &sim.findings()[0];
    let race = finding.race.as_deref().unwrap();
    assert_eq!(finding.kind, FindingKind::Race);
    assert_eq!(finding.operation, race.second.operation);
    assert_eq!(finding.stream, race.second.actor.stream());
    assert_eq!((finding.device, finding.address), (Some(0), Some(race.address)));
    assert_eq!((finding.bytes, finding.nearest), (race.bytes, race.memory));
    assert_eq!(finding.detail, race.to_string());
}

#[test]
fn two_places_are_told_once() {
    let sim = run_at(&config(), Pace::Random, |run| {
        let (a, b) = (run.stream(), run.stream());
        let memory = run.alloc(1 << 20);
        for block in 0..100 {
            run.fill(memory + 4096 * block, 64, a);
            run.fill(memory + 4096 * block, 64, b);
        }
    });
    assert_eq!(sim.races().len(), 1);
    let other = run_at(&config(), Pace::Random, |run| {
        let (a, b) = (run.stream(), run.stream());
        let memory = run.alloc(1 << 20);
        run.fill(memory, 64, a);
        run.fill(memory, 64, b);
        run.fill(memory + 4096, 64, a);
        run.fill(memory + 4096, 64, b);
    });
    assert_eq!(other.races().len(), 2, "of other places");
}

#[test]
fn off_finds_nothing() {
    let off = SimConfig { races: RaceCheck::Off, ..without_waits() };
    for program in [two_fills, host_reads, unload, mapped_late] {
        let sim = run_at(&off, Pace::Slowest, program);
        assert_eq!(sim.findings(), []);
        assert_eq!(sim.races(), []);
        assert_eq!(run_at(&without_waits(), Pace::Slowest, program).races().len(), 1);
    }
}

#[test]
fn abort_ends_the_process_with_the_report() {
    let abort = SimConfig { races: RaceCheck::Abort, ..config() };
    if std::env::var_os(CHILD).is_some() {
        run_at(&abort, Pace::Slowest, two_fills);
        return;
    }
    let name = "races::reports::abort_ends_the_process_with_the_report";
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(!child.status.success());
    let errors = String::from_utf8(child.stderr).unwrap();
    let race = only_race(two_fills);
    let first = race.first.site.unwrap();
    for part in ["race (H23): nothing orders two accesses to 4 bytes at", &first.to_string()] {
        assert!(errors.contains(part), "{errors}");
    }
    assert!(errors.contains("  missing: an event recorded on stream "), "no colours: {errors}");
    assert!(!String::from_utf8(child.stdout).unwrap().contains("test result: ok"));
    // The same program without a race ends normally.
    run_at(&abort, Pace::Slowest, |run| {
        run.fill(run.alloc(64), 64, run.stream());
    });
}
