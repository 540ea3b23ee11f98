//! The kernel's PTX, run instruction by instruction, against its reference: the same bits in every shape, and the same as
//! the arithmetic of the plain cache.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::collections::VecDeque;
use std::sync::Arc;

use chat::attention::arithmetic::attend;
use chat::attention::{Attend, Attention, Heads, references};
use cuda_driver::{Device, DeviceBuffer, Stream};
use cuda_sim::{RaceCheck, SimConfig, SimDriver};
use kv_kernels::{Append, KvShape, KvShapeOptions};
use kv_plane::{KvCache, KvCacheOptions, Request, Sequence};

/// Tokens of a block, and sequences with so many tokens before the step and in it.
struct Shape {
    heads: Heads,
    block_tokens: u32,
    sequences: &'static [(u64, u32)],
}

const SHAPES: [Shape; 4] = [
    // Decode and chunks of prompts in one batch, contexts on both sides of a tile.
    Shape {
        heads: Heads { heads: 3, kv_heads: 1, head_size: 64 },
        block_tokens: 8,
        sequences: &[(0, 5), (63, 1), (64, 1), (60, 9), (130, 2)],
    },
    Shape {
        heads: Heads { heads: 2, kv_heads: 2, head_size: 32 },
        block_tokens: 16,
        sequences: &[(7, 3)],
    },
    Shape {
        heads: Heads { heads: 4, kv_heads: 2, head_size: 128 },
        block_tokens: 4,
        sequences: &[(0, 1), (2, 4), (70, 1)],
    },
    Shape {
        heads: Heads { heads: 1, kv_heads: 1, head_size: 256 },
        block_tokens: 32,
        sequences: &[(40, 2), (0, 3)],
    },
];

#[derive(Clone, Copy, PartialEq)]
enum Runs {
    Ptx,
    Reference,
}

