//! Public trace formats, told by their content, and read as [`Trace`]s.

use std::io::{BufRead, Cursor, Read as _};

use kv_replay::trace::lines::{self, MARK, Unit};
use kv_replay::trace::rows::Rows;
use kv_replay::trace::{BLOCK_TOKENS_IN_TRACE, LINE_MAX_BYTES, Trace, TraceError};

use super::{ConvertOptions, csv_rows, weka};

const BAILIAN_BLOCK_TOKENS: u64 = 16;

/// Bytes of a file that are looked at first to tell its format.
const START_BYTES: u64 = 64 << 10;

/// A format of traces.
///
/// | format | content | tokens of a hash id |
/// | --- | --- | --- |
/// | trace | lines of JSON objects, as [`trace`](kv_replay::trace) describes them | by the options, else 512 |
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
pub(super) enum Format {
    /// The format of this project, which is that of the Mooncake traces.
    Trace,
    Bailian,
    /// Sessions of WEKA's collection of coding agents.
    Weka,
    Azure,
    BurstGpt,
}

impl Format {
    /// The format of a file that begins with `start`; as an error if a longer start could tell another. JSON is told by the
    /// names of the first object's own fields, whatever stands in their values.
    fn told_by(start: &[u8]) -> Result<Self, Self> {
        let start = start.strip_prefix(MARK).unwrap_or(start).trim_ascii_start();
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

/// Reads a trace in any format; it may have no request.
pub(super) fn parse(
    mut reader: impl BufRead,
    name: &str,
    options: &ConvertOptions,
) -> Result<Trace, TraceError> {
    options.reading.check()?;
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
    let rows = |grain| Rows::new(name, grain, &options.reading);
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
