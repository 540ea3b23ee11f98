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
//! | `timestamp` | arrival, in milliseconds from the start; never before the line above |
//! | `input_length` | prompt tokens, at least 1 |
//! | `output_length` | generated tokens, at least 1 |
//! | `hash_ids` | one id for each block of [`block_tokens`](Trace::block_tokens) prompt tokens, the last of which may be part full; equal ids mean an equal prompt up to the end of that block |
//! | `tenant` | whose request it is, a text or a number; may be left out. Reports then have figures for each |
//!
//! Other fields are ignored. Not checked: whether the ids before equal ids are equal too. A policy
//! can be simulated on any sequence of ids.
//!
//! [`Trace::read`] also reads the other formats of [`Format`], which it recognises by their content.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::compressed;
use crate::formats;
pub use crate::formats::{Format, ReadOptions};
use crate::json_file::{WriteError, write_atomically};

/// Number of prompt tokens of one hash id in the Mooncake traces, and in a trace that says nothing else.
pub const BLOCK_TOKENS_IN_TRACE: u64 = 512;

/// Maximum length of a prompt or answer, in tokens.
pub const LENGTH_MAX_TOKENS: u64 = 1 << 31;

/// Latest arrival, in milliseconds: the largest integer that every JSON reader represents exactly.
pub const TIMESTAMP_MAX_MS: u64 = 1 << 53;

/// Maximum length of a tenant's name, in bytes.
const TENANT_MAX_BYTES: usize = 64;

/// Maximum length of a line, in bytes: enough for the ids of the longest prompt. A file without
/// line breaks is refused instead of filling the memory.
pub const LINE_MAX_BYTES: u64 = 128 << 20;

/// One request of a trace.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Request {
    /// Arrival, in milliseconds from the start of the trace.
    pub timestamp_ms: u64,
    /// Number of prompt tokens.
    pub input_length: u64,
    /// Number of generated tokens.
    pub output_length: u64,
    /// One id for each block of [`Trace::block_tokens`] prompt tokens.
    pub hash_ids: Vec<u64>,
    /// Whose request it is; `None` if the trace does not say. Equal ids are equal prompts, whoever asks.
    pub tenant: Option<Arc<str>>,
}

impl Request {
    /// Checks everything that the format requires of a single request, which has an id for each block of
    /// `block_tokens` prompt tokens.
    ///
    /// # Errors
    ///
    /// The [`LineProblem`] that the request would have as a line.
    pub fn check(&self, block_tokens: u64) -> Result<(), LineProblem> {
        check_length("input_length", self.input_length)?;
        check_length("output_length", self.output_length)?;
        check_timestamp(self.timestamp_ms)?;
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
}

/// The requests of a trace, in order of arrival.
///
/// # Examples
///
/// ```
/// use kv_replay::trace::Trace;
///
/// let line = r#"{"timestamp": 0, "input_length": 700, "output_length": -3, "hash_ids": [0, 1]}"#;
/// let error = Trace::parse(line.as_bytes(), "trace.jsonl").unwrap_err();
/// assert_eq!(error.to_string(), "trace.jsonl:1: output_length is -3, expected a positive integer");
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Trace {
    /// Number of prompt tokens of one hash id, at least 1.
    pub block_tokens: u64,
    /// The requests. In a trace that was read or generated, all pass [`Request::check`], and
    /// arrivals do not decrease.
    pub requests: Vec<Request>,
}

/// The reason why a trace was not read.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be opened.
    #[error("cannot open trace {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path is a folder.
    #[error("cannot read trace {}: it is a folder", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
    },
    /// The file could be opened but not read to its end.
    #[error("cannot read trace {name} after line {lines_read}")]
    Read {
        /// The name of the file.
        name: String,
        /// Number of lines read before.
        lines_read: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A line violates the format.
    #[error("{name}:{line}: {problem}")]
    Line {
        /// The name of the file.
        name: String,
        /// The line number, from 1.
        line: u64,
        /// The problem.
        problem: LineProblem,
    },
    /// The trace contains no request.
    #[error("trace {name} is empty")]
    Empty {
        /// The name of the file.
        name: String,
    },
    /// A hash id stands for no tokens, or for more than a prompt has.
    #[error("--trace-block-tokens is {block_tokens}, expected 1 to {LENGTH_MAX_TOKENS}")]
    BlockTokens {
        /// Tokens of a hash id.
        block_tokens: u64,
    },
    /// The file says how many tokens a hash id stands for, and the options say another number.
    #[error(
        "--trace-block-tokens is {block_tokens}, but {name} says {found}; leave the option out"
    )]
    OtherBlockTokens {
        /// The name of the file.
        name: String,
        /// Tokens of a hash id by the options.
        block_tokens: u64,
        /// Tokens of a hash id by the file.
        found: u64,
    },
}

