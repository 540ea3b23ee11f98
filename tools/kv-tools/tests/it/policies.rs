//! Every policy against a model that is simple enough to check by eye: lists that are searched from
//! end to end.

use std::path::{Path, PathBuf};

use kv_replay::generate::{GenerateOptions, REQUESTS_MAX, generate};
use kv_replay::rng::SplitMix64;
use kv_replay::trace::{BLOCK_TOKENS_IN_TRACE, ReadOptions, Request, Trace, TraceError};
use kv_tools::policies::workloads::WORKLOADS;
use kv_tools::policies::{
    self, Capacity, CapacityError, Half, HalfError, PoliciesError, PoliciesOptions, hit_rates,
    hit_rates_of, parse_capacities,
};

/// Hits of a policy on the requests' ids with a capacity.
type Model = fn(&[Vec<u64>], usize) -> u64;

const MODELS: [(&str, Model); 6] = [
    ("lru", prefix_lru),
    ("belady", belady),
    ("slru", slru),
    ("s3fifo", s3fifo),
    ("arc", arc),
    ("lru_block", block_lru),
];

fn take(list: &mut Vec<u64>, id: u64) -> bool {
    let found = list.iter().position(|&other| other == id);
    found.map(|index| list.remove(index)).is_some()
}

fn prefix_lru(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let (mut cached, mut hits) = (Vec::new(), 0);
    for ids in requests {
        let run = ids.iter().take_while(|id| cached.contains(*id)).count();
        hits += run as u64;
        for &id in &ids[run..] {
            if !cached.contains(&id) {
                if cached.len() == capacity {
                    cached.remove(0);
                }
                cached.push(id);
            }
        }
        for &id in ids.iter().rev() {
            if take(&mut cached, id) {
                cached.push(id);
            }
        }
    }
    hits
}

fn block_lru(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let (mut cached, mut hits) = (Vec::new(), 0);
    for id in requests.concat() {
        if take(&mut cached, id) {
            hits += 1;
        } else if cached.len() == capacity {
            cached.remove(0);
        }
        cached.push(id);
    }
    hits
}

fn belady(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let sequence = requests.concat();
    let (mut cached, mut hits) = (Vec::new(), 0);
    for (position, &id) in sequence.iter().enumerate() {
        if cached.contains(&id) {
            hits += 1;
            continue;
        }
        if cached.len() == capacity {
            let wait = |other: &u64| {
                sequence[position..].iter().position(|later| later == other).unwrap_or(usize::MAX)
            };
            let furthest = *cached.iter().max_by_key(|other| wait(other)).unwrap();
            take(&mut cached, furthest);
        }
        cached.push(id);
    }
    hits
}

fn slru(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let (mut probation, mut protected, mut hits) = (Vec::new(), Vec::new(), 0);
    for id in requests.concat() {
        if take(&mut protected, id) || take(&mut probation, id) {
            hits += 1;
            protected.push(id);
            if protected.len() > capacity / 5 {
                probation.push(protected.remove(0));
            }
            continue;
        }
        if probation.len() + protected.len() == capacity {
            let from = if probation.is_empty() { &mut protected } else { &mut probation };
            from.remove(0);
        }
        probation.push(id);
    }
    hits
}

/// A cached id and its hits.
type Counted = (u64, u32);

fn s3fifo(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let small_max = (capacity / 10).max(1);
    let (mut small, mut main): (Vec<Counted>, Vec<Counted>) = (Vec::new(), Vec::new());
    let (mut ghosts, mut hits) = (Vec::new(), 0);
    for id in requests.concat() {
        if let Some(entry) = small.iter_mut().chain(&mut main).find(|entry| entry.0 == id) {
            entry.1 = 3.min(entry.1 + 1);
            hits += 1;
            continue;
        }
        while small.len() + main.len() >= capacity {
            let mut evicted = false;
            if small.len() >= small_max || main.is_empty() {
                while !small.is_empty() && !evicted {
                    let entry = small.remove(0);
                    if entry.1 > 1 {
                        main.push(entry);
                        if main.len() > capacity - small_max {
                            s3fifo_evict_main(&mut main);
                        }
                    } else {
                        ghosts.push(entry.0);
                        if ghosts.len() > capacity {
                            ghosts.remove(0);
                        }
                        evicted = true;
                    }
                }
            }
            if !evicted {
                s3fifo_evict_main(&mut main);
            }
        }
        if take(&mut ghosts, id) { main.push((id, 0)) } else { small.push((id, 0)) }
    }
    hits
}

