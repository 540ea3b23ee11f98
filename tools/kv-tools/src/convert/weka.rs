//! Sessions of coding agents, as WEKA's collection has them: one JSON document each.

use std::collections::HashMap;
use std::io::{self, BufRead, Read};

use kv_replay::rng::SplitMix64;
use kv_replay::trace::lines::{Lists, MARK, Unit, bad_value, field, hash_ids, not_json, shortened};
use kv_replay::trace::rows::{Row, Rows};
use kv_replay::trace::{
    LENGTH_MAX_TOKENS, LineProblem, POSITIVE, TIMESTAMP_MAX_MS, Trace, TraceError,
};
use serde::Deserialize as _;
use serde_json::{Deserializer, Map, Value};

use super::ConvertOptions;

/// Maximum length of a session, in bytes. Read, it takes up to thirty times as much memory.
const SESSION_MAX_BYTES: u64 = 16 << 20;

/// Reads sessions. Their requests are in the order of arrival.
pub(super) fn parse(
    reader: impl BufRead,
    name: &str,
    mut rows: Rows<'_>,
    options: &ConvertOptions,
) -> Result<Trace, TraceError> {
    rows.order_by_arrival();
    let mut sessions =
        Sessions { rows, block_tokens: None, ids: HashMap::new(), next_id: 0, read: 0 };
    let mut moments = SplitMix64::new(options.seed);
    let mut reader = Counted { reader, lines: 0, left: 0, lists: Ok(Lists::default()) };
    loop {
        let more = reader.skip_space();
        let lines_read = reader.lines;
        let unread = |source| TraceError::Read { name: name.to_owned(), lines_read, source };
        if !more.map_err(unread)? {
            break;
        }
        let line = reader.lines + 1;
        (reader.left, reader.lists) = (SESSION_MAX_BYTES, Ok(Lists::default()));
        let document = Value::deserialize(&mut Deserializer::from_reader(&mut reader));
        let document = document.map_err(|error| match &reader.lists {
            Err(problem) => sessions.rows.at(line, problem.clone()),
            _ if reader.left == 0 => {
                sessions.rows.at(line, LineProblem::TooLong { limit: SESSION_MAX_BYTES })
            }
            _ if error.is_io() => unread(error.into()),
            _ => sessions.rows.at(line + error.line().saturating_sub(1) as u64, not_json(&error)),
        })?;
        let start_ms = match options.sessions_within_ms {
            0 => 0,
            within => moments.below(within),
        };
        sessions.add(&document, start_ms, line)?;
    }
    let Sessions { rows, block_tokens, .. } = sessions;
    if let (Some(wanted), Some(found)) = (options.reading.block_tokens, block_tokens)
        && wanted != found
    {
        let name = name.to_owned();
        return Err(TraceError::OtherBlockTokens { name, block_tokens: wanted, found });
    }
    Ok(rows.finish())
}

/// A reader that counts lines, and ends once it has given more bytes than are left, or too many lists.
struct Counted<R> {
    reader: R,
    lines: u64,
    /// Bytes that the document may still have; 0 once it is too long.
    left: u64,
    /// Those of the document.
    lists: Result<Lists, LineProblem>,
}

impl<R: BufRead> Counted<R> {
    /// Passes over space, and the mark in front of text; whether anything follows.
    fn skip_space(&mut self) -> io::Result<bool> {
        loop {
            let bytes = self.reader.fill_buf()?;
            let spaces =
                bytes.iter().take_while(|byte| byte.is_ascii_whitespace() || MARK.contains(byte));
            let (count, is_end) = (spaces.clone().count(), bytes.is_empty());
            self.lines += spaces.filter(|&&byte| byte == b'\n').count() as u64;
            let more = count < bytes.len();
            self.reader.consume(count);
            if more || is_end {
                return Ok(more);
            }
        }
    }
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.left = self.left.saturating_sub(read as u64);
        if let Ok(lists) = &mut self.lists
            && let Err(problem) = lists.take(&into[..read])
        {
            self.lists = Err(problem);
        }
        if self.left == 0 || self.lists.is_err() {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        self.lines += into[..read].iter().filter(|&&byte| byte == b'\n').count() as u64;
        Ok(read)
    }
}

#[derive(Debug)]
struct Sessions<'a> {
    rows: Rows<'a>,
    block_tokens: Option<u64>,
    /// The id in the trace of each id of the file: of one session, or of all where it has none.
    ids: HashMap<(Option<u64>, u64), u64>,
    next_id: u64,
    read: u64,
}

/// A list of requests in a session.
#[derive(Clone, Copy)]
struct List<'a> {
    /// Where it is in its document.
    place: &'a str,
    /// What its times count from.
    start_ms: u64,
    /// The session, if its ids are its own.
    scope: Option<u64>,
    /// Line at which the session begins.
    line: u64,
}

