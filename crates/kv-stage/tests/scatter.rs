//! Compares the committed PTX of the scatter kernels with the expected result, and changes single
//! lines of it: each change must lead to other bytes or to a finding.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, KernelArgs, LaunchConfig, Module, Stream};
use cuda_sim::{SimConfig, SimDriver};

const PTX: &str = include_str!("../ptx/scatter.compute_80.ptx");

const WORD: usize = 16;
/// Number of words of the written memory. One more word follows, which must never be written.
const OUT_WORDS: u64 = 200;
/// Number of words of a packet.
const WORDS_MAX: u32 = 60;

/// Bytes in which no two words are equal.
fn noise(words: usize, seed: u32) -> Vec<u8> {
    let value = |number: u32| (number ^ seed).wrapping_mul(0x9E37_79B1).to_le_bytes();
    (0..words as u32 * 4).flat_map(value).collect()
}

/// The indices of `count` words, each once. Some are beyond the end.
fn indices(count: u32) -> Vec<u32> {
    (0..count)
        .map(|i| match i % 23 {
            21 => OUT_WORDS as u32 + i / 23 * 0x0100_0000,
            22 => u32::MAX - i,
            _ => i * 3 % 199,
        })
        .collect()
}

/// The expected memory: `out[index[i]] = data[i]`, and nothing beyond the end.
fn reference(out: &mut [u8], data: &[u8], index: &[u32]) {
    for (word, &target) in data.chunks_exact(WORD).zip(index) {
        if u64::from(target) < OUT_WORDS {
            out[target as usize * WORD..][..WORD].copy_from_slice(word);
        }
    }
}

/// One launch of one of the kernels.
#[derive(Clone, Copy, Debug)]
enum Launch {
    /// That many words, with that many blocks and threads.
    Words { count: u32, blocks: u32, threads: u32 },
    /// A packet with that many words, with that many threads.
    Packet { count: u32, threads: u32 },
}

const LAUNCHES: [Launch; 7] = [
    Launch::Words { count: 1, blocks: 1, threads: 256 },
    Launch::Words { count: 60, blocks: 2, threads: 16 },
    Launch::Words { count: 65, blocks: 1, threads: 256 },
    Launch::Packet { count: 0, threads: 32 },
    Launch::Packet { count: 20, threads: 32 },
    Launch::Packet { count: WORDS_MAX, threads: 64 },
    // Words without a thread are not written.
    Launch::Packet { count: WORDS_MAX, threads: 32 },
];

/// The memory after running `ptx`, and the expected memory; `None` if there was a finding.
fn run(ptx: &str, launch: Launch) -> Option<(Vec<u8>, Vec<u8>)> {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let upload = |bytes: &[u8]| {
        let buffer = DeviceBuffer::alloc(&device, bytes.len() as u64).unwrap();
        stream.upload(buffer.span(), bytes).unwrap();
        buffer
    };
    let module = Module::load(&device, ptx).unwrap();
    let before = noise(OUT_WORDS as usize + 1, 7);
    let (mut right, out) = (before.clone(), upload(&before));
    let args = KernelArgs::new().arg(out.span().address()).arg(OUT_WORDS);
    let (kernel, config, args, _source) = match launch {
        Launch::Words { count, blocks, threads } => {
            let (data, index) = (noise(count as usize, 3), indices(count));
            reference(&mut right, &data, &index);
            let source = [upload(&data), upload(bytemuck::cast_slice(&index))];
            let [data, index] = source.each_ref().map(|buffer| buffer.span().address());
            let args = args.arg(data).arg(index).arg(count);
            ("scatter_words", LaunchConfig::linear(blocks, threads), args, Vec::from(source))
        }
        Launch::Packet { count, threads } => {
            let (data, index) = (noise(WORDS_MAX as usize, 3), indices(WORDS_MAX));
            let written = count.min(threads) as usize;
            reference(&mut right, &data[..written * WORD], &index[..written]);
            let packet = [&data, bytemuck::cast_slice(&index), &count.to_le_bytes()[..]].concat();
            let source = upload(&packet);
            let args = args.arg(source.span().address()).arg(WORDS_MAX);
            ("scatter_packet", LaunchConfig::linear(1, threads), args, vec![source])
        }
    };
    let kernel = module.kernel(kernel).unwrap();
    // SAFETY: the simulated device checks the number and sizes of the arguments and every access,
    // and no argument names host memory.
    unsafe { kernel.launch(&stream, &config, &args) }.unwrap();
    let ended = stream.synchronize();
    if !sim.findings().is_empty() {
        return None;
    }
    ended.unwrap();
    let mut found = vec![0; right.len()];
    stream.download(&mut found, out.span()).unwrap();
    Some((found, right))
}

#[test]
fn words_and_packets_are_written_where_they_belong() {
    for launch in LAUNCHES {
        let (found, right) = run(PTX, launch).unwrap();
        assert!(found == right, "{launch:?}");
    }
}

/// Asserts that changing any line that `change` applies to is detected; returns the number of
/// lines.
fn assert_noticed(change: impl Fn(&str) -> Option<String>) -> usize {
    let lines: Vec<&str> = PTX.lines().collect();
    let mut tried = 0;
    for (number, line) in lines.iter().enumerate() {
        let Some(changed) = change(line) else { continue };
        tried += 1;
        let wrong =
            [&lines[..number], &[changed.as_str()], &lines[number + 1..]].concat().join("\n");
        let noticed = |launch| run(&wrong, launch).is_none_or(|(found, right)| found != right);
        assert!(LAUNCHES.into_iter().any(noticed), "{}: {line} -> {changed}", number + 1);
    }
    tried
}

#[test]
fn an_access_to_the_neighbouring_word_is_noticed() {
    let shifted = |line: &str| {
        let accesses = ["ld.global", "st.global", "ld.u32", "ld.v2"];
        let accesses = accesses.iter().any(|access| line.trim_start().starts_with(access));
        let (before, after) = line.split_once(']').filter(|_| accesses)?;
        Some(match before.rsplit_once('+') {
            Some((base, offset)) => {
                format!("{base}+{}]{after}", offset.parse::<i64>().ok()? + 8)
            }
            None => format!("{before}+8]{after}"),
        })
    };
    assert!(assert_noticed(shifted) >= 7);
}

#[test]
fn a_store_that_is_missing_is_noticed() {
    let removed = |line: &str| line.trim_start().starts_with("st.global").then(String::new);
    assert!(assert_noticed(removed) >= 2);
}

#[test]
fn a_comparison_that_is_missing_is_noticed() {
    // A guard is a branch around the guarded instruction.
    let removed = |line: &str| line.trim_start().starts_with('@').then(String::new);
    assert!(assert_noticed(removed) >= 4);
}