fn s3fifo_evict_main(main: &mut Vec<Counted>) {
    while !main.is_empty() {
        let (id, count) = main.remove(0);
        if count == 0 {
            return;
        }
        main.push((id, count - 1));
    }
}

/// The lists and target of ARC, as its publication names them.
#[derive(Default)]
struct ArcLists {
    t1: Vec<u64>,
    t2: Vec<u64>,
    b1: Vec<u64>,
    b2: Vec<u64>,
    p: usize,
}

impl ArcLists {
    fn replace(&mut self, id: u64) {
        let t1_len = self.t1.len();
        if t1_len > 0 && (t1_len > self.p || (self.b2.contains(&id) && t1_len == self.p)) {
            self.b1.push(self.t1.remove(0));
        } else {
            self.b2.push(self.t2.remove(0));
        }
    }
}

fn arc(requests: &[Vec<u64>], c: usize) -> u64 {
    let (mut lists, mut hits) = (ArcLists::default(), 0);
    for id in requests.concat() {
        if take(&mut lists.t1, id) || take(&mut lists.t2, id) {
            lists.t2.push(id);
            hits += 1;
        } else if lists.b1.contains(&id) {
            lists.p = c.min(lists.p + 1.max(lists.b2.len() / lists.b1.len()));
            lists.replace(id);
            take(&mut lists.b1, id);
            lists.t2.push(id);
        } else if lists.b2.contains(&id) {
            lists.p = lists.p.saturating_sub(1.max(lists.b1.len() / lists.b2.len()));
            lists.replace(id);
            take(&mut lists.b2, id);
            lists.t2.push(id);
        } else {
            let (l1, l2) = (lists.t1.len() + lists.b1.len(), lists.t2.len() + lists.b2.len());
            if l1 == c && lists.t1.len() < c {
                lists.b1.remove(0);
                lists.replace(id);
            } else if l1 == c {
                lists.t1.remove(0);
            } else if l1 + l2 >= c {
                if l1 + l2 == 2 * c {
                    lists.b2.remove(0);
                }
                lists.replace(id);
            }
            lists.t1.push(id);
        }
    }
    hits
}

fn trace_of(requests: Vec<Vec<u64>>) -> Trace {
    let request = |hash_ids: Vec<u64>| Request {
        timestamp_ms: 0,
        input_length: hash_ids.len() as u64 * BLOCK_TOKENS_IN_TRACE,
        output_length: 1,
        hash_ids,
        tenant: None,
    };
    Trace::new(requests.into_iter().map(request).collect())
}

/// Compares every policy with its model. A difference is reported with its trace and capacity.
fn assert_models_agree(label: &str, trace: &Trace, capacities: &str) {
    let ids: Vec<Vec<u64>> =
        trace.requests.iter().map(|request| request.hash_ids.clone()).collect();
    let report = hit_rates(trace, &parse_capacities(capacities).unwrap());
    assert_eq!(report.block_lookups, trace.block_lookups());
    for row in &report.capacities {
        let mut found: Vec<_> = row.hits.iter().map(|hits| (hits.policy, hits.hits)).collect();
        // A policy that learns has no model, and neither has one that is served as in a pool. They are
        // checked against properties that hold for every policy.
        let has_no_model = |policy: &str| policy == "hit_density" || policy.ends_with("_pool");
        let others: Vec<_> = found.extract_if(.., |(policy, _)| has_no_model(policy)).collect();
        assert_eq!(others.len(), 4);
        let expected = MODELS.map(|(name, model)| (name, model(&ids, row.capacity.blocks())));
        assert_eq!(found, expected, "{label}, capacity {}", row.capacity.blocks());
        for (policy, hits) in others {
            assert!(hits <= expected[1].1, "{policy}, {label}, capacity {}", row.capacity.blocks());
        }
    }
}

#[test]
fn policies_equal_their_models_on_generated_workloads() {
    for seed in 0..6 {
        let trace = generate(&GenerateOptions { requests: 60, seed }).unwrap();
        assert_models_agree(
            &format!("generated from seed {seed}"),
            &trace,
            "1,2,7,40,150,400,100000",
        );
    }
}

