//! Public trace formats, told by their content, and read as [`Trace`]s.

mod csv_rows;
mod lines;
mod rows;
mod weka;

use std::io::{BufRead, Cursor, Read as _};

use rows::Rows;
use serde_json::{Map, Value};

use crate::trace::{
    BLOCK_TOKENS_IN_TRACE, LENGTH_MAX_TOKENS, LINE_MAX_BYTES, LISTS_MAX, LineProblem,
    TIMESTAMP_MAX_MS, Trace, TraceError,
};

const BAILIAN_BLOCK_TOKENS: u64 = 16;

/// Bytes of a file that are looked at first to tell its format.
const START_BYTES: u64 = 64 << 10;

/// A format of traces.
///
/// | format | content | tokens of a hash id |
/// | --- | --- | --- |
/// | trace | lines of JSON objects, as [`trace`](crate::trace) describes them | by the options, else 512 |
/// | Bailian | the same with `chat_id`; the arrival is in seconds, with a fraction | by the options, else 16 |
/// | WEKA | JSON documents, each a session of an agent with its requests, those of sub-agents nested in it | by the file |
/// | Azure | CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`: dates and lengths, no ids | by the options, else 512 |
/// | BurstGPT | CSV with `Timestamp`, `Request tokens`, `Response tokens`: seconds and lengths, no ids | by the options, else 512 |
///
/// In formats with lengths only, every prompt is unique, and arrivals count from the first row.
///
/// The requests of a WEKA session and of its sub-agents are in the order of their arrival. Ids are the session's own
/// (`hash_id_scope` `local`) or those of the file (`global`). The collection has no id for a block that is part full; it gets
/// one of its own here.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Format {
    /// The format of this project, which is that of the Mooncake traces.
    Trace,
    Bailian,
    /// Sessions of WEKA's collection of coding agents.
    Weka,
    Azure,
    BurstGpt,
}

/// What a trace's file does not say.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ReadOptions {
    /// Number of prompt tokens of one hash id; `None` for what the format says.
    pub block_tokens: Option<u64>,
    /// Sessions whose times are their own begin at random moments within so many milliseconds; 0 for all at once.
    pub sessions_within_ms: u64,
    pub seed: u64,
    /// Leaves out requests that cannot be used and counts them ([`Trace::skipped`]); else the first of them is an error.
    pub skip_unusable: bool,
}

impl ReadOptions {
    fn check(&self) -> Result<(), TraceError> {
        match self.block_tokens {
            Some(block_tokens) if !(1..=LENGTH_MAX_TOKENS).contains(&block_tokens) => {
                Err(TraceError::BlockTokens { block_tokens })
            }
            _ => Ok(()),
        }
    }
}

impl Format {
    /// The format of a file that begins with `start`; as an error if a longer start could tell another. JSON is told by the
    /// names of the first object's own fields, whatever stands in their values.
    fn told_by(start: &[u8]) -> Result<Self, Self> {
        let start = start.strip_prefix(csv_rows::MARK).unwrap_or(start).trim_ascii_start();
        if !start.starts_with(b"{") {
            let format = csv_rows::format_of(start).unwrap_or(Self::Trace);
            return if start.contains(&b'\n') { Ok(format) } else { Err(format) };
        }
        let (names, is_whole) = own_fields(start);
        let has = |any: &[&str]| any.iter().any(|name| names.contains(&name.as_bytes()));
        match () {
            () if has(&["chat_id"]) => Ok(Self::Bailian),
            () if has(&["input_length", "input_tokens"]) && !is_whole => Err(Self::Trace),
            () if has(&["input_length", "input_tokens"]) => Ok(Self::Trace),
            () if has(&["hash_id_scope", "block_size", "requests"]) => Ok(Self::Weka),
            () if is_whole => Ok(Self::Trace),
            () => Err(Self::Trace),
        }
    }
}

/// The names of the fields of a JSON object, as far as `text` has them, and whether that is to its end.
fn own_fields(text: &[u8]) -> (Vec<&[u8]>, bool) {
    let (mut names, mut depth, mut at) = (Vec::new(), 0_u32, 0);
    let mut last = None;
    while let Some(&byte) = text.get(at) {
        match byte {
            b'"' => {
                let from = at + 1;
                at = from;
                while text.get(at).is_some_and(|&byte| byte != b'"') {
                    at += if text[at] == b'\\' { 2 } else { 1 };
                }
                last = text.get(from..at).filter(|_| depth == 1);
            }
            b':' => names.extend(last.take()),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return (names, true);
                }
            }
            _ => {}
        }
        at += 1;
    }
    (names, false)
}

