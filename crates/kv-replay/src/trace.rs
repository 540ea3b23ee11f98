//! Request traces: one JSON object per line, checked line by line.
//!
//! The format is that of the public Mooncake traces:
//!
//! ```json
//! {"timestamp": 0, "input_length": 700, "output_length": 52, "hash_ids": [0, 1]}
//! ```
//!
//! | field | meaning |
//! | --- | --- |
//! | `timestamp` or `created_time` | arrival, in milliseconds from the start, with or without a fraction; not before the line above, unless the lines have a `session_id` |
//! | `input_length` or `input_tokens` | prompt tokens, at least 1 |
//! | `output_length` or `output_tokens` | generated tokens, at least 1 |
//! | `hash_ids` | one id for each block of [`block_tokens`](Trace::block_tokens) prompt tokens, the last of which may be part full; equal ids mean an equal prompt up to the end of that block. A prompt without this field shares nothing |
//! | `session_id`, `delay` | a request without an arrival comes `delay` milliseconds behind the arrival of the one before it in its session, or behind the start; without a session, with the line above. Lines with a session may be in any order |
//! | `tenant` | whose request it is, a text or a number; may be left out. Reports then have figures for each |
//!
//! Other fields are ignored. Not checked: whether the ids before equal ids are equal too. A policy
//! can be simulated on any sequence of ids.
//!
//! A trace in another format, or compressed, is refused with its first line; `kv-tools convert` reads those.

pub mod lines;
pub mod rows;

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::json_file::{WriteError, write_atomically};
use lines::Unit;
use rows::Rows;

/// Number of prompt tokens of one hash id in the Mooncake traces, and in a trace that says nothing else.
pub const BLOCK_TOKENS_IN_TRACE: u64 = 512;

/// Maximum length of a prompt or answer, in tokens.
pub const LENGTH_MAX_TOKENS: u64 = 1 << 31;

/// Latest arrival, in milliseconds: the largest integer that every JSON reader represents exactly.
pub const TIMESTAMP_MAX_MS: u64 = 1 << 53;

/// Maximum length of a line, in bytes: enough for half a million ids. A file without line breaks is refused instead of filling
/// the memory.
pub const LINE_MAX_BYTES: u64 = 8 << 20;

/// Maximum number of lists and objects of a line or a session: each takes up to seven hundred bytes of memory while it is read.
pub const LISTS_MAX: u64 = 1 << 17;

/// Maximum number of hash ids of all requests together, those made for prompts without ids included: 1 GiB of memory.
pub const IDS_MAX: u64 = 1 << 27;

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Request {
    /// Arrival, in milliseconds from the start of the trace.
    pub timestamp_ms: u64,
    pub input_length: u64,
    pub output_length: u64,
    /// One id for each block of [`Trace::block_tokens`] prompt tokens.
    pub hash_ids: Vec<u64>,
    /// Whose request it is; `None` if the trace does not say. Equal ids are equal prompts, whoever asks.
    pub tenant: Option<Arc<str>>,
}

impl Request {
    /// Checks everything that the format requires of a single request, which has an id for each block of
    /// `block_tokens` prompt tokens.
    pub fn check(&self, block_tokens: u64) -> Result<(), LineProblem> {
        self.check_numbers()?;
        let block_tokens = block_tokens.max(1);
        let expected = self.input_length.div_ceil(block_tokens);
        let found = self.hash_ids.len() as u64;
        if found != expected {
            return Err(LineProblem::BlockCount {
                input_length: self.input_length,
                block_tokens,
                expected,
                found,
            });
        }
        Ok(())
    }

    /// Checks all but the number of ids.
    pub(crate) fn check_numbers(&self) -> Result<(), LineProblem> {
        check_length("input_length", self.input_length)?;
        check_length("output_length", self.output_length)?;
        check_timestamp(self.timestamp_ms)
    }
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Trace {
    /// Number of prompt tokens of one hash id, at least 1.
    pub block_tokens: u64,
    /// The requests. In a trace that was read or generated, all pass [`Request::check`], and
    /// arrivals do not decrease.
    pub requests: Vec<Request>,
    /// Number of requests of the file that were left out, because they could not be used
    /// ([`ReadOptions::skip_unusable`]).
    pub skipped: u64,
}

/// What a trace's file does not say.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ReadOptions {
    /// Number of prompt tokens of one hash id; `None` for what the format says.
    pub block_tokens: Option<u64>,
    /// Leaves out requests that cannot be used and counts them ([`Trace::skipped`]); else the first of them is an error.
    pub skip_unusable: bool,
}

