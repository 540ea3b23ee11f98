//! The program refuses bad input with exit status 2 and a message that names it, before it writes
//! anything.

use std::path::PathBuf;
use std::process::Output;

use crate::common::{GOOD, program};
use tempfile::TempDir;

/// An empty folder, and the path of a report in it.
struct Case {
    folder: TempDir,
    report: PathBuf,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let report = folder.path().join("report.json");
        Self { folder, report }
    }

    /// A trace of these lines, in another folder.
    fn trace(&self, lines: &[&str]) -> PathBuf {
        let path = self.folder.path().join("trace.jsonl");
        std::fs::write(&path, lines.join("\n")).unwrap();
        path
    }

    /// Runs `kv-replay run` with `args` and a report option; returns the error that it must print.
    fn refused(&self, args: &[&str]) -> String {
        let mut all = vec!["run", "--json", self.report.to_str().unwrap()];
        all.extend(args);
        let message = refused(&all);
        self.assert_nothing_written();
        message
    }

    fn assert_nothing_written(&self) {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let written: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name != "trace.jsonl")
            .collect();
        assert!(written.is_empty(), "left behind: {written:?}");
    }
}

fn kv_replay(args: &[&str]) -> Output {
    program().args(args).output().unwrap()
}

/// Runs with `args`, and returns the standard error of a run that must end with exit status 2 and
/// empty standard output.
fn refused(args: &[&str]) -> String {
    let output = kv_replay(args);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "", "{args:?}");
    assert!(message.starts_with("error: "), "{message}");
    message
}

#[track_caller]
fn assert_says(message: &str, expected: &str) {
    assert!(message.contains(expected), "expected {expected:?} in: {message}");
}

#[test]
fn options_are_named_with_their_values() {
    for (args, expected) in [
        (&["--device-blocks", "0"][..], "error: --device-blocks is 0, expected at least 1"),
        (&["--requests", "0"], "error: --requests is 0, expected at least 1"),
        (
            &["--block-tokens", "48"],
            "error: --block-tokens is 48, expected a divisor or a multiple of 512",
        ),
        (
            &["--device-blocks", "-5"],
            "invalid value '-5' for '--device-blocks <N>': expected a whole number from 0 to 18446744073709551615",
        ),
        (
            &["--layers", "4294967296"],
            "invalid value '4294967296' for '--layers <L>': expected a whole number from 0 to 4294967295",
        ),
        (&["--verify", "most"], "unknown verification \"most\"; expected none, sample or full"),
        (
            &["--transport", "dma"],
            "unknown transport \"dma\"; expected auto, copy-engine, kernel, two-hop or each-block",
        ),
        (&["--dtype", "int8"], "unknown dtype \"int8\"; expected f32, f16, bf16 or fp8"),
        (&["--head-size", "3"], "has 3 bytes, expected a multiple of 8"),
        (&["--device-blocks", "3"], "tokens, which take"),
        (
            &["--state-layers", "1", "--device-memory", "4096", "--device-blocks", "9"],
            "error: the argument '--device-memory <BYTES>' cannot be used with '--device-blocks <N>'",
        ),
    ] {
        assert_says(&Case::new().refused(args), expected);
    }
}

#[test]
fn a_shape_that_overflows_is_named() {
    let huge = ["--layers", "4294967295", "--kv-heads", "4294967295", "--head-size", "4294967288"];
    assert_says(
        &Case::new().refused(&huge),
        "error: a block of 512 tokens x 4294967295 layers x K and V x 4294967295 heads x \
         4294967288 elements of fp8 has more bytes than 64 bits can count",
    );
    assert_says(
        &Case::new().refused(&["--layers", "65536", "--kv-heads", "16", "--head-size", "128"]),
        "--device-blocks takes 1125899906842624 bytes on Simulated H100, which has",
    );
}

#[test]
fn devices_that_do_not_exist_are_named() {
    for (device, expected) in [
        ("gpu0", "unknown device \"gpu0\"; expected sim, sim:N, cuda or cuda:0[,cuda:1…]"),
        ("cuda:0,cuda:0", "device \"cuda:0\" is named twice"),
        ("sim:2,cuda:0", "\"sim:2,cuda:0\" mixes simulated devices and GPUs"),
        ("sim,sim", "\"sim,sim\" names simulated devices one by one; expected sim:2"),
    ] {
        assert_says(&Case::new().refused(&["--device", device]), expected);
    }
    let split = Case::new().refused(&["--device", "sim:3", "--layers", "2"]);
    assert_says(&split, "error: --layers is 2, expected at least one for each of the 3 devices");
    let heads = Case::new().refused(&["--device", "sim:2", "--place", "heads", "--kv-heads", "3"]);
    assert_says(&heads, "error: --kv-heads is 3: 3 query heads do not divide by 2 GPUs");
    let place = Case::new().refused(&["--place", "tails"]);
    assert_says(
        &place,
        "unknown division \"tails\"; expected heads, layers, layers:round-robin, layers:contiguous,",
    );
    let policy = Case::new().refused(&["--policy", "mru"]);
    assert_says(&policy, "unknown policy \"mru\"; expected lru");
    let many = Case::new().refused(&["--device", "sim:33", "--layers", "64"]);
    assert_says(&many, "error: cannot use device sim:33\n  caused by: ");
    assert_says(&many, "cannot simulate 33 devices: the number must be 1 to 32");
}

#[test]
fn a_report_that_cannot_be_written_is_found_before_the_trace_is_read() {
    let case = Case::new();
    let report = case.folder.path().join("absent/report.json");
    let report = report.to_str().unwrap();
    let message = refused(&["run", "--trace", "/absent/trace.jsonl", "--json", report]);
    assert_says(&message, &format!("error: cannot write {report}\n  caused by: No such file"));
    case.assert_nothing_written();
}

#[cfg(target_os = "linux")]
#[test]
fn a_standard_output_that_takes_nothing_costs_no_result() {
    let case = Case::new();
    let report = case.report.to_str().unwrap();
    let trace = case.trace(&[GOOD]);
    let trace = trace.to_str().unwrap();
    let workload = case.folder.path().join("workload.jsonl");
    let small = ["--requests", "1", "--device-blocks", "64", "--host-blocks", "0"];
    let run = [&["run", "--trace", trace, "--json", report], &small[..]].concat();
    let generate = ["generate", "--requests", "2", "--output", workload.to_str().unwrap()];
    for (args, made) in [(&run[..], &case.report), (&generate, &workload)] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = program().args(args).stdout(full).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert_says(&message, "error: cannot write to standard output\n  caused by: No space left");
        assert!(!std::fs::read(made).unwrap().is_empty(), "{args:?}");
        std::fs::remove_file(made).unwrap();
    }
    // A closed standard error does not change the exit status either.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = program();
    let status = command.args(["generate", "--requests", "0"]).stderr(full).status().unwrap();
    assert_eq!(status.code(), Some(2));
}

#[test]
fn a_profile_that_cannot_be_used_is_named_with_its_line() {
    let case = Case::new();
    let file = case.trace(&["base = h200", "htod = fast"]);
    let file = file.to_str().unwrap();
    let message = case.refused(&["--profile", file]);
    assert_says(&message, &format!("error: {file} is not a profile\n"));
    assert_says(&message, "caused by: line 2: `htod` takes a rate such as `55.1 GB/s`, not `fast`");
    assert_says(&case.refused(&["--profile", "b200"]), "neither h100 nor h200, nor a file");
    assert_says(
        &case.refused(&["--profile", "h100", "--device", "cuda:0"]),
        "error: --profile is for simulated devices; cuda:0 keeps real time",
    );
}