#[test]
fn policies_equal_their_models_on_any_sequence_of_ids() {
    // Few ids, unordered and repeated within a request: no prefix cache sees this, but it covers
    // every corner of the policies.
    for seed in 0..60 {
        let mut rng = SplitMix64::new(seed);
        let ids = rng.between(2, 40);
        let requests = (0..80).map(|_| {
            let length = rng.between(1, 12);
            (0..length).map(|_| rng.below(ids).min(rng.below(ids))).collect()
        });
        let trace = trace_of(requests.collect());
        assert_models_agree(&format!("random, seed {seed}"), &trace, "1,2,3,5,8,11,13,20,39");
    }
}

#[test]
fn a_prefix_cache_loses_tails_before_heads() {
    let trace = trace_of(vec![vec![1, 2, 3], vec![4], vec![1, 2, 3]]);
    let report = hit_rates(&trace, &[Capacity::new(3).unwrap()]);
    // Block 3 was evicted for 4, and 1 and 2 are still cached. Block by block, LRU would have lost
    // 1 and then all others.
    assert_eq!(report.capacities[0].hit_rate("lru"), Some(2.0 / 7.0));
    assert_eq!(report.capacities[0].hit_rate("lru_block"), Some(0.0));
    assert_eq!(report.capacities[0].hit_rate("unknown"), None);
}

#[test]
fn a_capacity_beyond_all_blocks_hits_every_repetition() {
    let trace = generate(&GenerateOptions { requests: 300, seed: 3 }).unwrap();
    let mut ids: Vec<u64> =
        trace.requests.iter().flat_map(|request| request.hash_ids.clone()).collect();
    ids.sort_unstable();
    ids.dedup();
    let repeated = trace.block_lookups() - ids.len() as u64;
    let report = hit_rates(&trace, &[Capacity::new(policies::CAPACITY_MAX_BLOCKS).unwrap()]);
    assert_eq!(report.capacities[0].hits.len(), MODELS.len() + 4);
    for hits in &report.capacities[0].hits {
        assert_eq!(hits.hits, repeated, "{}", hits.policy);
    }
}

#[test]
fn halves_add_up_and_the_second_finds_the_cache_warm() {
    let trace = generate(&GenerateOptions { requests: 301, seed: 5 }).unwrap();
    let capacities = parse_capacities("500").unwrap();
    let of = |half| hit_rates_of(&trace, &capacities, half);
    let [both, first, second] = [Half::Both, Half::First, Half::Second].map(of);
    assert_eq!(both, hit_rates(&trace, &capacities));
    assert_eq!(both.block_lookups, first.block_lookups + second.block_lookups);
    for ((both, first), second) in both.capacities[0]
        .hits
        .iter()
        .zip(&first.capacities[0].hits)
        .zip(&second.capacities[0].hits)
    {
        assert_eq!(both.hits, first.hits + second.hits, "{}", both.policy);
    }
    // The first half alone equals the trace that ends there.
    let cut = hit_rates(&trace.clone().limit(150), &capacities);
    assert_eq!(cut.block_lookups, first.block_lookups);
    let without_foresight = |report: &policies::PolicyReport| {
        let hits = report.capacities[0].hits.iter();
        hits.filter(|hits| hits.policy != "belady").map(|hits| hits.hits).collect::<Vec<_>>()
    };
    assert_eq!(without_foresight(&cut), without_foresight(&first));
}

#[test]
fn halves_have_names() {
    for half in [Half::Both, Half::First, Half::Second] {
        assert_eq!(half.to_string().parse(), Ok(half));
    }
    assert_eq!("third".parse::<Half>(), Err(HalfError { value: "third".to_owned() }));
    assert_eq!((Half::First.requests(5), Half::Second.requests(5)), (0..2, 2..5));
}

#[test]
fn capacities_are_checked_and_named() {
    let blocks = |list| {
        parse_capacities(list).map(|all| all.iter().map(|one| one.blocks()).collect::<Vec<_>>())
    };
    assert_eq!(blocks("3000, 1000"), Ok(vec![3000, 1000]));
    assert_eq!(blocks(" "), Err(CapacityError::Empty));
    for (list, value) in [
        ("1000,0", "0"),
        ("-5", "-5"),
        ("10,,20", ""),
        ("1e3", "1e3"),
        ("2.5", "2.5"),
        ("99999999999999999999", "99999999999999999999"),
        ("1073741825", "1073741825"),
    ] {
        assert_eq!(blocks(list), Err(CapacityError::Invalid { value: value.to_owned() }), "{list}");
    }
    let message = parse_capacities("1000,0").unwrap_err().to_string();
    assert_eq!(message, "capacity \"0\" is not a whole number of blocks from 1 to 1073741824");
}

