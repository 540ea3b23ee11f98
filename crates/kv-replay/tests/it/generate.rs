//! Generated workloads follow from their seed and have the documented shape.

use std::collections::HashMap;

use kv_replay::generate::{
    self, DOCUMENT_PERCENT, GenerateError, GenerateOptions, REQUESTS_MAX, generate,
};
use kv_replay::trace::Trace;

fn workload(requests: u64, seed: u64) -> Trace {
    generate(&GenerateOptions { requests, seed }).unwrap()
}

#[test]
fn the_seed_decides_every_byte() {
    assert_eq!(workload(400, 5).to_jsonl(), workload(400, 5).to_jsonl());
    assert_ne!(workload(400, 5).to_jsonl(), workload(400, 6).to_jsonl());
    assert_eq!(
        workload(400, 5).limit(150),
        workload(150, 5),
        "a longer workload begins with the shorter one"
    );
}

#[test]
fn the_bytes_are_the_same_on_every_platform() {
    // FNV-1a over the text. If this number changes, every workload that users identify by its seed
    // has changed.
    let hash =
        workload(2000, 1).to_jsonl().bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    assert_eq!(hash, 0xfeea_03cc_9bd8_f188, "{hash:#018x}");
}

#[test]
fn every_line_passes_the_reader() {
    for seed in 0..5 {
        let trace = workload(2000, seed);
        assert_eq!(trace.requests.len(), 2000);
        assert_eq!(Trace::parse(trace.to_jsonl().as_bytes(), "generated").unwrap(), trace);
    }
}

#[test]
fn equal_ids_follow_equal_ids() {
    let trace = workload(3000, 9);
    let mut parents = HashMap::new();
    for request in &trace.requests {
        let mut parent = None;
        for &id in &request.hash_ids {
            let known = *parents.entry(id).or_insert(parent);
            assert_eq!(known, parent, "block {id} follows two different blocks");
            parent = Some(id);
        }
    }
    // Ids are dense: every number up to the largest is used, except system prompts that no chat
    // chose.
    let largest = parents.keys().max().copied().unwrap();
    assert!(largest + 1 - parents.len() as u64 <= 32 * 8);
}

#[test]
fn a_part_full_block_is_never_shared() {
    let trace = workload(3000, 9);
    let mut uses: HashMap<u64, u32> = HashMap::new();
    for id in trace.requests.iter().flat_map(|request| &request.hash_ids) {
        *uses.entry(*id).or_default() += 1;
    }
    for request in trace.requests.iter().filter(|request| request.input_length % 512 != 0) {
        assert_eq!(uses[request.hash_ids.last().unwrap()], 1);
    }
}

#[test]
fn reuse_and_pace_are_those_of_a_chat_service() {
    for seed in 0..4 {
        let trace = workload(10_000, seed);
        let mut ids: Vec<u64> =
            trace.requests.iter().flat_map(|request| request.hash_ids.clone()).collect();
        ids.sort_unstable();
        ids.dedup();
        let reuse = 1.0 - ids.len() as f64 / trace.block_lookups() as f64;
        assert!(
            (0.3..0.6).contains(&reuse),
            "seed {seed}: {reuse:.3} of the lookups repeat a block"
        );
        let last_ms = trace.requests.last().unwrap().timestamp_ms;
        let per_s = 10_000.0 * 1000.0 / last_ms as f64;
        assert!((2.0..4.0).contains(&per_s), "seed {seed}: {per_s:.2} requests a second");
        // A document's first block is unique. This share of the sessions are documents; chats have
        // about 2.8 requests each.
        let own_start =
            trace.requests.iter().filter(|request| request.hash_ids[0] >= 32 * 8).count();
        let share = own_start as f64 / 10_000.0;
        let expected = DOCUMENT_PERCENT as f64 / 100.0 / 2.8;
        assert!(
            (share - expected).abs() < 0.04,
            "seed {seed}: {share:.3} of the requests are documents"
        );
        assert!(trace.requests.iter().all(|request| request.output_length < 2048));
    }
}

#[test]
fn no_requests_and_too_many_are_refused() {
    let error = |requests| generate(&GenerateOptions { requests, seed: 0 }).unwrap_err();
    assert!(matches!(error(0), GenerateError::NoRequests));
    assert!(matches!(
        error(REQUESTS_MAX + 1),
        GenerateError::TooManyRequests { requests: 4_000_001 }
    ));
    assert!(error(u64::MAX).to_string().starts_with("18446744073709551615 requests asked for, "));
}

#[test]
fn run_returns_the_workload_or_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("workload.jsonl");
    let text = generate::run(50, 3, (None, None)).unwrap();
    assert_eq!(text, workload(50, 3).to_jsonl());
    let said = generate::run(50, 3, (Some(&path), None)).unwrap();
    assert!(said.starts_with("wrote 50 requests with "), "{said}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    let nowhere = folder.path().join("absent/workload.jsonl");
    assert!(matches!(generate::run(50, 3, (Some(&nowhere), None)), Err(GenerateError::Write(_))));
}
