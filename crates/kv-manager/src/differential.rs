//! Admission to one group by the pool's batch call, and by the path of several groups: the same requests, the same answers.

use kv_pool::PoolConfig;
use kv_pool::tenants::{TenantId, TenantQuota};
use kv_pool::{ClaimError, Tier};

use crate::{
    Answer, Completion, GroupId, Manager, ManagerOptions, Outcome, Request, Sequence, WorkerId,
};

const BLOCK: u32 = 4;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// One of the two managers, with what it has admitted.
struct Side {
    manager: Manager,
    running: Vec<Sequence>,
    asleep: Vec<Sequence>,
    tenants: Vec<TenantId>,
}

impl Side {
    fn new(options: &ManagerOptions, in_groups: bool, tenants: u64) -> Self {
        let mut manager = Manager::new(options.clone()).unwrap();
        if in_groups {
            manager.keeps_all = false;
        }
        let mut all = vec![TenantId::NOBODY];
        all.extend((0..tenants).map(|at| manager.add_tenant_with_key(&[at as u8]).unwrap()));
        Self { manager, running: Vec::new(), asleep: Vec::new(), tenants: all }
    }

    fn step(&mut self) {
        let open = self.manager.begin_step().unwrap();
        for sequence in &mut self.running {
            if let Some(step) = sequence.awaits() {
                self.manager.commit(sequence, step, &[7]).unwrap();
            }
            drop(self.manager.reserve(sequence, sequence.to_compute().clamp(1, 12) as u32));
        }
        let mut batch: Vec<_> = self.running.iter_mut().filter(|one| one.next() > 0).collect();
        let step = self.manager.stage(&open, &mut batch).unwrap().step;
        self.manager.finish_step(open).unwrap();
        self.manager
            .complete(Completion { worker: WorkerId(0), step, outcome: Outcome::Done })
            .unwrap();
    }

    /// What became of requests, in words that both paths share.
    fn ask(&mut self, mut requests: Vec<Request>, budget: u64, numbers: bool) -> Vec<String> {
        let answers = self.manager.admit(&mut requests, budget);
        let mut words = Vec::new();
        for answer in answers {
            words.push(match answer {
                Answer::Admitted(sequence) => {
                    let ids: Vec<_> =
                        self.manager.block_ids(&sequence).iter().map(|id| id.get()).collect();
                    let word = format!(
                        "admitted {} {} {} {}",
                        sequence.cached_tokens(),
                        sequence.next(),
                        sequence.onboarded_blocks(),
                        if numbers { format!("{ids:?}") } else { String::new() }
                    );
                    self.running.push(sequence);
                    word
                }
                Answer::NoRoom(missing) if !numbers => match missing.reason {
                    ClaimError::Exhausted { .. } => "exhausted".to_owned(),
                    other => format!("bound {:?}", std::mem::discriminant(&other)),
                },
                other => format!("{other:?}"),
            });
        }
        words
    }
}

fn request(random: &mut Random, tenants: &[TenantId]) -> Request {
    let ids: Vec<u32> = {
        let family = random.below(4) as u32 * 1000;
        let shared = random.below(60) as u32;
        let own = family + 100 + random.below(20) as u32 * 40;
        (family..family + shared).chain(own..own + random.below(30) as u32).collect()
    };
    let mut request = Request::new(ids);
    request.tenant = tenants[random.below(tenants.len() as u64) as usize];
    request.waits = random.chance(60);
    if random.chance(30) {
        request.content.salt = vec![1];
    }
    if random.chance(10) {
        request.hit_max = random.below(40);
    }
    request
}

