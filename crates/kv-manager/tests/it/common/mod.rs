//! What the tests have in common.

#![allow(dead_code, reason = "each test uses a part of it")]
pub(crate) mod below;
pub(crate) mod ends;
pub(crate) mod host;
pub(crate) mod state;

use std::fmt::Debug;

use crate::prelude::*;

/// Blocks of four tokens.
pub(crate) const BLOCK: u32 = 4;

pub(crate) fn options(device: u64, host: u64) -> ManagerOptions {
    let pool = PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(device) };
    ManagerOptions::new(BLOCK, pool)
}

/// The same with groups behind the first.
pub(crate) fn with_groups(
    mut options: ManagerOptions,
    further: impl IntoIterator<Item = GroupOptions>,
) -> ManagerOptions {
    options.groups.extend(further);
    options
}

/// A group with so many device blocks.
pub(crate) fn group(kind: GroupKind, device: u64) -> GroupOptions {
    let pool = PoolConfig::primary_only(device);
    GroupOptions { kind, blocks_per_sequence_max: 64, ..GroupOptions::new(BLOCK, pool) }
}

pub(crate) fn made(options: ManagerOptions) -> Manager {
    Manager::new(options).unwrap()
}

pub(crate) fn manager(device: u64, host: u64) -> Manager {
    made(options(device, host))
}

pub(crate) fn admitted(answer: Answer) -> Sequence {
    match answer {
        Answer::Admitted(sequence) => sequence,
        other => panic!("{other:?}"),
    }
}

/// The blocks that are missing to a sequence, which got none.
pub(crate) fn lacking<T: Debug, E: Debug>(answer: Result<Room<T>, E>) -> Missing {
    match answer {
        Ok(Room::Lacks(NoRoom::Blocks(missing) | NoRoom::Bound(missing))) => missing,
        other => panic!("{other:?}"),
    }
}

/// Whether a sequence got nothing, for now or for good.
pub(crate) fn gets_nothing<T, E>(answer: &Result<Room<T>, E>) -> bool {
    !matches!(answer, Ok(Room::Given(_)))
}

/// Asks for requests where they lie: each that was looked at has an answer, and is there again, but without tokens once it
/// is admitted.
pub(crate) trait Asks {
    fn ask_all(&mut self, requests: &mut [Request], budget: u64) -> Vec<Answer>;

    /// Has a tenant hold no more device blocks of a group.
    fn bound(&mut self, group: GroupId, tenant: TenantId, held_max: u64);

    fn first_pool(&self) -> PoolView;

    /// Blocks of a group that have a name.
    fn named(&self, group: GroupId) -> usize;
}

impl Asks for Manager {
    fn ask_all(&mut self, requests: &mut [Request], budget: u64) -> Vec<Answer> {
        let mut queue = queued(requests);
        let admission = self.admit(&mut queue, budget);
        answered(requests, queue, admission)
    }

    fn bound(&mut self, group: GroupId, tenant: TenantId, held_max: u64) {
        let quota = TenantQuota { held_max, ..TenantQuota::NONE };
        self.set_quota(group, tenant, Tier::Primary, quota).unwrap();
    }

    fn first_pool(&self) -> PoolView {
        self.pool(GroupId(0)).unwrap()
    }

    fn named(&self, group: GroupId) -> usize {
        let blocks = self.pool(group).unwrap().snapshot().blocks;
        blocks.iter().filter(|block| block.hash.is_some()).count()
    }
}

/// Requests with their places.
pub(crate) fn queued(requests: &mut [Request]) -> VecDeque<(usize, Request)> {
    let take = |request: &mut Request| std::mem::replace(request, Request::new(Vec::new()));
    requests.iter_mut().map(take).enumerate().collect()
}