cuda_driver::messages::one_line_debug!(TraceError);

/// A problem of one line of a trace.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LineProblem {
    /// The line is not JSON.
    #[error("not valid JSON: {message} at column {column}")]
    NotJson {
        /// The parser's message.
        message: String,
        /// The position in bytes, from 1.
        column: usize,
    },
    /// The line is not CSV.
    #[error("not valid CSV: {message}")]
    NotCsv {
        /// The parser's message.
        message: String,
    },
    /// The line is empty.
    #[error("the line is empty, expected a JSON object")]
    Blank,
    /// The line is JSON, but not an object.
    #[error("expected a JSON object, found {value}")]
    NotAnObject {
        /// The value, shortened.
        value: String,
    },
    /// A field is missing.
    #[error("field {field} is missing")]
    MissingField {
        /// The field.
        field: &'static str,
    },
    /// A field has an invalid value.
    #[error("{field} is {value}, expected {expected}")]
    BadValue {
        /// The field, with the index if it is a list.
        field: String,
        /// The value, shortened.
        value: String,
        /// The expected kind of value.
        expected: &'static str,
    },
    /// A field is too large.
    #[error("{field} is {value}, more than the largest allowed, {limit}")]
    TooLarge {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The largest value allowed.
        limit: u64,
    },
    /// The number of ids does not match the number of prompt blocks.
    #[error(
        "hash_ids has {found} ids, but input_length {input_length} makes {expected} blocks of {block_tokens} tokens"
    )]
    BlockCount {
        /// Number of prompt tokens.
        input_length: u64,
        /// Number of tokens of a block.
        block_tokens: u64,
        /// Number of blocks of the prompt.
        expected: u64,
        /// Number of ids.
        found: u64,
    },
    /// The request arrives before the previous one.
    #[error("timestamp goes back from {previous_ms} to {timestamp_ms}")]
    Backwards {
        /// Arrival of this request.
        timestamp_ms: u64,
        /// Arrival of the previous request.
        previous_ms: u64,
    },
    /// The line is too long.
    #[error("the line is longer than {limit} bytes")]
    TooLong {
        /// Maximum length of a line.
        limit: u64,
    },
}

cuda_driver::messages::one_line_debug!(LineProblem);

impl Trace {
    /// A trace of these requests, with a hash id for each block of [`BLOCK_TOKENS_IN_TRACE`] prompt tokens.
    #[must_use]
    pub fn new(requests: Vec<Request>) -> Self {
        Self { block_tokens: BLOCK_TOKENS_IN_TRACE, requests }
    }

