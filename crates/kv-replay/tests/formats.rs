//! Public formats are told by their content, read exactly, and refused with line and reason.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kv_replay::convert::{self, ConvertError};
use kv_replay::trace::{Format, ReadOptions, Request, Trace};

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
    2023-11-16 18:15:46.6805900,374,44\n\
    2023-11-16 18:15:50.9951690,1025,109\n";
const BURST: &str = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
    5,ChatGPT,472,18,490,Conversation log\n\
    45.5,GPT-4,1087,230,1317,API log\n";
const BAILIAN: &str = r#"{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 2, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}"#;
const WEKA: &str = r#"{"id": "one", "block_size": 64, "hash_id_scope": "local", "requests": [
    {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2]},
    {"t": 10.5, "type": "subagent", "requests": [
        {"t": 0.0, "type": "n", "in": 64, "out": 6, "hash_ids": [9]},
        {"t": 100, "type": "n", "in": 128, "out": 7, "hash_ids": [9, 4]}]},
    {"t": 20.0004, "type": "n", "in": 200, "out": 8, "hash_ids": [1, 2, 3]}]}"#;

fn read(text: &str) -> Trace {
    Trace::parse(text.as_bytes(), "file").unwrap()
}

fn refused(text: &str) -> String {
    Trace::parse(text.as_bytes(), "file").unwrap_err().to_string()
}

fn request(timestamp_ms: u64, input_length: u64, output_length: u64, hash_ids: &[u64]) -> Request {
    Request { timestamp_ms, input_length, output_length, hash_ids: hash_ids.to_vec(), tenant: None }
}

#[test]
fn lengths_alone_make_prompts_that_share_nothing() {
    let expected = [request(0, 374, 44, &[0]), request(4315, 1025, 109, &[1, 2, 3])];
    assert_eq!(read(AZURE), Trace::new(expected.to_vec()));
    // As the traces of 2024 have it, and with a mark and quotes as spreadsheets write them.
    let other =
        AZURE.replace("46.6805900", "46.680590+00:00").replace("50.9951690", "50.995169+00:00");
    let quoted =
        format!("\u{FEFF}{}", other.replace("TIMESTAMP", "\"TIMESTAMP\"").replace('\n', "\r\n"));
    for text in [other, quoted] {
        assert_eq!(read(&text).requests, expected);
    }
    let expected = [request(0, 472, 18, &[0]), request(40_500, 1087, 230, &[1, 2, 3])];
    assert_eq!(read(BURST).requests, expected);
    let finer = ReadOptions { block_tokens: Some(1000), ..ReadOptions::default() };
    let finer = Trace::parse_with(BURST.as_bytes(), "file", &finer).unwrap();
    assert_eq!((finer.block_tokens, &finer.requests[1].hash_ids[..]), (1000, &[1, 2][..]));
}

#[test]
fn bailian_counts_seconds_and_sixteen_tokens() {
    let trace = read(BAILIAN);
    assert_eq!(trace.block_tokens, 16);
    assert_eq!(trace.requests, [request(61_114, 33, 2, &[7, 8, 9])]);
}

#[test]
fn a_session_has_its_sub_agents_requests_in_the_order_of_arrival() {
    let trace = read(WEKA);
    assert_eq!(trace.block_tokens, 64);
    // Blocks that are part full have ids of their own: 2 and 6.
    let expected = [
        request(0, 130, 5, &[0, 1, 2]),
        request(10_500, 64, 6, &[3]),
        request(20_000, 200, 8, &[0, 1, 5, 6]),
        request(110_500, 128, 7, &[3, 4]),
    ];
    assert_eq!(trace.requests, expected);
    // Ids of another session are others, unless the file says that they are not.
    let ids = |text: &str| -> Vec<u64> {
        let (trace, mut first) = (read(text), Vec::new());
        for request in trace.requests.iter().filter(|request| request.timestamp_ms == 0) {
            first.push(request.hash_ids[0]);
        }
        first
    };
    let two = format!("{WEKA}\n{WEKA}");
    assert_eq!(ids(&two), [0, 7]);
    assert_eq!(ids(&two.replace("local", "global")), [0, 0]);
}

#[test]
fn what_cannot_be_converted_is_named_with_line_and_reason() {
    for (text, expected) in [
        (
            AZURE.replace(",44", ",0"),
            "file:2: GeneratedTokens is \"0\", expected a positive integer",
        ),
        (AZURE.replace(",44", ","), "file:2: field GeneratedTokens is missing"),
        (AZURE.replace(",109", ""), "file:3: field GeneratedTokens is missing"),
        (
            AZURE.replace("374", "-1"),
            "file:2: ContextTokens is \"-1\", expected a positive integer",
        ),
        (
            AZURE.replace("374", "99999999999"),
            "file:2: input_length is 99999999999, more than the largest allowed, 2147483648",
        ),
        (
            AZURE.replace("2023-11-16 18:15:50", "2023-13-16 18:15:50"),
            "file:3: TIMESTAMP is \"2023-13-16 18:15:50.9951690\", expected a date and time such as 2023-11-16 18:15:46.680",
        ),
        (
            AZURE.replace("18:15:50", "18:15:40"),
            "file:3: TIMESTAMP is \"2023-11-16 18:15:40.9951690\", expected a time that is not before the first row's",
        ),
        (
            BURST.replace("45.5", "nan"),
            "file:3: Timestamp is \"nan\", expected a time that is not before the first row's",
        ),
        (
            BURST.replace(",18,", ",0,"),
            "file:2: Response tokens is \"0\", expected a positive integer",
        ),
        (
            BAILIAN.replace("61.114", "-1"),
            "file:1: timestamp is -1, expected a time in seconds, not negative",
        ),
        (
            BAILIAN.replace("33", "32"),
            "file:1: hash_ids has 3 ids, but input_length 32 makes 2 blocks of 16 tokens",
        ),
        (
            WEKA.replace("\"out\": 7", "\"out\": 0"),
            "file:1: requests[1].requests[1].out is 0, expected a positive integer",
        ),
        (
            WEKA.replace("[9, 4]", "[9, -4]"),
            "file:1: requests[1].requests[1].hash_ids[1] is -4, expected a non-negative 64-bit integer",
        ),
        (
            WEKA.replace("\"t\": 100", "\"t\": \"x\""),
            "file:1: requests[1].requests[1].t is \"x\", expected a time in seconds, not negative",
        ),
        (
            format!("{WEKA}\n{}", WEKA.replace("64", "32")),
            "file:7: block_size is 32, expected a positive integer, the same in all sessions of the file",
        ),
        (
            WEKA.replace("local", "elsewhere"),
            "file:1: hash_id_scope is \"elsewhere\", expected local or global",
        ),
        (
            WEKA.replace("130", "300"),
            "file:1: hash_ids has 2 ids, but input_length 300 makes 5 blocks of 64 tokens",
        ),
    ] {
        assert_eq!(refused(&text), expected);
    }
}