/// Whether the sides went apart, and where.
fn run(seed: u64, several: bool) -> Result<(), String> {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let host = if random.chance(50) { random.below(30) } else { 0 };
    let pool =
        PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(8 + random.below(50)) };
    let options = ManagerOptions {
        block_tokens: BLOCK,
        pool,
        sequences_max: 2 + random.below(8) as u32,
        blocks_per_sequence_max: 24,
        watermark_blocks: random.below(3) as u32,
        ..ManagerOptions::default()
    };
    let tenants = if random.chance(50) { random.below(3) } else { 0 };
    let mut sides = [false, true].map(|in_groups| Side::new(&options, in_groups, tenants));
    for turn in 0..30 {
        match random.below(8) {
            0..3 => {
                let count = if several { 1 + random.below(4) } else { 1 };
                let requests: Vec<_> = {
                    let tenants = sides[0].tenants.clone();
                    (0..count).map(|_| (random.0, request(&mut random, &tenants)).0).collect()
                };
                let budget = 1 + random.below(80);
                let made = |side: &Side| -> Vec<Request> {
                    let make = |&state: &u64| request(&mut Random(state), &side.tenants);
                    requests.iter().map(make).collect()
                };
                let asked = [made(&sides[0]), made(&sides[1])];
                let [one, two] = asked;
                let words = [sides[0].ask(one, budget, false), sides[1].ask(two, budget, false)];
                if words[0] != words[1] {
                    // The one path says first that there is no row, and then what the tenant may hold.
                    let first = |words: &[String]| {
                        let apart = words.iter().find(|word| !word.starts_with("bound"));
                        apart.cloned().unwrap_or_default()
                    };
                    let at = words[0].iter().zip(&words[1]).position(|(one, other)| one != other);
                    let at = at.unwrap_or(words[0].len().min(words[1].len()));
                    let [old, new] =
                        [0, 1].map(|side: usize| words[side].get(at).cloned().unwrap_or_default());
                    if new == "NoRow"
                        && old.starts_with("bound")
                        && first(&words[0][at..]) == "NoRow"
                    {
                        return Err("label: no row is said before a bound".into());
                    }
                    if old == "exhausted" && new.starts_with("bound") {
                        return Err("label: a bound is said before that room is short".into());
                    }
                    return Err(format!("turn {turn}, {count} requests: {words:#?}"));
                }
            }
            3 => {
                let count = sides[0].running.len() as u64;
                if count > 0 {
                    let at = random.below(count) as usize;
                    sides.iter_mut().for_each(|side| drop(side.running.swap_remove(at)));
                }
            }
            4 if tenants > 0 => {
                let at = random.below(1 + tenants) as usize;
                let reserved = random.below(4);
                let held_max =
                    if random.chance(50) { u64::MAX } else { reserved + random.below(20) };
                let quota = TenantQuota { reserved, held_max, ..TenantQuota::default() };
                for side in &mut sides {
                    drop(side.manager.set_quota_of(
                        GroupId(0),
                        side.tenants[at],
                        Tier::Primary,
                        quota,
                    ));
                }
            }
            5 => {
                let count = sides[0].running.len() as u64;
                if count > 0 {
                    let at = random.below(count) as usize;
                    for side in &mut sides {
                        if side.manager.suspend(&mut side.running[at]).is_ok() {
                            side.asleep.push(side.running.swap_remove(at));
                        }
                    }
                }
            }
            6 if !sides[0].asleep.is_empty() => {
                sides.iter_mut().for_each(|side| drop(side.asleep.pop()));
            }
            _ => sides.iter_mut().for_each(Side::step),
        }
        if sides[0].running.len() != sides[1].running.len() {
            return Err(format!("turn {turn}: other sequences"));
        }
    }
    Ok(())
}

#[test]
fn both_paths_of_admission_say_the_same_of_one_group() {
    let seeds = std::env::var("SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(2000);
    for several in [false, true] {
        let mut apart = Vec::new();
        for seed in 0..seeds {
            if let Err(how) = run(seed, several) {
                apart.push((seed, how));
            }
        }
        println!("several: {several}: {} of {seeds} apart", apart.len());
        for label in ["label: no row", "label: a bound"] {
            println!("{label}: {}", apart.iter().filter(|of| of.1.starts_with(label)).count());
        }
        let others = apart.iter().filter(|of| !of.1.starts_with("label"));
        println!("others: {}", others.clone().count());
        for (seed, how) in others.take(5) {
            println!("seed {seed}: {how}");
        }
    }
}