    /// Reads the trace in the file `path`, in any [`Format`]. The file may be compressed with gzip or zstd. Its
    /// content tells format and compression, not its name.
    ///
    /// # Errors
    ///
    /// [`TraceError`], naming the file, and the line and value that violate the format.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        Self::read_with(path, &ReadOptions::default())
    }

    /// As [`read`](Self::read), with options for what the file does not say.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); [`TraceError::BlockTokens`] and [`TraceError::OtherBlockTokens`] for options that no
    /// trace, or this one, can have.
    pub fn read_with(path: &Path, options: &ReadOptions) -> Result<Self, TraceError> {
        if path.is_dir() {
            return Err(TraceError::Folder { path: path.to_owned() });
        }
        let file = File::open(path)
            .map_err(|source| TraceError::Open { path: path.to_owned(), source })?;
        let name = path.display().to_string();
        let reader = compressed::open(file).map_err(|source| TraceError::Read {
            name: name.clone(),
            lines_read: 0,
            source,
        })?;
        Self::parse_with(reader, &name, options)
    }

    /// Requests a second on average, by the last arrival.
    pub fn rate(&self) -> f64 {
        let last_ms = self.requests.last().map_or(0, |last| last.timestamp_ms);
        self.requests.len() as f64 / (last_ms as f64 / 1e3).max(1e-3)
    }

    /// The same requests, of which the first arrives at once.
    #[must_use]
    pub fn from_first_arrival(mut self) -> Self {
        let first_ms = self.requests.first().map_or(0, |first| first.timestamp_ms);
        let earlier = |request: &mut Request| {
            request.timestamp_ms = request.timestamp_ms.saturating_sub(first_ms);
        };
        self.requests.iter_mut().for_each(earlier);
        self
    }

    /// The same requests, which arrive so many times as fast.
    #[must_use]
    pub fn faster(mut self, times: f64) -> Self {
        // A cast stays within the type.
        let sooner = |request: &mut Request| {
            request.timestamp_ms = (request.timestamp_ms as f64 / times) as u64;
        };
        self.requests.iter_mut().for_each(sooner);
        self
    }

    /// Reads a trace from `reader`. Errors contain `name`.
    ///
    /// # Errors
    ///
    /// Like [`Trace::read`].
    pub fn parse(reader: impl BufRead, name: &str) -> Result<Self, TraceError> {
        Self::parse_with(reader, name, &ReadOptions::default())
    }

    /// Reads a trace from `reader`, with options for what it does not say. Errors contain `name`.
    ///
    /// # Errors
    ///
    /// Like [`Trace::read_with`].
    pub fn parse_with(
        reader: impl BufRead,
        name: &str,
        options: &ReadOptions,
    ) -> Result<Self, TraceError> {
        let trace = formats::parse(reader, name, options)?;
        match trace.requests.is_empty() {
            true => Err(TraceError::Empty { name: name.to_owned() }),
            false => Ok(trace),
        }
    }

    /// Writes the trace to the file `path`, completely or not at all.
    ///
    /// # Errors
    ///
    /// [`WriteError`], naming the path. An existing file under that name is unchanged.
    pub fn write(&self, path: &Path) -> Result<(), WriteError> {
        write_atomically(path, self.to_jsonl().as_bytes())
    }

    /// Keeps the first `requests_max` requests.
    #[must_use]
    pub fn limit(mut self, requests_max: usize) -> Self {
        self.requests.truncate(requests_max);
        self
    }

    /// The trace as text, one line per request. Every line ends in a line break.
    #[must_use]
    pub fn to_jsonl(&self) -> String {
        self.requests.iter().map(|request| format!("{}\n", Line(request))).collect()
    }

    /// Number of block lookups of all requests: one for each of their hash ids.
    #[must_use]
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

/// Reads lines of JSON objects. `timestamp_ms` reads the arrival out of the fields of one.
pub(crate) fn parse_lines(
    mut reader: impl BufRead,
    name: &str,
    block_tokens: u64,
    timestamp_ms: fn(&Map<String, Value>) -> Result<u64, LineProblem>,
) -> Result<Trace, TraceError> {
    let mut requests: Vec<Request> = Vec::new();
    let mut bytes = Vec::new();
    let mut line = 0;
    loop {
        bytes.clear();
        let read = reader.by_ref().take(LINE_MAX_BYTES + 1).read_until(b'\n', &mut bytes).map_err(
            |source| TraceError::Read { name: name.to_owned(), lines_read: line, source },
        )?;
        if read == 0 {
            return Ok(Trace { block_tokens, requests });
        }
        line += 1;
        let previous_ms = requests.last().map_or(0, |request| request.timestamp_ms);
        let request = parse_line(&bytes, previous_ms, block_tokens, timestamp_ms)
            .map_err(|problem| TraceError::Line { name: name.to_owned(), line, problem })?;
        requests.push(request);
    }
}

