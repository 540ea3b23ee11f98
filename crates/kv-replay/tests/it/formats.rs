//! Public formats are told by their content, read exactly, and refused with line and reason.

use kv_replay::convert::{self, ConvertError};
use kv_replay::trace::{ReadOptions, Request, Trace};

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
    let told =
        convert::run(&files, &ReadOptions::default(), (Some(&output), None), |_| ()).unwrap();
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
    let told = convert::run(&sessions, &spread, (Some(&output), None), |_| ()).unwrap();
    assert!(told.ends_with("joined.jsonl --trace-block-tokens 64\n"), "{told}");
    let read = ReadOptions { block_tokens: Some(64), ..ReadOptions::default() };
    assert_eq!(Trace::read_with(&output, &read).unwrap(), trace);
    // A trace of this project stays as it is.
    let text = convert::run(&[output], &read, (None, None), |_| ()).unwrap();
    assert_eq!(text, trace.to_jsonl());
    // Nothing is written if one file is wrong.
    let fresh = folder.path().join("fresh.jsonl");
    let mixed = [files[0].clone(), sessions[0].clone()];
    let error =
        convert::run(&mixed, &ReadOptions::default(), (Some(&fresh), None), |_| ()).unwrap_err();
    assert!(matches!(error, ConvertError::Mixed { block_tokens: 512, found: 64, .. }));
    let wrong = [files[0].clone(), file("wrong.csv", &AZURE.replace("44", "x"))];
    let error =
        convert::run(&wrong, &ReadOptions::default(), (Some(&fresh), None), |_| ()).unwrap_err();
    assert!(error.to_string().contains("wrong.csv:2: GeneratedTokens"), "{error}");
    assert!(!fresh.exists());
}

/// The arrivals, lengths and first ids of a trace's requests.
fn outline(trace: &Trace) -> Vec<(u64, u64, u64, u64)> {
    let line = |of: &Request| (of.timestamp_ms, of.input_length, of.output_length, of.hash_ids[0]);
    trace.requests.iter().map(line).collect()
}

#[test]
fn a_format_is_told_by_its_own_fields_whatever_their_values_say() {
    let line = |more: &str| {
        format!(
            "{{\"timestamp\": 9, \"input_length\": 3, \"output_length\": 2, \"hash_ids\": [0]{more}}}"
        )
    };
    for more in [
        ", \"note\": \"a \\\"chat_id\\\": 7, or chat_id\"",
        ", \"meta\": {\"chat_id\": 1, \"block_size\": 2}",
        ", \"metas\": [{\"hash_id_scope\": 1}]",
        ", \"block_size\": 512",
    ] {
        let text = line(more);
        assert_eq!(read(&text).requests[0].timestamp_ms, 9, "{more}");
    }
    // The field that tells may stand behind as many ids as a long prompt has.
    let ids: Vec<u64> = (0..40_000).collect();
    let text = format!(
        "{{\"timestamp\": 2.5, \"input_length\": 640000, \"output_length\": 2, \"hash_ids\": {ids:?}, \"chat_id\": 3}}"
    );
    let trace = read(&text);
    assert_eq!((trace.block_tokens, trace.requests[0].timestamp_ms), (16, 2500));
    // A session may be written over many lines, and have its requests first.
    let (head, requests) = WEKA.split_once("\"requests\"").unwrap();
    let (requests, _) = requests.rsplit_once('}').unwrap();
    let head = head.trim_start_matches('{').trim().trim_end_matches(',');
    let turned = format!("\u{FEFF}{{\n\"requests\"{requests},\n{head}}}");
    assert_eq!(read(&turned), read(WEKA));
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
        assert_eq!(outline(&read(&text)), expected, "{text}");
    }
    let back = line("\"timestamp\": 9", ids) + &line("\"timestamp\": 8", ids);
    assert_eq!(refused(&back), "file:2: timestamp goes back from 9 to 8");
}

