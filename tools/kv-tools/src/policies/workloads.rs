//! Workloads that no policy was made for, to see that none is chosen for the traces at hand alone.
//!
//! Each follows from its seed on every platform. Requests come 10 ms a block apart, but for agents, which
//! keep a pace of their own. Content is named by counting up.

use std::collections::HashMap;

use kv_replay::generate::{GenerateError, GenerateOptions, REQUESTS_MAX, generate};
use kv_replay::rng::SplitMix64;
use kv_replay::trace::{BLOCK_TOKENS_IN_TRACE, Request, Trace};

/// A workload by name.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Its name in reports.
    pub name: &'static str,
    /// What it is like.
    pub about: &'static str,
    make: fn(u64) -> Result<Trace, GenerateError>,
}

impl Workload {
    /// Generates its requests, up to the first after `lookups` block lookups, at most [`REQUESTS_MAX`].
    ///
    /// # Errors
    ///
    /// [`GenerateError`] if that is no request, or too many.
    pub fn generate(&self, lookups: u64) -> Result<Trace, GenerateError> {
        if lookups > REQUESTS_MAX {
            return Err(GenerateError::TooManyRequests { requests: lookups });
        }
        (self.make)(lookups)
    }
}

/// All workloads.
pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "zipf_7",
        about: "single blocks of 20,000 by a Zipf law of exponent 7/8",
        make: |lookups| zipf(1, 7, lookups),
    },
    Workload {
        name: "zipf_8",
        about: "the same of exponent 1",
        make: |lookups| zipf(2, 8, lookups),
    },
    Workload {
        name: "zipf_6",
        about: "the same of exponent 3/4",
        make: |lookups| zipf(3, 6, lookups),
    },
    Workload { name: "loop", about: "4,000 blocks in turn", make: turns },
    Workload {
        name: "mix",
        about: "4,000 chains of eight blocks by a Zipf law of exponent 3/4, every tenth request 20 new blocks",
        make: |lookups| mix(1, lookups),
    },
    Workload {
        name: "phases",
        about: "15,000 blocks of a Zipf law that moves on, then ten loops of 1,500 blocks, in turn",
        make: |lookups| phases(1, lookups),
    },
    Workload {
        name: "scans_20",
        about: "a hundred chats, and one request in five that is 64 to 255 new blocks",
        make: |lookups| scans(1, 20, lookups),
    },
    Workload {
        name: "scans_60",
        about: "the same with three in five",
        make: |lookups| scans(2, 60, lookups),
    },
    Workload {
        name: "tenants_400",
        about: "system prompts of 400 tenants by a Zipf law of exponent 7/8, each with 1 to 15 new blocks",
        make: |lookups| tenants(1, 400, 7, lookups),
    },
    Workload {
        name: "tenants_2000",
        about: "the same of 2,000 tenants and exponent 3/4",
        make: |lookups| tenants(2, 2000, 6, lookups),
    },
    Workload {
        name: "shifting",
        about: "1,500 documents by a Zipf law whose order changes",
        make: |lookups| shifting(1, lookups),
    },
    Workload {
        name: "documents",
        about: "a shared head, three of 400 documents in any order, a question",
        make: |lookups| documents(1, lookups),
    },
    Workload {
        name: "once",
        about: "prompts that never come back",
        make: |lookups| once(1, lookups),
    },
    Workload {
        name: "agents_8",
        about: "eight agents at a time, with a shared head, quick turns and a pause now and then",
        make: |lookups| agents(1, 8, lookups),
    },
    Workload {
        name: "agents_60",
        about: "the same, sixty of them",
        make: |lookups| agents(2, 60, lookups),
    },
    Workload {
        name: "chats_11",
        about: "`kv-replay generate --seed 11`",
        make: |lookups| chats(11, lookups),
    },
    Workload {
        name: "chats_12",
        about: "`kv-replay generate --seed 12`",
        make: |lookups| chats(12, lookups),
    },
    Workload {
        name: "chats_13",
        about: "`kv-replay generate --seed 13`",
        make: |lookups| chats(13, lookups),
    },
];

/// Ranks by a Zipf law.
struct Zipf {
    /// Weights of all ranks up to each.
    sums: Vec<f64>,
}

impl Zipf {
    /// Ranks below `ranks`, with an exponent in eighths: roots of two are the same on every platform.
    fn new(ranks: u32, eighths: u32) -> Self {
        let weight = |rank: u32| {
            let mut root = f64::from(rank);
            let mut product = 1.0;
            for bit in [8, 4, 2, 1] {
                product *= if eighths & bit == 0 { 1.0 } else { root };
                root = root.sqrt();
            }
            1.0 / product
        };
        let sums = (1..=ranks).scan(0.0, |sum, rank| {
            *sum += weight(rank);
            Some(*sum)
        });
        Self { sums: sums.collect() }
    }

