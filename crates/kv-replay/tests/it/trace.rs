//! Traces are read exactly, and an invalid one is refused with its file, line and value.

use std::path::Path;

use crate::common::GOOD;
use kv_replay::generate::{GenerateOptions, generate};
use kv_replay::trace::{LINE_MAX_BYTES, ReadOptions, Request, Trace, TraceError};

/// The error for a trace whose second line is `line`.
fn message(line: &str) -> String {
    let text = format!("{GOOD}\n{line}\n");
    Trace::parse(text.as_bytes(), "trace.jsonl").unwrap_err().to_string()
}

#[test]
fn reads_what_stands_there() {
    let last = r#"{"hash_ids":[18446744073709551615],"output_length":1,"input_length":512,"timestamp":5,"extra":{}}"#;
    let trace = Trace::parse(format!("{GOOD}\r\n{last}").as_bytes(), "trace.jsonl").unwrap();
    let [first, second] = &trace.requests[..] else { panic!("two requests, found {trace:?}") };
    assert_eq!((first.timestamp_ms, first.input_length, first.output_length), (5, 700, 52));
    assert_eq!(first.hash_ids, [0, 1]);
    assert_eq!((second.timestamp_ms, second.input_length, second.output_length), (5, 512, 1));
    assert_eq!(second.hash_ids, [u64::MAX]);
    assert_eq!(trace.block_lookups(), 3);
    assert_eq!(trace.limit(1).to_jsonl(), format!("{GOOD}\n"), "as the published traces");
}

#[test]
fn a_broken_line_is_named_with_its_value() {
    let with = |from: &str, to: &str| message(&GOOD.replace(from, to));
    for (found, expected) in [
        (with("52", "-3"), "output_length is -3, expected a positive integer"),
        (with("52", "0"), "output_length is 0, expected a positive integer"),
        (with("52", "1.5"), "output_length is 1.5, expected a positive integer"),
        (with("52", "\"many\""), "output_length is \"many\", expected a positive integer"),
        (with("52", "null"), "output_length is null, expected a positive integer"),
        (with("700", "-700"), "input_length is -700, expected a positive integer"),
        (with("700", "0"), "input_length is 0, expected a positive integer"),
        (
            with("700", "2147483649"),
            "input_length is 2147483649, more than the largest allowed, 2147483648",
        ),
        (
            with("52", "99999999999"),
            "output_length is 99999999999, more than the largest allowed, 2147483648",
        ),
        (with("700", "1e30"), "input_length is 1e+30, expected a positive integer"),
        (
            with("700", "1025"),
            "hash_ids has 2 ids, but input_length 1025 makes 3 blocks of 512 tokens",
        ),
        (
            with("700", "512"),
            "hash_ids has 2 ids, but input_length 512 makes 1 blocks of 512 tokens",
        ),
        (
            with("[0, 1]", "[]"),
            "hash_ids has 0 ids, but input_length 700 makes 2 blocks of 512 tokens",
        ),
        (with("[0, 1]", "[0, -1]"), "hash_ids[1] is -1, expected a non-negative 64-bit integer"),
        (with("[0, 1]", "7"), "hash_ids is 7, expected a list of ids"),
        (with("\"timestamp\": 5", "\"timestamp\": 4"), "timestamp goes back from 5 to 4"),
        (
            with("\"timestamp\": 5", "\"timestamp\": -4"),
            "timestamp is -4, expected a time in milliseconds, not negative",
        ),
        (
            with("\"timestamp\": 5", "\"timestamp\": 9007199254740993"),
            "timestamp is 9007199254740993, more than the largest allowed, 9007199254740992",
        ),
        (with("output_length", "output"), "field output_length is missing"),
        (
            with("}", ", \"tenant\": -1}"),
            "tenant is -1, expected a text of 1 to 64 bytes without control characters, or a non-negative integer",
        ),
        (
            with("}", ", \"tenant\": \"a\\n\"}"),
            "tenant is \"a\\n\", expected a text of 1 to 64 bytes without control characters, or a non-negative integer",
        ),
        (
            with("}", ", \"tenant\": \"\"}"),
            "tenant is \"\", expected a text of 1 to 64 bytes without control characters, or a non-negative integer",
        ),
        (message("[1, 2]"), "expected a JSON object, found [1,2]"),
        (message(&GOOD[..20]), "not valid JSON: EOF while parsing a string at column 20"),
        (message(&format!("{GOOD} x")), "not valid JSON: trailing characters at column 80"),
    ] {
        assert_eq!(found, format!("trace.jsonl:2: {expected}"));
    }
    let empty = message(&format!("\n{GOOD}"));
    assert_eq!(empty, "trace.jsonl:2: the line is empty, expected a JSON object");
    assert!(message("not json").starts_with("trace.jsonl:2: not valid JSON: "));
}