impl Sessions<'_> {
    fn add(&mut self, document: &Value, start_ms: u64, line: u64) -> Result<(), TraceError> {
        let (session, scope) =
            self.scope(document).map_err(|problem| self.rows.at(line, problem))?;
        self.list(session, List { place: "", start_ms, scope, line })
    }

    /// The fields of a session, and its number if its ids are its own.
    fn scope<'d>(
        &mut self,
        document: &'d Value,
    ) -> Result<(&'d Map<String, Value>, Option<u64>), LineProblem> {
        let Value::Object(session) = document else {
            return Err(LineProblem::NotAnObject { value: shortened(document) });
        };
        let value = field(session, "block_size")?;
        let known = self.block_tokens;
        let is_right = |&size: &u64| {
            (1..=LENGTH_MAX_TOKENS).contains(&size) && known.is_none_or(|known| known == size)
        };
        let block_tokens = value.as_u64().filter(is_right).ok_or_else(|| {
            bad_value(
                "block_size",
                value,
                "a positive integer, the same in all sessions of the file",
            )
        })?;
        self.block_tokens = Some(block_tokens);
        self.read += 1;
        let scope = match session.get("hash_id_scope").map(Value::as_str) {
            None | Some(Some("local")) => Some(self.read),
            Some(Some("global")) => None,
            _ => {
                let value = field(session, "hash_id_scope")?;
                return Err(bad_value("hash_id_scope", value, "local or global"));
            }
        };
        self.rows.block_tokens = block_tokens;
        Ok((session, scope))
    }

    /// Adds the requests of a session or of a sub-agent. JSON of more than 128 levels is not read at all, so lists are
    /// not nested deeper.
    fn list(&mut self, of: &Map<String, Value>, list: List<'_>) -> Result<(), TraceError> {
        let entries = field(of, "requests").and_then(|value| {
            let expected =
                || bad_value(format!("{}requests", list.place), value, "a list of requests");
            value.as_array().ok_or_else(expected)
        });
        let entries = entries.map_err(|problem| self.rows.at(list.line, problem))?;
        for (at, entry) in entries.iter().enumerate() {
            let place = format!("{}requests[{at}]", list.place);
            let read = begun(entry, &place).map(|(fields, after)| {
                (fields, list.start_ms.saturating_add(after).min(TIMESTAMP_MAX_MS))
            });
            match read {
                Ok((fields, start_ms)) if fields.contains_key("requests") => {
                    let place = &format!("{place}.");
                    self.list(fields, List { place, start_ms, ..list })?;
                }
                Ok((fields, start_ms)) => {
                    let row = self.request(fields, List { place: &place, start_ms, ..list });
                    self.rows.push(list.line, row)?;
                }
                Err(problem) => self.rows.push(list.line, Err(problem))?,
            }
        }
        Ok(())
    }

    fn request(&mut self, fields: &Map<String, Value>, at: List<'_>) -> Result<Row, LineProblem> {
        let place = |name: &str| format!("{}.{name}", at.place);
        let length = |name: &'static str| {
            let value = field(fields, name)?;
            let length = value.as_u64().filter(|length| (1..=LENGTH_MAX_TOKENS).contains(length));
            length.ok_or_else(|| bad_value(place(name), value, POSITIVE))
        };
        let (input_length, output_length) = (length("in")?, length("out")?);
        let ids = hash_ids(field(fields, "hash_ids")?, &place("hash_ids"))?;
        let mut hash_ids: Vec<u64> = ids.into_iter().map(|id| self.id(at.scope, id)).collect();
        let block_tokens = self.block_tokens.unwrap_or(1);
        if hash_ids.len() as u64 == input_length / block_tokens
            && !input_length.is_multiple_of(block_tokens)
        {
            // The block that is part full has no id in the collection.
            hash_ids.push(self.new_id());
        }
        let (timestamp_ms, hash_ids) = (at.start_ms, Some(hash_ids));
        Ok(Row { timestamp_ms, input_length, output_length, hash_ids, tenant: None })
    }

    fn id(&mut self, scope: Option<u64>, id: u64) -> u64 {
        let next = &mut self.next_id;
        *self.ids.entry((scope, id)).or_insert_with(|| {
            *next += 1;
            *next - 1
        })
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }
}

/// The fields of a request or sub-agent, and when it begins, in milliseconds.
fn begun<'a>(entry: &'a Value, place: &str) -> Result<(&'a Map<String, Value>, u64), LineProblem> {
    let Value::Object(fields) = entry else {
        return Err(bad_value(place, entry, "a request"));
    };
    Ok((fields, Unit::Seconds.ms(field(fields, "t")?, &format!("{place}.t"))?))
}
