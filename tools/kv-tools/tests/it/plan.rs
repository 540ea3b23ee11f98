//! A plan agrees with a run of the same trace, to within what its page of assumptions leaves open, and a router with many GPUs does
//! what it is for.

use kv_pool::store::StoreKind;
use kv_replay::config::{ModelCost, RunConfig, Verify};
use kv_replay::device::{SimSizes, open};
use kv_replay::engine;
use kv_replay::generate::{GenerateOptions, generate};
use kv_replay::report::RunReport;
use kv_replay::trace::{Request, Trace};
use kv_tools::plan::{self, Choice, ChoiceReport, PlanError, PlanOptions, Router, Rules, simulate};
use kv_tools::policies::evict::Eviction;

const MODEL: ModelCost = ModelCost { prefill_tokens_per_s: 60_000, decode_step_us: 9_000 };

fn rules() -> Rules {
    let mut rules = Rules::default();
    (rules.block_tokens, rules.model, rules.max_batch) = (512, MODEL, 16);
    rules
}

fn choice(gpus: u32, device_blocks: u64, host_blocks: u64) -> Choice {
    Choice { gpus, device_blocks, host_blocks, disk_blocks: 0, policy: Eviction::Lru }
}

fn workload(requests: u64) -> Trace {
    generate(&GenerateOptions { requests, seed: 9 }).unwrap()
}

fn request(timestamp_ms: u64, input_length: u64, output_length: u64, first: u64) -> Request {
    let hash_ids = (first..first + input_length.div_ceil(512)).collect();
    Request { timestamp_ms, input_length, output_length, hash_ids, tenant: None }
}

/// A byte-level run with the same options.
fn measured(trace: &Trace, choice: &Choice, rules: &Rules) -> RunReport {
    let config = RunConfig {
        block_tokens: rules.block_tokens,
        device_blocks: choice.device_blocks,
        host_blocks: choice.host_blocks,
        policy: choice.policy.name().parse().unwrap(),
        store: rules.store,
        max_batch: rules.max_batch,
        step_tokens: rules.step_tokens,
        model: rules.model,
        open_loop: true,
        verify: Verify::None,
        ..RunConfig::default()
    };
    let devices = open(&"sim".parse().unwrap(), SimSizes::for_config(&config)).unwrap();
    engine::run(&config, trace, &devices, &mut ()).unwrap()
}

fn within(what: &str, planned: f64, measured: f64, percent: f64) {
    let off = 100.0 * (planned / measured - 1.0);
    assert!(off.abs() <= percent, "{what}: planned {planned}, measured {measured}: {off:+.1} %");
}

#[test]
fn a_plan_is_near_a_run_of_the_same_trace() {
    let trace = workload(200);
    for (device, host, store) in
        [(4000, 0, StoreKind::All), (1000, 2000, StoreKind::All), (1000, 2000, StoreKind::Evidence)]
    {
        let (choice, mut rules) = (choice(1, device, host), rules());
        rules.store = store;
        let planned = simulate(&trace, &choice, &rules).unwrap();
        let run = measured(&trace, &choice, &rules);
        let open = run.open_loop.unwrap();
        assert_eq!(planned.block_lookups, run.block_lookups);
        assert_eq!(planned.generated_tokens, run.generated_tokens);
        let points = 100.0 * (planned.hit_rate - run.hit_rate);
        assert!(points.abs() <= 1.0, "{choice:?}: {points:+.2} points of {:.3}", run.hit_rate);
        within("tokens a second", planned.generated_tokens_per_s, open.generated_tokens_per_s, 5.0);
        let [first, its] = [planned.time_to_first_token_ms, open.time_to_first_token_ms];
        assert_eq!(first.count, its.count);
        within("p50 of the first token", first.p50, its.p50, 10.0);
        within("p99 of the first token", first.p99, its.p99, 10.0);
    }
}

#[test]
fn a_request_alone_takes_what_the_model_takes_and_a_queue_adds_up() {
    let trace = Trace::new(vec![request(1000, 6000, 11, 0)]);
    let alone = simulate(&trace, &choice(1, 100, 0), &rules()).unwrap();
    let near =
        |found: f64, expected: f64| assert!((found - expected).abs() < 0.01, "{found}, {expected}");
    near(alone.time_to_first_token_ms.p50, 100.0);
    near(alone.end_to_end_ms.max, 199.0);
    let mut one_by_one = rules();
    one_by_one.max_batch = 1;
    let two = Trace::new(vec![request(0, 6000, 11, 0), request(10, 6000, 1, 50)]);
    let queued = simulate(&two, &choice(1, 100, 0), &one_by_one).unwrap();
    near(queued.time_to_first_token_ms.max, 199.0 + 100.0 - 10.0);
}