#[test]
fn a_long_value_is_cut_in_the_message() {
    let line = GOOD.replace("52", &format!("\"{}\"", "ü".repeat(5000)));
    let found = message(&line);
    assert!(found.contains("ü…, expected a positive integer"), "{found}");
    assert!(found.len() < 250, "{} bytes", found.len());
}

#[test]
fn a_file_without_line_breaks_is_refused_before_it_fills_the_memory() {
    let error =
        Trace::parse(std::io::BufReader::new(std::io::repeat(b' ')), "endless").unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "endless:1: it is longer than {LINE_MAX_BYTES} bytes, the most for a line, a row or a session"
        )
    );
}

#[test]
fn empty_and_unreadable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent.jsonl");
    let error = Trace::read(&absent).unwrap_err();
    assert!(matches!(error, TraceError::Open { .. }));
    assert_eq!(error.to_string(), format!("cannot open trace {}", absent.display()));
    let error = Trace::read(folder.path()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("cannot read trace {}: it is a folder", folder.path().display())
    );
    let empty = folder.path().join("empty.jsonl");
    std::fs::write(&empty, "").unwrap();
    assert_eq!(
        Trace::read(&empty).unwrap_err().to_string(),
        format!("trace {} is empty", empty.display())
    );
}

#[test]
fn what_is_written_is_what_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl");
    let trace = generate(&GenerateOptions { requests: 500, seed: 11 }).unwrap();
    trace.write(&path).unwrap();
    assert_eq!(Trace::read(&path).unwrap(), trace);
    assert!(trace.write(Path::new("/absent/folder/trace.jsonl")).is_err());
}

#[test]
fn tenants_are_texts_or_numbers() {
    let line = |tenant: &str| {
        format!(
            "{{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]{tenant}}}\n"
        )
    };
    let tenants = ["", ", \"tenant\": null", ", \"tenant\": \"a \\\"b\\\"\"", ", \"tenant\": 7"];
    let lines: String = tenants.iter().map(|tenant| line(tenant)).collect();
    let trace = Trace::parse(lines.as_bytes(), "t").unwrap();
    let found: Vec<_> = trace.requests.iter().map(|request| request.tenant.as_deref()).collect();
    assert_eq!(found, [None, None, Some("a \"b\""), Some("7")]);
    assert_eq!(Trace::parse(trace.to_jsonl().as_bytes(), "t").unwrap(), trace);
}

/// The arrivals, lengths and first ids of a trace's requests.
fn outline(trace: &Trace) -> Vec<(u64, u64, u64, u64)> {
    let line = |of: &Request| (of.timestamp_ms, of.input_length, of.output_length, of.hash_ids[0]);
    trace.requests.iter().map(line).collect()
}

#[test]
fn forms_that_other_programs_write_are_read() {
    let ids = ", \"hash_ids\": [0, 1]";
    let line = |first: &str, ids: &str| {
        format!("{{{first}, \"input_length\": 655, \"output_length\": 52{ids}}}\n")
    };
    for (text, expected) in [
        // Milliseconds with a fraction.
        (
            line("\"timestamp\": 0.0", ids) + &line("\"timestamp\": 105.5", ids),
            vec![(0, 655, 52, 0), (106, 655, 52, 0)],
        ),
        // Prompts without ids share nothing, neither with each other nor with those that have some.
        (
            line("\"timestamp\": 0", "")
                + &line("\"timestamp\": 5", ids)
                + &line("\"timestamp\": 7", ""),
            vec![(0, 655, 52, 2), (5, 655, 52, 0), (7, 655, 52, 4)],
        ),
        // Turns behind the one before, grouped by session.
        (
            line("\"session_id\": \"a\", \"timestamp\": 10", ids)
                + &line("\"session_id\": \"a\", \"delay\": 2000.4", ids)
                + &line("\"session_id\": 2, \"timestamp\": 40", ids)
                + &line("\"session_id\": 2", ids)
                + &line("\"session_id\": \"a\", \"delay\": 5", ids),
            vec![
                (10, 655, 52, 0),
                (40, 655, 52, 0),
                (40, 655, 52, 0),
                (2010, 655, 52, 0),
                (2015, 655, 52, 0),
            ],
        ),
        // No times at all: each with the line above.
        (line("\"a\": 1", ids) + &line("\"b\": 2", ids), vec![(0, 655, 52, 0), (0, 655, 52, 0)]),
        // Other names.
        (
            "{\"created_time\": 3, \"input_tokens\": 5, \"output_tokens\": 6, \"hash_ids\": [7]}"
                .to_owned(),
            vec![(3, 5, 6, 7)],
        ),
        // A mark in front, empty lines at the end.
        (format!("\u{FEFF}{}\n \r\n\n", line("\"timestamp\": 4", ids)), vec![(4, 655, 52, 0)]),
    ] {
        assert_eq!(outline(&Trace::parse(text.as_bytes(), "file").unwrap()), expected, "{text}");
    }
    let back = line("\"timestamp\": 9", ids) + &line("\"timestamp\": 8", ids);
    let error = Trace::parse(back.as_bytes(), "file").unwrap_err();
    assert_eq!(error.to_string(), "file:2: timestamp goes back from 9 to 8");
}