fn parse_line(
    bytes: &[u8],
    previous_ms: u64,
    block_tokens: u64,
    timestamp_ms: fn(&Map<String, Value>) -> Result<u64, LineProblem>,
) -> Result<Request, LineProblem> {
    if bytes.len() as u64 > LINE_MAX_BYTES {
        return Err(LineProblem::TooLong { limit: LINE_MAX_BYTES });
    }
    // The line break is removed, because the parser would report it instead of a truncated value
    // before it.
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    if bytes.trim_ascii().is_empty() {
        return Err(LineProblem::Blank);
    }
    let fields = match serde_json::from_slice(bytes.strip_suffix(b"\r").unwrap_or(bytes)) {
        Ok(Value::Object(fields)) => fields,
        Ok(other) => return Err(LineProblem::NotAnObject { value: shortened(&other) }),
        Err(error) => return Err(not_json(&error)),
    };
    let request = Request {
        timestamp_ms: timestamp_ms(&fields)?,
        input_length: integer(&fields, "input_length", POSITIVE)?,
        output_length: integer(&fields, "output_length", POSITIVE)?,
        hash_ids: hash_ids(field(&fields, "hash_ids")?, "hash_ids")?,
        tenant: fields.get("tenant").map(tenant).transpose()?.flatten(),
    };
    request.check(block_tokens)?;
    check_order(previous_ms, request.timestamp_ms)?;
    Ok(request)
}

/// Checks that a request does not arrive before the previous one.
pub(crate) fn check_order(previous_ms: u64, timestamp_ms: u64) -> Result<(), LineProblem> {
    match timestamp_ms < previous_ms {
        true => Err(LineProblem::Backwards { timestamp_ms, previous_ms }),
        false => Ok(()),
    }
}

/// The arrival in milliseconds, as traces in the format of this module have it.
pub(crate) fn milliseconds(fields: &Map<String, Value>) -> Result<u64, LineProblem> {
    integer(fields, "timestamp", "a non-negative integer")
}

pub(crate) const POSITIVE: &str = "a positive integer";

pub(crate) fn not_json(error: &serde_json::Error) -> LineProblem {
    let text = error.to_string();
    // The parser sees one line at a time, so its own "line 1" would mislead.
    let message = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message);
    LineProblem::NotJson { message: message.to_owned(), column: error.column() }
}

pub(crate) fn field<'a>(
    fields: &'a Map<String, Value>,
    field: &'static str,
) -> Result<&'a Value, LineProblem> {
    fields.get(field).ok_or(LineProblem::MissingField { field })
}

pub(crate) fn integer(
    fields: &Map<String, Value>,
    name: &'static str,
    expected: &'static str,
) -> Result<u64, LineProblem> {
    let value = field(fields, name)?;
    value.as_u64().ok_or_else(|| bad_value(name, value, expected))
}

/// Whose request it is: a text or a number.
fn tenant(value: &Value) -> Result<Option<Arc<str>>, LineProblem> {
    match value {
        Value::Null => Ok(None),
        Value::String(text)
            if (1..=TENANT_MAX_BYTES).contains(&text.len()) && !text.contains(char::is_control) =>
        {
            Ok(Some(text.as_str().into()))
        }
        Value::Number(number) if number.is_u64() => Ok(Some(number.to_string().into())),
        _ => Err(bad_value(
            "tenant",
            value,
            "a text of 1 to 64 bytes without control characters, or a non-negative integer",
        )),
    }
}

/// The ids of a list, which errors call `name`.
pub(crate) fn hash_ids(value: &Value, name: &str) -> Result<Vec<u64>, LineProblem> {
    let ids = value.as_array().ok_or_else(|| bad_value(name, value, "a list of ids"))?;
    ids.iter()
        .enumerate()
        .map(|(index, id)| {
            id.as_u64().ok_or_else(|| {
                bad_value(format!("{name}[{index}]"), id, "a non-negative 64-bit integer")
            })
        })
        .collect()
}

pub(crate) fn bad_value(
    field: impl Into<String>,
    value: &Value,
    expected: &'static str,
) -> LineProblem {
    LineProblem::BadValue { field: field.into(), value: shortened(value), expected }
}

/// The value as JSON, truncated if it is long.
pub(crate) fn shortened(value: &Value) -> String {
    const SHOWN_MAX_CHARS: usize = 48;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

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
