//! What the host and the streams did when, in no more than [`SPANS_MAX`] spans however long the run is.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most spans. When there are as many, short neighbours become one span.
pub const SPANS_MAX: usize = 4000;

/// Shorter neighbours than this may become one span from the beginning, in nanoseconds.
const FIRST_RESOLUTION_NS: u64 = 500;

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Timeline {
    pub tracks: Vec<Track>,
    /// Names of spans and of causes; spans have their indices.
    pub names: Vec<String>,
    /// Neighbours of one track have become one span where both of them, and what is between them, are no longer than
    /// this many nanoseconds.
    pub resolution_ns: u64,
    pub track: Vec<u32>,
    pub name: Vec<u32>,
    /// Of each span, what it waited for: a name, or -1 for a span that did not wait.
    pub cause: Vec<i64>,
    /// When each span began, in nanoseconds since the run began.
    pub begin_ns: Vec<u64>,
    /// How long each span is, in nanoseconds.
    pub length_ns: Vec<u64>,
    /// How many operations each span stands for.
    pub count: Vec<u64>,
}

/// A thread of the host or a stream of a device.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Track {
    pub name: String,
    /// The device; `None` for the host.
    pub device: Option<u32>,
    /// Nanoseconds in which it did something, over the whole run.
    pub busy_ns: u64,
    /// Nanoseconds in which it waited, over the whole run, by what it waited for.
    pub waited_ns: BTreeMap<String, u64>,
}

/// A name that is known at once, or only when the run is over: that of a track.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Name {
    Text(&'static str),
    Track(u32),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Span {
    pub track: u32,
    pub name: Name,
    pub cause: Option<Name>,
    pub begin_ns: u64,
    pub end_ns: u64,
    pub count: u64,
}

/// Several operations with different names.
const SEVERAL: &str = "several";

#[derive(Debug)]
pub struct TimelineBuilder {
    spans: Vec<Span>,
    resolution_ns: u64,
    /// By track, time spent without a wait, and waits by cause.
    busy_ns: BTreeMap<u32, u64>,
    waited_ns: BTreeMap<(u32, Name), u64>,
}

impl Default for TimelineBuilder {
    fn default() -> Self {
        Self {
            spans: Vec::new(),
            resolution_ns: FIRST_RESOLUTION_NS,
            busy_ns: BTreeMap::new(),
            waited_ns: BTreeMap::new(),
        }
    }
}

impl TimelineBuilder {
    /// Adds a span; one without a length is nothing.
    pub fn add(&mut self, span: Span) {
        let length = span.end_ns.saturating_sub(span.begin_ns);
        if length == 0 {
            return;
        }
        match span.cause {
            Some(cause) => *self.waited_ns.entry((span.track, cause)).or_default() += length,
            None => *self.busy_ns.entry(span.track).or_default() += length,
        }
        self.spans.push(span);
        if self.spans.len() >= SPANS_MAX {
            self.join(SPANS_MAX / 2);
        }
    }

    /// Makes one span of short neighbours, until no more than `most` are left.
    fn join(&mut self, most: usize) {
        self.spans.sort_by_key(|span| (span.track, span.begin_ns));
        // New spans are joined as old ones were; only if that is not enough, more than before.
        self.join_near();
        // Each track may keep one span at least.
        while self.spans.len() > most && self.resolution_ns < u64::MAX {
            self.resolution_ns = self.resolution_ns.saturating_mul(2);
            self.join_near();
        }
    }

    fn join_near(&mut self) {
        let near = self.resolution_ns;
        self.spans.dedup_by(|next, last| {
            let joins = last.track == next.track
                && last.end_ns - last.begin_ns <= near
                && next.end_ns - next.begin_ns <= near
                && next.begin_ns.saturating_sub(last.end_ns) <= near;
            if joins {
                if last.name != next.name {
                    last.name = Name::Text(SEVERAL);
                }
                if last.cause != next.cause {
                    last.cause = None;
                }
                last.end_ns = last.end_ns.max(next.end_ns);
                last.count += next.count;
            }
            joins
        });
    }

    pub fn finish(mut self, mut tracks: Vec<Track>) -> Timeline {
        self.spans.sort_by_key(|span| (span.track, span.begin_ns));
        let called = |name| match name {
            Name::Text(text) => text.to_owned(),
            Name::Track(track) => tracks.get(track as usize).map_or("?", |t| &t.name).to_owned(),
        };
        let mut waited: Vec<BTreeMap<String, u64>> = vec![BTreeMap::new(); tracks.len()];
        for (&(track, cause), ns) in &self.waited_ns {
            if let Some(waited) = waited.get_mut(track as usize) {
                *waited.entry(called(cause)).or_default() += ns;
            }
        }
        let mut indices = BTreeMap::new();
        let mut timeline = Timeline { resolution_ns: self.resolution_ns, ..Timeline::default() };
        for span in self.spans {
            let mut index_of = |name| {
                *indices.entry(name).or_insert_with(|| {
                    timeline.names.push(called(name));
                    timeline.names.len() as u32 - 1
                })
            };
            timeline.name.push(index_of(span.name));
            timeline.cause.push(span.cause.map_or(-1, |cause| index_of(cause).into()));
            timeline.track.push(span.track);
            timeline.begin_ns.push(span.begin_ns);
            timeline.length_ns.push(span.end_ns - span.begin_ns);
            timeline.count.push(span.count);
        }
        for (at, (track, waited)) in (0..).zip(tracks.iter_mut().zip(waited)) {
            track.busy_ns = self.busy_ns.get(&at).copied().unwrap_or(0);
            track.waited_ns = waited;
        }
        timeline.tracks = tracks;
        timeline
    }
}

impl Timeline {
    /// Whether all columns have the same length, and all indices are those of something.
    pub fn is_whole(&self) -> bool {
        let Self { tracks, names, track, name, cause, begin_ns, length_ns, count, .. } = self;
        let lengths =
            [track.len(), name.len(), cause.len(), begin_ns.len(), length_ns.len(), count.len()];
        lengths.iter().all(|&length| length == lengths[0])
            && track.iter().all(|&at| (at as usize) < tracks.len())
            && name.iter().all(|&at| (at as usize) < names.len())
            && cause.iter().all(|&at| at < names.len() as i64)
    }

    /// The spans that waited, the longest first: track, what they waited for, begin and length in nanoseconds.
    pub fn waits(&self) -> Vec<(&str, &str, u64, u64)> {
        let mut waits: Vec<_> = (0..self.cause.len())
            .filter_map(|at| {
                let cause = self.names.get(usize::try_from(*self.cause.get(at)?).ok()?)?;
                let track = self.tracks.get(*self.track.get(at)? as usize)?;
                let (begin, length) = (*self.begin_ns.get(at)?, *self.length_ns.get(at)?);
                Some((track.name.as_str(), cause.as_str(), begin, length))
            })
            .collect();
        waits.sort_by_key(|&(.., begin, length)| (std::cmp::Reverse(length), begin));
        waits
    }
}
