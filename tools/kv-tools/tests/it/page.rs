//! `kv-replay report`: the page needs nothing else, the trace file is right, and bad input leaves no file.

use std::path::{Path, PathBuf};

use kv_replay::config::RunConfig;
use kv_replay::device::{SimSizes, open};
use kv_replay::engine;
use kv_replay::generate::{GenerateOptions, generate};
use kv_replay::json_file::WriteError;
use kv_tools::page::{self, RUNS_MAX, ReportError, ReportOptions};
use serde_json::Value;

/// The JSON report of a small run, in a folder.
fn report_in(folder: &Path, name: &str, series: bool) -> PathBuf {
    let config = RunConfig {
        block_tokens: 64,
        device_blocks: 1024,
        host_blocks: 512,
        max_batch: 4,
        step_tokens: 4096,
        series,
        ..RunConfig::default()
    };
    let mut trace = generate(&GenerateOptions { requests: 8, seed: 5 }).unwrap();
    for request in &mut trace.requests {
        request.input_length = request.input_length.min(8_000);
        request.hash_ids.truncate(request.input_length.div_ceil(512) as usize);
        request.output_length = request.output_length.min(20);
    }
    let devices = open(&"sim".parse().unwrap(), SimSizes::for_config(&config)).unwrap();
    let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
    let path = folder.join(name);
    std::fs::write(&path, serde_json::to_vec(&report).unwrap()).unwrap();
    path
}

fn entries(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_page_needs_nothing_else_and_says_what_limited_each_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let runs =
        [report_in(folder.path(), "with.json", true), report_in(folder.path(), "a<b.json", false)];
    let (out, events, json) = (at("page.html"), at("events.json"), at("said.json"));
    let options =
        ReportOptions { runs: &runs, out: &out, trace_events: Some(&events), json: Some(&json) };
    let said = page::run(&options).unwrap();
    assert!(said.contains("page.html is written"), "{said}");
    let html = std::fs::read_to_string(&out).unwrap();
    assert!(html.starts_with("<!doctype html>"), "{}", &html[..40]);
    for foreign in ["stylesheet", "src=\"http", "href=\"http", "@import", "a<b"] {
        assert!(!html.contains(foreign), "{foreign}");
    }
    assert!(html.contains("a&lt;b"));
    let summaries: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    for (summary, name) in summaries.as_array().unwrap().iter().zip(["with", "a&lt;b"]) {
        let limited = summary["limited_by"].as_str().unwrap();
        assert!(!limited.is_empty() && html.contains(limited), "{name}: {limited}");
    }
    let events: Value = serde_json::from_slice(&std::fs::read(&events).unwrap()).unwrap();
    let spans = events["traceEvents"].as_array().unwrap();
    let whole = spans.iter().filter(|event| event["ph"] == "X");
    assert!(whole.clone().count() > 10, "{}", spans.len());
    for span in whole {
        assert!(
            span["ts"].as_f64().unwrap() >= 0.0 && span["dur"].as_f64().unwrap() >= 0.0,
            "{span}"
        );
        assert!(span["name"].is_string() && span["pid"].is_u64() && span["tid"].is_u64(), "{span}");
    }
}

#[test]
fn what_is_no_report_is_refused_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let good = report_in(folder.path(), "good.json", true);
    std::fs::write(at("other.json"), b"{\"requests\": 1}").unwrap();
    std::fs::write(at("text.json"), b"hello").unwrap();
    let mut torn: Value = serde_json::from_slice(&std::fs::read(&good).unwrap()).unwrap();
    torn["series"]["samples"]["time_ns"].as_array_mut().unwrap().pop();
    std::fs::write(at("torn.json"), torn.to_string()).unwrap();
    let before = entries(folder.path());
    let out = at("page.html");
    let run = |runs: &[PathBuf], out: &Path| {
        page::run(&ReportOptions { runs, out, trace_events: None, json: None }).unwrap_err()
    };
    let one = |name: &str| run(&[good.clone(), at(name)], &out);
    assert!(
        matches!(one("absent.json"), ReportError::Read { path, .. } if path == at("absent.json"))
    );
    for name in ["other.json", "text.json"] {
        assert!(
            matches!(one(name), ReportError::NoReport { path, .. } if path == at(name)),
            "{name}"
        );
    }
    assert!(matches!(one("torn.json"), ReportError::Torn { path } if path == at("torn.json")));
    assert!(matches!(run(&[], &out), ReportError::Runs { count: 0 }));
    let many = vec![good.clone(); RUNS_MAX + 1];
    assert!(matches!(run(&many, &out), ReportError::Runs { count } if count == RUNS_MAX + 1));
    assert!(
        matches!(run(std::slice::from_ref(&good), &good), ReportError::Write(WriteError::Same { path, .. }) if path == good)
    );
    assert!(matches!(run(&[good], &at("no/page.html")), ReportError::Write(_)));
    assert_eq!(entries(folder.path()), before, "a file was left");
}
