//! Public trace formats, told by their content, and read as [`Trace`]s.

mod csv_rows;
mod weka;

use std::fmt;
use std::io::BufRead;

use serde_json::{Map, Value};

use crate::trace::{
    BLOCK_TOKENS_IN_TRACE, LENGTH_MAX_TOKENS, LineProblem, TIMESTAMP_MAX_MS, Trace, TraceError,
    bad_value, field, milliseconds, parse_lines,
};

/// Number of prompt tokens of one hash id in the Bailian traces.
const BAILIAN_BLOCK_TOKENS: u64 = 16;

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
#[non_exhaustive]
pub enum Format {
    /// The format of this project, which is that of the Mooncake traces.
    Trace,
    /// Alibaba's Bailian traces.
    Bailian,
    /// Sessions of WEKA's collection of coding agents.
    Weka,
    /// Azure's LLM inference traces.
    Azure,
    /// BurstGPT.
    BurstGpt,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Trace => "trace",
            Self::Bailian => "Bailian",
            Self::Weka => "WEKA",
            Self::Azure => "Azure",
            Self::BurstGpt => "BurstGPT",
        })
    }
}

/// What a trace's file does not say.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ReadOptions {
    /// Number of prompt tokens of one hash id; `None` for what the [`Format`] says.
    pub block_tokens: Option<u64>,
    /// Sessions whose times are their own begin at random moments within so many milliseconds; 0 for all at once.
    pub sessions_within_ms: u64,
    /// Seed of these moments.
    pub seed: u64,
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
    /// The format of a file that begins with `start`: its first line, or as much of it as is enough to tell.
    #[must_use]
    pub fn of(start: &[u8]) -> Self {
        let start = start.strip_prefix(csv_rows::MARK).unwrap_or(start);
        let start = start.trim_ascii_start();
        let has = |key: &str| start.windows(key.len()).any(|window| window == key.as_bytes());
        if start.starts_with(b"{") {
            return match () {
                () if has("\"hash_id_scope\"") || has("\"block_size\"") => Self::Weka,
                () if has("\"chat_id\"") => Self::Bailian,
                () => Self::Trace,
            };
        }
        csv_rows::format_of(start).unwrap_or(Self::Trace)
    }
}

/// Reads a trace in any format; it may have no request.
pub(crate) fn parse(
    mut reader: impl BufRead,
    name: &str,
    options: &ReadOptions,
) -> Result<Trace, TraceError> {
    options.check()?;
    let unread = |source| TraceError::Read { name: name.to_owned(), lines_read: 0, source };
    let format = Format::of(reader.fill_buf().map_err(unread)?);
    let grain = |otherwise| options.block_tokens.unwrap_or(otherwise);
    match format {
        Format::Trace => parse_lines(reader, name, grain(BLOCK_TOKENS_IN_TRACE), milliseconds),
        Format::Bailian => parse_lines(reader, name, grain(BAILIAN_BLOCK_TOKENS), |fields| {
            seconds(fields, "timestamp", "timestamp")
        }),
        Format::Weka => weka::parse(reader, name, options),
        Format::Azure | Format::BurstGpt => {
            csv_rows::parse(reader, name, format, grain(BLOCK_TOKENS_IN_TRACE))
        }
    }
}

/// A time of a JSON object in seconds, as milliseconds. Errors call it `place`.
fn seconds(
    fields: &Map<String, Value>,
    name: &'static str,
    place: &str,
) -> Result<u64, LineProblem> {
    let value = field(fields, name)?;
    value
        .as_f64()
        .and_then(to_ms)
        .ok_or_else(|| bad_value(place, value, "a time in seconds, not negative"))
}

/// Seconds as milliseconds, rounded; `None` for what no trace can have.
fn to_ms(seconds: f64) -> Option<u64> {
    let ms = (seconds * 1e3).round();
    (0.0..=TIMESTAMP_MAX_MS as f64).contains(&ms).then_some(ms as u64)
}
