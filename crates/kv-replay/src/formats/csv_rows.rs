//! Traces as CSV, with a date or a time and two lengths in each row.

use std::io::BufRead;

use csv::{ReaderBuilder, StringRecord};
use jiff::civil::DateTime;

use super::{Format, to_ms};
use crate::trace::{LineProblem, Request, Trace, TraceError, check_order};

/// The mark that some programs write in front of text.
pub(super) const MARK: &[u8] = b"\xEF\xBB\xBF";

/// The columns of a format: its time, prompt tokens and generated tokens.
const COLUMNS: [(Format, [&str; 3]); 2] = [
    (Format::Azure, ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]),
    (Format::BurstGpt, ["Timestamp", "Request tokens", "Response tokens"]),
];

/// The format whose columns the first line of `start` names.
pub(super) fn format_of(start: &[u8]) -> Option<Format> {
    let line = start.split(|&byte| byte == b'\n').next()?;
    let line = std::str::from_utf8(line).ok()?;
    let named: Vec<_> = line.split(',').map(|name| name.trim().trim_matches('"')).collect();
    let format =
        COLUMNS.into_iter().find(|(_, names)| names.iter().all(|name| named.contains(name)));
    format.map(|(format, _)| format)
}

/// Reads rows. Each prompt has ids that no other one has.
pub(super) fn parse(
    reader: impl BufRead,
    name: &str,
    format: Format,
    block_tokens: u64,
) -> Result<Trace, TraceError> {
    let mut rows = ReaderBuilder::new().flexible(true).from_reader(reader);
    let headers = rows.headers().map_err(|source| unread(name, 1, source))?.clone();
    let names = COLUMNS.iter().find(|(of, _)| *of == format).map_or([""; 3], |(_, names)| *names);
    let column = |name: &str| {
        let found = |header: &str| header.trim_start_matches('\u{FEFF}').trim() == name;
        headers.iter().position(found).unwrap_or(usize::MAX)
    };
    let columns = names.map(column);
    let mut requests: Vec<Request> = Vec::new();
    let (mut first, mut next_id) = (None, 0);
    for row in rows.records() {
        let row = row.map_err(|source| {
            let line = source.position().map_or(0, csv::Position::line);
            unread(name, line, source)
        })?;
        let line = row.position().map_or(0, csv::Position::line);
        let read = Row { row: &row, columns, names };
        let request = read.request(format, &mut first, (block_tokens, &mut next_id));
        let previous_ms = requests.last().map_or(0, |request| request.timestamp_ms);
        let request = request.and_then(|request| {
            request.check(block_tokens)?;
            check_order(previous_ms, request.timestamp_ms)?;
            Ok(request)
        });
        let at = |problem| TraceError::Line { name: name.to_owned(), line, problem };
        requests.push(request.map_err(at)?);
    }
    Ok(Trace { block_tokens, requests })
}

fn unread(name: &str, line: u64, source: csv::Error) -> TraceError {
    match source.into_kind() {
        csv::ErrorKind::Io(source) => {
            TraceError::Read { name: name.to_owned(), lines_read: line.saturating_sub(1), source }
        }
        other => {
            // The kind has no message of its own.
            let problem = LineProblem::NotCsv { message: format!("{other:?}") };
            TraceError::Line { name: name.to_owned(), line, problem }
        }
    }
}

/// A row, and which of its cells are the time and the lengths.
struct Row<'a> {
    row: &'a StringRecord,
    columns: [usize; 3],
    names: [&'static str; 3],
}

impl Row<'_> {
    fn request(
        &self,
        format: Format,
        first: &mut Option<Moment>,
        (block_tokens, next_id): (u64, &mut u64),
    ) -> Result<Request, LineProblem> {
        let moment = match format {
            Format::Azure => self.date()?,
            _ => Moment::Seconds(self.parsed(0, "a time in seconds, not negative")?),
        };
        let timestamp_ms = moment
            .since(*first.get_or_insert(moment))
            .ok_or_else(|| self.bad(0, "a time that is not before the first row's"))?;
        let input_length: u64 = self.parsed(1, "a positive integer")?;
        let output_length: u64 = self.parsed(2, "a positive integer")?;
        for (column, length) in [(1, input_length), (2, output_length)] {
            if length == 0 {
                return Err(self.bad(column, "a positive integer"));
            }
        }
        let request = Request {
            timestamp_ms,
            input_length,
            output_length,
            hash_ids: Vec::new(),
            tenant: None,
        };
        // Too long a prompt is refused before its ids are made.
        if input_length > crate::trace::LENGTH_MAX_TOKENS {
            return request.check(block_tokens).map(|()| request);
        }
        let end = *next_id + input_length.div_ceil(block_tokens);
        let hash_ids = (*next_id..end).collect();
        *next_id = end;
        Ok(Request { hash_ids, ..request })
    }

    fn cell(&self, column: usize) -> Result<&str, LineProblem> {
        let cell = self.row.get(self.columns[column]).map(str::trim);
        cell.filter(|cell| !cell.is_empty())
            .ok_or(LineProblem::MissingField { field: self.names[column] })
    }

    fn parsed<T: std::str::FromStr>(
        &self,
        column: usize,
        expected: &'static str,
    ) -> Result<T, LineProblem> {
        self.cell(column)?.parse().map_err(|_| self.bad(column, expected))
    }

    fn bad(&self, column: usize, expected: &'static str) -> LineProblem {
        let value = self.row.get(self.columns[column]).unwrap_or_default();
        LineProblem::BadValue {
            field: self.names[column].to_owned(),
            value: format!("{value:?}"),
            expected,
        }
    }

    /// A date and time. Those of one file have one distance from universal time, which therefore does not count.
    fn date(&self) -> Result<Moment, LineProblem> {
        let cell = self.cell(0)?;
        // The date itself has hyphens, so only what is behind the hour can be an offset.
        let end = cell.get(11..).and_then(|rest| rest.find(['+', '-', 'Z']).map(|at| 11 + at));
        let date = cell.get(..end.unwrap_or(cell.len())).unwrap_or(cell);
        match date.parse::<DateTime>() {
            Ok(date) => Ok(Moment::Date(date)),
            Err(_) => Err(self.bad(0, "a date and time such as 2023-11-16 18:15:46.680")),
        }
    }
}

/// When a request arrives.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Date(DateTime),
    Seconds(f64),
}

impl Moment {
    /// Milliseconds since `first`; `None` if that is not a time that a trace can have.
    fn since(self, first: Self) -> Option<u64> {
        match (self, first) {
            (Self::Date(now), Self::Date(first)) => to_ms(now.duration_since(first).as_secs_f64()),
            (Self::Seconds(now), Self::Seconds(first)) => to_ms(now - first),
            _ => None,
        }
    }
}