#[test]
fn a_file_that_ends_early_or_contradicts_its_options_is_refused() {
    assert!(refused(&WEKA[..WEKA.len() - 2]).starts_with("file:6: not valid JSON: "));
    assert_eq!(refused("TIMESTAMP,ContextTokens,GeneratedTokens\n"), "trace file is empty");
    let other = ReadOptions { block_tokens: Some(512), ..ReadOptions::default() };
    assert_eq!(
        Trace::parse_with(WEKA.as_bytes(), "file", &other).unwrap_err().to_string(),
        "--trace-block-tokens is 512, but file says 64; leave the option out"
    );
}

#[test]
fn no_text_of_any_format_panics() {
    for text in [AZURE, BURST, BAILIAN, WEKA] {
        for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
            let cut = Trace::parse(&text.as_bytes()[..end], "file");
            let changed = format!("{}\u{7f}{}", &text[..end], &text[end..]);
            let changed = Trace::parse(changed.as_bytes(), "file");
            for trace in [cut, changed].into_iter().flatten() {
                let right = |request: &Request| request.check(trace.block_tokens).is_ok();
                assert!(trace.requests.iter().all(right), "{end} of {text}");
            }
        }
    }
}

#[test]
fn converted_traces_are_joined_by_arrival() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let files = [file("a.csv", AZURE), file("b.csv", BURST)];
    let output = folder.path().join("joined.jsonl");
    let told = convert::run(&files, &ReadOptions::default(), Some(&output), |_| ()).unwrap();
    assert_eq!(told, "4 requests within 40.5 s, 8 block lookups of 512 tokens\n");
    let arrivals: Vec<_> = Trace::read(&output).unwrap().requests;
    let arrivals: Vec<_> = arrivals.iter().map(|at| (at.timestamp_ms, at.hash_ids[0])).collect();
    assert_eq!(arrivals, [(0, 0), (0, 4), (4315, 1), (40_500, 5)]);
    // Sessions are spread, each with its own ids.
    let sessions = [file("one.json", WEKA), file("two.json", WEKA)];
    let spread = ReadOptions { sessions_within_ms: 1_000_000, ..ReadOptions::default() };
    let trace = convert::join(&sessions, &spread, |_| ()).unwrap();
    let starts: Vec<_> =
        trace.requests.iter().filter(|request| request.input_length == 130).collect();
    assert!(starts[0].timestamp_ms != starts[1].timestamp_ms && trace.block_tokens == 64);
    assert!(starts[0].hash_ids[0] != starts[1].hash_ids[0]);
    assert_eq!(convert::join(&sessions, &spread, |_| ()).unwrap(), trace);
    let told = convert::run(&sessions, &spread, Some(&output), |_| ()).unwrap();
    assert!(told.ends_with("joined.jsonl --trace-block-tokens 64\n"), "{told}");
    let read = ReadOptions { block_tokens: Some(64), ..ReadOptions::default() };
    assert_eq!(Trace::read_with(&output, &read).unwrap(), trace);
    // A trace of this project stays as it is.
    let text = convert::run(&[output], &read, None, |_| ()).unwrap();
    assert_eq!(text, trace.to_jsonl());
    // Nothing is written if one file is wrong.
    let fresh = folder.path().join("fresh.jsonl");
    let mixed = [files[0].clone(), sessions[0].clone()];
    let error = convert::run(&mixed, &ReadOptions::default(), Some(&fresh), |_| ()).unwrap_err();
    assert!(matches!(error, ConvertError::Mixed { block_tokens: 512, found: 64, .. }));
    let wrong = [files[0].clone(), file("wrong.csv", &AZURE.replace("44", "x"))];
    let error = convert::run(&wrong, &ReadOptions::default(), Some(&fresh), |_| ()).unwrap_err();
    assert!(error.to_string().contains("wrong.csv:2: GeneratedTokens"), "{error}");
    assert!(!fresh.exists());
}

#[test]
fn formats_are_told_by_their_beginning() {
    for (text, format) in [
        (AZURE, Format::Azure),
        (BURST, Format::BurstGpt),
        (BAILIAN, Format::Bailian),
        (WEKA, Format::Weka),
        ("{\"timestamp\": 1}", Format::Trace),
        ("Timestamp,Model\n1,2", Format::Trace),
        ("", Format::Trace),
    ] {
        assert_eq!(Format::of(text.as_bytes()), format, "{text}");
    }
}
