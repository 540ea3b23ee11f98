//! A call that is not granted changes nothing: the whole state is compared, for every call and every reason.

use crate::common::state::{difference, evictions, state};
use crate::common::{gets_nothing, sampled};
use crate::prelude::*;

/// Memory that is nearly used up, and sequences in every state.
struct World {
    manager: Manager,
    other: Manager,
    /// It decodes, and the last id that it samples is to come.
    running: Sequence,
    /// Its prompt is computed in part.
    prompt: Sequence,
    asleep: Sequence,
    foreign: Sequence,
    /// A tenant that holds as much as it may.
    bound: TenantId,
    strange: TenantId,
    step: OpenStep,
    held: Vec<Sequence>,
}

type Call = (&'static str, fn(&mut World) -> bool);

fn group(kind: GroupKind, device: u64) -> GroupOptions {
    let pool = PoolConfig { secondary_blocks: 4, ..PoolConfig::primary_only(device) };
    GroupOptions { pool, blocks_per_sequence_max: 16, ..common::group(kind, 0) }
}

fn one() -> ManagerOptions {
    let groups = vec![group(GroupKind::Full, 20)];
    ManagerOptions { groups, sequences_max: 64, ..options(20, 4) }
}

fn draft() -> ManagerOptions {
    let draft = GroupOptions { draft_model: true, ..group(GroupKind::Full, 20) };
    with_groups(one(), [draft])
}

fn several() -> ManagerOptions {
    let window = group(GroupKind::Window { tokens: 6, sinks: 2 }, 20);
    let state = group(GroupKind::State { checkpoint_tokens: 8, drafts: 1 }, 8);
    with_groups(one(), [window, state])
}

fn shared() -> ManagerOptions {
    let groups = [28, 14].map(|blocks| group(GroupKind::Full, blocks));
    ManagerOptions {
        groups: groups.into(),
        shared: Some(SharedMemory { granules: 7, granule_blocks: vec![4, 2] }),
        ..one()
    }
}

fn world(options: ManagerOptions) -> World {
    let lower = LowerOptions { tiers: 1, ..LowerOptions::default() };
    let options = ManagerOptions { pinned_blocks_max: 1, lower, ..options };
    let mut other = Manager::new(options.clone()).unwrap();
    let mut manager = made(options);
    let foreign = admit(&mut other, 0..6);
    let (bound, strange) = (manager.add_tenant().unwrap(), other.add_tenant().unwrap());
    // Content that nobody uses.
    drop(sampled(&mut manager, 100..112, 1));
    step(&mut manager, &mut []);
    let mut asleep = sampled(&mut manager, 200..206, 1);
    manager.suspend(&mut asleep).unwrap();
    step(&mut manager, &mut []);
    let held = admitted(common::ask(&mut manager, of(bound, 300..304)));
    for at in 0..u16::try_from(manager.options().groups.len()).unwrap() {
        manager.bound(GroupId(at), bound, 1);
    }
    let mut prompt = admit_within(&mut manager, 0..18, 6);
    step(&mut manager, &mut [&mut prompt]);
    let mut running = sampled(&mut manager, 500..505, 1);
    go_on(&mut manager, &mut running, 1);
    let step = manager.begin_step().unwrap();
    World {
        manager,
        other,
        running,
        prompt,
        asleep,
        foreign,
        bound,
        strange,
        step,
        held: vec![held],
    }
}

fn ask(world: &mut World, ids: Range<u32>, change: impl FnOnce(&mut Request)) -> Answer {
    let mut request = Request::new(ids.collect());
    change(&mut request);
    common::ask(&mut world.manager, request)
}

fn is_refused(answer: &Answer) -> bool {
    matches!(answer, Answer::Refused(_))
}

fn is_no_room(answer: &Answer) -> bool {
    matches!(answer, Answer::NoRoom(_))
}

/// A prompt that has no room now, and begins with what is cached.
fn too_many(world: &World) -> Range<u32> {
    if world.manager.granules().is_empty() { 100..160 } else { 100..124 }
}

fn has_further(world: &World) -> bool {
    world.manager.options().groups.len() > 1
}

fn keeps_states(world: &World) -> bool {
    let kinds = world.manager.options().groups.iter().map(|group| group.kind);
    kinds.into_iter().any(|kind| matches!(kind, GroupKind::State { .. }))
}

const ADMISSIONS: &[Call] = &[
    ("an empty request", |world| is_refused(&ask(world, 0..0, |_| {}))),
    ("a request that is too long", |world| is_refused(&ask(world, 0..1000, |_| {}))),
    ("a request that never fits its tenant", |world| {
        let tenant = world.bound;
        is_refused(&ask(world, 100..110, |request| request.tenant = tenant))
    }),
    ("a request of a foreign tenant", |world| {
        let tenant = world.strange;
        is_refused(&ask(world, 100..104, |request| request.tenant = tenant))
    }),
    ("a request with unordered inputs", |world| {
        is_refused(&ask(world, 100..110, |request| {
            request.content.inputs = vec![(5, vec![1]), (1, vec![2])];
        }))
    }),
    ("a request that waits for a prompt", |world| {
        matches!(ask(world, 0..18, |_| {}), Answer::Waiting(_))
    }),
    ("a request of a tenant at its bound", |world| {
        let tenant = world.bound;
        is_no_room(&ask(world, 304..308, |request| request.tenant = tenant))
    }),
    ("a request without room", |world| {
        let ids = too_many(world);
        is_no_room(&ask(world, ids, |request| request.waits = false))
    }),
    ("requests that wait for each other, without room for the first", |world| {
        let mut requests =
            [too_many(world), too_many(world)].map(|ids| Request::new(ids.collect()));
        requests.iter_mut().for_each(|request| request.hit_max = 8);
        let answers = world.manager.ask_all(&mut requests, u64::MAX);
        answers.len() == 1 && is_no_room(&answers[0])
    }),
    ("requests without a budget", |world| {
        let mut requests = [100..110, 600..610].map(|ids| Request::new(ids.collect()));
        world.manager.ask_all(&mut requests, 0).is_empty()
    }),
    ("a request whose memory is refused", |world| {
        if !world.manager.granules().is_empty() {
            // Memory that groups share is there.
            return true;
        }
        let mut requests = VecDeque::from([Request::new((600..640).collect())]);
        world.manager.growing(Some(&mut no_memory)).admit(&mut requests, u64::MAX).is_err()
    }),
    ("an adoption whose memory is refused", |world| {
        if !world.manager.granules().is_empty() {
            return true;
        }
        let there = world.manager.formats();
        let mut request = Request::new((600..640).collect());
        world.manager.growing(Some(&mut no_memory)).adopt(&mut request, 20, &there).is_err()
    }),
    ("an adoption of other groups", |world| {
        let mut request = Request::new((100..110).collect());
        let (answer, adoption) = world.manager.adopt(&mut request, 8, &[]);
        adoption.is_none() && matches!(answer, Answer::Refused(AdmitError::Format { .. }))
    }),
    ("an adoption without room", |world| {
        let mut request = Request::new(too_many(world).collect());
        let (answer, adoption) = adopt(&mut world.manager, &mut request, 20);
        adoption.is_none() && is_no_room(&answer)
    }),
    ("a pin of too much", |world| {
        let all = names(100..108);
        // Of a draft model, nothing is there.
        world.manager.pin(&all).map_or(true, |pin| pin.is_empty())
    }),
    ("a prefetch of what is there", |world| {
        let all = names(100..108);
        world.manager.prefetch(&all) == 0
    }),
    ("a prefetch of what is nowhere", |world| {
        let all = names(7000..7008);
        world.manager.prefetch(&all) == 0
    }),
];

/// The owner of memory that cannot say whether there is any.
fn no_memory(_: GroupId, _: usize) -> Result<u64, ()> {
    Err(())
}

const SEQUENCES: &[Call] = &[
    ("a reservation whose memory is refused", |world| {
        if keeps_states(world) || !world.manager.granules().is_empty() {
            // It ends at the next checkpoint, up to which there is room, or memory is there.
            return true;
        }
        world.manager.growing(Some(&mut no_memory)).reserve(&mut world.running, 40).is_err()
    }),
    ("a reservation without room", |world| {
        // With a state it ends at the next checkpoint, up to which there is room.
        keeps_states(world) || gets_nothing(&world.manager.reserve(&mut world.running, 58))
    }),
    ("a reservation of a prompt that is too long", |world| {
        keeps_states(world) || world.manager.reserve(&mut world.prompt, 1000).is_err()
    }),
    ("a reservation that is too long", |world| {
        keeps_states(world) || world.manager.reserve(&mut world.running, 1000).is_err()
    }),
    ("a reservation of a foreign sequence", |world| {
        world.manager.reserve(&mut world.foreign, 1).is_err()
    }),
    ("a reservation of a suspended sequence", |world| {
        world.manager.reserve(&mut world.asleep, 1).is_err()
    }),
    ("a draft reservation of a suspended sequence", |world| {
        world.manager.reserve_draft(&mut world.asleep, 1).is_err()
    }),
    ("a commit of another step", |world| {
        world.manager.commit(&mut world.running, 9999, &[1]).is_err()
    }),
    ("a commit of too many ids", |world| {
        let step = world.running.awaits().unwrap();
        world.manager.commit(&mut world.running, step, &[1; 9]).is_err()
    }),
    ("a commit of names", |world| {
        let step = world.running.awaits().unwrap();
        let names = Tokens::Named { count: 1, names: &[] };
        world.manager.commit(&mut world.running, step, names).is_err()
    }),
    ("a draft commit of another step", |world| {
        world.manager.commit_draft(&mut world.running, 9999, 1).is_err()
    }),
    ("a cut behind the end", |world| world.manager.truncate(&mut world.running, 99).is_err()),
    ("a cut of a suspended sequence", |world| {
        world.manager.truncate(&mut world.asleep, 1).is_err()
    }),
    ("a next turn with ids to come", |world| {
        world.manager.extend(&mut world.running, &[1]).is_err()
    }),
    ("a fork with ids to come", |world| world.manager.fork(&mut world.running).is_err()),
    ("a fork of a foreign sequence", |world| world.manager.fork(&mut world.foreign).is_err()),
    ("a second suspension", |world| world.manager.suspend(&mut world.asleep).is_err()),
    ("a resumption of what runs", |world| world.manager.resume(&mut world.running).is_err()),
    ("a resumption of a foreign sequence", |world| {
        world.manager.resume(&mut world.foreign).is_err()
    }),
    ("a batch without tokens", |world| {
        world.manager.stage(&world.step, &mut [&mut world.running]).is_err()
    }),
    ("a batch with a suspended sequence", |world| {
        world.manager.stage(&world.step, &mut [&mut world.asleep]).is_err()
    }),
    ("a batch with a foreign sequence", |world| {
        world.manager.stage(&world.step, &mut [&mut world.foreign]).is_err()
    }),
    ("an export with ids to come", |world| {
        let running = std::mem::replace(&mut world.running, world.held.pop().unwrap());
        let refused = world.manager.export(running).unwrap_err();
        world.held.push(std::mem::replace(&mut world.running, refused.sequence));
        true
    }),
    ("the end of a transfer of another manager", |world| {
        let there = world.other.formats();
        let mut request = Request::new((700..710).collect());
        let (answer, adoption) = world.other.adopt(&mut request, 8, &there);
        drop(answer);
        world.manager.adopted(&mut world.running, adoption.unwrap(), 1).is_err()
    }),
    ("a batch of a foreign step", |world| {
        let step = world.other.begin_step().unwrap();
        world.manager.stage(&step, &mut []).is_err()
    }),
];

const OTHERS: &[Call] = &[
    ("a second step", |world| world.manager.begin_step().is_err()),
    ("the end of a foreign step", |world| {
        let step = world.other.begin_step().unwrap();
        world.manager.finish_step(step).is_err()
    }),
    ("a completion of a step to come", |world| {
        let done = Completion { worker: WorkerId(0), step: 9999, outcome: Outcome::Done };
        world.manager.complete(done).is_err()
    }),
    ("a completion of no worker", |world| {
        let done = Completion { worker: WorkerId(9), step: 1, outcome: Outcome::Done };
        world.manager.complete(done).is_err()
    }),
    ("the end of no ticket", |world| {
        let settled = Settled { worker: WorkerId(0), ticket: TicketId(99), wrong: Vec::new() };
        world.manager.settle(&settled).is_err()
    }),
    ("a loss of no tier", |world| {
        let dropped = Dropped { worker: WorkerId(0), tier: Tier::Primary, blocks: Vec::new() };
        world.manager.dropped(&dropped).is_err()
    }),
    ("a policy of no tier", |world| {
        world.manager.set_store_policy(Tier::Fourth, Box::new(StoreAll)).is_err()
    }),
    ("the loss of no worker", |world| world.manager.lose_worker(WorkerId(9)).is_err()),
    ("the fence of a worker that runs", |world| world.manager.fence_worker(WorkerId(0)).is_err()),
    ("the start of a worker that runs", |world| world.manager.join_worker(WorkerId(0)).is_err()),
    ("a budget of no group", |world| {
        world.manager.set_budget(GroupId(9), Tier::Primary, 1).is_err()
    }),
    ("a budget beyond the memory", |world| {
        world.manager.set_budget(GroupId(0), Tier::Primary, 9999).is_err()
    }),
    ("granules beyond the memory", |world| world.manager.set_granules(9999).is_err()),
    ("a quota of a foreign tenant", |world| {
        world
            .manager
            .set_quota(GroupId(0), world.strange, Tier::Primary, TenantQuota::NONE)
            .is_err()
    }),
    ("a quota of more than there is", |world| {
        let quota = TenantQuota { reserved: 9999, ..TenantQuota::NONE };
        world.manager.set_quota(GroupId(0), world.bound, Tier::Primary, quota).is_err()
    }),
];

/// What a caller sees of a sequence.
fn view(sequence: &Sequence) -> String {
    let groups = (0..3).map(GroupId);
    let blocks = |group| (0..16).map(move |at| sequence.block(group, at));
    let blocks: Vec<_> = groups.flat_map(blocks).collect();
    let ends = (sequence.known(), sequence.resolved(), sequence.upper(), sequence.draft_end());
    let next = (sequence.next(), sequence.awaits(), sequence.row(), sequence.is_suspended());
    format!("{ends:?} {next:?} {blocks:?}")
}

/// Without a row.
const ROWS: &[Call] = &[
    ("a request without a row", |world| matches!(ask(world, 600..604, |_| {}), Answer::NoRow)),
    ("an adoption without a row", |world| {
        let there = world.manager.formats();
        let mut request = Request::new((600..610).collect());
        matches!(world.manager.adopt(&mut request, 8, &there), (Answer::NoRow, None))
    }),
    ("a fork without a row", |world| world.manager.fork(&mut world.prompt).is_err()),
    ("a resumption without a row", |world| {
        world.manager.resume(&mut world.asleep) == Ok(Room::Lacks(NoRoom::Row))
    }),
];

/// Without a block on the device and in host memory.
const MEMORY: &[Call] = &[
    ("a resumption without room", |world| {
        // Of several groups, nothing is left that it could go on with, so it needs no block.
        has_further(world) || gets_nothing(&world.manager.resume(&mut world.asleep))
    }),
    ("a suspension without room", |world| world.manager.suspend(&mut world.prompt).is_err()),
    ("a block that is not there", |world| {
        keeps_states(world) || gets_nothing(&world.manager.reserve(&mut world.running, 4))
    }),
    ("a request for one block", |world| is_no_room(&ask(world, 600..601, |_| {}))),
];

/// A world without rows.
fn without_rows(options: &ManagerOptions) -> World {
    world(ManagerOptions { sequences_max: 3, ..options.clone() })
}

/// A world without blocks.
fn without_blocks(options: &ManagerOptions) -> World {
    let mut world = world(options.clone());
    for id in 800_000.. {
        match ask(&mut world, id..id + 1, |_| {}) {
            Answer::Admitted(sequence) => world.held.push(sequence),
            _ => break,
        }
    }
    for group in 0..u16::try_from(options.groups.len()).unwrap() {
        world.manager.set_budget(GroupId(group), Tier::Secondary, 0).unwrap();
    }
    world
}

fn check(
    name: &str,
    options: &ManagerOptions,
    calls: &[Call],
    world: fn(&ManagerOptions) -> World,
) {
    for (what, call) in calls {
        let what = format!("{what}, with {name}");
        let mut refused = world(options);
        let before = state(&refused.manager);
        let sequences = |world: &World| [&world.running, &world.prompt, &world.asleep].map(view);
        let of_sequences = sequences(&refused);
        assert!(call(&mut refused), "{what}, was granted");
        if let Some(difference) = difference(&before, &state(&refused.manager)) {
            panic!("{what}:\n{difference}");
        }
        assert_eq!(of_sequences, sequences(&refused), "{what}");
        // Nor does it change who is evicted next.
        let mut untouched = world(options);
        assert_eq!(evictions(&mut refused.manager), evictions(&mut untouched.manager), "{what}");
    }
}

#[test]
fn h37_a_call_that_is_not_granted_changes_nothing() {
    let worlds = [
        ("one group", one()),
        ("a draft model", draft()),
        ("three groups", several()),
        ("shared memory", shared()),
    ];
    for (name, options) in worlds {
        for calls in [ADMISSIONS, SEQUENCES, OTHERS] {
            check(name, &options, calls, |options| world(options.clone()));
        }
        check(name, &options, ROWS, without_rows);
        check(name, &options, MEMORY, without_blocks);
    }
}
