//! Traces are read exactly, and an invalid one is refused with its file, line and value.

use std::io::Write as _;
use std::path::Path;

use crate::common::GOOD;
use kv_replay::generate::{GenerateOptions, generate};
use kv_replay::trace::{LINE_MAX_BYTES, Trace, TraceError};

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
fn compressed_files_are_told_by_their_content() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl");
    let text = format!("{GOOD}\n");
    let expected = Trace::parse(text.as_bytes(), "").unwrap();
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
        assert_eq!(Trace::read(&path).unwrap(), expected);
    }
    // Two members of gzip, or frames of zstd, are one text; so are frames without text before, between and behind them.
    let passed = [&[0x5A, 0x2A, 0x4D, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
    let frames = [&passed[..], &zstd, &passed, &zstd, &passed].concat();
    for two in [gzip.repeat(2), zstd.repeat(2), frames] {
        std::fs::write(&path, two).unwrap();
        assert_eq!(Trace::read(&path).unwrap().requests.len(), 2);
    }
    // A torn one is an error, not a shorter trace; so is one with another checksum.
    let mut changed = zstd.repeat(2);
    *changed.last_mut().unwrap() ^= 1;
    let cut = [&zstd[..], &passed[..9]].concat();
    for damaged in [&changed[..], &cut, &[&zstd[..], b"x"].concat(), &summed(sum ^ 1)] {
        std::fs::write(&path, damaged).unwrap();
        let error = Trace::read(&path).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.starts_with("the zstd file is damaged: "), "{cause}");
    }
    for torn in [&gzip[..gzip.len() - 9], &zstd[..zstd.len() - 9]] {
        std::fs::write(&path, torn).unwrap();
        assert!(matches!(Trace::read(&path), Err(TraceError::Read { .. })), "{torn:?}");
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
    let error = Trace::read(&path).unwrap_err();
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
    let trace = Trace::read(Path::new(&path));
    drop(reader);
    let _ = writes.join().unwrap();
    assert_eq!(trace.unwrap().requests.len(), 7_000);
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