fn run(trace: &Path, capacities: &str, json: &Path) -> Result<String, PoliciesError> {
    let traces = [trace.to_owned()];
    policies::run(&options(&traces, capacities, json), |_, _| ())
}

const READING: ReadOptions = ReadOptions { block_tokens: None, skip_unusable: false };

fn options<'a>(traces: &'a [PathBuf], capacities: &'a str, json: &'a Path) -> PoliciesOptions<'a> {
    let (half, json) = (Half::Both, Some(json));
    PoliciesOptions {
        traces,
        reading: &READING,
        capacities,
        host_capacities: None,
        half,
        saved: false,
        hints: false,
        json,
    }
}

#[test]
fn several_traces_of_another_grain_are_reported_apart() {
    let folder = tempfile::tempdir().unwrap();
    let json_path = folder.path().join("report.json");
    let line = |ids: &str| {
        format!(
            "{{\"timestamp\": 0, \"input_length\": 128, \"output_length\": 1, \"hash_ids\": {ids}}}\n"
        )
    };
    let texts = [line("[1, 2]").repeat(2), line("[1, 1]")];
    let traces = [0, 1].map(|index| folder.path().join(format!("{index}.jsonl")));
    for (path, text) in traces.iter().zip(&texts) {
        std::fs::write(path, text).unwrap();
    }
    let reading = ReadOptions { block_tokens: Some(64), ..READING };
    let fine =
        PoliciesOptions { reading: &reading, saved: true, ..options(&traces, "2", &json_path) };
    let tables = policies::run(&fine, |_, _| ()).unwrap();
    assert!(tables.contains("0.jsonl: 4 block lookups") && tables.contains("cache saved"));
    assert!(tables.contains("1.jsonl: 2 block lookups"));
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&json_path).unwrap()).unwrap();
    let second = &json["traces"][1];
    assert!(second["trace"].as_str().unwrap().ends_with("1.jsonl"));
    assert_eq!(second["report"]["default_policy"], "hit_density");
    // One block is enough for the one that is found again.
    assert_eq!(second["report"]["capacities"][0]["cache_saved"], 0.5);
    let wrong = policies::run(&PoliciesOptions { reading: &READING, ..fine }, |_, _| ());
    assert!(matches!(wrong, Err(PoliciesError::Trace(TraceError::Line { .. }))));
    let none = ReadOptions { block_tokens: Some(0), ..READING };
    let none = policies::run(&PoliciesOptions { reading: &none, ..fine }, |_, _| ());
    let refused = TraceError::BlockTokens { block_tokens: 0 }.to_string();
    assert_eq!(none.unwrap_err().to_string(), refused);
}

