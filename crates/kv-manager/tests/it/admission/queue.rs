//! The order of a queue: nobody's answer depends on who stands behind, and the first is never left to wait for nothing.

use super::*;

pub(super) fn quota(held_max: u64, reserved: u64) -> TenantQuota {
    TenantQuota { held_max, reserved, ..TenantQuota::NONE }
}

pub(super) fn set(manager: &mut Manager, group: GroupId, tenant: TenantId, quota: TenantQuota) {
    manager.set_quota(group, tenant, Tier::Primary, quota).unwrap();
}

/// Computes a prompt of a tenant, which stays in the cache.
pub(super) fn cache(manager: &mut Manager, tenant: TenantId, ids: Range<u32>) {
    let mut sequence = admitted(ask(manager, of(tenant, ids)));
    step(manager, &mut [&mut sequence]);
    drop(sequence);
    step(manager, &mut []);
}

#[test]
fn what_is_found_behind_the_first_leaves_it_what_is_kept_for_nobody() {
    for mut manager in one_and_two(16) {
        let [holder, other] = [0; 2].map(|_| manager.add_tenant().unwrap());
        cache(&mut manager, other, 0..17);
        set(&mut manager, FULL, holder, quota(16, 8));
        // Of 16 blocks, eight are not kept: six for the first, and the second would pin four.
        let _open = manager.begin_step().unwrap();
        let mut requests = [of(TenantId::NOBODY, 100..124), of(other, 0..20)];
        let answers = manager.ask_all(&mut requests, u64::MAX);
        assert!(matches!(answers[0], Answer::Admitted(_)), "{answers:?}");
        assert!(matches!(answers[1], Answer::NoRoom(_)), "{answers:?}");
    }
}

#[test]
fn what_is_found_behind_the_first_leaves_it_what_its_tenant_may_hold() {
    for mut manager in one_and_two(32) {
        let tenant = manager.add_tenant().unwrap();
        cache(&mut manager, tenant, 0..17);
        for group in (0..)
            .map(GroupId)
            .take_while(|&group| manager.pool(group).is_some())
            .collect::<Vec<_>>()
        {
            set(&mut manager, group, tenant, quota(6, 0));
        }
        let mut requests = [of(tenant, 100..116), of(tenant, 0..20), of(TenantId::NOBODY, 0..4)];
        let answers = manager.ask_all(&mut requests, u64::MAX);
        assert!(matches!(answers[0], Answer::Admitted(_)), "{answers:?}");
        assert!(matches!(&answers[1], Answer::NoRoom(missing) if is_bound(missing)), "{answers:?}");
        // A bound is the tenant's own affair, whoever notices it.
        assert!(matches!(answers.get(2), Some(Answer::Admitted(_))), "{answers:?}");
    }
}

#[test]
fn a_bound_that_two_requests_reach_together_stops_nobody_else() {
    for mut manager in one_and_two(32) {
        let tenant = manager.add_tenant().unwrap();
        cache(&mut manager, tenant, 0..17);
        set(&mut manager, FULL, tenant, quota(6, 0));
        // Four blocks that the first finds, one that it claims, and two of the second.
        let mut requests = [of(tenant, 0..20), of(tenant, 100..108), of(TenantId::NOBODY, 0..4)];
        let answers = manager.ask_all(&mut requests, u64::MAX);
        assert!(matches!(answers[0], Answer::Admitted(_)), "{answers:?}");
        assert!(matches!(&answers[1], Answer::NoRoom(missing) if is_bound(missing)), "{answers:?}");
        assert!(matches!(answers.get(2), Some(Answer::Admitted(_))), "{answers:?}");
    }
}