/// Numbers that follow from a place, of either sign, and of several magnitudes.
fn value(seed: u64) -> f32 {
    let mixed = (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let (sign, size) = ((mixed >> 40) as f32 / (1 << 23) as f32 - 1.0, (mixed >> 20) % 3);
    sign * [0.05, 1.0, 6.0][size as usize]
}

/// The row of keys (0) or values (1) of a token of a sequence.
fn row(heads: Heads, sequence: usize, token: u64, kv: u64) -> Vec<f32> {
    let seed = ((sequence as u64 * 1000 + token) * 2 + kv) * 1024;
    (0..heads.kv_floats() as u64).map(|at| value(seed + at)).collect()
}

fn query(heads: Heads, sequence: usize, token: u64) -> Vec<f32> {
    let seed = (sequence as u64 * 1000 + token + 500_000) * 4096;
    (0..heads.query_floats() as u64).map(|at| value(seed + at)).collect()
}

/// The output of all tokens of the step, computed over a cache whose sequences were admitted in this order.
fn computed(shape: &Shape, runs: Runs) -> Vec<f32> {
    let races = RaceCheck::Report;
    let sim = SimDriver::new(SimConfig { races, ..SimConfig::default() }).unwrap();
    sim.register_kernels(kv_kernels::references());
    sim.register_kernels(kv_stage::references());
    if runs == Runs::Reference {
        sim.register_kernels(references());
    }
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let heads = shape.heads;
    let row_bytes = heads.kv_floats() as u64 * 4;
    let kv = KvShapeOptions { layers: 1, kv_count: 2, row_bytes, block_tokens: shape.block_tokens };
    let options = KvCacheOptions::new(KvShape::new(kv).unwrap(), 128);
    let mut cache = KvCache::new(&[stream], options).unwrap();
    let attention = Attention::load(&device, heads).unwrap();

    // What is before the step is computed in a step of its own.
    let mut running: Vec<(usize, Sequence)> = Vec::new();
    let mut output = Vec::new();
    for second in [false, true] {
        let step = cache.begin_step().unwrap();
        for (index, &(before, tokens)) in shape.sequences.iter().enumerate() {
            let ids = (0..before + u64::from(tokens)).map(|id| id as u32 + 1000 * index as u32);
            let mut queue = VecDeque::from([Request::new(ids.collect())]);
            if second && before > 0 {
                let (_, sequence) = running.iter_mut().find(|(of, _)| *of == index).unwrap();
                cache.reserve(sequence, tokens).unwrap().given().unwrap();
            } else if second || before > 0 {
                let admitted = cache.admit(&mut queue, 1 << 20).unwrap().admitted.pop();
                let Some((_, mut sequence)) = admitted else { panic!("the cache is full") };
                let first = if second { tokens } else { before as u32 };
                cache.reserve(&mut sequence, first).unwrap().given().unwrap();
                running.push((index, sequence));
            }
        }
        let places: Vec<(usize, u64, u64)> = running
            .iter()
            .map(|(index, sequence)| (*index, sequence.upper(), u64::from(sequence.next())))
            .collect();
        let mut batch: Vec<_> = running.iter_mut().map(|(_, sequence)| sequence).collect();
        if batch.is_empty() {
            cache.finish_step(step).unwrap();
            continue;
        }
        cache.stage(&step, &mut batch).unwrap();
        let tokens: Vec<(usize, u64)> = places
            .iter()
            .flat_map(|&(index, start, count)| (start..start + count).map(move |at| (index, at)))
            .collect();
        output = step_output(&cache, &attention, &tokens, heads);
        cache.finish_step(step).unwrap();
        if second {
            let rows = output.chunks(heads.query_floats());
            let mut rows: Vec<_> = tokens.iter().zip(rows.map(<[f32]>::to_vec)).collect();
            rows.sort_by_key(|(token, _)| **token);
            output = rows.into_iter().flat_map(|(_, row)| row).collect();
        }
    }
    drop(running);
    assert_eq!((sim.findings(), sim.races().len()), (vec![], 0));
    output
}

/// Stores keys and values of the tokens of a staged step, and attends for them.
fn step_output(
    cache: &KvCache,
    attention: &Attention,
    tokens: &[(usize, u64)],
    heads: Heads,
) -> Vec<f32> {
    let part = &cache.parts()[0];
    let stream = part.compute();
    let upload = |floats: Vec<f32>| {
        let buffer = DeviceBuffer::alloc(part.device(), floats.len() as u64 * 4).unwrap();
        stream.upload(buffer.span(), bytemuck::cast_slice(&floats)).unwrap();
        buffer
    };
    let rows = |kv| upload(tokens.iter().flat_map(|&(s, at)| row(heads, s, at, kv)).collect());
    let (keys, values) = (rows(0), rows(1));
    let queries = upload(tokens.iter().flat_map(|&(s, at)| query(heads, s, at)).collect());
    let count = tokens.len() as u64;
    let append = Append {
        keys: keys.span().into(),
        values: Some(values.span().into()),
        layer_stride_bytes: 0,
        token_stride_bytes: heads.kv_floats() as u64 * 4,
        first_layer: 0,
        layers: 1,
        slot_mapping: part.batch().tables[0].slots.slice(0, count * 8).unwrap().into(),
        host_slots: None,
        tokens: count,
        num_blocks: part.ready_blocks(),
        report: None,
    };
    part.kernels().append(stream, part.paged(), append).unwrap();
    let out = DeviceBuffer::alloc(part.device(), queries.bytes()).unwrap();
    let mut result = vec![0.0_f32; tokens.len() * heads.query_floats()];
    // In two launches, as pieces of a step are.
    let row_bytes = heads.query_floats() as u64 * 4;
    for (first, tokens) in [(0, count / 2), (count / 2, count - count / 2)] {
        let span = |buffer: &DeviceBuffer| {
            buffer.span().slice(first * row_bytes, tokens * row_bytes).unwrap()
        };
        let attend = Attend {
            paged: part.paged(),
            layer: 0,
            num_blocks: part.ready_blocks(),
            batch: part.batch(),
            sequences: cache.manager().last_plan().batch.len() as u32,
            first_token: first as u32,
            tokens: tokens as u32,
            queries: span(&queries),
            out: span(&out),
        };
        attention.launch(stream, &attend).unwrap();
    }
    stream.download(bytemuck::cast_slice_mut(&mut result), out.span()).unwrap();
    result
}

/// The same by the arithmetic of the plain cache.
fn plain(shape: &Shape) -> Vec<f32> {
    let heads = shape.heads;
    let (size, group) = (heads.head_size as usize, (heads.heads / heads.kv_heads) as usize);
    let mut out = Vec::new();
    for (sequence, &(before, tokens)) in shape.sequences.iter().enumerate() {
        let end = before + u64::from(tokens);
        let rows = |kv| (0..end).map(|at| row(heads, sequence, at, kv)).collect::<Vec<_>>();
        let (keys, values) = (rows(0), rows(1));
        for token in before..end {
            let queries = query(heads, sequence, token);
            for (head, query) in queries.chunks(size).enumerate() {
                let part = head / group * size..(head / group + 1) * size;
                let mut row = vec![0.0; size];
                attend(
                    query,
                    token as usize + 1,
                    heads.scale(),
                    |j| &keys[j][part.clone()],
                    |j| &values[j][part.clone()],
                    &mut row,
                );
                out.extend(row);
            }
        }
    }
    out
}

fn bits(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|float| float.to_bits()).collect()
}

#[test]
fn ptx_reference_and_plain_arithmetic_give_the_same_bits() {
    for (index, shape) in SHAPES.iter().enumerate() {
        let expected = plain(shape);
        assert!(expected.iter().all(|float| float.is_finite()));
        let reference = computed(shape, Runs::Reference);
        assert_eq!(bits(&reference), bits(&expected), "the reference, shape {index}");
        let ptx = computed(shape, Runs::Ptx);
        assert_eq!(bits(&ptx), bits(&expected), "the PTX, shape {index}");
    }
}

#[test]
fn heads_that_the_kernel_is_not_made_for_are_refused() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let device = Device::open(Arc::new(sim), 0).unwrap();
    for (heads, kv_heads, head_size) in
        [(3, 2, 64), (0, 1, 64), (2, 0, 64), (2, 1, 48), (2, 1, 512)]
    {
        assert!(Attention::load(&device, Heads { heads, kv_heads, head_size }).is_err());
    }
}