/// Forty sessions of four blocks and twenty turns, two at a time, between prompts that never come back: a policy
/// that is told which blocks are over keeps the others.
#[test]
fn hints_keep_what_comes_back() {
    let mut requests = Vec::new();
    for round in 0..400_u64 {
        for session in [2 * (round / 20), 2 * (round / 20) + 1] {
            let session = 4 * session;
            requests.push((session..session + 4).collect::<Vec<_>>());
            let scan = 1_000_000 + 8 * requests.len() as u64;
            requests.push((scan..scan + 8).collect());
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let (trace, json) = (folder.path().join("trace.jsonl"), folder.path().join("report.json"));
    trace_of(requests).write(&trace).unwrap();
    let hits = |hints| {
        let traces = [trace.clone()];
        policies::run(&PoliciesOptions { hints, ..options(&traces, "20", &json) }, |_, _| ())
            .unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let rates = &json["capacities"][0]["hit_rate"];
        ["hit_density", "hit_density_pool", "s3fifo"].map(|policy| rates[policy].as_f64().unwrap())
    };
    let (without, with) = (hits(false), hits(true));
    assert!(with[0] >= without[0] && with[1] > without[1], "{without:?} {with:?}");
    // 38 of 40 requests of two sessions find their four blocks, which are a third of all that is looked up.
    assert!(with[1] > 0.3, "{with:?}");
    assert_eq!(with[2], without[2], "who knows no hints");
}

/// On workloads that it was not made for. All of them, at all sizes: the example `policy_workloads`.
#[test]
fn our_policy_is_not_below_published_ones() {
    for workload in WORKLOADS {
        if !["mix", "tenants_400", "documents", "phases"].contains(&workload.name) {
            continue;
        }
        let trace = workload.generate(40_000).unwrap();
        let row = &hit_rates(&trace, &parse_capacities("500").unwrap()).capacities[0];
        let rate = |policy| row.hit_rate(policy).unwrap();
        let best = ["lru", "slru", "s3fifo", "arc"].map(rate).into_iter().fold(0.0, f64::max);
        let ours = rate(policies::DEFAULT_POLICY);
        assert!(ours >= best - 0.01, "{}: {ours} against {best}", workload.name);
    }
}

#[test]
fn workloads_follow_from_their_names_and_end_where_they_are_told() {
    for workload in WORKLOADS {
        let trace = workload.generate(3000).unwrap();
        assert_eq!(workload.generate(3000).unwrap().requests, trace.requests, "{}", workload.name);
        assert!(trace.block_lookups() >= 1000, "{}", workload.name);
        assert!(workload.generate(0).is_err(), "{}", workload.name);
    }
}

#[test]
fn the_report_has_the_documented_form() {
    let folder = tempfile::tempdir().unwrap();
    let (trace_path, json_path) =
        (folder.path().join("trace.jsonl"), folder.path().join("report.json"));
    trace_of(vec![vec![1, 2], vec![1, 2]]).write(&trace_path).unwrap();
    let table = run(&trace_path, "2,1", &json_path).unwrap();
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&json_path).unwrap()).unwrap();
    let rates = |rate: f64, lru: f64, belady: f64| serde_json::json!({"lru": lru, "belady": belady, "slru": rate, "s3fifo": rate, "arc": rate, "hit_density": rate, "hit_density_pool": rate, "s3fifo_pool": rate, "arc_pool": rate, "lru_block": rate});
    assert_eq!(
        json,
        serde_json::json!({"block_lookups": 4, "default_policy": "hit_density", "capacities": [
            {"capacity": 2, "hit_rate": rates(0.5, 0.5, 0.5), "way": null, "cache_saved": null},
            {"capacity": 1, "hit_rate": rates(0.0, 0.0, 0.0), "way": null, "cache_saved": null},
        ]})
    );
    let expected = "4 block lookups; hit rate by capacity in blocks: the share of the trace's hash ids, part-full ones included\n\n\
        capacity     lru  belady    slru  s3fifo     arc  hit_density  hit_density_pool  s3fifo_pool  arc_pool  lru_block    way\n       \
        2  0.5000  0.5000  0.5000  0.5000  0.5000       0.5000            0.5000       0.5000    0.5000     0.5000      -\n       \
        1  0.0000  0.0000  0.0000  0.0000  0.0000       0.0000            0.0000       0.0000    0.0000     0.0000      -\n";
    assert_eq!(table, expected);
}

#[test]
fn a_failed_run_writes_no_report() {
    let folder = tempfile::tempdir().unwrap();
    let (trace_path, json_path) =
        (folder.path().join("trace.jsonl"), folder.path().join("report.json"));
    assert!(matches!(run(&trace_path, "10", &json_path), Err(PoliciesError::Trace(_))));
    trace_of(vec![vec![1]]).write(&trace_path).unwrap();
    assert!(matches!(run(&trace_path, "0", &json_path), Err(PoliciesError::Capacities(_))));
    assert!(!json_path.exists());
    let unwritable = folder.path().join("absent/report.json");
    assert!(matches!(run(&trace_path, "10", &unwritable), Err(PoliciesError::Write(_))));
}