#[test]
fn dates_count_by_their_own_offsets() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
        2023-10-29 02:59:00+02:00,10,1\n2023-10-29 02:00:00+01:00,10,1\n2023-10-29 01:00:30Z,10,1\n\
        2023-10-29 01:01:00,10,1\n";
    let arrivals: Vec<_> = outline(&read(text)).iter().map(|row| row.0).collect();
    assert_eq!(arrivals, [0, 60_000, 90_000, 120_000]);
}

#[test]
fn requests_that_cannot_be_used_are_left_out_when_asked_and_counted() {
    let good = crate::common::GOOD;
    let lines = [
        good,
        &good.replace("52", "0"),
        "",
        "not json",
        &good.replace("700", "7000"),
        &good.replace("5,", "4,"),
        good,
    ];
    let skip = ReadOptions { skip_unusable: true, ..ReadOptions::default() };
    let burst = BURST.replace(",18,", ",0,").replace("GPT-4", "GPT-\u{e9}");
    let agents = WEKA.replace("\"out\": 7", "\"out\": 0").replace("\"t\": 10.5", "\"t\": -1");
    for (text, used, skipped) in
        [(lines.join("\n"), 2, 5), (burst, 1, 1), (agents, 2, 1), (AZURE.to_owned(), 2, 0)]
    {
        let trace = Trace::parse_with(text.as_bytes(), "file", &skip).unwrap();
        assert_eq!((trace.requests.len(), trace.skipped), (used, skipped), "{text}");
    }
    let none = BURST.replace(",18,", ",0,").replace("1087", "0");
    assert_eq!(
        Trace::parse_with(none.as_bytes(), "file", &skip).unwrap_err().to_string(),
        "trace file is empty: 2 requests that could not be used were left out"
    );
}

#[test]
fn no_file_takes_more_memory_than_its_length_and_a_bound() {
    // Each row of 36 bytes would have four million ids.
    let row = format!("5,{},1\n", kv_replay::trace::LENGTH_MAX_TOKENS);
    let text = format!("Timestamp,Request tokens,Response tokens\n{}", row.repeat(1000));
    assert_eq!(
        refused(&text),
        format!(
            "file:34: the requests up to here have more than {} hash ids; give a larger --trace-block-tokens, or cut the file",
            kv_replay::trace::IDS_MAX
        )
    );
    let endless = |start: &str, rest: &'static [u8]| {
        let rest = std::io::Read::chain(std::io::repeat(rest[0]), std::io::empty());
        let text = std::io::Read::chain(std::io::Cursor::new(start.to_owned().into_bytes()), rest);
        Trace::parse(std::io::BufReader::new(text), "endless").unwrap_err().to_string()
    };
    let too_long = |line: u32, limit: u64| {
        format!(
            "endless:{line}: it is longer than {limit} bytes, the most for a line, a row or a session"
        )
    };
    // A cell, also one that is quoted and has line breaks, and a session.
    assert_eq!(endless(AZURE, b"7"), too_long(4, 1 << 20));
    assert_eq!(endless(&format!("{AZURE}\""), b"\n"), too_long(4, 1 << 20));
    assert_eq!(endless(&WEKA[..WEKA.len() - 2], b" "), too_long(1, 16 << 20));
    // Each of seven bytes would have several hundred of memory.
    let small = "{\"\":0},".repeat(140_000);
    for (of, line) in [(BAILIAN.to_owned(), 1), (WEKA.replace('\n', " "), 1)] {
        let deep = of.replacen('{', &format!("{{\"more\": [{small} 0], "), 1);
        assert_eq!(
            refused(&deep),
            format!(
                "file:{line}: it has more than {} lists and objects, the most for a line or a session",
                kv_replay::trace::LISTS_MAX
            )
        );
        // A text may have as many as it likes, and each line has its own.
        let text = of.replacen('{', &format!("{{\"more\": {:?}, ", "[{\\\"".repeat(100_000)), 1);
        assert_eq!(read(&text).requests, read(&of).requests);
        let some = of.replacen('{', &format!("{{\"more\": [{} 0], ", &small[..7 * 100_000]), 1);
        assert_eq!(
            read(&some.repeat(2).replace("}{", "}\n{")).requests.len(),
            2 * read(&of).requests.len()
        );
    }
}
