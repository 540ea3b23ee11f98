//! Both sides of a hand-over in one thread, each iterated as far as a test wants: which of them is late is no chance.

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

pub(super) fn request((blocks, more): (u64, u64), output_length: u64, first_id: u64) -> Request {
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
        let format = scheduler.manager().formats()[0];
        scheduler.handover = Handover::start(&config, format, &devices.devices[0]).unwrap();
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
        match &self.scheduler.handover {
            Handover::None => unreachable!(),
            Handover::Prefill(prefill) => prefill.report.clone(),
            Handover::Decode(decode) => decode.report.clone(),
        }
    }

    /// Blocks of a request that were filled while it waits for more.
    fn filled(&self, request: usize) -> usize {
        match &self.scheduler.handover {
            Handover::Decode(decode) => decode.filled(request),
            _ => 0,
        }
    }

    fn fills(&self) -> bool {
        matches!(&self.scheduler.handover, Handover::Decode(decode) if decode.fills())
    }

    fn computed(&self) -> u64 {
        self.report.bytes_transferred / (self.config.block_bytes().unwrap() / BLOCK)
    }

    /// Does something behind the steps that are complete, while none that runs goes on.
    fn while_steps_run(&mut self, work: impl FnOnce(&mut Scheduler<'a, Local>)) {
        let sim = self.devices.sim.clone().unwrap();
        let compute = self.scheduler.cache.cache.parts()[0].compute().raw();
        let step = self.scheduler.cache.begin_step().unwrap();
        sim.hold(compute);
        work(&mut self.scheduler);
        sim.release_hold(compute);
        // As an iteration without work.
        self.scheduler.cache.finish_step(step).unwrap();
        self.scheduler.cache.drain().unwrap();
    }

    /// Ends it, and looks for what it has left.
    fn close(self) {
        let Self { scheduler, devices, .. } = self;
        close(scheduler.into_cache().cache).unwrap();
        let sim = devices.sim.clone().unwrap();
        assert_eq!(sim.findings(), [], "nothing is read or written out of order");
    }
}

pub(super) fn config(device_blocks: u64, max_batch: u32) -> RunConfig {
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

/// Two nodes, of which one computes a prompt of 8 blocks and a half, as far as 4 blocks, and the other one has these.
fn with_half_a_prompt(life: Life, test: impl FnOnce(Side<'_>, Side<'_>)) {
    let trace = Trace::new(vec![request((8, 32), 100, 0)]);
    let nodes = Nodes::new(1);
    let mut config = config(64, 4);
    let mut prefill = Side::new(nodes.config(0, &config), &trace);
    config.life = life;
    let mut decode = Side::new(nodes.config(1, &config), &trace);
    prefill.until(|side| side.handover().handover_blocks >= 4);
    assert_eq!(prefill.handover().handover_blocks, 4);
    decode.until(|side| side.filled(0) == 4);
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
fn blocks_of_a_step_leave_while_the_next_one_runs() {
    let trace = Trace::new(vec![request((8, 0), 8, 0)]);
    let nodes = Nodes::new(1);
    let mut prefill = Side::new(nodes.config(0, &config(64, 1)), &trace);
    let mut decode = Side::new(nodes.config(1, &config(64, 1)), &trace);
    prefill.until(|side| side.report.iterations == 2);
    assert_eq!(prefill.handover().handover_blocks, 0);
    prefill.while_steps_run(|scheduler| {
        let completed = scheduler.manager().completed_step();
        let Scheduler { handover: Handover::Prefill(prefill), cache, live, .. } = scheduler else {
            unreachable!()
        };
        let sequence_of = |number: usize| live.get(&number)?.sequence.as_ref();
        prefill.completed(&*cache, completed, sequence_of).unwrap();
        assert_eq!(prefill.report.handover_blocks, 2);
    });
    prefill.until(|side| side.handover().handover_blocks == 8);
    decode.finish();
    assert_eq!(decode.handover().handed_over, 1);
    prefill.finish();
    decode.close();
    prefill.close();
}

#[test]
fn blocks_are_filled_while_a_step_runs() {
    let trace = Trace::new(vec![request((2, 0), 2000, 0), request((16, 0), 8, 100)]);
    let nodes = Nodes::new(1);
    let mut prefill = Side::new(nodes.config(0, &config(64, 1)), &trace);
    let mut decode = Side::new(nodes.config(1, &config(64, 2)), &trace);
    prefill.until(|side| side.handover().handover_blocks == 2 + 4);
    decode.until(|side| side.filled(1) == 4);
    prefill.until(|side| side.handover().handover_blocks > 2 + 4);
    decode.devices.sim.as_ref().unwrap().set_pace(Pace::Slowest);
    let (iterations, since) = (decode.report.iterations, Instant::now());
    decode.until(|side| side.report.iterations == iterations + 1);
    decode.while_steps_run(|scheduler| {
        let completed = scheduler.manager().completed_step();
        let Scheduler { handover: Handover::Decode(decode), cache, .. } = scheduler else {
            unreachable!()
        };
        while decode.filled(1) == 4 {
            decode.hear();
            let ended = decode.fill(cache, completed).unwrap();
            assert!(ended.is_empty() && since.elapsed() < HANG);
            std::thread::yield_now();
        }
    });
    prefill.until(|side| side.handover().handover_blocks == 2 + 16);
    decode.finish();
    prefill.finish();
    decode.close();
    prefill.close();
}

#[test]
fn what_has_come_of_a_node_that_dies_is_used_and_the_rest_is_computed() {
    with_half_a_prompt(Life::default(), |prefill, mut decode| {
        drop(prefill);
        decode.finish();
        let report = decode.handover();
        assert_eq!((report.handed_over, report.handover_recomputed), (0, 1));
        assert_eq!(decode.computed(), 4 * BLOCK + 32 + 100);
        decode.close();
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
    decode.until(|side| side.filled(1) == 4);
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
    decode.until(|side| side.filled(0) == 4);
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

#[test]
fn blocks_are_filled_behind_the_copies_that_still_read_them() {
    // The third one takes the blocks of the second one, which move down to the host meanwhile, while the first one runs. The last
    // one finds them there.
    let all = [
        request((2, 0), 600, 0),
        request((8, 0), 2, 100),
        request((8, 0), 2, 200),
        request((8, 0), 2, 100),
    ];
    let trace = Trace::new(all.to_vec());
    let nodes = Nodes::new(1);
    let mut prefill = Side::new(nodes.config(0, &config(64, 1)), &trace);
    let config = RunConfig { host_blocks: 64, ..config(21, 2) };
    let mut decode = Side::new(nodes.config(1, &config), &trace);
    prefill.until(|side| side.handover().handover_blocks == 2 + 8);
    decode.until(|side| side.report.finished == 1);
    decode.until(|side| side.computed() > 6 * BLOCK);
    prefill.until(|side| side.handover().handover_blocks == 2 + 8 + 8);
    decode.until(|side| side.report.finished == 2);
    prefill.finish();
    decode.finish();
    assert!(decode.scheduler.manager().stats().offloaded_blocks > 0);
    assert!(decode.scheduler.manager().stats().onboarded_blocks > 0);
    decode.close();
    prefill.close();
}
