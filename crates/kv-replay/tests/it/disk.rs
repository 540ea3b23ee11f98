//! Runs over files below host memory: every byte is right, and a second run finds what the first one stored.

use crate::common::{devices, generated};
use kv_plane::TransportChoice;
use kv_pool::store::StoreKind;
use kv_replay::config::{ConfigError, ModelCost, RunConfig};
use kv_replay::device::OpenDevices;
use kv_replay::disk::DiskConfig;
use kv_replay::engine;
use kv_replay::report::RunReport;
use kv_replay::trace::{Request, Trace};

/// Replays a trace for an engine that computes so many tokens in a second, or of which that is not known.
fn replay(disk: &DiskConfig, compute_rate: u64) -> RunReport {
    let config = RunConfig {
        disk: Some(disk.clone()),
        compute_rate: Some(compute_rate),
        store: StoreKind::All,
        block_tokens: 64,
        device_blocks: 1024,
        host_blocks: 192,
        max_batch: 4,
        step_tokens: 4096,
        ..RunConfig::default()
    };
    let mut trace = generated(10, 3, (20_000, 20));
    trace.requests.extend_from_within(..);
    config.check().unwrap();
    let devices = devices("sim", &config);
    let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
    assert_eq!(report.corrupt_blocks, 0, "{:?}", report.corruptions);
    assert_eq!(report.finished, report.requests);
    report
}

#[test]
fn files_below_the_host_save_tokens_and_survive_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let disk = |fresh| {
        let mut disk = DiskConfig::new(folder.path().to_owned(), 32 << 20);
        disk.fresh = fresh;
        disk
    };
    let first = replay(&disk(false), 0);
    let first_disk = first.disk.clone().unwrap();
    assert_eq!(first_disk.disk_survivors, 0);
    assert!(first_disk.disk_stored > 0, "{first_disk:?}");
    let second = replay(&disk(false), 0);
    let second_disk = second.disk.clone().unwrap();
    assert!(second_disk.disk_survivors > 0, "{second_disk:?}");
    assert!(second_disk.disk_saved_tokens > first_disk.disk_saved_tokens, "{second_disk:?}");
    assert!(second.block_hits > first.block_hits);
    let json = serde_json::to_value(&second).unwrap();
    assert_eq!(json["disk_survivors"], second_disk.disk_survivors);
    assert!(second.summary().contains("found from before"));
    // No file is as fast as this engine. What it loads before a first load is measured depends on the machine.
    // A busy machine may begin all loads of a run before the first has ended.
    let declined = |_| replay(&disk(false), u64::MAX).tiers.unwrap().blocks_declined;
    assert_eq!(second.tiers.unwrap().blocks_declined, 0);
    assert!((0..20).map(declined).any(|blocks| blocks > 0));
    let fresh = replay(&disk(true), 0).disk.unwrap();
    assert_eq!(fresh.disk_survivors, 0);
}

#[test]
fn files_below_the_host_need_a_host_and_a_folder_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let disk = DiskConfig::new(folder.path().to_owned(), 1 << 20);
    let config = RunConfig { disk: Some(disk.clone()), host_blocks: 0, ..RunConfig::default() };
    assert_eq!(config.check(), Err(ConfigError::DiskWithoutHost));
    let file = folder.path().join("kv-disk-000.slots");
    std::fs::write(&file, b"somebody's letters").unwrap();
    let config = RunConfig { disk: Some(disk), ..RunConfig::default() };
    let trace = generated(2, 3, (20_000, 20));
    let devices = devices("sim", &config);
    let refused = engine::run(&config, &trace, &devices, &mut ()).unwrap_err();
    assert!(format!("{refused:?}").contains("is not used"), "{refused:?}");
    assert_eq!(std::fs::read(&file).unwrap(), b"somebody's letters");
}

/// On a machine without virtual time, whether a load is worth it depends on the disk and the processor: each block is judged.
#[test]
fn an_engine_that_waits_for_its_model_judges_what_files_have() {
    let folder = tempfile::tempdir().unwrap();
    // A kernel counts instructions for nanoseconds here: 64 tokens take some tens of milliseconds.
    let model = ModelCost { prefill_tokens_per_s: 40_000, decode_step_us: 1 };
    let config = RunConfig {
        disk: Some(DiskConfig::new(folder.path().to_owned(), 32 << 20)),
        model,
        store: StoreKind::All,
        // Measured, as on a GPU, this would take seconds.
        transport: TransportChoice::EachBlock,
        block_tokens: 64,
        device_blocks: 40,
        host_blocks: 40,
        max_batch: 1,
        step_tokens: 128,
        open_loop: true,
        ..RunConfig::default()
    };
    let request = |turn: u64| Request {
        timestamp_ms: turn,
        input_length: 2000,
        output_length: 4,
        hash_ids: (0..4).map(|id| 100 * (turn % 4) + id).collect(),
        tenant: None,
    };
    let trace = Trace::new((0..12).map(request).collect());
    let devices = devices("sim", &config);
    let devices = OpenDevices { sim: None, ..devices };
    let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
    assert_eq!((report.finished, report.corrupt_blocks), (12, 0), "{:?}", report.corruptions);
    let tiers = report.tiers.unwrap();
    assert!(tiers.blocks_loaded + tiers.blocks_declined > 0, "{tiers:?}");
}