#[test]
fn what_host_memory_has_is_loaded_over_the_link() {
    let turns = (0..8).map(|turn| request(1000 * turn, 20_481, 1, 100 * (turn % 2))).collect();
    let mut rules = rules();
    (rules.block_bytes, rules.store) = (1 << 26, StoreKind::All);
    let without = simulate(&Trace::new(turns), &choice(1, 41, 0), &rules).unwrap();
    assert_eq!((without.block_hits, without.link_to_device), (0, 0.0));
    let turns = (0..8).map(|turn| request(1000 * turn, 20_481, 1, 100 * (turn % 2))).collect();
    let with = simulate(&Trace::new(turns), &choice(1, 41, 100), &rules).unwrap();
    assert_eq!((with.block_hits, with.prefill_tokens_saved), (6 * 40, 6 * 40 * 512));
    assert!(with.host_hit_rate > 0.5 && with.link_to_device > 0.0, "{with:?}");
    // 40 blocks of 64 MiB take 48.7 ms down the link, beside as many that go up, instead of 341 ms to compute.
    let [first, computed] = [&with, &without].map(|of| of.time_to_first_token_ms.p50);
    assert!(first > 48.7 && first < computed / 2.0, "{first} ms, {computed} ms");
}

#[test]
fn what_files_have_is_read_into_host_memory_unless_computing_is_faster() {
    // Prompts of 40 blocks of 64 MiB, one after the other; there is room for one on the device, and in host memory.
    let turns = || (0..12).map(|turn| request(1000 * turn, 20_481, 1, 100 * (turn % 4))).collect();
    let play = |disk_blocks, rate| {
        let mut rules = rules();
        (rules.block_bytes, rules.store) = (1 << 26, StoreKind::All);
        rules.disk_bytes_per_s = rate;
        let choice = Choice { disk_blocks, ..choice(1, 41, 45) };
        simulate(&Trace::new(turns()), &choice, &rules).unwrap()
    };
    let without = play(0, 0);
    assert_eq!((without.block_hits, without.disk_reads_per_lookup), (0, 0.0));
    // Once they are there, which is stored a few blocks with each iteration, prompts take 0.125 s to be read, and 48.7 ms to the device.
    let with = play(400, 20 << 30);
    assert!((6 * 40..=8 * 40).contains(&with.block_hits), "{with:?}");
    assert!(with.disk_reads_per_lookup > 0.4, "{with:?}");
    let [first, computed] = [&with, &without].map(|of| of.time_to_first_token_ms.p50);
    assert!(first > 125.0 + 48.7 && first < computed, "{first} ms, {computed} ms");
    // Room for half of a prompt, and files that are slower than computing.
    for (disk_blocks, rate) in [(20, 20 << 30), (400, 1 << 30)] {
        let little = play(disk_blocks, rate);
        assert!(little.block_hits < 4 * 40, "{little:?}");
        assert_eq!(little.end_to_end_ms.count, 12);
    }
    assert_eq!(with, play(400, 20 << 30));
}

fn routed(router: Router) -> ChoiceReport {
    let mut rules = rules();
    (rules.router, rules.speed) = (router, 20.0);
    simulate(&workload(3000), &choice(20, 1000, 0), &rules).unwrap()
}

#[test]
fn a_router_that_knows_prefixes_finds_more_and_equal_plans_are_equal() {
    let [prefix, least, turns] = [Router::Prefix, Router::Least, Router::Turns].map(routed);
    assert!(prefix.hit_rate > 1.3 * turns.hit_rate.max(least.hit_rate), "{prefix:?} {turns:?}");
    assert!(prefix.time_to_first_token_ms.p50 < turns.time_to_first_token_ms.p50);
    assert_eq!(prefix, routed(Router::Prefix));
    for report in [prefix, least, turns] {
        assert_eq!(report.end_to_end_ms.count, 3000);
    }
}

#[test]
fn rules_that_make_no_sense_are_refused() {
    let trace = workload(5);
    let files = Choice { disk_blocks: 7, ..choice(1, 600, 0) };
    let refused = simulate(&trace, &files, &rules()).unwrap_err().to_string();
    assert!(
        refused.contains("7 blocks in files") && refused.contains("--host-memory"),
        "{refused}"
    );
    let refused = |change: fn(&mut Rules)| {
        let mut rules = rules();
        change(&mut rules);
        simulate(&trace, &choice(1, 600, 0), &rules).unwrap_err().to_string()
    };
    assert!(refused(|rules| rules.block_tokens = 0).contains("--block-tokens is 0"));
    assert!(refused(|rules| rules.max_batch = 0).contains("5 requests were never served with 0"));
    assert!(refused(|rules| rules.step_tokens = 0).contains("and 0 tokens of an iteration"));
    let empty = Trace { block_tokens: 0, ..Trace::new(Vec::new()) };
    assert!(simulate(&empty, &choice(1, 600, 0), &rules()).is_err());
}

