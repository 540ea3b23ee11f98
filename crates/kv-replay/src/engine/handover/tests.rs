//! Both sides of a hand-over in one thread, each iterated as far as a test wants: which of them is late
//! is no chance.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use cuda_sim::Pace;
use kv_remote::Key;
use tempfile::TempDir;

use super::Handover;
use crate::config::{Life, RunConfig};
use crate::device::{OpenDevices, SimSizes, open};
use crate::engine::cache::Local;
use crate::engine::scheduler::Scheduler;
use crate::engine::{build_cache, close};
use crate::nodes::NodeConfig;
use crate::report::RunReport;
use crate::trace::{Request, Trace};

const BLOCK: u64 = 64;
const LAYERS: u32 = 2;
const LONG: Duration = Duration::from_secs(120);
/// After so long, what a test waits for does not come.
const HANG: Duration = Duration::from_secs(25);

fn request((blocks, more): (u64, u64), output_length: u64, first_id: u64) -> Request {
    let input_length = blocks * BLOCK + more;
    let ids = input_length.div_ceil(512);
    let hash_ids = (first_id..first_id + ids).collect();
    Request { timestamp_ms: 0, input_length, output_length, hash_ids, tenant: None }
}

/// The nodes of a test, of which the last one goes on with what the others compute.
struct Nodes {
    folder: TempDir,
    prefill: u16,
}

impl Nodes {
    fn new(prefill: u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Each waits for the others before it begins.
        for node in 0..=prefill {
            std::fs::write(folder.path().join(format!("{node}.sock")), "").unwrap();
        }
        Self { folder, prefill }
    }

    fn config(&self, index: u16, config: &RunConfig) -> RunConfig {
        let socket = self.folder.path().join(format!("{index}.sock"));
        std::fs::remove_file(socket).unwrap();
        let key = Key::new(&[7; 32]).unwrap();
        let mut node = NodeConfig::new(index, self.prefill + 1, self.folder.path(), key, 1 << 24);
        (node.prefill, node.handover) = (self.prefill, LONG);
        RunConfig { node: Some(node), ..config.clone() }
    }
}

struct Side<'a> {
    scheduler: Scheduler<'a, Local>,
    report: RunReport,
    config: RunConfig,
    devices: OpenDevices,
}

impl<'a> Side<'a> {
    fn new(config: RunConfig, trace: &'a Trace) -> Self {
        let devices = open(&"sim".parse().unwrap(), SimSizes::for_config(&config)).unwrap();
        let cache = Local::new(build_cache(&config, trace, &devices).unwrap()).unwrap();
        let mut scheduler = Scheduler::new(cache, &config, trace, devices.clock.clone()).unwrap();
        scheduler.handover = Handover::start(&config, &scheduler.cache.cache).unwrap();
        if let (Handover::Prefill(_), Some(sim)) = (&scheduler.handover, &devices.sim) {
            // An iteration takes in one step, so that a test can stop behind each.
            sim.set_pace(Pace::Slowest);
        }
        let report = RunReport::new(&config, "sim").unwrap();
        Self { scheduler, report, config, devices }
    }

    fn until(&mut self, mut is_so: impl FnMut(&Self) -> bool) {
        let since = Instant::now();
        while !is_so(self) {
            self.scheduler.iterate(&mut self.report).unwrap();
            assert!(since.elapsed() < HANG, "{:?}", self.handover());
        }
    }

    /// Iterates to the end of its requests.
    fn finish(&mut self) {
        self.until(|side| !side.scheduler.has_work());
        assert_eq!(self.report.corrupt_blocks, 0, "{:?}", self.report.corruptions);
        assert_eq!(self.handover().handover_blocks_wrong, 0);
    }

    fn handover(&self) -> crate::nodes::HandoverReport {
        self.scheduler.handover.report().unwrap()
    }

    /// Whether a request has been admitted whose blocks are filled, and waits for more.
    fn is_filled(&self, request: usize) -> bool {
        let live = self.scheduler.live.get(&request);
        live.is_some_and(|live| live.request.is_none() && live.sequence.is_none())
    }

    fn fills(&self) -> bool {
        matches!(&self.scheduler.handover, Handover::Decode(decode) if decode.side.fills())
    }

    fn computed(&self) -> u64 {
        self.report.bytes_transferred / (self.config.block_bytes().unwrap() / BLOCK)
    }

    /// Ends it, and looks for what it has left.
    fn close(self) {
        let Self { scheduler, devices, .. } = self;
        close(scheduler.into_cache().cache).unwrap();
        let sim = devices.sim.clone().unwrap();
        assert_eq!(sim.findings(), [], "nothing is read or written out of order");
    }
}

fn config(device_blocks: u64, max_batch: u32) -> RunConfig {
    let mut config = RunConfig {
        block_tokens: BLOCK as u32,
        device_blocks,
        host_blocks: 0,
        max_batch,
        step_tokens: 2048,
        life: Life { chunk: 128, ..Life::default() },
        ..RunConfig::default()
    };
    config.shape.layers = LAYERS;
    config
}

/// Two nodes, of which one computes a prompt of 8 blocks and a half, as far as 4 blocks, and the other
/// one has these.
fn with_half_a_prompt(life: Life, test: impl FnOnce(Side<'_>, Side<'_>)) {
    let trace = Trace::new(vec![request((8, 32), 100, 0)]);
    let nodes = Nodes::new(1);
    let mut config = config(64, 4);
    let mut prefill = Side::new(nodes.config(0, &config), &trace);
    config.life = life;
    let mut decode = Side::new(nodes.config(1, &config), &trace);
    prefill.until(|side| side.handover().handover_blocks >= 4);
    assert_eq!(prefill.handover().handover_blocks, 4);
    decode.until(|side| side.handover().handover_early_parts == 4 * u64::from(LAYERS));
    test(prefill, decode);
}