#[test]
fn requests_that_cannot_be_used_are_left_out_when_asked_and_counted() {
    let lines = [
        GOOD,
        &GOOD.replace("52", "0"),
        "",
        "not json",
        &GOOD.replace("700", "7000"),
        &GOOD.replace("5,", "4,"),
        GOOD,
    ];
    let skip = ReadOptions { skip_unusable: true, ..ReadOptions::default() };
    let read = |text: &str| Trace::parse_with(text.as_bytes(), "file", &skip);
    let trace = read(&lines.join("\n")).unwrap();
    assert_eq!((trace.requests.len(), trace.skipped), (2, 5));
    assert_eq!(
        read(&lines[1..3].join("\n")).unwrap_err().to_string(),
        "trace file is empty: 1 request that could not be used was left out"
    );
}

#[test]
fn a_trace_in_another_format_is_refused_with_what_reads_it() {
    let gzip = "\u{1f}\u{8b}";
    let agents = r#"{"block_size": 64, "requests": []}"#;
    let seconds = GOOD.replace("}", ", \"chat_id\": 1}");
    for (text, expected) in [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n",
            "not valid JSON: ",
        ),
        (gzip, "not valid JSON: "),
        ("[]", "expected a JSON object, found []"),
        (agents, "field input_length is missing"),
        (&seconds, "chat_id is a field of Bailian's traces, whose times are in seconds"),
    ] {
        let found = Trace::parse(text.as_bytes(), "file").unwrap_err().to_string();
        let more = "; of a trace that is compressed or in another format, `kv-tools convert` makes one of this format";
        assert!(
            found.starts_with(&format!("file:1: {expected}")) && found.ends_with(more),
            "{found}"
        );
    }
    // Where requests may be left out, times in seconds are no less another format; behind the first line such a field says nothing.
    let skip = ReadOptions { skip_unusable: true, ..ReadOptions::default() };
    let error = Trace::parse_with(seconds.as_bytes(), "file", &skip).unwrap_err();
    assert!(matches!(error, TraceError::OtherFormat { .. }), "{error}");
    let later = format!("{GOOD}\n{seconds}");
    assert_eq!(Trace::parse(later.as_bytes(), "file").unwrap().requests.len(), 2);
}

#[test]
fn no_text_panics() {
    for end in 0..GOOD.len() {
        let cut = Trace::parse(&GOOD.as_bytes()[..end], "file");
        let changed = format!("{}\u{7f}{}", &GOOD[..end], &GOOD[end..]);
        let changed = Trace::parse(changed.as_bytes(), "file");
        for trace in [cut, changed].into_iter().flatten() {
            let right = |request: &Request| request.check(trace.block_tokens).is_ok();
            assert!(trace.requests.iter().all(right), "{end}");
        }
    }
}

#[test]
fn no_file_takes_more_memory_than_its_length_and_a_bound() {
    // Each line would have four million ids.
    let tokens = kv_replay::trace::LENGTH_MAX_TOKENS;
    let line = format!("{{\"timestamp\": 5, \"input_length\": {tokens}, \"output_length\": 1}}\n");
    let refused = |text: &str| Trace::parse(text.as_bytes(), "file").unwrap_err().to_string();
    assert_eq!(
        refused(&line.repeat(1000)),
        format!(
            "file:33: the requests up to here have more than {} hash ids; give a larger --trace-block-tokens, or cut the file",
            kv_replay::trace::IDS_MAX
        )
    );
    // Each of seven bytes would have several hundred of memory.
    let small = "{\"\":0},".repeat(140_000);
    let deep = GOOD.replacen('{', &format!("{{\"more\": [{small} 0], "), 1);
    assert_eq!(
        refused(&deep),
        format!(
            "file:1: it has more than {} lists and objects, the most for a line or a session",
            kv_replay::trace::LISTS_MAX
        )
    );
    // A text may have as many as it likes, and each line has its own.
    let read = |text: &str| Trace::parse(text.as_bytes(), "file").unwrap().requests;
    let text = GOOD.replacen('{', &format!("{{\"more\": {:?}, ", "[{\\\"".repeat(100_000)), 1);
    assert_eq!(read(&text), read(GOOD));
    let some = GOOD.replacen('{', &format!("{{\"more\": [{} 0], ", &small[..7 * 100_000]), 1);
    assert_eq!(read(&format!("{some}\n{some}")).len(), 2);
}