#[test]
fn what_was_admitted_stays_so_if_there_is_no_memory_for_those_behind() {
    let [mut manager, _] = one_and_two(32);
    let tenant = manager.add_tenant().unwrap();
    cache(&mut manager, tenant, 0..17);
    manager.set_budget(FULL, Tier::Primary, 8).unwrap();
    set(&mut manager, FULL, tenant, quota(6, 0));
    let requests = [of(tenant, 0..20), of(tenant, 100..108), of(TenantId::NOBODY, 0..40)];
    let mut queue: VecDeque<_> = requests.into_iter().enumerate().collect();
    let mut asked = Vec::new();
    let mut memory = |group, blocks| {
        asked.push((group, blocks));
        Err(())
    };
    let admission = manager.growing(Some(&mut memory)).admit(&mut queue, u64::MAX);
    let Admission { admitted, refused, waiting, no_room } = admission.unwrap();
    assert_eq!(asked, [(FULL, 10)], "for those behind the first, which has its blocks");
    assert_eq!((admitted.len(), admitted[0].0.0, refused.len()), (1, 0, 0));
    assert!(matches!(waiting[..], [(0, Waiting::Bound(_))]), "{waiting:?}");
    assert_eq!(no_room, None, "nobody knows");
    assert_eq!(queue.iter().map(|request| request.0).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn nothing_leaves_the_queue_if_there_is_no_memory_for_the_first() {
    for mut manager in one_and_two(32) {
        manager.set_budget(FULL, Tier::Primary, 0).unwrap();
        let requests = [Request::new(Vec::new()), of(TenantId::NOBODY, 0..20)];
        let mut queue = VecDeque::from(requests);
        let mut refuses = |_, blocks| Err(blocks);
        let refused = manager.growing(Some(&mut refuses)).admit(&mut queue, u64::MAX);
        assert_eq!(refused.unwrap_err(), 5);
        assert_eq!(queue.len(), 2, "the first can never be admitted, and is told so later");
        let mut memory = |_, blocks| Ok::<_, ()>(blocks as u64);
        let admission = manager.growing(Some(&mut memory)).admit(&mut queue, u64::MAX);
        let Admission { admitted, refused, .. } = admission.unwrap();
        assert_eq!((admitted.len(), refused.len(), queue.len()), (1, 1, 0));
        assert_eq!(refused[0].1, AdmitError::NoTokens);
    }
}

#[test]
fn a_queue_keeps_what_waits_in_its_order_and_loses_what_is_admitted_or_refused() {
    for mut manager in one_and_two(32) {
        let tenant = manager.add_tenant().unwrap();
        set(&mut manager, FULL, tenant, quota(4, 0));
        let held = admitted(ask(&mut manager, of(tenant, 500..508)));
        // The first of a prefix computes it, a tenant is at its bound, and one is longer than all memory.
        let requests = [
            ("first", of(TenantId::NOBODY, 0..20)),
            ("follows", of(TenantId::NOBODY, 0..24)),
            ("never", of(TenantId::NOBODY, 1000..2000)),
            ("bound", of(tenant, 100..112)),
            ("never of its tenant", of(tenant, 200..232)),
            ("too much", of(TenantId::NOBODY, 300..420)),
            ("behind", of(TenantId::NOBODY, 600..604)),
        ];
        let mut queue = VecDeque::from(requests);
        let Admission { admitted, refused, waiting, no_room } = manager.admit(&mut queue, u64::MAX);
        let names: Vec<_> = admitted.iter().map(|of| of.0.0).collect();
        assert_eq!(names, ["first"]);
        let names: Vec<_> = refused.iter().map(|of| of.0.0).collect();
        assert_eq!(names, ["never", "never of its tenant"]);
        assert!(refused.iter().all(|of| of.0.1.tokens() > 0), "they are as they were");
        let names: Vec<_> = queue.iter().map(|of| of.0).collect();
        assert_eq!(names, ["follows", "bound", "too much", "behind"]);
        let positions: Vec<_> = waiting.iter().map(|of| of.0).collect();
        assert_eq!(positions, [0, 1], "{waiting:?}");
        assert!(matches!(waiting[0].1, Waiting::Prefix { tokens: 0 }), "{waiting:?}");
        assert!(matches!(waiting[1].1, Waiting::Bound(_)), "{waiting:?}");
        assert!(matches!(no_room, Some((2, NoRoom::Blocks(_)))), "{no_room:?}");
        // In a later step there is room for all of them, one after the other.
        drop((held, admitted));
        step(&mut manager, &mut []);
        let Admission { admitted, no_room, .. } = manager.admit(&mut queue, u64::MAX);
        let names: Vec<_> = admitted.iter().map(|of| of.0.0).collect();
        assert_eq!(names, ["follows", "bound"]);
        assert!(matches!(no_room, Some((0, NoRoom::Blocks(_)))), "{no_room:?}");
        drop(admitted);
        step(&mut manager, &mut []);
        let Admission { admitted, .. } = manager.admit(&mut queue, u64::MAX);
        let names: Vec<_> = admitted.iter().map(|of| of.0.0).collect();
        assert_eq!((names, queue.len()), (vec!["too much", "behind"], 0));
    }
}

#[test]
fn what_others_of_a_call_claim_does_not_count_for_a_tenants_bound() {
    for mut manager in one_and_two(32) {
        let tenant = bounded(&mut manager, 4);
        let mut requests = [of(TenantId::NOBODY, 0..16), of(tenant, 100..112)];
        let answers = manager.ask_all(&mut requests, u64::MAX);
        assert!(answers.iter().all(|answer| matches!(answer, Answer::Admitted(_))), "{answers:?}");
    }
}

#[test]
fn a_request_that_is_kept_from_what_is_others_stops_those_behind_it() {
    for mut manager in one_and_two(8) {
        let owner = manager.add_tenant().unwrap();
        set(&mut manager, FULL, owner, quota(8, 4));
        let _running = admitted(ask(&mut manager, of(TenantId::NOBODY, 0..8)));
        let mut requests =
            [of(TenantId::NOBODY, 100..112), of(owner, 200..204), of(TenantId::NOBODY, 300..301)];
        let answers = manager.ask_all(&mut requests, u64::MAX);
        let [Answer::NoRoom(missing)] = &answers[..] else { panic!("{answers:?}") };
        let reason = &missing.reason;
        assert!(
            matches!(reason, ClaimError::Tenant(TenantError::KeptForOthers { .. })),
            "{missing}"
        );
        // In a call of its own, the owner gets what is kept for it.
        assert!(matches!(ask(&mut manager, of(owner, 200..204)), Answer::Admitted(_)));
    }
}

#[test]
fn a_prefix_in_host_memory_is_brought_back_once_for_all_of_a_call() {
    for device in [[12, 12], [12, 0]] {
        let pool = |blocks| PoolConfig { secondary_blocks: 16, ..PoolConfig::primary_only(blocks) };
        let further =
            |&blocks: &u64| GroupOptions { pool: pool(blocks), ..group(GroupKind::Full, 0) };
        let further = device[1..].iter().filter(|&&blocks| blocks > 0).map(further);
        let options = with_groups(options(device[0], 16), further);
        let mut manager = made(options);
        cache(&mut manager, TenantId::NOBODY, 0..17);
        // Twelve blocks push the prefix to host memory.
        cache(&mut manager, TenantId::NOBODY, 100..148);
        let before = manager.stats().onboarded_blocks;
        let mut requests = [20, 21].map(|last| of(TenantId::NOBODY, 0..last));
        requests.iter_mut().for_each(|request| request.waits = false);
        let answers = manager.ask_all(&mut requests, u64::MAX);
        let cached: Vec<_> =
            answers.into_iter().map(|answer| admitted(answer).cached_tokens()).collect();
        assert_eq!(cached, [16, 16]);
        let groups = manager.snapshot().tables.len() as u64;
        assert_eq!(manager.stats().onboarded_blocks - before, 4 * groups);
    }
}

#[test]
fn different_prefixes_in_host_memory_do_not_evict_each_other() {
    let mut manager = manager(12, 8);
    for ids in [0..17, 200..217, 100..148] {
        cache(&mut manager, TenantId::NOBODY, ids);
    }
    let mut requests = [0..20, 200..220].map(|ids| of(TenantId::NOBODY, ids));
    let answers = manager.ask_all(&mut requests, u64::MAX);
    let cached: Vec<_> =
        answers.into_iter().map(|answer| admitted(answer).cached_tokens()).collect();
    assert_eq!(cached, [16, 16]);
}

/// A manager that has seen all kinds of things, decided by a seed.
struct World {
    random: Random,
    manager: Manager,
    clock: ManualClock,
    tenants: Vec<TenantId>,
    running: Vec<Sequence>,
    asleep: Vec<Sequence>,
}

fn world_options(random: &mut Random) -> ManagerOptions {
    let host = [0, 8][random.below(2) as usize];
    let pool = |blocks| PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(blocks) };
    let kinds = [
        GroupKind::Full,
        GroupKind::Window { tokens: 6, sinks: 0 },
        GroupKind::Window { tokens: 9, sinks: 4 },
        GroupKind::State { checkpoint_tokens: 8, drafts: 0 },
    ];
    let groups: Vec<_> = (0..1 + random.below(3))
        .map(|_| {
            let kind = kinds[random.below(4) as usize];
            let block_tokens = BLOCK << random.below(2);
            let pool = pool(4 + random.below(12));
            let watermark_blocks = random.below(3) as u32;
            GroupOptions { block_tokens, pool, watermark_blocks, ..group(kind, 0) }
        })
        .collect();
    let options = options(6 + random.below(14), host);
    let mut options = ManagerOptions { sequences_max: 6, ..with_groups(options, groups) };
    options.groups[0].watermark_blocks = random.below(3) as u32;
    if random.chance(50) {
        let granule_blocks: Vec<u32> =
            options.groups.iter().map(|_| 1 + random.below(4) as u32).collect();
        let granules = 4 + random.below(12) as u32;
        let blocks = |index: usize| u64::from(granules * granule_blocks[index]);
        let groups = options.groups.iter_mut().enumerate();
        groups.for_each(|(at, group)| group.pool = pool(blocks(at)));
        options.shared = Some(SharedMemory { granules, granule_blocks });
    }
    options
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        // The age of content is a part of what a seed decides.
        let clock = ManualClock::new();
        let build = |builder: PoolBuilder| builder.clock(clock.clone());
        let mut manager = Manager::with_pool(world_options(&mut random), build).unwrap();
        let mut tenants = vec![TenantId::NOBODY];
        tenants.extend((0..3_u8).map(|key| manager.add_tenant_with_key(&[key]).unwrap()));
        Self { random, manager, clock, tenants, running: Vec::new(), asleep: Vec::new() }
    }

    fn request(&mut self) -> Request {
        let random = &mut self.random;
        let first = random.below(3) as u32 * 100;
        let tokens = 1 + random.below(40) as u32;
        let mut ids: Vec<u32> = (first..first + tokens).collect();
        if random.chance(30) {
            let from = random.below(u64::from(tokens)) as usize;
            ids[from..].iter_mut().for_each(|id| *id += 1000);
        }
        let mut request = Request::new(ids);
        request.tenant = self.tenants[random.below(4) as usize];
        request.waits = random.chance(50);
        if random.chance(30) {
            // What several tenants find.
            request.content.salt = vec![1];
        }
        request
    }

    fn requests(&mut self) -> Vec<Request> {
        let count = 1 + self.random.below(4);
        (0..count).map(|_| self.request()).collect()
    }

    fn turn(&mut self) {
        let index = |random: &mut Random, of: &[Sequence]| {
            (!of.is_empty()).then(|| random.below(of.len() as u64) as usize)
        };
        match self.random.below(10) {
            0..3 => {
                let mut requests = self.requests();
                let budget = 1 + self.random.below(60);
                for answer in self.manager.ask_all(&mut requests, budget) {
                    if let Answer::Admitted(sequence) = answer {
                        self.running.push(sequence);
                    }
                }
            }
            3 => {
                if let Some(at) = index(&mut self.random, &self.running) {
                    drop(self.running.swap_remove(at));
                }
            }
            4 => {
                if let Some(at) = index(&mut self.random, &self.running)
                    && self.manager.suspend(&mut self.running[at]).is_ok()
                {
                    self.asleep.push(self.running.swap_remove(at));
                }
            }
            5 => {
                if let Some(at) = index(&mut self.random, &self.asleep)
                    && matches!(self.manager.resume(&mut self.asleep[at]), Ok(Room::Given(_)))
                {
                    self.running.push(self.asleep.swap_remove(at));
                }
            }
            6 => {
                let tenant = self.tenants[self.random.below(4) as usize];
                let reserved = self.random.below(4).saturating_sub(1);
                let held_max =
                    if self.random.chance(50) { u64::MAX } else { reserved + self.random.below(8) };
                let group = GroupId(self.random.below(4) as u16);
                // More may be kept than there is.
                drop(self.manager.set_quota(
                    group,
                    tenant,
                    Tier::Primary,
                    quota(held_max, reserved),
                ));
            }
            7 => {
                if let Some(at) = index(&mut self.random, &self.running) {
                    let twin = self.manager.fork(&mut self.running[at]);
                    self.running.extend(twin.ok());
                }
            }
            _ => self.step(),
        }
    }

    fn step(&mut self) {
        self.clock.advance(std::time::Duration::from_secs(1));
        let manager = &mut self.manager;
        self.running.retain_mut(|sequence| {
            let left = sequence.to_compute().clamp(1, 8) as u32;
            let reserved = if sequence.next() > 0 {
                Ok(())
            } else {
                manager.reserve(sequence, left).map(drop)
            };
            !matches!(reserved, Err(ReserveError::TooLong { .. }))
        });
        let mut batch: Vec<_> =
            self.running.iter_mut().filter(|sequence| sequence.next() > 0).collect();
        let plan = step(manager, &mut batch);
        for sequence in batch {
            if sequence.to_compute() == 0 {
                manager.commit(sequence, plan.step, &[7]).unwrap();
            }
        }
    }

    fn seen(seed: u64) -> Self {
        let mut world = Self::new(seed);
        for _ in 0..10 + world.random.below(50) {
            world.turn();
        }
        world
    }
}

