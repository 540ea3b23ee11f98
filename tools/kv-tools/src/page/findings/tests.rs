//! Each rule on numbers made for it, and what comes first where several hold.

use super::*;
use kv_replay::series::{Histogram, Track};

/// A run of 10 samples over 10 s with one compute stream.
fn run(change: impl FnOnce(&mut RunFile, &mut Series)) -> Summary {
    let mut run = RunFile {
        requests: 10,
        finished: 10,
        block_lookups: 1000,
        block_hits: 600,
        device_blocks: 100,
        max_batch: 4,
        prompt_tokens: 2000,
        prefix_tokens_reused: 500,
        ..RunFile::default()
    };
    let mut series = Series::default();
    series.samples.time_ns = (1..=10).map(|at| at * 1_000_000_000).collect();
    let compute = Track { name: "device 0: compute".to_owned(), ..Track::default() };
    series.timeline.tracks = vec![Track::default(), compute];
    change(&mut run, &mut series);
    run.series = Some(series);
    summarise(&run)
}

fn wait(series: &mut Series, cause: &str, ns: u64) {
    series.timeline.tracks[1].waited_ns.insert(cause.to_owned(), ns);
}

fn lost(series: &mut Series, blocks: u64) {
    series.samples.lost = vec![blocks];
}

#[test]
fn a_run_without_stalls_is_limited_by_nothing() {
    assert_eq!(run(|_, _| ()).limit, "nothing");
    assert_eq!(summarise(&RunFile::default()).limit, "unknown");
}

#[test]
fn a_wrong_run_says_so_before_all_else() {
    let corrupt = run(|run, series| {
        run.corrupt_blocks = 3;
        run.finished = 2;
        lost(series, 900);
    });
    assert_eq!(corrupt.limit, "corrupt");
    assert!(corrupt.limited_by.contains("3 blocks"));
    let unfinished = run(|run, _| (run.finished, run.cancelled) = (7, 1));
    assert_eq!(unfinished.limit, "unfinished");
    assert!(unfinished.limited_by.contains("2 of 10"), "{unfinished:?}");
}

#[test]
fn the_link_limits_from_a_fifth_of_the_time_on_and_the_way_decides_what_helps() {
    let waits = |cause: &'static str, ns| run(move |_, series| wait(series, cause, ns));
    assert_eq!(waits("device 0: copies to the device", 1_999_999_999).limit, "nothing");
    let back = waits("device 0: copies to the device", 2_000_000_000);
    assert_eq!(back.limit, "link");
    assert!(back.limited_by.contains("20.0 %") && back.helps.contains("more device memory"));
    let away = waits("device 0: copies to host memory", 5_000_000_000);
    assert!(away.helps.contains("--store evidence"), "{away:?}");
    let chosen = run(|run, series| {
        run.store = "evidence".to_owned();
        wait(series, "device 0: copies to host memory", 5_000_000_000);
    });
    assert!(chosen.helps.contains("--store-rate"), "{chosen:?}");
    assert_eq!(waits("device 0: compute", 9_000_000_000).limit, "nothing");
}

#[test]
fn room_and_rows_limit_if_requests_wait_for_them_often() {
    let room = run(|run, series| {
        run.preemptions = 12;
        series.samples.stalls_room = vec![0, 0, 0, 1, 2, 3, 3, 3, 3, 3];
    });
    assert_eq!(room.limit, "room");
    assert!(room.limited_by.contains("30.0 %") && room.limited_by.contains("12 were"));
    let full = |free| {
        run(move |_, series| {
            series.samples.running = vec![4; 10];
            series.samples.waiting = vec![1; 10];
            series.samples.device_free = vec![free];
        })
    };
    assert_eq!((full(50).limit, full(49).limit), ("batch", "nothing"));
}

