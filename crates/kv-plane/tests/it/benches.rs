//! The benchmark of decode steps, in its short form on the simulated device: what it expects of the cache holds.

#[path = "../../benches/decode_gpu.rs"]
mod decode_gpu;

/// With whatever policy, each sequence of a round that is too long for the device is found as a whole, on the device or
/// in host memory, and nothing is computed again (`play` looks). Where the oldest leaves first, all of it comes back
/// from host memory; the default policy keeps a part of the round on the device, and the rest comes back.
#[test]
fn decode_gpu_finds_every_block_of_a_round_again() {
    let rig = decode_gpu::Rig::open(true).unwrap();
    let moved = rig.device.while_current(|| decode_gpu::measure(&rig)).unwrap();
    let (by_default, others): (Vec<_>, Vec<_>) =
        moved.iter().partition(|moved| moved.way == decode_gpu::BY_DEFAULT);
    assert_eq!((by_default.len(), others.len()), (2, 8));
    for moved in others.iter().filter(|moved| moved.way != "plain copies") {
        assert!(moved.blocks == moved.most && moved.most > 0, "{}", moved.way);
    }
    for moved in by_default {
        assert!(moved.blocks < moved.most, "{} of {}", moved.blocks, moved.most);
    }
}