/// The result of LRU with so many blocks on the device and in host memory.
fn two_tiers(requests: Vec<Vec<u64>>, device: &str, host: &str) -> [u64; 3] {
    let folder = tempfile::tempdir().unwrap();
    let (trace, json) = (folder.path().join("trace.jsonl"), folder.path().join("report.json"));
    trace_of(requests).write(&trace).unwrap();
    let traces = [trace];
    let asked = PoliciesOptions { host_capacities: Some(host), ..options(&traces, device, &json) };
    let table = policies::run(&asked, |_, _| ()).unwrap();
    assert!(table.contains("brought back"), "{table}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let lru = &report["two_tiers"][0];
    assert_eq!((&lru["store"], &lru["blocks_refused"]), (&"all".into(), &0.into()));
    assert_eq!(
        (&lru["policy"], lru["host_capacity"].to_string()),
        (&"lru".into(), host.to_owned())
    );
    let count = |name: &str| lru[name].as_u64().unwrap();
    let hits = count("device_hits") + count("host_hits");
    let rate = hits as f64 / count("block_lookups") as f64;
    assert!((lru["hit_rate"].as_f64().unwrap() - rate).abs() < 1e-12);
    ["device_hits", "host_hits", "blocks_stored"].map(count)
}

#[test]
fn two_tiers_count_what_travels() {
    let turns = || vec![vec![1, 2], vec![3, 4], vec![1, 2], vec![3, 4], vec![3, 4]];
    // Both prompts fit: one on the device, the other one below, and they change places.
    assert_eq!(two_tiers(turns(), "2", "4"), [2, 4, 6]);
    // While a prompt is brought back, host memory has no room for the one that makes way.
    assert_eq!(two_tiers(turns(), "2", "2"), [2, 2, 4]);
    // All fits on the device.
    assert_eq!(two_tiers(turns(), "4", "4"), [6, 0, 0]);
    // A request beyond device memory keeps what fits, and the rest are misses.
    assert_eq!(two_tiers(vec![vec![1, 2, 3], vec![1, 2, 3]], "2", "1"), [2, 0, 0]);
    // Heads stay longer than tails.
    assert_eq!(two_tiers(vec![vec![1, 2, 3], vec![4], vec![1, 2, 3]], "3", "1"), [2, 1, 1]);
}

#[test]
fn a_tier_below_never_costs_hits_of_lru_on_generated_workloads() {
    let trace = generate(&GenerateOptions { requests: 400, seed: 3 }).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (path, json) = (folder.path().join("trace.jsonl"), folder.path().join("report.json"));
    trace.write(&path).unwrap();
    let traces = [path];
    let asked =
        PoliciesOptions { host_capacities: Some("500,2000"), ..options(&traces, "300", &json) };
    policies::run(&asked, |_, _| ()).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let alone = report["capacities"][0]["hit_rate"]["lru"].as_f64().unwrap();
    let all = report["two_tiers"].as_array().unwrap();
    let rates: Vec<f64> = all
        .iter()
        .filter(|entry| entry["policy"] == "lru" && entry["store"] == "all")
        .map(|entry| entry["hit_rate"].as_f64().unwrap())
        .collect();
    assert_eq!(rates.len(), 2);
    assert!(alone < rates[0] && rates[0] < rates[1], "{alone} {rates:?}");
    assert_eq!(all.len(), 2 * 2 * policies::evict::Eviction::ALL.len());
    for rules in all.chunks(2) {
        let [every, evidence] = rules else { panic!("{rules:?}") };
        assert_eq!((&every["store"], &evidence["store"]), (&"all".into(), &"evidence".into()));
        assert_eq!(
            (&every["policy"], &every["host_capacity"]),
            (&evidence["policy"], &evidence["host_capacity"])
        );
        let count = |of: &serde_json::Value, name: &str| of[name].as_u64().unwrap();
        assert!(count(evidence, "blocks_refused") > 0, "{evidence}");
        assert!(
            count(evidence, "blocks_stored") < count(every, "blocks_stored"),
            "{every} {evidence}"
        );
    }
}

#[test]
fn lookups_of_workloads() {
    for workload in WORKLOADS {
        for lookups in [0, 1, 1000, REQUESTS_MAX + 1, u64::MAX] {
            let made = workload.generate(lookups);
            // Chats are counted by requests, of which 24 lookups are the fewest.
            let is_chat = workload.name.starts_with("chats");
            let fine = (if is_chat { 24 } else { 1 }..=REQUESTS_MAX).contains(&lookups);
            assert_eq!(made.is_ok(), fine, "{}, {lookups}", workload.name);
        }
    }
}

#[test]
fn capacities_and_halves() {
    let trace = generate(&GenerateOptions { requests: 20, seed: 0 }).unwrap();
    for blocks in [0, 1, 2, 1 << 16, 1 << 30, (1 << 30) + 1, 1 << 40, usize::MAX] {
        if let Ok(capacity) = Capacity::new(blocks) {
            assert_eq!(hit_rates(&trace, &[capacity]).capacities.len(), 1);
        }
    }
    for list in
        ["", "0", "1", "1073741824", "1073741825", "18446744073709551616", "-1", ",", "1,,2"]
    {
        let _ = parse_capacities(list);
    }
    assert!(parse_capacities(&"1,".repeat(1 << 20)).is_err());
    for half in [Half::Both, Half::First, Half::Second] {
        for of in [0, 1, 2, usize::MAX] {
            let requests = half.requests(of);
            assert!(requests.start <= requests.end && requests.end <= of);
        }
    }
}
