//! What a request says at its end follows from what comes behind it.

use std::time::Duration;

use kv_pool::policy::ReuseHint;
use kv_replay::hints::of_requests;
use kv_replay::trace::Request;

fn request(timestamp_ms: u64, input_length: u64, hash_ids: &[u64]) -> Request {
    Request {
        timestamp_ms,
        input_length,
        output_length: 1,
        hash_ids: hash_ids.to_vec(),
        tenant: None,
    }
}

#[test]
fn the_next_request_that_continues_one_is_when_it_comes_back() {
    let requests = [
        request(0, 25, &[1, 2, 3]),
        request(5, 20, &[9, 8]),
        request(70, 41, &[1, 2, 4, 5, 6]),
        request(90, 20, &[1, 7]),
        request(95, 9, &[4]),
    ];
    let back = |ms| Some(ReuseHint::BackIn(Duration::from_millis(ms)));
    // The third block of the first prompt is not full, so the third request continues it. The fourth one
    // begins with its first block only.
    let over = Some(ReuseHint::Over);
    assert_eq!(of_requests(&requests, 10), [back(70), over, over, over, None]);
    assert_eq!(of_requests(&[], 10), []);
}
