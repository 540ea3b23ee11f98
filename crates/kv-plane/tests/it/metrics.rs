//! The text of every metric, read by a parser that is not ours, and the dashboard, which asks for metrics that exist.

use std::collections::BTreeSet;

use kv_disk::{DiskStats, Miss};
use kv_plane::metrics::{DASHBOARD, Exposition};
use kv_pool::stats::{PoolStats, TierStats};
use prometheus_parse::{Scrape, Value};

use crate::prelude::*;

/// Everything that can be exposed, with some numbers that are not 0.
fn everything() -> String {
    let mut manager = ManagerStats {
        prompt_tokens: 1000,
        cached_tokens: 700,
        host_tokens: 200,
        ..Default::default()
    };
    manager.stalls.room = 5;
    manager.blocks[1].cached = 77;
    let ways = WayBytes { device_to_host: 1 << 40, loaded: [3, 4], ..Default::default() };
    let mut cache = CacheStats { pages_inline: 9, ways, ..Default::default() };
    cache.transports.copy_engine.blocks = 21;
    let mut disk = DiskStats { slots: 12, read_bytes: u64::MAX, ..Default::default() };
    disk.misses[0] = 8;
    let lower = LowerStats { loaded_blocks: [6, 0], late: 2, ..Default::default() };
    let counters = PoolCounters { lookups: 10, hits: 4, ..Default::default() };
    let primary =
        TierStats { empty: 1, cached: 2, pinned: 3, claimed: 4, retiring: 5, ..Default::default() };
    let pool = PoolStats { primary, counters, ..Default::default() };
    let mut exposition = Exposition::new();
    exposition.label("cache", "first").unwrap();
    exposition.manager(&manager).lower_tiers(&lower).cache(&cache).disk(&disk);
    exposition.label("cache", "second").unwrap().pool(&pool);
    exposition.text()
}

fn scrape(text: &str) -> Scrape {
    Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).unwrap()
}

#[test]
fn another_parser_reads_each_number_under_its_labels() {
    let text = everything();
    let scrape = scrape(&text);
    let value = |name: &str, labels: &[(&str, &str)]| -> f64 {
        let has = |sample: &&prometheus_parse::Sample| {
            sample.metric == name
                && labels.iter().all(|(label, value)| sample.labels.get(label) == Some(value))
        };
        let found: Vec<_> = scrape.samples.iter().filter(has).collect();
        let [sample] = &found[..] else { panic!("one {name} with {labels:?}, found {found:?}") };
        match sample.value {
            Value::Counter(value) | Value::Gauge(value) => value,
            ref other => panic!("{name} is {other:?}"),
        }
    };
    let first = ("cache", "first");
    assert_eq!(value("kv_cache_prompt_tokens_total", &[]), 1000.0);
    assert_eq!(value("kv_cache_hit_tokens_total", &[("tier", "device")]), 500.0);
    assert_eq!(value("kv_cache_hit_tokens_total", &[("tier", "host")]), 200.0);
    assert_eq!(value("kv_cache_stalls_total", &[("cause", "room")]), 5.0);
    assert_eq!(value("kv_cache_blocks", &[first, ("tier", "host"), ("state", "cached")]), 77.0);
    let second = ("cache", "second");
    assert_eq!(value("kv_cache_blocks", &[second, ("tier", "device"), ("state", "in_use")]), 7.0);
    assert_eq!(value("kv_cache_block_hits_total", &[second]), 4.0);
    assert_eq!(
        value("kv_cache_moved_bytes_total", &[("way", "device_to_host")]),
        (1_u64 << 40) as f64
    );
    assert_eq!(value("kv_cache_moved_bytes_total", &[("way", "lowest_to_host")]), 4.0);
    assert_eq!(value("kv_cache_mapped_pages_total", &[("when", "inline")]), 9.0);
    assert_eq!(value("kv_cache_transport_blocks_total", &[("transport", "copy_engine")]), 21.0);
    assert_eq!(value("kv_cache_lower_loaded_blocks_total", &[("tier", "lower")]), 6.0);
    assert_eq!(value("kv_cache_lower_late_total", &[]), 2.0);
    assert_eq!(value("kv_cache_disk_misses_total", &[("reason", Miss::ALL[0].name())]), 8.0);
    assert_eq!(value("kv_cache_disk_read_bytes_total", &[]), u64::MAX as f64);
}

#[test]
fn every_metric_is_named_typed_and_explained_and_no_series_comes_twice() {
    let text = everything();
    let scrape = scrape(&text);
    let mut types = BTreeMap::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(types.insert(name, kind), None, "{name} comes twice");
            assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
            assert!(text.contains(&format!("# HELP {name} ")), "{name}");
        }
    }
    let mut series = BTreeSet::new();
    for sample in &scrape.samples {
        assert!(types.contains_key(sample.metric.as_str()), "{}", sample.metric);
        let labels: BTreeMap<_, _> = sample.labels.iter().collect();
        assert!(series.insert(format!("{} {labels:?}", sample.metric)), "{sample:?} comes twice");
    }
    let page = include_str!("../../src/metrics/mod.rs");
    for name in types.keys() {
        assert!(
            page.contains(&format!("`{name}`")) || page.contains(&format!("`{name}{{")),
            "{name}"
        );
    }
}

#[test]
fn the_dashboard_asks_for_metrics_that_exist() {
    let text = everything();
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut asked = 0;
    for panel in panels {
        assert!(panel["description"].as_str().is_some_and(|text| !text.is_empty()), "{panel}");
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            let names = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            for name in names.filter(|name| name.starts_with("kv_cache_")) {
                assert!(
                    text.contains(&format!("\n# TYPE {name} "))
                        || text.starts_with(&format!("# HELP {name} ")),
                    "{name}"
                );
                asked += 1;
            }
        }
    }
    assert!(asked >= panels.len());
}