#[test]
fn what_was_there_before_and_is_gone_asks_for_a_larger_cache() {
    let small = run(|_, series| lost(series, 250));
    assert_eq!(small.limit, "capacity");
    assert!(small.helps.contains("--host-blocks") && small.helps.contains("25.0 points"));
    let with_host = run(|run, series| {
        run.host_blocks = 5;
        lost(series, 250);
    });
    assert!(with_host.helps.contains("--disk"), "{with_host:?}");
    assert!(small.limited_by.contains("850") && small.limited_by.contains("29.4 %"), "{small:?}");
    // 66 of the 666 that were there before are less than a tenth.
    assert_eq!(run(|_, series| lost(series, 66)).limit, "nothing");
    assert_eq!(run(|_, series| lost(series, 67)).limit, "capacity");
    let few = run(|run, series| {
        run.block_hits = 0;
        lost(series, 9);
    });
    assert_eq!(few.limit, "nothing");
}

#[test]
fn the_size_that_would_have_kept_what_was_gone_is_said() {
    let small = run(|run, series| {
        run.host_blocks = 23;
        lost(series, 250);
        series.cache_at_loss_blocks = sizes([(500, 200), (700, 50)]);
    });
    assert!(small.helps.contains("511 blocks would have kept half"), "{small:?}");
    assert!(small.helps.contains("and 700 blocks would have kept nine in ten"), "{small:?}");
    assert!(small.helps.contains("device and host memory have 123"), "{small:?}");
    // A size that the cache has is no advice, however its tiers have divided it.
    let divided = run(|run, series| {
        run.host_blocks = 23;
        lost(series, 250);
        series.cache_at_loss_blocks = sizes([(110, 200), (700, 50)]);
    });
    assert!(divided.helps.contains("700 blocks would have kept nine in ten"), "{divided:?}");
    assert!(!divided.helps.contains("half"), "{divided:?}");
    let enough = run(|run, series| {
        run.host_blocks = 23;
        lost(series, 250);
        series.cache_at_loss_blocks = sizes([(110, 250)]);
    });
    assert!(enough.limit == "capacity" && !enough.helps.contains("would have kept"), "{enough:?}");
}

fn sizes(counted: impl IntoIterator<Item = (u64, u64)>) -> kv_replay::series::HistogramReport {
    let mut sizes = Histogram::default();
    counted.into_iter().for_each(|(blocks, count)| sizes.add(blocks, count));
    sizes.report()
}

#[test]
fn a_run_is_not_advised_about_its_own_verification() {
    for (verify, limit) in [("none", "computation"), ("sample", "nothing"), ("full", "nothing")] {
        let busy = run(|run, series| {
            run.verify = verify.to_owned();
            series.timeline.tracks[1].busy_ns = 9_000_000_000;
        });
        assert_eq!(busy.limit, limit, "{verify}");
        let told = busy.facts.iter().any(|fact| fact.contains(&format!("--verify {verify}")));
        assert_eq!(told, limit == "nothing", "{busy:?}");
    }
}

#[test]
fn busy_devices_are_limited_by_computation_and_a_long_wait_for_workers_is_named() {
    let busy = run(|_, series| series.timeline.tracks[1].busy_ns = 7_000_000_000);
    assert_eq!(busy.limit, "computation");
    assert!(busy.helps.contains("25.0 %"), "{busy:?}");
    let stalled = run(|_, series| {
        let timeline = &mut series.timeline;
        timeline.names = vec!["drain".to_owned(), "workers".to_owned()];
        (timeline.track, timeline.name, timeline.cause) = (vec![0], vec![0], vec![1]);
        (timeline.begin_ns, timeline.length_ns) = (vec![4_000_000_000], vec![1_500_000_000]);
    });
    assert_eq!(stalled.limit, "workers");
    assert!(stalled.limited_by.contains("took 1.5 s, from 4.0 s on"), "{stalled:?}");
}

#[test]
fn facts_count_what_was_stored_and_what_came_back() {
    let facts = run(|run, _| {
        (run.blocks_offloaded, run.blocks_onboarded) = (200, 50);
        (run.blocks_refused, run.blocks_regretted) = (7, 1);
    })
    .facts;
    assert!(facts.iter().any(|fact| fact.contains("25 for each 100 stored")), "{facts:?}");
    assert!(facts.iter().any(|fact| fact.starts_with("7 evicted blocks were not stored")));
}
