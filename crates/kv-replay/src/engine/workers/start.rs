//! The start of a run: the processes, the division of the model over them, and their cache.

use std::process::Command;

use kv_multigpu::place::Placement;
use kv_plane::manager::WorkerId;
use kv_plane::processes::{Connection, Processes};
use kv_plane::{GroupId, KvCache, KvCacheOptions, SharedMemory};
use kv_pool::clock::ManualClock;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::WorkersConfig;
use super::drill::Drills;
use super::fleet::Fleet;
use super::setup::{Open, Opened, Share};
use crate::config::{ConfigError, RunConfig};
use crate::device::{SimSizes, combined};
use crate::engine::passing::pool_clock;
use crate::engine::{RunError, blocks_of_longest, common_options, groups, tiers};
use crate::family;
use crate::place::{self, Division, place_apart};
use crate::trace::Trace;

pub(super) struct Started {
    pub(super) fleet: Fleet,
    pub(super) placement: Option<Placement>,
    pub(super) description: String,
}

pub(super) fn start(
    config: &RunConfig,
    workers: &WorkersConfig,
    trace: &Trace,
    clock: &ManualClock,
) -> Result<Started, RunError> {
    let (command, number) = (workers.command.clone(), workers.workers);
    let connect = move |_| {
        Connection::spawn(family::bind(Command::new(&command.program).args(&command.args)))
    };
    let shared = shared(config, number)?;
    // Its blocks are those of all workers.
    let blocks = blocks_of_longest(config, trace);
    let common = common_options(config, blocks, &[], pool_clock(config, false, clock))?;
    let options = KvCacheOptions { tiers: tiers::of_workers(config)?, ..common };
    let options = groups::sharing(options, shared.clone());
    let mut processes = Processes::start(options, number, workers.timeout, connect)?;
    let mut opened = Vec::new();
    for (open, worker) in opens(config, workers).iter().zip(0..) {
        opened.push(ask::<Opened>(&mut processes, WorkerId(worker), open)?);
    }
    let (placement, shares) = shares(config, &opened, blocks)?;
    let mut shapes = Vec::new();
    for (share, worker) in shares.into_iter().zip(0..) {
        let mut share = share.sharing(shared.as_ref());
        share.give_files(config, worker, number);
        shapes.extend(groups::shapes(&share.config)?);
        tell(&mut processes, WorkerId(worker), &share)?;
    }
    if opened.iter().all(|opened| opened.simulated) {
        processes = processes.in_lockstep();
    }
    let reads = groups::shapes(config)?.into_iter().map(|(_, reads)| reads).collect();
    let drills = Drills::new(workers);
    let cache = KvCache::start(processes)?;
    let fleet = Fleet { cache, shapes, reads, drills, failed: None, told: 0 };
    Ok(Started { fleet, placement, description: description(workers, &opened) })
}

/// Tells a worker something.
fn tell(
    processes: &mut Processes,
    worker: WorkerId,
    what: &impl Serialize,
) -> Result<Vec<u8>, RunError> {
    // A value of numbers and texts is always written.
    let what = serde_json::to_vec(what).unwrap_or_default();
    Ok(processes.ask(worker, &what)?)
}

fn ask<T: DeserializeOwned>(
    processes: &mut Processes,
    worker: WorkerId,
    what: &impl Serialize,
) -> Result<T, RunError> {
    let answer = tell(processes, worker, what)?;
    serde_json::from_slice(&answer).map_err(RunError::Account)
}

fn opens(config: &RunConfig, workers: &WorkersConfig) -> Vec<Open> {
    let sizes = SimSizes::for_config(config);
    let open = |worker| Open {
        device: workers.device.to_string(),
        worker,
        profile: workers.profile.clone(),
        device_bytes: sizes.device_bytes,
        pinned_bytes: sizes.pinned_bytes,
        seed: config.seed,
    };
    (0..workers.workers).map(open).collect()
}