/// The lists and objects of JSON text so far, which comes piece by piece.
#[derive(Clone, Copy, Debug, Default)]
struct Lists {
    count: u64,
    is_in_text: bool,
    is_escaped: bool,
}

impl Lists {
    /// Counts those of a piece; an error once there are more than are read.
    fn take(&mut self, piece: &[u8]) -> Result<(), LineProblem> {
        for &byte in piece {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = self.is_in_text,
                b'"' => self.is_in_text = !self.is_in_text,
                b'{' | b'[' if !self.is_in_text => self.count += 1,
                _ => {}
            }
        }
        match self.count > LISTS_MAX {
            true => Err(LineProblem::TooManyLists { limit: LISTS_MAX }),
            false => Ok(()),
        }
    }
}

/// Reads a trace in any format; it may have no request.
pub(crate) fn parse(
    mut reader: impl BufRead,
    name: &str,
    options: &ReadOptions,
) -> Result<Trace, TraceError> {
    options.check()?;
    let (mut start, mut format) = (Vec::new(), Err(Format::Trace));
    for length in [START_BYTES, 16 * START_BYTES, LINE_MAX_BYTES + 1] {
        let missing = length - start.len() as u64;
        let read = reader.by_ref().take(missing).read_to_end(&mut start);
        read.map_err(|source| TraceError::Read { name: name.to_owned(), lines_read: 0, source })?;
        format = Format::told_by(&start);
        if format.is_ok() || (start.len() as u64) < length {
            break;
        }
    }
    let reader = Cursor::new(start).chain(reader);
    let format = format.unwrap_or_else(|otherwise| otherwise);
    let rows = |grain| Rows::new(name, options.block_tokens.unwrap_or(grain), options);
    match format {
        Format::Trace => {
            lines::parse(reader, name, rows(BLOCK_TOKENS_IN_TRACE), Unit::Milliseconds)
        }
        Format::Bailian => lines::parse(reader, name, rows(BAILIAN_BLOCK_TOKENS), Unit::Seconds),
        Format::Weka => weka::parse(reader, name, rows(1), options),
        Format::Azure | Format::BurstGpt => {
            csv_rows::parse(reader, name, format, rows(BLOCK_TOKENS_IN_TRACE))
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Unit {
    Milliseconds,
    Seconds,
}

impl Unit {
    /// A time as milliseconds, rounded. Errors call it `place`.
    fn ms(self, value: &Value, place: &str) -> Result<u64, LineProblem> {
        let (per_ms, expected) = match self {
            Self::Milliseconds => (1.0, "a time in milliseconds, not negative"),
            Self::Seconds => (1e3, "a time in seconds, not negative"),
        };
        if let (Self::Milliseconds, Some(whole)) = (self, value.as_u64()) {
            return Ok(whole);
        }
        let ms = value.as_f64().and_then(|time| to_ms(time * per_ms));
        ms.ok_or_else(|| bad_value(place, value, expected))
    }
}

/// Milliseconds, rounded; `None` for what no trace can have.
fn to_ms(ms: f64) -> Option<u64> {
    let ms = ms.round();
    (0.0..=TIMESTAMP_MAX_MS as f64).contains(&ms).then_some(ms as u64)
}

fn not_json(error: &serde_json::Error) -> LineProblem {
    let text = error.to_string();
    // The parser sees one line at a time, so its own "line 1" would mislead.
    let message = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message);
    LineProblem::NotJson { message: message.to_owned(), column: error.column() }
}

fn field<'a>(
    fields: &'a Map<String, Value>,
    field: &'static str,
) -> Result<&'a Value, LineProblem> {
    fields.get(field).ok_or(LineProblem::MissingField { field })
}

/// The ids of a list, which errors call `name`.
fn hash_ids(value: &Value, name: &str) -> Result<Vec<u64>, LineProblem> {
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

fn bad_value(field: impl Into<String>, value: &Value, expected: &'static str) -> LineProblem {
    LineProblem::BadValue { field: field.into(), value: shortened(value), expected }
}

/// The value as JSON, truncated if it is long.
fn shortened(value: &Value) -> String {
    const SHOWN_MAX_CHARS: usize = 48;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
