//! Public formats are told by their content, read exactly, and refused with line and reason.

use std::io::Write as _;
use std::path::Path;

use kv_replay::trace::{ReadOptions, Request, Trace, TraceError};
use kv_tools::convert::{self, ConvertError, ConvertOptions};

/// A good line of a trace.
const GOOD: &str =
    r#"{"timestamp": 5, "input_length": 700, "output_length": 52, "hash_ids": [0, 1]}"#;

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

fn parse(text: &[u8], reading: ReadOptions) -> Result<Trace, TraceError> {
    convert::parse(text, "file", &reading.into())
}

fn read(text: &str) -> Trace {
    parse(text.as_bytes(), ReadOptions::default()).unwrap()
}

fn read_file(path: &Path) -> Result<Trace, TraceError> {
    convert::read(path, &ConvertOptions::default())
}

fn refused(text: &str) -> String {
    parse(text.as_bytes(), ReadOptions::default()).unwrap_err().to_string()
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
    let finer = parse(BURST.as_bytes(), finer).unwrap();
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
        parse(WEKA.as_bytes(), other).unwrap_err().to_string(),
        "--trace-block-tokens is 512, but file says 64; leave the option out"
    );
}

#[test]
fn no_text_of_any_format_panics() {
    for text in [AZURE, BURST, BAILIAN, WEKA] {
        for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
            let cut = parse(&text.as_bytes()[..end], ReadOptions::default());
            let changed = format!("{}\u{7f}{}", &text[..end], &text[end..]);
            let changed = parse(changed.as_bytes(), ReadOptions::default());
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
        convert::run(&files, &ConvertOptions::default(), (Some(&output), None), |_| ()).unwrap();
    assert_eq!(told, "4 requests within 40.5 s, 8 block lookups of 512 tokens\n");
    let arrivals: Vec<_> = Trace::read(&output).unwrap().requests;
    let arrivals: Vec<_> = arrivals.iter().map(|at| (at.timestamp_ms, at.hash_ids[0])).collect();
    assert_eq!(arrivals, [(0, 0), (0, 4), (4315, 1), (40_500, 5)]);
    // Sessions are spread, each with its own ids.
    let sessions = [file("one.json", WEKA), file("two.json", WEKA)];
    let spread = ConvertOptions { sessions_within_ms: 1_000_000, ..ConvertOptions::default() };
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
    let text = convert::run(&[output], &read.into(), (None, None), |_| ()).unwrap();
    assert_eq!(text, trace.to_jsonl());
    // Nothing is written if one file is wrong.
    let fresh = folder.path().join("fresh.jsonl");
    let mixed = [files[0].clone(), sessions[0].clone()];
    let error =
        convert::run(&mixed, &ConvertOptions::default(), (Some(&fresh), None), |_| ()).unwrap_err();
    assert!(matches!(error, ConvertError::Mixed { block_tokens: 512, found: 64, .. }));
    let wrong = [files[0].clone(), file("wrong.csv", &AZURE.replace("44", "x"))];
    let error =
        convert::run(&wrong, &ConvertOptions::default(), (Some(&fresh), None), |_| ()).unwrap_err();
    assert!(error.to_string().contains("wrong.csv:2: GeneratedTokens"), "{error}");
    assert!(!fresh.exists());
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
fn dates_count_by_their_own_offsets() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
        2023-10-29 02:59:00+02:00,10,1\n2023-10-29 02:00:00+01:00,10,1\n2023-10-29 01:00:30Z,10,1\n\
        2023-10-29 01:01:00,10,1\n";
    let arrivals: Vec<_> = read(text).requests.iter().map(|row| row.timestamp_ms).collect();
    assert_eq!(arrivals, [0, 60_000, 90_000, 120_000]);
}

#[test]
fn requests_that_cannot_be_used_are_left_out_when_asked_and_counted() {
    let skip = ReadOptions { skip_unusable: true, ..ReadOptions::default() };
    let burst = BURST.replace(",18,", ",0,").replace("GPT-4", "GPT-\u{e9}");
    let agents = WEKA.replace("\"out\": 7", "\"out\": 0").replace("\"t\": 10.5", "\"t\": -1");
    for (text, used, skipped) in [(burst, 1, 1), (agents, 2, 1), (AZURE.to_owned(), 2, 0)] {
        let trace = parse(text.as_bytes(), skip).unwrap();
        assert_eq!((trace.requests.len(), trace.skipped), (used, skipped), "{text}");
    }
    let none = BURST.replace(",18,", ",0,").replace("1087", "0");
    assert_eq!(
        parse(none.as_bytes(), skip).unwrap_err().to_string(),
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
        let text = std::io::BufReader::new(text);
        convert::parse(text, "endless", &ConvertOptions::default()).unwrap_err().to_string()
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

#[test]
fn compressed_files_are_told_by_their_content() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl");
    let text = format!("{GOOD}\n");
    let expected = read(&text);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    let gzip = encoder.finish().unwrap();
    let fastest = ruzstd::encoding::CompressionLevel::Fastest;
    let zstd = ruzstd::encoding::compress_to_vec(text.as_bytes(), fastest);
    // A frame of one plain block, which says the low half of its text's sum.
    let length = text.len() as u8;
    let block = (u32::from(length) << 3 | 1).to_le_bytes();
    let head = [&[0x28, 0xB5, 0x2F, 0xFD, 0x24, length][..], &block[..3]].concat();
    let summed = |sum: u32| [&head, text.as_bytes(), &sum.to_le_bytes()].concat();
    let sum = xxhash_rust::xxh64::xxh64(text.as_bytes(), 0) as u32;
    for bytes in [text.as_bytes(), &gzip, &zstd, &summed(sum)] {
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(read_file(&path).unwrap(), expected);
    }
    // Two members of gzip, or frames of zstd, are one text; so are frames without text before, between and behind them.
    let passed = [&[0x5A, 0x2A, 0x4D, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
    let frames = [&passed[..], &zstd, &passed, &zstd, &passed].concat();
    for two in [gzip.repeat(2), zstd.repeat(2), frames] {
        std::fs::write(&path, two).unwrap();
        assert_eq!(read_file(&path).unwrap().requests.len(), 2);
    }
    // A torn one is an error, not a shorter trace; so is one with another checksum.
    let mut changed = zstd.repeat(2);
    *changed.last_mut().unwrap() ^= 1;
    let cut = [&zstd[..], &passed[..9]].concat();
    for damaged in [&changed[..], &cut, &[&zstd[..], b"x"].concat(), &summed(sum ^ 1)] {
        std::fs::write(&path, damaged).unwrap();
        let error = read_file(&path).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.starts_with("the zstd file is damaged: "), "{cause}");
    }
    for torn in [&gzip[..gzip.len() - 9], &zstd[..zstd.len() - 9]] {
        std::fs::write(&path, torn).unwrap();
        assert!(matches!(read_file(&path), Err(TraceError::Read { .. })), "{torn:?}");
    }
}

#[test]
fn a_small_file_that_unpacks_to_very_much_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl.gz");
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let line = format!("{}{GOOD}\n", " ".repeat(10_000));
    for _ in 0..7_000 {
        encoder.write_all(line.as_bytes()).unwrap();
    }
    std::fs::write(&path, encoder.finish().unwrap()).unwrap();
    let error = read_file(&path).unwrap_err();
    assert!(matches!(error, TraceError::Read { .. }), "{error}");
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.starts_with("its text is more than 256 times as long as the file"), "{cause}");
}

#[test]
fn a_compressed_trace_comes_through_a_pipe_however_long_it_is() {
    use std::os::fd::AsRawFd as _;
    let line = format!("{}{GOOD}\n", " ".repeat(10_000));
    let mut noise = (0_u32..).map(|number| number.wrapping_mul(2_654_435_761).to_string());
    let mut text = Vec::new();
    for _ in 0..7_000 {
        let noise: String = noise.by_ref().take(20).collect();
        text.push(line.replacen("{", &format!("{{\"more\": \"{noise}\", "), 1));
    }
    let text = text.concat();
    assert!(text.len() > 64 << 20, "more than any file may have");
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    let bytes = encoder.finish().unwrap();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
    let writes = std::thread::spawn(move || writer.write_all(&bytes));
    let trace = read_file(Path::new(&path));
    drop(reader);
    let _ = writes.join().unwrap();
    assert_eq!(trace.unwrap().requests.len(), 7_000);
}
