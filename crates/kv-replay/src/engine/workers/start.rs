//! The start of a run: the processes, the division of the model over them, and their manager.

use std::sync::Arc;

use kv_cache::kv_manager::{GroupId, Manager, ManagerOptions};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_place::Placement;
use kv_pool::clock::ManualClock;
use kv_pool::{PoolConfig, Tier};

use super::WorkersConfig;
use super::fleet::{self, Fleet, Place};
use super::frame;
use super::member::{Deadline, Member};
use super::setup::{Memory, Open, Opened, Share};
use crate::config::RunConfig;
use crate::device::SimSizes;
use crate::engine::{OVERLAP_DEPTH, RunError, blocks_of_longest, counted};
use crate::place::{Division, place_apart};
use crate::shape::KV_COUNT;
use crate::trace::Trace;

/// What was started for a run.
pub(super) struct Started {
    pub(super) fleet: Fleet,
    pub(super) placement: Option<Placement>,
    pub(super) description: String,
}

/// Starts the processes, and divides the model over their devices.
pub(super) fn start(
    config: &RunConfig,
    workers: &WorkersConfig,
    trace: &Trace,
    clock: &ManualClock,
) -> Result<Started, RunError> {
    let failed = |worker: usize| {
        move |source| RunError::Worker { worker: worker as u16, source: Box::new(source) }
    };
    let sizes = SimSizes::for_config(config);
    let open = |worker| Open {
        device: workers.device.to_string(),
        worker,
        profile: workers.profile.clone(),
        device_bytes: sizes.device_bytes,
        pinned_bytes: sizes.pinned_bytes,
        seed: config.seed,
    };
    let opens: Vec<_> = (0..workers.workers).map(open).collect();
    // All start at once.
    let started = opens.iter().enumerate();
    let started =
        started.map(|(worker, _)| Member::start(&workers.command).map_err(failed(worker)));
    let mut members = started.collect::<Result<Vec<_>, _>>()?;
    let mut opened = Vec::new();
    for (worker, (member, open)) in members.iter_mut().zip(&opens).enumerate() {
        let deadline = Deadline::after(workers.timeout);
        opened.push(fleet::open(member, open, deadline).map_err(failed(worker))?);
    }
    let (placement, shares) = shares(config, &opened, blocks_of_longest(config, trace))?;
    for (member, share) in members.iter().zip(&shares) {
        member.send(frame::of_value(frame::Kind::Share, share).into());
    }
    let mut memory = Memory { device_blocks: u64::MAX, host_blocks: u64::MAX };
    for (worker, member) in members.iter_mut().enumerate() {
        let deadline = Deadline::after(workers.timeout);
        let ready = fleet::ready(member, deadline).map_err(failed(worker))?;
        memory.device_blocks = memory.device_blocks.min(ready.device_blocks);
        memory.host_blocks = memory.host_blocks.min(ready.host_blocks);
    }
    let places = members.into_iter().zip(opens).zip(shares).map(|((member, open), share)| {
        let shape = shape(&share)?;
        Ok(Place::new(member, open, share, shape))
    });
    let plan = fleet::Plan {
        manager: manager(config, workers.workers, trace, clock, memory)?,
        workers: places.collect::<Result<Vec<_>, RunError>>()?,
        memory,
        command: workers.command.clone(),
        timeout: workers.timeout,
        eager: opened.iter().any(|opened| !opened.simulated),
        stops: workers.stops.clone(),
        kills: workers.kills.clone(),
    };
    let fleet = Fleet::new(plan);
    Ok(Started { fleet, placement, description: description(workers, &opened) })
}

fn description(workers: &WorkersConfig, opened: &[Opened]) -> String {
    let names: Vec<_> = opened.iter().map(|opened| opened.name.as_str()).collect();
    let groups = names.chunk_by(|a, b| a == b).map(|group| match group {
        [one] => (*one).to_owned(),
        many => format!("{} x {}", many.len(), many[0]),
    });
    let groups: Vec<_> = groups.collect();
    let processes = if names.len() == 1 { "worker process" } else { "worker processes" };
    format!("{} {processes}, {} ({})", names.len(), workers.device, groups.join(", "))
}

