//! Metrics of one moment, gathered from snapshots of statistics, and their text.

use std::collections::BTreeMap;
use std::fmt;

use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder as _, TextEncoder};

/// The metrics of one moment.
///
/// Each scrape makes a new one, adds the statistics that the process has, and answers with the [text](Self::text). Nothing
/// is counted here, so a scrape costs what the snapshots cost. Statistics of several caches go into one exposition under
/// different [labels](Self::label).
#[derive(Clone, Default)]
pub struct Exposition {
    families: BTreeMap<&'static str, MetricFamily>,
    labels: Vec<(String, String)>,
}

/// The reason why a label is refused.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LabelError {
    /// Prometheus has no label of that name.
    #[error(
        "{name:?} is not the name of a label: expected letters, digits and _, not beginning with a digit or __"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The metrics have a label of that name themselves.
    #[error("the label {name:?} is one of the metrics' own")]
    Taken {
        /// The name.
        name: String,
    },
}

impl fmt::Debug for LabelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Labels that some metrics have.
const OWN_LABELS: [&str; 7] = ["tier", "state", "cause", "way", "reason", "transport", "when"];

impl Exposition {
    /// No metrics, without labels of the caller.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives all that is added from now on a label, such as the model or the cache's name. A second value for one name takes
    /// the place of the first.
    ///
    /// # Errors
    /// [`LabelError`] for a name that Prometheus does not take, or that the metrics have themselves.
    pub fn label(
        &mut self,
        name: impl Into<String>,
        value: impl Into<String>,
    ) -> Result<&mut Self, LabelError> {
        let name = name.into();
        let is_letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
        let starts_well = name.bytes().next().is_some_and(is_letter) && !name.starts_with("__");
        if !starts_well || !name.bytes().all(|byte| is_letter(byte) || byte.is_ascii_digit()) {
            return Err(LabelError::Name { name });
        }
        if OWN_LABELS.contains(&name.as_str()) {
            return Err(LabelError::Taken { name });
        }
        self.labels.retain(|(other, _)| *other != name);
        self.labels.push((name, value.into()));
        Ok(self)
    }

    /// The text of all metrics, in the format 0.0.4 of Prometheus, whose content type is `text/plain; version=0.0.4`.
    #[must_use]
    pub fn text(&self) -> String {
        let families: Vec<_> = self.families.values().cloned().collect();
        let mut text = Vec::new();
        // Families without metrics are the only ones that the encoder refuses, and memory is the only writer.
        let _ = TextEncoder::new().encode(&families, &mut text);
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Adds a count that only rises while the process lives.
    pub(super) fn counter(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: u64,
    ) {
        let mut counter = Counter::default();
        counter.set_value(value as f64);
        let set = |metric: &mut Metric| metric.set_counter(counter);
        self.add((name, help, MetricType::COUNTER), labels, set);
    }

    /// Adds counts that differ by a label.
    pub(super) fn counters<'a>(
        &mut self,
        name: &'static str,
        help: &'static str,
        label: &str,
        counts: impl IntoIterator<Item = (&'a str, u64)>,
    ) {
        for (of, count) in counts {
            self.counter(name, help, &[(label, of)], count);
        }
    }

    /// Adds a quantity of now.
    pub(super) fn gauge(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: u64,
    ) {
        let mut gauge = Gauge::default();
        gauge.set_value(value as f64);
        let set = |metric: &mut Metric| metric.set_gauge(gauge);
        self.add((name, help, MetricType::GAUGE), labels, set);
    }

    fn add(
        &mut self,
        (name, help, kind): (&'static str, &'static str, MetricType),
        labels: &[(&str, &str)],
        set: impl FnOnce(&mut Metric),
    ) {
        let own = labels.iter().copied();
        let theirs = self.labels.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let pairs = own.chain(theirs).map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.to_owned());
            pair.set_value(value.to_owned());
            pair
        });
        let mut metric = Metric::from_label(pairs.collect());
        set(&mut metric);
        let family = self.families.entry(name).or_insert_with(|| {
            let mut family = MetricFamily::default();
            family.set_name(name.to_owned());
            family.set_help(help.to_owned());
            family.set_field_type(kind);
            family
        });
        family.mut_metric().push(metric);
    }
}

impl fmt::Debug for Exposition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.families.keys();
        f.debug_struct("Exposition").field("labels", &self.labels).field("metrics", &names).finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn labels_are_checked_and_escaped() {
        let mut exposition = Exposition::new();
        for name in ["", "1st", "__name", "a-b", "ü"] {
            let error = exposition.label(name, "x").unwrap_err();
            assert_eq!(error, LabelError::Name { name: name.to_owned() });
        }
        let taken = exposition.label("tier", "x").unwrap_err();
        assert_eq!(taken.to_string(), "the label \"tier\" is one of the metrics' own");
        exposition.label("model", "old").unwrap().label("model", "a\"b\\c\nd").unwrap();
        exposition.counter("kv_cache_x_total", "Some.", &[("way", "up")], 3);
        assert_eq!(
            exposition.text(),
            "# HELP kv_cache_x_total Some.\n# TYPE kv_cache_x_total counter\n\
             kv_cache_x_total{way=\"up\",model=\"a\\\"b\\\\c\\nd\"} 3\n"
        );
        assert_eq!(Exposition::new().text(), "");
    }
}
