//! Traces as CSV, with a date or a time and two lengths in each row.

use std::cell::Cell;
use std::io::{self, Read};

use csv::{ReaderBuilder, StringRecord};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use kv_replay::trace::lines::to_ms;
use kv_replay::trace::rows::{Row, Rows};
use kv_replay::trace::{LineProblem, POSITIVE, Trace, TraceError};

use super::formats::Format;

const ROW_MAX_BYTES: u64 = 1 << 20;

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
    reader: impl Read,
    name: &str,
    format: Format,
    mut rows: Rows<'_>,
) -> Result<Trace, TraceError> {
    let left = Cell::new(ROW_MAX_BYTES);
    let mut records =
        ReaderBuilder::new().flexible(true).from_reader(Bounded { reader, left: &left });
    let unread = |line: u64, source: csv::Error, left: u64| match source.into_kind() {
        csv::ErrorKind::Io(_) if left == 0 => {
            Ok((line, LineProblem::TooLong { limit: ROW_MAX_BYTES }))
        }
        csv::ErrorKind::Io(source) => {
            let lines_read = line.saturating_sub(1);
            Err(TraceError::Read { name: name.to_owned(), lines_read, source })
        }
        // The kind has no message of its own.
        other => Ok((line, LineProblem::NotCsv { message: format!("{other:?}") })),
    };
    let headers = match records.headers() {
        Ok(headers) => headers.clone(),
        Err(source) => {
            let (line, problem) = unread(1, source, left.get())?;
            return Err(rows.at(line, problem));
        }
    };
    let names = COLUMNS.iter().find(|(of, _)| *of == format).map_or([""; 3], |(_, names)| *names);
    let column = |name: &str| {
        let found = |header: &str| header.trim_start_matches('\u{FEFF}').trim() == name;
        headers.iter().position(found).unwrap_or(usize::MAX)
    };
    let columns = names.map(column);
    let (mut first_s, mut record) = (None, StringRecord::new());
    loop {
        left.set(ROW_MAX_BYTES);
        let begins = records.position().line();
        match records.read_record(&mut record) {
            Ok(false) => return Ok(rows.finish()),
            Ok(true) => {
                let line = record.position().map_or(0, csv::Position::line);
                let cells = Cells { record: &record, columns, names };
                rows.push(line, cells.row(format, &mut first_s))?;
            }
            Err(source) => {
                let line = source.position().map_or(begins, csv::Position::line);
                let (line, problem) = unread(line, source, left.get())?;
                if matches!(problem, LineProblem::TooLong { .. }) {
                    return Err(rows.at(line, problem));
                }
                rows.push(line, Err(problem))?;
            }
        }
    }
}

/// A reader that fails once it has given more bytes than are left.
struct Bounded<'a, R> {
    reader: R,
    /// 0 once it has failed.
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.left.set(self.left.get().saturating_sub(read as u64));
        if self.left.get() == 0 {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        Ok(read)
    }
}

/// A row, and which of its cells are the time and the lengths.
struct Cells<'a> {
    record: &'a StringRecord,
    columns: [usize; 3],
    names: [&'static str; 3],
}

impl Cells<'_> {
    fn row(&self, format: Format, first_s: &mut Option<f64>) -> Result<Row, LineProblem> {
        let now_s = match format {
            Format::Azure => self.date()?,
            _ => self.parsed(0, "a time in seconds, not negative")?,
        };
        let timestamp_ms = to_ms((now_s - first_s.unwrap_or(now_s)) * 1e3)
            .ok_or_else(|| self.bad(0, "a time that is not before the first row's"))?;
        let input_length: u64 = self.parsed(1, POSITIVE)?;
        let output_length: u64 = self.parsed(2, POSITIVE)?;
        for (column, length) in [(1, input_length), (2, output_length)] {
            if length == 0 {
                return Err(self.bad(column, POSITIVE));
            }
        }
        first_s.get_or_insert(now_s);
        Ok(Row { timestamp_ms, input_length, output_length, hash_ids: None, tenant: None })
    }

    fn cell(&self, column: usize) -> Result<&str, LineProblem> {
        let cell = self.record.get(self.columns[column]).map(str::trim);
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
        let value = self.record.get(self.columns[column]).unwrap_or_default();
        LineProblem::BadValue {
            field: self.names[column].to_owned(),
            value: format!("{value:?}"),
            expected,
        }
    }

    /// Seconds of a date and time. One without an offset counts as universal time.
    fn date(&self) -> Result<f64, LineProblem> {
        let cell = self.cell(0)?;
        let moment = cell.parse::<Timestamp>().or_else(|_| {
            cell.parse::<DateTime>().and_then(|date| TimeZone::UTC.to_timestamp(date))
        });
        moment
            .map(|moment| moment.as_duration().as_secs_f64())
            .map_err(|_| self.bad(0, "a date and time such as 2023-11-16 18:15:46.680"))
    }
}