/// Divides the model over the workers' devices.
fn shares(
    config: &RunConfig,
    opened: &[Opened],
    blocks: u64,
) -> Result<(Option<Placement>, Vec<Share>), RunError> {
    let whole = (config.shape.layers, config.shape.kv_heads);
    if let [_] = opened {
        return Ok((None, vec![Share::new(config, whole.0, whole.1, blocks)]));
    }
    let free_bytes = |one: &Opened| {
        let here = |other: &&Opened| !one.simulated && other.ordinal == one.ordinal;
        one.free_bytes / (opened.iter().filter(here).count() as u64).max(1)
    };
    let free_bytes: Vec<_> = opened.iter().map(free_bytes).collect();
    let placement = place_apart(config, &free_bytes)?;
    if config.device_blocks > placement.kv_blocks_max() {
        let (blocks, fit) = (config.device_blocks, placement.kv_blocks_max());
        let options = kv_cache::OptionsError::PlacedTooMany { blocks, fit };
        return Err(RunError::Build(options.into()));
    }
    let share = |worker: usize| match (config.place, placement.shards()) {
        (Division::Heads, Some(shards)) => {
            let heads = shards.kv_heads_of(worker);
            Ok(Share::new(config, whole.0, (heads.end - heads.start) as u32, blocks))
        }
        _ => match placement.layers_on(worker).count() as u32 {
            0 => Err(RunError::WorkerWithoutLayers { worker: worker as u16 }),
            layers => Ok(Share::new(config, layers, whole.1, blocks)),
        },
    };
    let shares = (0..opened.len()).map(share).collect::<Result<_, _>>()?;
    Ok((Some(placement), shares))
}

/// The shape of a worker's share.
fn shape(share: &Share) -> Result<KvShape, RunError> {
    let config = share
        .config()
        .map_err(|error| RunError::Worker { worker: 0, source: Box::new(error.into()) })?;
    Ok(KvShape::new(KvShapeOptions {
        layers: share.layers,
        kv_count: KV_COUNT as u32,
        row_bytes: config.shape.row_bytes()?,
        block_tokens: config.block_tokens,
    })?)
}

/// The manager of a run, which hands out blocks that all workers have memory for.
fn manager(
    config: &RunConfig,
    workers: u16,
    trace: &Trace,
    clock: &ManualClock,
    memory: Memory,
) -> Result<Manager, RunError> {
    let (primary_blocks, secondary_blocks) = (config.device_blocks, config.host_blocks);
    let refused = |source| RunError::Build(kv_cache::BuildError::Manager(source));
    let options = ManagerOptions {
        block_tokens: config.block_tokens,
        pool: PoolConfig { primary_blocks, secondary_blocks, ..PoolConfig::default() },
        sequences_max: config.max_batch,
        blocks_per_sequence_max: counted(
            "the longest request, in blocks,",
            blocks_of_longest(config, trace),
        )?,
        workers,
        steps_in_flight_max: OVERLAP_DEPTH + 1,
        lower: super::super::tiers::tiers(config, 0).options(),
        ..ManagerOptions::default()
    };
    let policy = || match config.policy {
        kv_pool::policy::PolicyKind::Lru => Ok(None),
        kind => kind.make(primary_blocks + secondary_blocks).map(Some),
    };
    let policy = || policy().map_err(|source| RunError::Build(source.into()));
    let policies = [(Tier::Primary, policy()?), (Tier::Secondary, policy()?)];
    let mut policies = Some(policies);
    let mut manager = Manager::with_pool(options, |builder| {
        let builder = builder.clock(Arc::new(clock.clone()));
        let made =
            policies.take().into_iter().flatten().filter_map(|(tier, made)| Some((tier, made?)));
        made.fold(builder, |builder, (tier, policy)| builder.policy(tier, policy))
    })
    .map_err(refused)?;
    let group = GroupId::default();
    manager.set_budget(group, Tier::Primary, memory.device_blocks.min(primary_blocks))?;
    if secondary_blocks > 0 {
        manager.set_budget(group, Tier::Secondary, memory.host_blocks.min(secondary_blocks))?;
    }
    Ok(manager)
}