impl ReadOptions {
    pub fn check(&self) -> Result<(), TraceError> {
        match self.block_tokens {
            Some(block_tokens) if !(1..=LENGTH_MAX_TOKENS).contains(&block_tokens) => {
                Err(TraceError::BlockTokens { block_tokens })
            }
            _ => Ok(()),
        }
    }
}

#[derive(thiserror::Error)]
pub enum TraceError {
    #[error("cannot open trace {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot read trace {}: it is a folder", path.display())]
    Folder { path: PathBuf },
    #[error("cannot read trace {name} after line {lines_read}")]
    Read { name: String, lines_read: u64, source: io::Error },
    #[error("{name}:{line}: {problem}")]
    Line { name: String, line: u64, problem: LineProblem },
    #[error(
        "{name}:1: {problem}; of a trace that is compressed or in another format, `kv-tools convert` makes one of this format"
    )]
    OtherFormat { name: String, problem: LineProblem },
    #[error("trace {name} is empty{}", behind(left_out(*skipped)))]
    Empty { name: String, skipped: u64 },
    #[error("--trace-block-tokens is {block_tokens}, expected 1 to {LENGTH_MAX_TOKENS}")]
    BlockTokens { block_tokens: u64 },
    #[error(
        "--trace-block-tokens is {block_tokens}, but {name} says {found}; leave the option out"
    )]
    OtherBlockTokens { name: String, block_tokens: u64, found: u64 },
}

cuda_driver::messages::one_line_debug!(TraceError);

impl TraceError {
    /// Says of a first line that is no request at all where traces in other formats are read.
    fn of_another_format(self) -> Self {
        use LineProblem::{InSeconds, MissingField, NotAnObject, NotJson};
        match self {
            Self::Line {
                name,
                line: 1,
                problem:
                    problem @ (InSeconds
                    | NotAnObject { .. }
                    | NotJson { .. }
                    | MissingField { field: "input_length" }),
            } => Self::OtherFormat { name, problem },
            other => other,
        }
    }
}

/// Says how many requests were left out; empty for none.
pub fn left_out(skipped: u64) -> String {
    match skipped {
        0 => String::new(),
        1 => "1 request that could not be used was left out".to_owned(),
        _ => format!("{skipped} requests that could not be used were left out"),
    }
}

fn behind(more: String) -> String {
    if more.is_empty() { more } else { format!(": {more}") }
}

#[derive(Clone, Eq, PartialEq, thiserror::Error)]
pub enum LineProblem {
    #[error("not valid JSON: {message} at column {column}")]
    NotJson { message: String, column: usize },
    #[error("chat_id is a field of Bailian's traces, whose times are in seconds")]
    InSeconds,
    #[error("not valid CSV: {message}")]
    NotCsv { message: String },
    #[error("the line is empty, expected a JSON object")]
    Blank,
    #[error("expected a JSON object, found {value}")]
    NotAnObject { value: String },
    #[error("field {field} is missing")]
    MissingField { field: &'static str },
    #[error("{field} is {value}, expected {expected}")]
    BadValue { field: String, value: String, expected: &'static str },
    #[error("{field} is {value}, more than the largest allowed, {limit}")]
    TooLarge { field: &'static str, value: u64, limit: u64 },
    #[error(
        "hash_ids has {found} ids, but input_length {input_length} makes {expected} blocks of {block_tokens} tokens"
    )]
    BlockCount { input_length: u64, block_tokens: u64, expected: u64, found: u64 },
    #[error("timestamp goes back from {previous_ms} to {timestamp_ms}")]
    Backwards { timestamp_ms: u64, previous_ms: u64 },
    #[error("it is longer than {limit} bytes, the most for a line, a row or a session")]
    TooLong { limit: u64 },
    #[error("it has more than {limit} lists and objects, the most for a line or a session")]
    TooManyLists { limit: u64 },
    #[error(
        "the requests up to here have more than {limit} hash ids; give a larger --trace-block-tokens, or cut the file"
    )]
    TooManyIds { limit: u64 },
}

cuda_driver::messages::one_line_debug!(LineProblem);

impl Trace {
    /// A trace of these requests, with a hash id for each block of [`BLOCK_TOKENS_IN_TRACE`] prompt tokens.
    pub fn new(requests: Vec<Request>) -> Self {
        Self { block_tokens: BLOCK_TOKENS_IN_TRACE, requests, skipped: 0 }
    }