fn description(workers: &WorkersConfig, opened: &[Opened]) -> String {
    let names: Vec<_> = opened.iter().map(|opened| opened.name.as_str()).collect();
    let processes = if names.len() == 1 { "worker process" } else { "worker processes" };
    format!("{} {processes}, {} ({})", names.len(), workers.device, combined(&names))
}

/// How the groups share the memory of each worker, for all workers alike.
fn shared(config: &RunConfig, workers: u16) -> Result<Option<SharedMemory>, RunError> {
    match config.place {
        // Each worker has as many heads of all layers.
        Division::Heads => groups::shared(&share_of_groups(config, 0, workers.into())?, 1),
        Division::Layers(_) => groups::shared(config, workers.into()),
    }
}

fn shares(
    config: &RunConfig,
    opened: &[Opened],
    blocks: u64,
) -> Result<(Option<Placement>, Vec<Share>), RunError> {
    if let [_] = opened {
        return Ok((None, vec![Share::new(config, blocks)]));
    }
    if config.has_groups() {
        let shares = (0..opened.len()).map(|worker| share_of_groups(config, worker, opened.len()));
        let shares = shares.map(|share| Ok(Share::new(&share?, blocks)));
        return Ok((None, shares.collect::<Result<_, RunError>>()?));
    }
    let free_bytes = |one: &Opened| {
        let here = |other: &&Opened| !one.simulated && other.ordinal == one.ordinal;
        one.free_bytes / (opened.iter().filter(here).count() as u64).max(1)
    };
    let free_bytes: Vec<_> = opened.iter().map(free_bytes).collect();
    let placement = place_apart(config, &free_bytes)?;
    if config.device_blocks > placement.kv_blocks_max() {
        let (blocks, fit) = (config.device_blocks, placement.kv_blocks_max());
        let options = kv_plane::OptionsError::PlacedTooMany { blocks, fit };
        return Err(RunError::Build(options.into()));
    }
    let share = |worker: usize| {
        let mut own = config.clone();
        match (config.place, placement.shards()) {
            (Division::Heads, Some(shards)) => {
                let heads = shards.kv_heads_of(worker);
                own.shape.kv_heads = (heads.end - heads.start) as u32;
            }
            _ => own.shape.layers = placement.layers_on(worker).count() as u32,
        }
        match own.shape.layers {
            0 => Err(RunError::WorkerWithoutLayers { worker: worker as u16 }),
            _ => Ok(Share::new(&own, blocks)),
        }
    };
    let shares = (0..opened.len()).map(share).collect::<Result<_, _>>()?;
    Ok((Some(placement), shares))
}

/// What one of `workers` workers has of a model of several groups: a contiguous run of the layers of each, or heads
/// of all layers.
fn share_of_groups(
    config: &RunConfig,
    worker: usize,
    workers: usize,
) -> Result<RunConfig, RunError> {
    let mut own = config.clone();
    if config.place == Division::Heads {
        let shards = place::shards(config.shape.kv_heads, workers);
        let shards = shards
            .map_err(|reason| ConfigError::Heads { kv_heads: config.shape.kv_heads, reason })?;
        let heads = shards.kv_heads_of(worker);
        own.shape.kv_heads = (heads.end - heads.start) as u32;
        return Ok(own);
    }
    let windows = config.window_layers();
    // The group that has the next layers, if there are any.
    let mut group = GroupId(0);
    let mut run = |layers: u32| {
        // As `kv-plane` divides a group over the devices of one process.
        let (each, more) = (layers / workers as u32, layers % workers as u32);
        if each == 0 && layers > 0 {
            let few = kv_plane::OptionsError::DevicesOverLayers { group, devices: workers, layers };
            return Err(RunError::Build(few.into()));
        }
        group.0 += u16::from(layers > 0);
        Ok(each + u32::from((worker as u32) < more))
    };
    let (full, windows) = (run(config.shape.layers - windows)?, run(windows)?);
    own.shape.layers = full + windows;
    own.full_layers = if windows > 0 { full } else { 0 };
    own.state_layers = run(config.state_layers)?;
    own.draft_layers = run(config.draft_layers)?;
    Ok(own)
}
