//! The table for people and the JSON for programs.

use std::fmt::Write as _;

use serde::Serialize;

use crate::measure::{Samples, least, median, ratio};

/// Which way is better, and how many digits are worth showing.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Nanoseconds; less is better.
    Nanoseconds,
    /// Milliseconds; less is better.
    Milliseconds,
    /// Bytes; less is better.
    Bytes,
    /// Calls; less is better.
    Calls,
    /// Millions of block operations a second; more is better.
    MillionsPerSecond,
}

impl Unit {
    fn sign(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Milliseconds => "ms",
            Self::Bytes => "B",
            Self::Calls => "calls",
            Self::MillionsPerSecond => "M/s",
        }
    }
}

/// One line: an operation, and the figures of every contender.
#[derive(Debug, Serialize)]
pub struct Row {
    /// What was measured.
    pub label: String,
    /// In which unit.
    pub unit: Unit,
    /// By contender.
    pub figures: Vec<Figure>,
}

/// What a contender reached.
#[derive(Debug, Serialize)]
pub struct Figure {
    /// Whose it is.
    pub contender: &'static str,
    /// The middle round.
    pub median: f64,
    /// The best round.
    pub best: f64,
    /// How many times better the first contender of the row is; the median of the rounds.
    pub ratio: f64,
    /// Every round, in order.
    pub samples: Samples,
}

impl Row {
    /// Takes nanoseconds, milliseconds, bytes or calls as they are.
    #[must_use]
    pub fn of_costs(label: &str, unit: Unit, names: &[&'static str], all: Vec<Samples>) -> Self {
        let ours = all[0].clone();
        let figures = names
            .iter()
            .zip(all)
            .map(|(&contender, samples)| Figure {
                contender,
                median: median(&samples),
                best: least(&samples),
                ratio: ratio(&ours, &samples),
                samples,
            })
            .collect();
        Self { label: label.to_owned(), unit, figures }
    }

    /// Takes nanoseconds an operation and shows millions of operations a second.
    #[must_use]
    pub fn of_rates(label: &str, names: &[&'static str], all: Vec<Samples>) -> Self {
        let mut row = Self::of_costs(label, Unit::MillionsPerSecond, names, all);
        for figure in &mut row.figures {
            let rate = |nanoseconds: f64| 1e3 / nanoseconds;
            figure.samples.iter_mut().for_each(|sample| *sample = rate(*sample));
            (figure.median, figure.best) = (rate(figure.median), rate(figure.best));
        }
        row
    }

    /// The line of the table.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut line = format!("| {} ", self.label);
        for figure in &self.figures {
            let (median, best) = (digits(figure.median), digits(figure.best));
            let _ = write!(line, "| {median} ({best}) {} ", self.unit.sign());
        }
        for figure in self.figures.iter().skip(1) {
            let _ = write!(line, "| {} ", digits(figure.ratio));
        }
        line + "|"
    }
}

/// The first lines of the table.
#[must_use]
pub fn head(names: &[&'static str]) -> String {
    let mut titles = String::from("| operation ");
    let mut rule = String::from("| --- ");
    for name in names {
        let _ = write!(titles, "| {name} ");
        rule.push_str("| ---: ");
    }
    for name in names.iter().skip(1) {
        let _ = write!(titles, "| {name} / ours ");
        rule.push_str("| ---: ");
    }
    format!("{titles}|\n{rule}|")
}

/// Three digits that say something, and none after the point from 100 on.
fn digits(value: f64) -> String {
    match value.abs() {
        size if !size.is_finite() => "-".to_owned(),
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_compared_the_right_way_round() {
        let names = ["a", "b"];
        let row = Row::of_rates("load", &names, vec![vec![10.0; 3], vec![50.0, 40.0, 60.0]]);
        assert_eq!(row.markdown(), "| load | 100 (100) M/s | 20.0 (25.0) M/s | 5.00 |");
        assert_eq!(row.figures[1].samples, [20.0, 25.0, 1e3 / 60.0]);
    }

    #[test]
    fn a_cost_is_shown_as_it_is() {
        let all = vec![vec![1.0, 2.0, 3.0], vec![100.0; 3]];
        let row = Row::of_costs("miss", Unit::Nanoseconds, &["a", "b"], all);
        assert_eq!(row.markdown(), "| miss | 2.00 (1.00) ns | 100 (100) ns | 50.0 |");
    }
}