/// What came of each of these requests, in their order; those that are not admitted go back to their places.
pub(crate) fn answered(
    requests: &mut [Request],
    queue: VecDeque<(usize, Request)>,
    admission: Admission<(usize, Request)>,
) -> Vec<Answer> {
    let Admission { admitted, refused, waiting, no_room } = admission;
    let mut answers = BTreeMap::new();
    for ((place, _), sequence) in admitted {
        answers.insert(place, Answer::Admitted(sequence));
    }
    for ((place, request), error) in refused {
        requests[place] = request;
        answers.insert(place, Answer::Refused(error));
    }
    for (position, waiting) in waiting {
        let answer = match waiting {
            Waiting::Bound(missing) => Answer::NoRoom(missing),
            waiting => Answer::Waiting(waiting),
        };
        answers.insert(queue[position].0, answer);
    }
    if let Some((position, no_room)) = no_room {
        let answer = match no_room {
            NoRoom::Row => Answer::NoRow,
            NoRoom::Blocks(missing) | NoRoom::Bound(missing) => Answer::NoRoom(missing),
        };
        answers.insert(queue[position].0, answer);
    }
    assert!(queue.iter().is_sorted_by_key(|request| request.0), "the queue keeps its order");
    for (place, request) in queue {
        requests[place] = request;
    }
    assert!(answers.keys().copied().eq(0..answers.len()), "{answers:?}");
    answers.into_values().collect()
}

pub(crate) fn admit(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) -> Sequence {
    let mut requests = [Request::new(ids.into_iter().collect())];
    admitted(manager.ask_all(&mut requests, u64::MAX).pop().unwrap())
}

/// A tenant's request.
pub(crate) fn of(tenant: TenantId, ids: Range<u32>) -> Request {
    let mut request = Request::new(ids.collect());
    request.tenant = tenant;
    request
}

/// The answer to a request that is alone.
pub(crate) fn ask(manager: &mut Manager, request: Request) -> Answer {
    manager.ask_all(&mut [request], u64::MAX).pop().unwrap()
}

/// The answer to a prompt that waits for nobody.
pub(crate) fn ask_now(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) -> Answer {
    let mut request = Request::new(ids.into_iter().collect());
    request.waits = false;
    ask(manager, request)
}

pub(crate) fn admit_now(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) -> Sequence {
    admitted(ask_now(manager, ids))
}

/// Two sequences of a prompt, of which the second waits for no name of the first.
pub(crate) fn twins(manager: &mut Manager, ids: Range<u32>) -> [Sequence; 2] {
    let mut requests = [ids.clone(), ids].map(|ids| Request::new(ids.collect()));
    requests[1].waits = false;
    let answers = manager.ask_all(&mut requests, u64::MAX);
    let both: Vec<_> = answers.into_iter().map(admitted).collect();
    both.try_into().unwrap()
}

/// Commits the id that a step has sampled, and computes it in a whole step; its plan.
pub(crate) fn decode(manager: &mut Manager, sequence: &mut Sequence, at: u64, id: u32) -> StepPlan {
    manager.commit(sequence, at, &[id]).unwrap();
    go_on(manager, sequence, 1)
}

/// Adopts from a manager like this one.
pub(crate) fn adopt(
    manager: &mut Manager,
    request: &mut Request,
    tokens: u64,
) -> (Answer, Option<Adoption>) {
    let formats = manager.formats();
    manager.adopt(request, tokens, &formats)
}

/// The names of the blocks that ids fill.
pub(crate) fn names(ids: impl IntoIterator<Item = u32>) -> Vec<BlockHash> {
    let ids: Vec<u32> = ids.into_iter().collect();
    let mut parent = BlockHash::ROOT;
    let name = |ids: &[u32]| {
        parent = BlockHash::chain(parent, ids);
        parent
    };
    ids.chunks_exact(BLOCK as usize).map(name).collect()
}

pub(crate) fn done(manager: &mut Manager, step: u64) {
    complete(manager, step, Outcome::Done);
}

pub(crate) fn complete(manager: &mut Manager, step: u64, outcome: Outcome) {
    manager.complete(Completion { worker: WorkerId(0), step, outcome }).unwrap();
}