    /// Reads the trace in the file `path`.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        Self::read_with(path, &ReadOptions::default())
    }

    /// As [`read`](Self::read), with options for what the file does not say.
    pub fn read_with(path: &Path, options: &ReadOptions) -> Result<Self, TraceError> {
        if path.is_dir() {
            return Err(TraceError::Folder { path: path.to_owned() });
        }
        let file = File::open(path)
            .map_err(|source| TraceError::Open { path: path.to_owned(), source })?;
        Self::parse_with(BufReader::new(file), &path.display().to_string(), options)
    }

    /// Requests a second on average, by the last arrival.
    pub fn rate(&self) -> f64 {
        let last_ms = self.requests.last().map_or(0, |last| last.timestamp_ms);
        self.requests.len() as f64 / (last_ms as f64 / 1e3).max(1e-3)
    }

    pub fn from_first_arrival(mut self) -> Self {
        let first_ms = self.requests.first().map_or(0, |first| first.timestamp_ms);
        let earlier = |request: &mut Request| {
            request.timestamp_ms = request.timestamp_ms.saturating_sub(first_ms);
        };
        self.requests.iter_mut().for_each(earlier);
        self
    }

    /// The same requests, which arrive so many times as fast.
    pub fn faster(mut self, times: f64) -> Self {
        // A cast stays within the type.
        let sooner = |request: &mut Request| {
            request.timestamp_ms = (request.timestamp_ms as f64 / times) as u64;
        };
        self.requests.iter_mut().for_each(sooner);
        self
    }

    /// Reads a trace from `reader`. Errors contain `name`.
    pub fn parse(reader: impl BufRead, name: &str) -> Result<Self, TraceError> {
        Self::parse_with(reader, name, &ReadOptions::default())
    }

    /// Reads a trace from `reader`, with options for what it does not say. Errors contain `name`.
    pub fn parse_with(
        reader: impl BufRead,
        name: &str,
        options: &ReadOptions,
    ) -> Result<Self, TraceError> {
        options.check()?;
        let rows = Rows::new(name, BLOCK_TOKENS_IN_TRACE, options);
        let read = lines::parse(reader, name, rows, Unit::Milliseconds);
        read.map_err(TraceError::of_another_format)?.not_empty(name)
    }

    /// The trace, unless it has no request. Errors contain `name`.
    pub fn not_empty(self, name: &str) -> Result<Self, TraceError> {
        match self.requests.is_empty() {
            true => Err(TraceError::Empty { name: name.to_owned(), skipped: self.skipped }),
            false => Ok(self),
        }
    }

    pub fn write(&self, path: &Path) -> Result<(), WriteError> {
        write_atomically(path, self.to_jsonl().as_bytes())
    }

    pub fn limit(mut self, requests_max: usize) -> Self {
        self.requests.truncate(requests_max);
        self
    }

    /// The trace as text, one line per request. Every line ends in a line break.
    pub fn to_jsonl(&self) -> String {
        self.requests.iter().map(|request| format!("{}\n", Line(request))).collect()
    }

    pub fn counts(&self) -> Value {
        let sum = |of: fn(&Request) -> u64| self.requests.iter().map(of).sum::<u64>();
        serde_json::json!({
            "requests": self.requests.len(),
            "requests_skipped": self.skipped,
            "block_tokens": self.block_tokens,
            "block_lookups": self.block_lookups(),
            "prompt_tokens": sum(|request| request.input_length),
            "generated_tokens": sum(|request| request.output_length),
            "last_arrival_ms": self.requests.last().map_or(0, |last| last.timestamp_ms),
        })
    }

    /// Number of block lookups of all requests: one for each of their hash ids.
    pub fn block_lookups(&self) -> u64 {
        self.requests.iter().map(|request| request.hash_ids.len() as u64).sum()
    }
}

/// A request in the form of the published traces.
struct Line<'a>(&'a Request);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { timestamp_ms, input_length, output_length, hash_ids, tenant } = self.0;
        write!(
            f,
            "{{\"timestamp\": {timestamp_ms}, \"input_length\": {input_length}, \"output_length\": {output_length}, \
             \"hash_ids\": {hash_ids:?}"
        )?;
        if let Some(tenant) = tenant {
            write!(f, ", \"tenant\": {}", Value::from(&**tenant))?;
        }
        f.write_str("}")
    }
}

pub const POSITIVE: &str = "a positive integer";

fn check_length(field: &'static str, value: u64) -> Result<(), LineProblem> {
    match value {
        0 => Err(LineProblem::BadValue {
            field: field.to_owned(),
            value: "0".to_owned(),
            expected: POSITIVE,
        }),
        1..=LENGTH_MAX_TOKENS => Ok(()),
        _ => Err(LineProblem::TooLarge { field, value, limit: LENGTH_MAX_TOKENS }),
    }
}

fn check_timestamp(value: u64) -> Result<(), LineProblem> {
    if value > TIMESTAMP_MAX_MS {
        return Err(LineProblem::TooLarge { field: "timestamp", value, limit: TIMESTAMP_MAX_MS });
    }
    Ok(())
}
