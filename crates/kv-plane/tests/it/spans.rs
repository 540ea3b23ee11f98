//! Calls are spans with the names and fields that the README lists, and nested where one call is part of another.

use std::fmt::Write as _;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber, subscriber};

use crate::prelude::*;

/// Writes down each span of the cache when it begins.
#[derive(Clone, Default)]
struct Writer(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl Subscriber for Writer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with("kv_plane")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let metadata = span.metadata();
        let mut line = Line(format!("{} {}", metadata.level(), metadata.name()));
        span.record(&mut line);
        let mut lines = self.0.lock().unwrap();
        lines.push(line.0);
        Id::from_u64(lines.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn calls_are_the_spans_that_the_readme_lists() {
    let sim = sim(SimConfig::default());
    let device = device(&sim);
    let shape = KvShapeOptions { layers: 1, kv_count: 2, row_bytes: 16, block_tokens: 4 };
    let options = options(KvShape::new(shape).unwrap(), 8, 8);
    let writer = Writer::default();
    subscriber::with_default(writer.clone(), || {
        let mut cache = KvCache::new(&streams(&[device]), options).unwrap();
        let step = cache.begin_step().unwrap();
        let mut queue = VecDeque::from([Request::new((0..6).collect())]);
        let (_, mut sequence) = cache.admit(&mut queue, 100).unwrap().admitted.remove(0);
        cache.stage(&step, &mut [&mut sequence]).unwrap();
        let number = step.number();
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
        cache.commit(&mut sequence, number, &[7]).unwrap();
        cache.reserve(&mut sequence, 1).unwrap().given().unwrap();
        let number = one_step(&mut cache, &mut [&mut sequence]);
        cache.commit(&mut sequence, number, &[8]).unwrap();
        assert_eq!(cache.decode(&mut [&mut sequence], number, &[9]), 0, "nothing is to come");
        let twin = cache.fork(&mut sequence).unwrap();
        drop(twin);
        cache.suspend(&mut sequence).unwrap();
        let step = cache.begin_step().unwrap();
        cache.finish_step(step).unwrap();
        cache.resume(&mut sequence).unwrap().given().unwrap();
    });
    let lines = writer.0.lock().unwrap().clone();
    assert_eq!(
        lines,
        [
            "DEBUG begin_step",
            "DEBUG admit requests=1 budget=100",
            "DEBUG stage step=1 sequences=1",
            "DEBUG finish_step step=1",
            "DEBUG drain",
            "TRACE commit step=1",
            "TRACE reserve tokens=1",
            "DEBUG begin_step",
            "DEBUG stage step=2 sequences=1",
            "DEBUG finish_step step=2",
            "DEBUG drain",
            "TRACE commit step=2",
            "TRACE decode step=2",
            "DEBUG fork tokens=8",
            "DEBUG suspend tokens=8",
            "DEBUG begin_step",
            "DEBUG finish_step step=3",
            "DEBUG stage step=3 sequences=0",
            "DEBUG resume tokens=8",
        ]
    );
}
