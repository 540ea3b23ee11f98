//! Random numbers, sizes that people write, and bytes of a model's KV.

use kv_replay::disk::{ByteSize, ByteSizeError};
use kv_replay::rng::SplitMix64;
use kv_replay::shape::{Dtype, KvModelShape};

const DRAWS: u32 = 100_000;

/// Mean of many draws. Its error is far below the tolerances used here.
fn mean(mut draw: impl FnMut(&mut SplitMix64) -> f64) -> f64 {
    let mut rng = SplitMix64::new(42);
    (0..DRAWS).map(|_| draw(&mut rng)).sum::<f64>() / f64::from(DRAWS)
}

#[test]
fn gives_the_published_numbers() {
    // The reference implementation's first numbers for the seed 1234567.
    let mut rng = SplitMix64::new(1_234_567);
    assert_eq!(
        [rng.next_u64(), rng.next_u64(), rng.next_u64()],
        [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
    );
}

#[test]
fn means_are_the_documented_ones() {
    assert!((mean(|rng| rng.exponential()) - 1.0).abs() < 0.02);
    let octaves = mean(|rng| rng.octaves(64, 6) as f64);
    assert!((octaves / (1.5 * 64.0 * 63.0 / 6.0) - 1.0).abs() < 0.02, "{octaves}");
    assert!((mean(|rng| f64::from(u8::from(rng.percent(25)))) - 0.25).abs() < 0.01);
}

const SHAPE: KvModelShape =
    KvModelShape { layers: 2, kv_heads: 3, head_size: 4, dtype: Dtype::Bf16 };

#[test]
fn bytes_are_counted() {
    assert_eq!(SHAPE.row_bytes(), Ok(24));
    assert_eq!(SHAPE.block_bytes(16), Ok(24 * 2 * 2 * 16));
    assert_eq!(KvModelShape { dtype: Dtype::F32, ..SHAPE }.row_bytes(), Ok(48));
}

#[test]
fn sizes_are_read_as_people_write_them() {
    for (text, bytes) in
        [("0", 0), ("4096", 4096), ("256MiB", 256 << 20), ("4GiB", 4 << 30), ("1KiB", 1024)]
    {
        assert_eq!(text.parse(), Ok(ByteSize(bytes)));
    }
    for text in ["", "MiB", "4GB", "-1", "1.5GiB", "99999999999TiB", "4 GiB"] {
        assert_eq!(text.parse::<ByteSize>(), Err(ByteSizeError { found: text.to_owned() }));
    }
}