    fn draw(&self, rng: &mut SplitMix64) -> usize {
        const STEPS: u64 = 1 << 53;
        let total = self.sums.last().copied().unwrap_or_default();
        let drawn = rng.below(STEPS) as f64 / STEPS as f64 * total;
        let rank = self.sums.partition_point(|&sum| sum <= drawn);
        rank.min(self.sums.len().saturating_sub(1))
    }
}

/// Requests so far.
struct Requests {
    requests: Vec<Request>,
    next_id: u64,
    now_ms: u64,
    lookups: u64,
    wanted: u64,
}

impl Requests {
    /// None so far, of `wanted` lookups, with ids from `first_id` on.
    fn new(wanted: u64, first_id: u64) -> Result<Self, GenerateError> {
        match wanted {
            0 => Err(GenerateError::NoRequests),
            _ => {
                Ok(Self { requests: Vec::new(), next_id: first_id, now_ms: 0, lookups: 0, wanted })
            }
        }
    }

    fn more(&self) -> bool {
        self.lookups < self.wanted
    }

    /// New blocks.
    fn fresh(&mut self, blocks: u64) -> Vec<u64> {
        let first = self.next_id;
        self.next_id += blocks;
        (first..self.next_id).collect()
    }

    fn push(&mut self, hash_ids: Vec<u64>) {
        let blocks = hash_ids.len() as u64;
        self.now_ms += 10 * blocks;
        self.lookups += blocks;
        let input_length = blocks * BLOCK_TOKENS_IN_TRACE;
        let timestamp_ms = self.now_ms;
        self.requests.push(Request {
            timestamp_ms,
            input_length,
            output_length: 1,
            hash_ids,
            tenant: None,
        });
    }

    fn into_trace(self) -> Trace {
        Trace::new(self.requests)
    }
}

fn zipf(seed: u64, eighths: u32, lookups: u64) -> Result<Trace, GenerateError> {
    const BLOCKS: u32 = 20_000;
    let (mut rng, ranks) = (SplitMix64::new(seed), Zipf::new(BLOCKS, eighths));
    let mut requests = Requests::new(lookups, BLOCKS.into())?;
    while requests.more() {
        requests.push(vec![ranks.draw(&mut rng) as u64]);
    }
    Ok(requests.into_trace())
}

fn turns(lookups: u64) -> Result<Trace, GenerateError> {
    let mut requests = Requests::new(lookups, 4000)?;
    while requests.more() {
        requests.push(vec![requests.lookups % 4000]);
    }
    Ok(requests.into_trace())
}

fn mix(seed: u64, lookups: u64) -> Result<Trace, GenerateError> {
    let (mut rng, chains) = (SplitMix64::new(seed), Zipf::new(4000, 6));
    let mut requests = Requests::new(lookups, 8 * 4000)?;
    while requests.more() {
        let ids = if requests.requests.len() % 10 == 9 {
            requests.fresh(20)
        } else {
            let first = 8 * chains.draw(&mut rng) as u64;
            (first..first + 8).collect()
        };
        requests.push(ids);
    }
    Ok(requests.into_trace())
}

fn phases(seed: u64, lookups: u64) -> Result<Trace, GenerateError> {
    let (mut rng, ranks) = (SplitMix64::new(seed), Zipf::new(6000, 8));
    let mut requests = Requests::new(lookups, 60_000)?;
    while requests.more() {
        let (phase, place) = (requests.lookups / 30_000, requests.lookups % 30_000);
        let id = if place < 15_000 {
            phase * 500 % 30_000 + ranks.draw(&mut rng) as u64
        } else {
            40_000 + place % 1500
        };
        requests.push(vec![id]);
    }
    Ok(requests.into_trace())
}

fn scans(seed: u64, percent: u64, lookups: u64) -> Result<Trace, GenerateError> {
    let mut rng = SplitMix64::new(seed);
    let mut requests = Requests::new(lookups, 0)?;
    let mut chats = vec![Vec::new(); 100];
    while requests.more() {
        if rng.percent(percent) {
            let scan = requests.fresh(rng.octaves(64, 2));
            requests.push(scan);
            continue;
        }
        let chat: &mut Vec<u64> = &mut chats[rng.below(100) as usize];
        if chat.len() > 60 {
            chat.clear();
        }
        chat.extend(requests.fresh(rng.between(1, 6)));
        requests.push(chat.clone());
    }
    Ok(requests.into_trace())
}

