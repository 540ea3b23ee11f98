//! The start of a run: the processes, the division of the model over them, and their manager.

use std::collections::VecDeque;

use cuda_driver::guard;
use kv_multigpu::place::Placement;
use kv_plane::SharedMemory;
use kv_plane::manager::{GroupId, GroupOptions, Manager, ManagerOptions, Survivors};
use kv_pool::clock::ManualClock;
use kv_pool::store::StoreByEvidence;
use kv_pool::{PoolConfig, Tier};

use super::WorkersConfig;
use super::error::WorkerFault;
use super::fleet::{self, Fleet, Place};
use super::frame;
use super::member::{Deadline, Member};
use super::setup::{Memory, Open, Opened, Share};
use crate::config::{ConfigError, RunConfig};
use crate::device::SimSizes;
use crate::engine::passing::pool_clock;
use crate::engine::{OVERLAP_DEPTH, RunError, blocks_of_longest, counted, groups, tiers};
use crate::place::{self, Division, place_apart};
use crate::report::WorkersReport;
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
    let failed = |worker: usize| {
        move |source| RunError::Worker { worker: worker as u16, source: Box::new(source) }
    };
    let opens = opens(config, workers);
    // All start at once.
    let started = opens.iter().enumerate();
    let started =
        started.map(|(worker, _)| Member::start(&workers.command).map_err(failed(worker)));
    let mut members = started.collect::<Result<Vec<_>, _>>()?;
    let mut opened = Vec::new();
    for (worker, (member, open)) in members.iter_mut().zip(&opens).enumerate() {
        let deadline = Deadline::after(workers.timeout);
        let begun = fleet::open(member, open, deadline).map_err(WorkerFault::at_start);
        opened.push(begun.map_err(failed(worker))?);
    }
    let shared = shared(config, workers.workers)?;
    let (placement, shares) = shares(config, &opened, blocks_of_longest(config, trace))?;
    let mut shares: Vec<_> =
        shares.into_iter().map(|share| share.sharing(shared.as_ref())).collect();
    for (share, worker) in shares.iter_mut().zip(0..) {
        share.give_files(config, worker, workers.workers);
    }
    for (member, share) in members.iter().zip(&shares) {
        member.send(frame::of_value(frame::Kind::Share, share).into());
    }
    let kinds = groups::shapes(config)?.into_iter().map(|(_, reads)| reads).collect::<Vec<_>>();
    let most = Memory { device_blocks: u64::MAX, host_blocks: u64::MAX };
    let (mut memory, mut survivors) = (vec![most; kinds.len()], Vec::new());
    for (worker, member) in members.iter_mut().enumerate() {
        let deadline = Deadline::after(workers.timeout);
        let ready = fleet::ready(member, memory.len(), deadline).map_err(WorkerFault::at_start);
        let ready = ready.map_err(failed(worker))?;
        memory.iter_mut().zip(&ready.memory).for_each(|(all, own)| *all = all.meet(*own));
        let told = ready.survivors(worker as u16).map_err(WorkerFault::from);
        survivors.push(told.map_err(failed(worker))?);
    }
    let mut manager = manager(config, (workers.workers, shared), trace, clock, &memory)?;
    begin_tiers(&mut manager, config, &survivors)?;
    // What takes their place begins without content: all workers have forgotten it then.
    guard!("replay.replaced-files-empty", shares.iter_mut().for_each(Share::forget_files));
    let places = members.into_iter().zip(opens).zip(shares);
    let places = places.map(|((member, open), share)| {
        let shapes = groups::shapes(&share.config)?;
        Ok(Place { member, open, share, shapes, failures: 0 })
    });
    let budget = memory.first().map_or(0, |memory| memory.device_blocks);
    let report = WorkersReport { workers: workers.workers.into(), ..WorkersReport::default() };
    let fleet = Fleet {
        manager,
        workers: places.collect::<Result<Vec<_>, RunError>>()?,
        command: workers.command.clone(),
        timeout: workers.timeout,
        eager: opened.iter().any(|opened| !opened.simulated),
        in_flight: VecDeque::new(),
        staged: 0,
        memory,
        reads: kinds,
        budget,
        loss: None,
        judged: 0,
        stops: workers.stops.clone(),
        kills: workers.kills.clone(),
        report,
    };
    Ok(Started { fleet, placement, description: description(workers, &opened) })
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
    let groups = names.chunk_by(|a, b| a == b).map(|group| match group {
        [one] => (*one).to_owned(),
        many => format!("{} x {}", many.len(), many[0]),
    });
    let groups: Vec<_> = groups.collect();
    let processes = if names.len() == 1 { "worker process" } else { "worker processes" };
    format!("{} {processes}, {} ({})", names.len(), workers.device, groups.join(", "))
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
    let run = |layers: u32| {
        // As `kv-plane` divides a group over the devices of one process.
        let (each, more) = (layers / workers as u32, layers % workers as u32);
        match each {
            0 if layers > 0 => {
                let few = kv_plane::OptionsError::DevicesOverLayers { devices: workers, layers };
                Err(RunError::Build(few.into()))
            }
            _ => Ok(each + u32::from((worker as u32) < more)),
        }
    };
    let (full, windows) = (run(config.shape.layers - windows)?, run(windows)?);
    own.shape.layers = full + windows;
    own.full_layers = if windows > 0 { full } else { 0 };
    own.state_layers = run(config.state_layers)?;
    own.draft_layers = run(config.draft_layers)?;
    Ok(own)
}

