//! Traces as lines of JSON objects, and what readers of other formats need: times, ids, and bounds on lists.

use std::collections::HashMap;
use std::io::{BufRead, Read as _};
use std::sync::Arc;

use cuda_driver::guard;
use serde_json::{Map, Value};

use super::rows::{Row, Rows};
use super::{
    LINE_MAX_BYTES, LISTS_MAX, LineProblem, POSITIVE, TIMESTAMP_MAX_MS, Trace, TraceError,
};

/// The mark that some programs write in front of text.
pub const MARK: &[u8] = b"\xEF\xBB\xBF";

const TENANT_MAX_BYTES: usize = 64;

/// Names of the arrival, of the prompt's length and of the answer's: of Mooncake's traces, and of others.
const ARRIVAL: [&str; 2] = ["timestamp", "created_time"];
const INPUT: [&str; 2] = ["input_length", "input_tokens"];
const OUTPUT: [&str; 2] = ["output_length", "output_tokens"];

/// Reads lines of JSON objects into `rows`. Arrivals are in `unit`.
pub fn parse(
    mut reader: impl BufRead,
    name: &str,
    mut rows: Rows<'_>,
    unit: Unit,
) -> Result<Trace, TraceError> {
    let mut sessions = HashMap::new();
    let mut bytes = Vec::new();
    // Empty lines are nothing at the end of a file, and a mistake elsewhere.
    let mut blank = None;
    for line in 1.. {
        bytes.clear();
        let lines_read = line - 1;
        reader
            .by_ref()
            .take(LINE_MAX_BYTES + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| TraceError::Read { name: name.to_owned(), lines_read, source })?;
        if bytes.is_empty() {
            break;
        }
        if bytes.len() as u64 > LINE_MAX_BYTES {
            return Err(rows.at(line, LineProblem::TooLong { limit: LINE_MAX_BYTES }));
        }
        let text = bytes.strip_prefix(MARK).filter(|_| line == 1).unwrap_or(&bytes);
        if text.trim_ascii().is_empty() {
            blank = blank.or(Some(line));
            continue;
        }
        if let Some(blank) = blank.take() {
            rows.push(blank, Err(LineProblem::Blank))?;
        }
        let row = object(text).and_then(|fields| {
            if line == 1 && unit == Unit::Milliseconds && fields.contains_key("chat_id") {
                return Err(LineProblem::InSeconds);
            }
            if fields.contains_key("session_id") {
                // Lines may be grouped by session.
                rows.order_by_arrival();
            }
            row(&fields, unit, rows.last_ms(), &mut sessions)
        });
        if let Err(problem @ LineProblem::InSeconds) = row {
            return Err(rows.at(line, problem));
        }
        rows.push(line, row)?;
    }
    Ok(rows.finish())
}

fn object(text: &[u8]) -> Result<Map<String, Value>, LineProblem> {
    // The line break is removed, because the parser would report it instead of a truncated value
    // before it.
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    guard!("replay.lists-of-a-line-bounded", Lists::default().take(text)?);
    match serde_json::from_slice(text.strip_suffix(b"\r").unwrap_or(text)) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => Err(LineProblem::NotAnObject { value: shortened(&other) }),
        Err(error) => Err(not_json(&error)),
    }
}

fn row(
    fields: &Map<String, Value>,
    unit: Unit,
    last_ms: u64,
    sessions: &mut HashMap<String, u64>,
) -> Result<Row, LineProblem> {
    let row = Row {
        timestamp_ms: arrival(fields, unit, last_ms, sessions)?,
        input_length: length(fields, INPUT)?,
        output_length: length(fields, OUTPUT)?,
        hash_ids: fields.get("hash_ids").map(|ids| hash_ids(ids, "hash_ids")).transpose()?,
        tenant: fields.get("tenant").map(tenant).transpose()?.flatten(),
    };
    if let Some(session) = fields.get("session_id") {
        sessions.insert(session.to_string(), row.timestamp_ms);
    }
    Ok(row)
}

/// When a request arrives: by its own field; else `delay` behind the one before it in its session, or behind the start of
/// the trace; without a session, with the line above.
fn arrival(
    fields: &Map<String, Value>,
    unit: Unit,
    last_ms: u64,
    sessions: &HashMap<String, u64>,
) -> Result<u64, LineProblem> {
    if let Some((name, value)) = first(fields, ARRIVAL) {
        return unit.ms(value, name);
    }
    let before = fields.get("session_id").and_then(|session| sessions.get(&session.to_string()));
    let delay_ms = match fields.get("delay") {
        None | Some(Value::Null) => 0,
        Some(delay) => unit.ms(delay, "delay")?,
    };
    match (before, fields.contains_key("session_id")) {
        (Some(&before), _) => Ok(before.saturating_add(delay_ms)),
        (None, true) => Ok(delay_ms),
        (None, false) => Ok(last_ms),
    }
}

fn length(fields: &Map<String, Value>, names: [&'static str; 2]) -> Result<u64, LineProblem> {
    let (name, value) = match first(fields, names) {
        Some(found) => found,
        None => (names[0], field(fields, names[0])?),
    };
    value.as_u64().ok_or_else(|| bad_value(name, value, POSITIVE))
}

/// The first of these fields that is there.
fn first<'a>(
    fields: &'a Map<String, Value>,
    names: [&'static str; 2],
) -> Option<(&'static str, &'a Value)> {
    names.into_iter().find_map(|name| fields.get(name).map(|value| (name, value)))
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

/// The lists and objects of JSON text so far, which comes piece by piece.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lists {
    count: u64,
    is_in_text: bool,
    is_escaped: bool,
}

impl Lists {
    /// Counts those of a piece; an error once there are more than are read.
    pub fn take(&mut self, piece: &[u8]) -> Result<(), LineProblem> {
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

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Unit {
    Milliseconds,
    Seconds,
}

impl Unit {
    /// A time as milliseconds, rounded. Errors call it `place`.
    pub fn ms(self, value: &Value, place: &str) -> Result<u64, LineProblem> {
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
pub fn to_ms(ms: f64) -> Option<u64> {
    let ms = ms.round();
    (0.0..=TIMESTAMP_MAX_MS as f64).contains(&ms).then_some(ms as u64)
}

pub fn not_json(error: &serde_json::Error) -> LineProblem {
    let text = error.to_string();
    // The parser sees one line at a time, so its own "line 1" would mislead.
    let message = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message);
    LineProblem::NotJson { message: message.to_owned(), column: error.column() }
}

pub fn field<'a>(
    fields: &'a Map<String, Value>,
    field: &'static str,
) -> Result<&'a Value, LineProblem> {
    fields.get(field).ok_or(LineProblem::MissingField { field })
}

/// The ids of a list, which errors call `name`.
pub fn hash_ids(value: &Value, name: &str) -> Result<Vec<u64>, LineProblem> {
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

pub fn bad_value(field: impl Into<String>, value: &Value, expected: &'static str) -> LineProblem {
    LineProblem::BadValue { field: field.into(), value: shortened(value), expected }
}

/// The value as JSON, truncated if it is long.
pub fn shortened(value: &Value) -> String {
    const SHOWN_MAX_CHARS: usize = 48;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