fn tenants(seed: u64, count: u32, eighths: u32, lookups: u64) -> Result<Trace, GenerateError> {
    let (mut rng, ranks) = (SplitMix64::new(seed), Zipf::new(count, eighths));
    let mut requests = Requests::new(lookups, 0)?;
    let heads: Vec<_> = (0..count).map(|_| requests.fresh(rng.between(4, 40))).collect();
    while requests.more() {
        let mut ids = heads[ranks.draw(&mut rng)].clone();
        ids.extend(requests.fresh(rng.octaves(1, 4)));
        requests.push(ids);
    }
    Ok(requests.into_trace())
}

fn shifting(seed: u64, lookups: u64) -> Result<Trace, GenerateError> {
    const DOCUMENTS: u32 = 1500;
    let (mut rng, ranks) = (SplitMix64::new(seed), Zipf::new(DOCUMENTS, 7));
    let mut requests = Requests::new(lookups, 0)?;
    let mut documents: Vec<_> =
        (0..DOCUMENTS).map(|_| requests.fresh(rng.between(2, 20))).collect();
    while requests.more() {
        if rng.percent(10) {
            let one = rng.below(DOCUMENTS.into()) as usize;
            documents.swap(one, rng.below(DOCUMENTS.into()) as usize);
        }
        if rng.percent(5) {
            let popular = rng.below(60) as usize;
            documents[popular] = requests.fresh(rng.between(2, 20));
        }
        let mut ids = documents[ranks.draw(&mut rng)].clone();
        ids.extend(requests.fresh(rng.between(0, 3)));
        requests.push(ids);
    }
    Ok(requests.into_trace())
}

fn documents(seed: u64, lookups: u64) -> Result<Trace, GenerateError> {
    const DOCUMENTS: u32 = 400;
    let (mut rng, ranks) = (SplitMix64::new(seed), Zipf::new(DOCUMENTS, 8));
    let mut requests = Requests::new(lookups, 0)?;
    let head = requests.fresh(3);
    let sizes: Vec<_> = (0..DOCUMENTS).map(|_| rng.between(2, 12)).collect();
    // A document is named by what comes before it, too.
    let mut known: HashMap<Vec<usize>, Vec<u64>> = HashMap::new();
    while requests.more() {
        let (mut ids, mut path) = (head.clone(), Vec::new());
        for _ in 0..3 {
            let document = ranks.draw(&mut rng);
            path.push(document);
            let blocks = known.entry(path.clone());
            ids.extend(blocks.or_insert_with(|| requests.fresh(sizes[document])).iter());
        }
        ids.extend(requests.fresh(1));
        requests.push(ids);
    }
    Ok(requests.into_trace())
}

fn once(seed: u64, lookups: u64) -> Result<Trace, GenerateError> {
    let mut rng = SplitMix64::new(seed);
    let mut requests = Requests::new(lookups, 0)?;
    while requests.more() {
        let prompt = requests.fresh(rng.octaves(1, 7));
        requests.push(prompt);
    }
    Ok(requests.into_trace())
}

fn agents(seed: u64, count: u64, lookups: u64) -> Result<Trace, GenerateError> {
    let mut rng = SplitMix64::new(seed);
    let mut requests = Requests::new(lookups, 0)?;
    let head = requests.fresh(30);
    // Each agent's prompt, and when its next request comes.
    let mut agents: Vec<_> = (0..count).map(|agent| (head.clone(), agent * 1000)).collect();
    while requests.more() {
        let Some((prompt, next_ms)) = agents.iter_mut().min_by_key(|(_, next_ms)| *next_ms) else {
            break;
        };
        let added = requests.fresh(rng.octaves(1, 4));
        if prompt.len() > 400 || rng.percent(1) {
            prompt.clone_from(&head);
        }
        prompt.extend(added);
        requests.push(prompt.clone());
        requests.now_ms = *next_ms;
        if let Some(request) = requests.requests.last_mut() {
            request.timestamp_ms = *next_ms;
        }
        let pauses = rng.percent(5);
        *next_ms += if pauses { rng.octaves(60_000, 3) } else { rng.octaves(2000, 3) };
    }
    Ok(requests.into_trace())
}

/// A generated workload has 21 blocks a request and more.
fn chats(seed: u64, lookups: u64) -> Result<Trace, GenerateError> {
    generate(&GenerateOptions { requests: lookups / 24, seed })
}
