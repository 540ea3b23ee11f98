//! Sessions of coding agents, as WEKA's collection has them: one JSON document each.

use std::collections::HashMap;
use std::io::{BufRead, Read as _};

use serde_json::{Deserializer, Map, Value};

use super::{ReadOptions, seconds};
use crate::rng::SplitMix64;
use crate::trace::{
    LENGTH_MAX_TOKENS, LineProblem, POSITIVE, Request, TIMESTAMP_MAX_MS, Trace, TraceError,
    bad_value, field, hash_ids, integer, not_json, shortened,
};

/// Maximum length of a file of sessions, in bytes: far beyond the whole collection.
const FILE_MAX_BYTES: u64 = 1 << 30;

/// Reads sessions. Their requests are in the order of arrival.
pub(super) fn parse(
    reader: impl BufRead,
    name: &str,
    options: &ReadOptions,
) -> Result<Trace, TraceError> {
    let mut text = Vec::new();
    let read = reader.take(FILE_MAX_BYTES + 1).read_to_end(&mut text);
    read.map_err(|source| TraceError::Read { name: name.to_owned(), lines_read: 0, source })?;
    let line_at = |offset: usize| {
        let before = &text[..offset.min(text.len())];
        1 + before.iter().filter(|&&byte| byte == b'\n').count() as u64
    };
    let at = |line, problem| TraceError::Line { name: name.to_owned(), line, problem };
    if text.len() as u64 > FILE_MAX_BYTES {
        return Err(at(1, LineProblem::TooLong { limit: FILE_MAX_BYTES }));
    }
    let mut sessions = Sessions::default();
    let mut moments = SplitMix64::new(options.seed);
    let mut documents = Deserializer::from_slice(&text).into_iter::<Value>();
    loop {
        let skipped = text[documents.byte_offset().min(text.len())..].trim_ascii_start().len();
        let line = line_at(text.len() - skipped);
        let Some(document) = documents.next() else { break };
        let document = document.map_err(|error| {
            let line = line + error.line().saturating_sub(1) as u64;
            at(line, not_json(&error))
        })?;
        let start_ms = match options.sessions_within_ms {
            0 => 0,
            within => moments.below(within),
        };
        sessions.add(&document, start_ms).map_err(|problem| at(line, problem))?;
    }
    let block_tokens = sessions.block_tokens.unwrap_or(1);
    if let Some(wanted) = options.block_tokens.filter(|&wanted| wanted != block_tokens) {
        let (name, found) = (name.to_owned(), block_tokens);
        return Err(TraceError::OtherBlockTokens { name, block_tokens: wanted, found });
    }
    let mut requests = sessions.requests;
    // Stable: requests of one moment stay in the order of the file.
    requests.sort_by_key(|request| request.timestamp_ms);
    Ok(Trace { block_tokens, requests })
}

/// The sessions read so far.
#[derive(Debug, Default)]
struct Sessions {
    block_tokens: Option<u64>,
    requests: Vec<Request>,
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
}

impl Sessions {
    fn add(&mut self, document: &Value, start_ms: u64) -> Result<(), LineProblem> {
        let Value::Object(session) = document else {
            return Err(LineProblem::NotAnObject { value: shortened(document) });
        };
        let block_tokens = integer(session, "block_size", POSITIVE)?;
        let known = *self.block_tokens.get_or_insert(block_tokens);
        if !(1..=LENGTH_MAX_TOKENS).contains(&block_tokens) || block_tokens != known {
            let expected = "a positive integer, the same in all sessions of the file";
            return Err(bad_value("block_size", field(session, "block_size")?, expected));
        }
        self.read += 1;
        let scope = match session.get("hash_id_scope").map(Value::as_str) {
            None | Some(Some("local")) => Some(self.read),
            Some(Some("global")) => None,
            _ => {
                let value = field(session, "hash_id_scope")?;
                return Err(bad_value("hash_id_scope", value, "local or global"));
            }
        };
        self.list(session, List { place: "", start_ms, scope })
    }

    /// Adds the requests of a session or of a sub-agent. JSON of more than 128 levels is not read at all, so lists are
    /// not nested deeper.
    fn list(&mut self, of: &Map<String, Value>, list: List<'_>) -> Result<(), LineProblem> {
        let value = field(of, "requests")?;
        let place = |at: usize| format!("{}requests[{at}]", list.place);
        let entries = value.as_array().ok_or_else(|| {
            bad_value(format!("{}requests", list.place), value, "a list of requests")
        })?;
        for (at, entry) in entries.iter().enumerate() {
            let place = place(at);
            let Value::Object(fields) = entry else {
                return Err(bad_value(place, entry, "a request"));
            };
            let after = seconds(fields, "t", &format!("{place}.t"))?;
            let start_ms = list.start_ms.saturating_add(after).min(TIMESTAMP_MAX_MS);
            match fields.contains_key("requests") {
                true => {
                    let place = &format!("{place}.");
                    self.list(fields, List { place, start_ms, ..list })?;
                }
                false => self.request(fields, List { place: &place, start_ms, ..list })?,
            }
        }
        Ok(())
    }

    fn request(&mut self, fields: &Map<String, Value>, at: List<'_>) -> Result<(), LineProblem> {
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
        let timestamp_ms = at.start_ms;
        let request = Request { timestamp_ms, input_length, output_length, hash_ids, tenant: None };
        request.check(block_tokens)?;
        self.requests.push(request);
        Ok(())
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
