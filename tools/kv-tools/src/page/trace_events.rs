//! The timeline in JSON trace event format, which Perfetto and chrome://tracing open.

use serde_json::{Value, json};

use super::RunFile;

/// Counts that are drawn beside the spans.
const GROUPS: usize = 3;

/// A trace of these runs, each as a process of its own. Runs without a timeline have a name only.
pub(super) fn trace_events(runs: &[RunFile]) -> Value {
    let mut events = Vec::new();
    for (pid, run) in (1..).zip(runs) {
        events.push(
            json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": run.name}}),
        );
        let Some(series) = &run.series else { continue };
        let timeline = &series.timeline;
        for (tid, track) in timeline.tracks.iter().enumerate() {
            let args = json!({"name": track.name});
            events.push(
                json!({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": args}),
            );
            let args = json!({"sort_index": tid});
            events.push(json!({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": args}));
        }
        let named = |at: i64| usize::try_from(at).ok().and_then(|at| timeline.names.get(at));
        for (at, &track) in timeline.track.iter().enumerate() {
            let cause = named(timeline.cause[at]);
            let mut args = json!({"operations": timeline.count[at]});
            if let Some(cause) = cause {
                args["waits_for"] = json!(cause);
            }
            events.push(json!({
                "ph": "X",
                "pid": pid,
                "tid": track,
                "ts": micros(timeline.begin_ns[at]),
                "dur": micros(timeline.length_ns[at]),
                "name": named(timeline.name[at].into()),
                "cat": if cause.is_some() { "wait" } else { "work" },
                "args": args,
            }));
        }
        let samples = &series.samples;
        for (at, &time) in samples.time_ns.iter().enumerate() {
            let value = |column: &[u64]| column.get(at).copied().unwrap_or(0);
            let groups: [(&str, Value); GROUPS] = [
                (
                    "requests",
                    json!({"running": value(&samples.running), "waiting": value(&samples.waiting)}),
                ),
                (
                    "device blocks",
                    json!({"in use": value(&samples.device_in_use), "cached": value(&samples.device_cached)}),
                ),
                (
                    "host blocks",
                    json!({"in use": value(&samples.host_in_use), "cached": value(&samples.host_cached)}),
                ),
            ];
            let counters = groups.into_iter().map(|(name, args)| {
                json!({"ph": "C", "pid": pid, "tid": 0, "ts": micros(time), "name": name, "args": args})
            });
            events.extend(counters);
        }
    }
    json!({"displayTimeUnit": "ns", "traceEvents": events})
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}
