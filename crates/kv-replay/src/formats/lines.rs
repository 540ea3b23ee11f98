//! Traces as lines of JSON objects.

use std::collections::HashMap;
use std::io::{BufRead, Read as _};
use std::sync::Arc;

use cuda_driver::guard;
use serde_json::{Map, Value};

use super::csv_rows::MARK;
use super::rows::{Row, Rows};
use super::{Lists, Unit, bad_value, field, hash_ids, not_json, shortened};
use crate::trace::{LINE_MAX_BYTES, LineProblem, POSITIVE, Trace, TraceError};

const TENANT_MAX_BYTES: usize = 64;

/// Names of the arrival, of the prompt's length and of the answer's: of Mooncake's traces, and of others.
const ARRIVAL: [&str; 2] = ["timestamp", "created_time"];
const INPUT: [&str; 2] = ["input_length", "input_tokens"];
const OUTPUT: [&str; 2] = ["output_length", "output_tokens"];

/// Reads lines of JSON objects into `rows`. Arrivals are in `unit`.
pub(super) fn parse(
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
            if fields.contains_key("session_id") {
                // Lines may be grouped by session.
                rows.order_by_arrival();
            }
            row(&fields, unit, rows.last_ms(), &mut sessions)
        });
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