#[test]
fn a_thousand_gpus_fit_into_one_process() {
    let mut rules = rules();
    rules.speed = 1000.0;
    let report = simulate(&workload(5000), &choice(1000, 900, 1000), &rules).unwrap();
    assert_eq!((report.end_to_end_ms.count, report.choice.gpus), (5000, 1000));
}

#[test]
fn no_policy_finds_more_than_the_best_possible_and_bad_choices_leave_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let (out, json) = (folder.path().join("plan.html"), folder.path().join("plan.json"));
    let (trace, rules) = (workload(300), rules());
    let choices = [choice(1, 600, 0), choice(2, 600, 300)];
    let assumed = ["a <sentence>".to_owned()];
    let options = PlanOptions {
        read: &[],
        target_ms: None,
        trace: &trace,
        rules: &rules,
        choices: &choices,
        assumed: &assumed,
        against: None,
        out: Some(&out),
        json: Some(&json),
    };
    let bad = [choice(1, 600, 0), choice(1, 5, 0)];
    let refused = plan::run(&PlanOptions { choices: &bad, ..options }, |_| ()).unwrap_err();
    assert!(matches!(refused, PlanError::RequestTooLarge { device_blocks: 5, .. }), "{refused}");
    for choices in [&[][..], &[choice(1, 600, 0); 65][..]] {
        let refused = plan::run(&PlanOptions { choices, ..options }, |_| ()).unwrap_err();
        assert!(matches!(refused, PlanError::Choices { count } if count == choices.len()));
    }
    for gpus in [0, 10_001] {
        let refused = simulate(&trace, &choice(gpus, 600, 0), &rules).unwrap_err();
        assert!(matches!(refused, PlanError::Gpus { gpus: found } if found == gpus));
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let mut told = Vec::new();
    let text = plan::run(&options, |done| told.push(done)).unwrap();
    assert_eq!(told, [1, 2]);
    assert!(text.contains("a <sentence>") && text.contains("plan.html is written"), "{text}");
    let html = std::fs::read_to_string(&out).unwrap();
    assert!(html.contains("a &lt;sentence&gt;") && !html.contains("<sentence>"));
    let written: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    for one in written["choices"].as_array().unwrap() {
        let rate = |name: &str| one[name].as_f64().unwrap();
        assert!(rate("hit_rate") > 0.0 && rate("hit_rate") <= rate("best_hit_rate"), "{one}");
    }
}

#[test]
fn a_choice_is_overloaded_if_its_queue_grows_and_not_if_it_is_busy() {
    // One request a second, each of which computes for so long: from idle to twice what fits.
    for (service_ms, overloaded) in
        [(20, false), (500, false), (900, false), (1300, true), (2000, true)]
    {
        let requests = (0..200).map(|at| request(at * 1000, service_ms, 2, at * 10)).collect();
        let (trace, mut rules) = (Trace::new(requests), rules());
        rules.max_batch = 1;
        rules.model = ModelCost { prefill_tokens_per_s: 1000, decode_step_us: 1 };
        let report = simulate(&trace, &choice(1, 600, 0), &rules).unwrap();
        assert_eq!(report.is_overloaded(), overloaded, "{service_ms}: {}", report.queue_growth);
        let expected = (service_ms as f64 / 1e3 - 1.0).max(0.0);
        assert!(
            (report.queue_growth - expected).abs() < 0.02,
            "{service_ms}: {}",
            report.queue_growth
        );
        // A run of the same says the same.
        let run = measured(&trace, &choice(1, 600, 0), &rules).open_loop.unwrap();
        assert!((run.queue_growth - expected).abs() < 0.05, "{service_ms}: {}", run.queue_growth);
    }
}

#[test]
fn the_smallest_choice_that_keeps_a_target_is_named() {
    let requests = (0..200).map(|at| request(at * 1000, 1500, 2, at * 10)).collect();
    let (trace, mut rules) = (Trace::new(requests), rules());
    rules.max_batch = 1;
    rules.router = kv_tools::plan::Router::Turns;
    rules.model = ModelCost { prefill_tokens_per_s: 1000, decode_step_us: 1 };
    let choices = [choice(4, 600, 0), choice(1, 600, 0), choice(2, 600, 0), choice(2, 900, 0)];
    let told = |target_ms| {
        let options = PlanOptions {
            read: &[],
            target_ms,
            trace: &trace,
            rules: &rules,
            choices: &choices,
            assumed: &[],
            against: None,
            out: None,
            json: None,
        };
        plan::run(&options, |_| ()).unwrap()
    };
    let text = told(Some(1600));
    assert!(text.contains("Number 2 is overloaded: requests wait 0.5"), "{text}");
    assert!(text.contains("Number 3 is the smallest choice in which 99 in 100"), "{text}");
    assert!(told(Some(100)).contains("In no choice have 99 in 100"), "{text}");
    assert!(!told(None).contains("99 in 100"));
}