/// Stages a step of these sequences and leaves it in flight; its plan.
pub(crate) fn staged(manager: &mut Manager, batch: &mut [&mut Sequence]) -> StepPlan {
    let step = manager.begin_step().unwrap();
    let plan = manager.stage(&step, batch).unwrap().clone();
    manager.finish_step(step).unwrap();
    plan
}

/// A whole step of these sequences, which is complete; its plan.
pub(crate) fn step(manager: &mut Manager, batch: &mut [&mut Sequence]) -> StepPlan {
    let plan = staged(manager, batch);
    done(manager, plan.step);
    plan
}

/// A whole step of so many tokens of a sequence, for which there is room; its plan.
pub(crate) fn go_on(manager: &mut Manager, sequence: &mut Sequence, tokens: u32) -> StepPlan {
    manager.reserve(sequence, tokens).unwrap().given().unwrap();
    step(manager, &mut [sequence])
}

/// The same, left in flight.
pub(crate) fn go_on_staged(
    manager: &mut Manager,
    sequence: &mut Sequence,
    tokens: u32,
) -> StepPlan {
    manager.reserve(sequence, tokens).unwrap().given().unwrap();
    staged(manager, &mut [sequence])
}

/// A last step of a sequence, which goes, and another one, behind which its blocks can be claimed.
pub(crate) fn finish(manager: &mut Manager, mut sequence: Sequence) {
    step(manager, &mut [&mut sequence]);
    drop(sequence);
    step(manager, &mut []);
}

/// Has a prompt cached that nobody uses.
pub(crate) fn cache_prompt(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) {
    let sequence = admit(manager, ids);
    finish(manager, sequence);
}

/// Admits a prompt, of which the next step computes so many tokens at most.
pub(crate) fn admit_within(manager: &mut Manager, ids: Range<u32>, budget: u64) -> Sequence {
    let mut requests = [Request::new(ids.collect())];
    admitted(manager.ask_all(&mut requests, budget).pop().unwrap())
}

/// A sequence whose prompt is computed and complete.
pub(crate) fn computed(manager: &mut Manager, ids: impl IntoIterator<Item = u32>) -> Sequence {
    let mut sequence = admit(manager, ids);
    step(manager, &mut [&mut sequence]);
    sequence
}

/// The same of a prompt whose chunks may end at checkpoints.
pub(crate) fn computed_in_chunks(
    manager: &mut Manager,
    ids: impl IntoIterator<Item = u32>,
) -> Sequence {
    let mut sequence = admit(manager, ids);
    loop {
        step(manager, &mut [&mut sequence]);
        let left = sequence.to_compute() as u32;
        if left == 0 {
            return sequence;
        }
        manager.reserve(&mut sequence, left).unwrap().given().unwrap();
    }
}

/// The same with the id that came out.
pub(crate) fn sampled(
    manager: &mut Manager,
    ids: impl IntoIterator<Item = u32>,
    id: u32,
) -> Sequence {
    let mut sequence = computed_in_chunks(manager, ids);
    let last = sequence.awaits().unwrap();
    manager.commit(&mut sequence, last, &[id]).unwrap();
    sequence
}

/// Nothing is in use, and nothing was lost.
pub(crate) fn check_empty(manager: &mut Manager) {
    let all = manager.options().groups[0].pool.primary_blocks;
    while let Ok(step) = manager.begin_step() {
        let number = manager.stage(&step, &mut []).unwrap().step;
        manager.finish_step(step).unwrap();
        done(manager, number);
        if manager.first_pool().claimable() as u64 == all {
            break;
        }
    }
    assert_eq!(manager.first_pool().claimable() as u64, all);
    assert_eq!(manager.free_rows(), manager.options().sequences_max as usize);
    manager.first_pool().check_integrity().unwrap();
}

/// The names of all content of the first group.
pub(crate) fn cached_names(manager: &Manager) -> Vec<BlockHash> {
    let blocks = manager.first_pool().snapshot().blocks;
    blocks.iter().filter_map(|block| block.hash).collect()
}