#[test]
fn blocks_are_filled_while_the_rest_of_the_prompt_is_computed() {
    with_half_a_prompt(Life::default(), |mut prefill, mut decode| {
        decode.until(|side| side.scheduler.iteration > 100);
        assert!(decode.fills(), "it waits for the rest");
        assert_eq!(decode.handover().handover_early_parts, 4 * u64::from(LAYERS));
        prefill.until(|side| side.handover().handover_blocks == 9);
        decode.finish();
        prefill.finish();
        let report = decode.handover();
        assert_eq!((report.handed_over, report.handover_recomputed), (1, 0));
        assert_eq!(report.handover_blocks, 9);
        assert_eq!(decode.computed(), 1 + 100, "the last token of the prompt is computed here");
        decode.close();
        prefill.close();
    });
}

#[test]
fn a_request_that_is_cancelled_while_its_blocks_are_filled_leaves_nothing() {
    let life = Life { cancel: 100, ..Life::default() };
    with_half_a_prompt(life, |prefill, mut decode| {
        decode.finish();
        assert_eq!((decode.report.cancelled, decode.report.finished), (1, 0));
        let report = decode.handover();
        assert_eq!((report.handed_over, report.handover_recomputed), (0, 0));
        assert_eq!(report.handover_cancelled, 1);
        assert!(!decode.fills());
        assert_eq!(decode.scheduler.manager().free_rows(), 4);
        decode.close();
        drop(prefill);
    });
}

#[test]
fn a_request_that_is_filled_gives_way_to_one_that_runs() {
    let trace = Trace::new(vec![request((4, 0), 520, 0), request((8, 0), 8, 100)]);
    let nodes = Nodes::new(1);
    let mut prefill = Side::new(nodes.config(0, &config(64, 1)), &trace);
    let mut decode = Side::new(nodes.config(1, &config(16, 4)), &trace);
    prefill.until(|side| side.handover().handover_blocks == 4 + 4);
    decode.until(|side| side.is_filled(1));
    // The first one grows to 13 blocks, of 16.
    decode.until(|side| side.report.finished == 1);
    assert_eq!(decode.report.preemptions, 1);
    decode.until(|side| side.scheduler.iteration > 1000);
    assert!(!decode.fills(), "the second one waits for the whole now");
    prefill.finish();
    decode.finish();
    assert_eq!(decode.report.preemptions, 1);
    assert_eq!(decode.handover().handed_over, 2);
    assert_eq!(decode.computed(), 1 + 520 + 1 + 8, "nothing is computed again");
    decode.close();
    prefill.close();
}

#[test]
fn a_request_that_lacks_the_blocks_of_one_that_has_come_waits_for_it() {
    // Iterations in which the first one fills its fourth block, before the second one comes.
    for generated in 62..=65 {
        let trace = Trace::new(vec![request((3, 0), 200, 0), request((8, 0), 8, 100)]);
        let nodes = Nodes::new(1);
        let mut prefill = Side::new(nodes.config(0, &config(64, 1)), &trace);
        let mut decode = Side::new(nodes.config(1, &config(12, 4)), &trace);
        prefill.until(|side| side.handover().handover_blocks == 3);
        decode.until(|side| side.computed() == generated);
        prefill.until(|side| side.handover().handed_over == 2);
        decode.finish();
        assert_eq!(decode.report.finished, 2);
        decode.close();
        prefill.close();
    }
}

#[test]
fn a_request_that_is_filled_gives_way_to_one_that_has_come_if_nothing_else_runs() {
    // The node of the first one computes half of it, and then nothing more.
    let all = [request((8, 0), 8, 0), request((12, 0), 8, 100)];
    let trace = Trace::new(all.to_vec());
    let [first, second] = all.map(|of| Trace::new(vec![of]));
    let nodes = Nodes::new(2);
    let mut slow = Side::new(nodes.config(0, &config(64, 1)), &first);
    let mut quick = Side::new(nodes.config(1, &config(64, 1)), &second);
    let mut decode = Side::new(nodes.config(2, &config(16, 4)), &trace);
    slow.until(|side| side.handover().handover_blocks == 4);
    decode.until(|side| side.is_filled(0));
    quick.finish();
    decode.until(|side| side.report.finished == 1);
    assert_eq!(decode.report.preemptions, 1);
    slow.finish();
    decode.finish();
    assert_eq!(decode.handover().handed_over, 2);
    decode.close();
}

#[test]
fn no_room_is_taken_for_a_prompt_that_is_computed_while_another_request_lacks_it() {
    let all = [request((5, 0), 150, 0), request((12, 0), 8, 100), request((8, 0), 8, 200)];
    let trace = Trace::new(all.to_vec());
    let [first, second, third] = all;
    let (evens, odds) = (Trace::new(vec![first, third]), Trace::new(vec![second]));
    let nodes = Nodes::new(2);
    let mut slow = Side::new(nodes.config(0, &config(64, 1)), &evens);
    let mut quick = Side::new(nodes.config(1, &config(64, 1)), &odds);
    let mut decode = Side::new(nodes.config(2, &config(16, 4)), &trace);
    slow.until(|side| side.handover().handover_blocks == 5);
    decode.until(|side| side.computed() > 0);
    quick.finish();
    decode.until(|side| side.handover().handed_over == 2);
    slow.until(|side| side.handover().handover_blocks > 5);
    decode.until(|side| {
        assert!(side.report.finished > 0 || !side.fills(), "the second one lacks the room");
        side.report.finished == 1
    });
    slow.finish();
    decode.finish();
    assert_eq!((decode.report.preemptions, decode.handover().handed_over), (0, 3));
    decode.close();
}