/// Has the manager store what it is to store in files, and tells it what those of the workers have had since before.
fn begin_tiers(
    manager: &mut Manager,
    config: &RunConfig,
    survivors: &[Vec<Survivors>],
) -> Result<(), RunError> {
    if let Some((tier, rules)) = tiers::store_rules(config)? {
        let policy =
            StoreByEvidence::new(rules).map_err(|source| RunError::Build(source.into()))?;
        let set = manager.set_store_policy(tier, Box::new(policy));
        debug_assert!(set.is_ok(), "{set:?}");
    }
    for (worker, survivors) in (0..).zip(survivors) {
        let taken = survivors.iter().try_for_each(|of| manager.take_survivors(of));
        taken.map_err(|error| RunError::Worker { worker, source: Box::new(error.into()) })?;
    }
    Ok(())
}

/// The manager of a run, which hands out blocks that all workers have memory for.
fn manager(
    config: &RunConfig,
    (workers, shared): (u16, Option<SharedMemory>),
    trace: &Trace,
    clock: &ManualClock,
    memory: &[Memory],
) -> Result<Manager, RunError> {
    let given = shared.as_ref().map(groups::blocks_of).unwrap_or_default();
    let given = |group: usize, own| given.get(group).map_or(own, |&blocks| blocks.into());
    let (primary_blocks, secondary_blocks) = (given(0, config.device_blocks), config.host_blocks);
    let refused = |source| RunError::Build(kv_plane::BuildError::Manager(source));
    let blocks = blocks_of_longest(config, trace);
    let further = groups::further(config, blocks)?.into_iter().zip(1..);
    let further = further.map(|(group, index)| GroupOptions {
        kind: group.kind,
        block_tokens: config.block_tokens,
        pool: PoolConfig {
            primary_blocks: given(index, group.device_blocks.into()),
            secondary_blocks: group.host_blocks.into(),
            ..PoolConfig::default()
        },
        blocks_per_sequence_max: group.blocks_per_sequence_max,
        watermark_blocks: group.watermark_blocks,
        draft_model: group.draft_model,
    });
    let options = ManagerOptions {
        block_tokens: config.block_tokens,
        pool: PoolConfig { primary_blocks, secondary_blocks, ..PoolConfig::default() },
        further_groups: further.collect(),
        sequences_max: config.max_batch,
        blocks_per_sequence_max: counted("the longest request, in blocks,", blocks)?,
        workers,
        steps_in_flight_max: OVERLAP_DEPTH + 1,
        lower: tiers::rules(config),
        shared,
        ..ManagerOptions::default()
    };
    let further = options.further_groups.iter().map(|group| &group.pool);
    let pools: Vec<_> = std::iter::once(&options.pool).chain(further).cloned().collect();
    let mut policies = Vec::new();
    for pool in &pools {
        let blocks = pool.primary_blocks + pool.secondary_blocks;
        let policy = || config.policy.make(blocks).map_err(|source| RunError::Build(source.into()));
        let host = u32::try_from(pool.secondary_blocks).unwrap_or(u32::MAX);
        let store = super::super::stores::host_store(config, &[])?.make(host);
        let store = store.map_err(|source| RunError::Build(source.into()))?;
        policies.push(([(Tier::Primary, policy()?), (Tier::Secondary, policy()?)], store));
    }
    let mut policies = policies.into_iter();
    // Called for each group, in their order.
    let mut manager = Manager::with_pool(options, |builder| {
        let builder = builder.clock(pool_clock(config, false, clock));
        let Some((made, store)) = policies.next() else { return builder };
        let made = made.into_iter().filter_map(|(tier, made)| Some((tier, made?)));
        let builder = made.fold(builder, |builder, (tier, policy)| builder.policy(tier, policy));
        match store {
            Some(policy) => builder.store_policy(policy),
            None => builder,
        }
    })
    .map_err(refused)?;
    let shares = !manager.granules().is_empty();
    for ((pool, memory), id) in pools.iter().zip(memory).zip(0..) {
        let budgets = [
            (Tier::Primary, memory.device_blocks, pool.primary_blocks),
            (Tier::Secondary, memory.host_blocks, pool.secondary_blocks),
        ];
        // Memory that groups share is all there.
        let own = |tier| tier == Tier::Secondary || !shares;
        for (tier, ready, blocks) in
            budgets.into_iter().filter(|&(tier, _, blocks)| blocks > 0 && own(tier))
        {
            manager.set_budget(GroupId(id), tier, ready.min(blocks))?;
        }
    }
    Ok(manager)
}