fn tell(answer: Answer) -> String {
    match answer {
        Answer::Admitted(sequence) => format!("{} {}", sequence.cached_tokens(), sequence.next()),
        answer => format!("{answer:?}"),
    }
}

#[test]
fn no_answer_depends_on_the_requests_behind() {
    for seed in 0..2_000 {
        let told = |count: usize| {
            let mut world = World::seen(seed);
            let mut requests: Vec<_> = (0..5).map(|_| world.request()).collect();
            let answers = world.manager.ask_all(&mut requests[..count], 100);
            answers.into_iter().map(tell).collect::<Vec<_>>()
        };
        let all = told(5);
        for count in 1..5 {
            let some = told(count);
            let same = all.len().min(count);
            assert_eq!(
                some[..same.min(some.len())],
                all[..same],
                "seed {seed}, {count} of {all:?}"
            );
            assert!(some.len() >= same, "seed {seed}");
        }
    }
}

#[test]
fn the_first_is_admitted_or_refused_for_good_where_nothing_runs() {
    let mut admissions = 0;
    for seed in 0..4_000 {
        let mut world = World::seen(seed);
        (world.running, world.asleep) = (Vec::new(), Vec::new());
        for _ in 0..6 {
            (0..3).for_each(|_| drop(step(&mut world.manager, &mut [])));
            let mut requests = world.requests();
            // What is given back in vain cannot be claimed until the step is complete.
            let open = world.manager.begin_step().unwrap();
            let answers = world.manager.ask_all(&mut requests, 1 + world.random.below(60));
            drop(open);
            world.manager.end_dropped_step();
            match answers.first() {
                Some(Answer::Admitted(_)) => admissions += 1,
                Some(Answer::Refused(_)) => {}
                other => panic!(
                    "seed {seed}: {other:?} of {:?} with {:?}",
                    requests[0],
                    world.manager.options()
                ),
            }
            world.running = answers
                .into_iter()
                .filter_map(|answer| match answer {
                    Answer::Admitted(sequence) => Some(sequence),
                    _ => None,
                })
                .collect();
            world.step();
            world.running.clear();
        }
    }
    assert!(admissions > 10_000, "{admissions}");
}
