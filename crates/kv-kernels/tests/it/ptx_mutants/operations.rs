//! Launches of the operations beside transfers, in which every instruction of their entries matters.

use bytemuck::Zeroable;
use cuda_driver::{DeviceBuffer, KernelArgs, LaunchConfig};
use kv_kernels::raw::{RawBlockSide, RawBlockUnits};

use super::{Scenario, address};
use crate::kernels::machine::{Machine, noise};

const COPY: &str = include_str!("../../../ptx/block_copy.compute_80.ptx");
const APPEND: &str = include_str!("../../../ptx/append.compute_80.ptx");
const SUM: &str = include_str!("../../../ptx/block_sum.compute_80.ptx");

/// Each entry alone in its module, with its launches.
pub(crate) fn operations() -> Vec<(String, Vec<Scenario>)> {
    vec![
        (only(COPY, "copy_blocks_16"), copies()),
        (
            only(APPEND, "append_16"),
            vec![
                append(true, true),
                append(false, true),
                append(true, false),
                append(false, false),
            ],
        ),
        (
            only(SUM, "sum_blocks_16"),
            // Segments that have whole tiles of a warp, those of several vectors, and of one.
            [150, 24, 1]
                .into_iter()
                .flat_map(|segment| {
                    [(1, 0), (1, 1), (2, 0), (2, 1)]
                        .map(|(kinds, second)| sum(kinds, segment, second))
                })
                // Tiles that begin in every part of every row.
                .chain([sum(2, 150, 210)])
                .collect(),
        ),
    ]
}

/// A module without its other entries.
fn only(ptx: &str, entry: &str) -> String {
    let mut kept = true;
    let mut text = String::new();
    for line in ptx.lines() {
        if let Some((_, name)) = line.split_once(".visible .entry ") {
            kept = name.trim_end_matches('(') == entry;
        }
        if kept {
            text.push_str(line);
            text.push('\n');
        }
        if line == "}" {
            kept = true;
        }
    }
    assert!(text.contains(&format!(".entry {entry}(")), "{entry} is not in its module");
    text
}

/// Three planes of two tokens of two segments of three vectors, with gaps everywhere.
const UNITS: RawBlockUnits = RawBlockUnits { planes: 3, tokens: 2, segments: 2, unit_vectors: 3 };
const BLOCKS: u64 = 4;

/// Memory for a side whose planes lie in order, and the side.
fn side(
    machine: &Machine,
    order: [u64; 4],
    base: u64,
    table: bool,
) -> (Vec<DeviceBuffer>, RawBlockSide) {
    let [plane_stride, block_stride, token_stride, segment_stride] = order.map(|n| n * 16);
    let memory = machine.upload(&noise(16 * 1024));
    let start = address(&memory);
    let strides = RawBlockSide {
        block_stride,
        token_stride,
        segment_stride,
        num_blocks: BLOCKS,
        ..RawBlockSide::zeroed()
    };
    if !table {
        let side = RawBlockSide { base: start + base, plane_stride, ..strides };
        return (vec![memory], side);
    }
    // In another order than the planes lie.
    let planes = machine.upload(&[2u64, 0, 1].map(|plane| start + plane * plane_stride));
    let plane_ptrs = address(&planes);
    (vec![memory, planes], RawBlockSide { base, plane_ptrs, ..strides })
}

fn copies() -> Vec<Scenario> {
    // Whether ids name the blocks of source and destination, or the places of pairs do.
    let scenario = |(tables, reported, ids): ([bool; 2], bool, [u32; 2])| {
        let setup = move |machine: &Machine| {
            let (mut to, to_side) = side(machine, [130, 26, 13, 5], 16, tables[0]);
            let (mut from, from_side) = side(machine, [17, 150, 4, 60], 32, tables[1]);
            let mut pairs = [[3, 1], [2, 0], [-1, 0], [0, 4], [4, 0], [1, -1], [0, 2]];
            if ids[0] == 0 {
                // No two of the first, which have places, go to one block.
                pairs[..4].copy_from_slice(&[[9, 1], [9, 0], [-1, 3], [0, 2]]);
            }
            let pairs = machine.upload(&pairs);
            let report = machine.upload(&[0u64; 3]);
            let args = KernelArgs::new()
                .arg(to_side)
                .arg(from_side)
                .arg(UNITS.dividers())
                .arg(address(&pairs))
                .arg(7u32 * 36)
                .arg(ids)
                .arg(100u64)
                .arg(if reported { address(&report) } else { 0 });
            to.append(&mut from);
            to.extend([pairs, report]);
            (to, args)
        };
        // 3 blocks of 32 threads: 8 tiles, of which the last is not full.
        let config = LaunchConfig::linear(3, 32);
        Scenario { entry: "copy_blocks_16", config, setup: Box::new(setup) }
    };
    const IDS: [u32; 2] = [u32::MAX; 2];
    [
        ([true, false], true, IDS),
        ([false, true], true, IDS),
        ([true, true], false, IDS),
        ([false, false], false, IDS),
        ([true, false], false, IDS),
        ([true, true], true, IDS),
        ([true, false], true, [u32::MAX, 0]),
        ([false, true], true, [0, u32::MAX]),
    ]
    .map(scenario)
    .into()
}

fn append(table: bool, reported: bool) -> Scenario {
    let setup = move |machine: &Machine| {
        // Five planes in the table, of which the first belongs to no row here.
        let memory = machine.upload(&noise(16 * 1024));
        let planes = [3u64, 1, 4, 0, 2].map(|plane| address(&memory) + plane * 120 * 16);
        let planes = machine.upload(&planes);
        let pages = RawBlockSide {
            base: if table { 16 } else { address(&memory) + 16 },
            plane_ptrs: if table { address(&planes) } else { 0 },
            plane_stride: 120 * 16,
            block_stride: 30 * 16,
            token_stride: 3 * 16,
            segment_stride: 13 * 16,
            num_blocks: BLOCKS,
        };
        let (keys, values) = (machine.upload(&noise(4096)), machine.upload(&noise(4112)));
        // Strides of layers, tokens and segments, and where the first segment begins.
        let rows = [address(&keys), address(&values), 90 * 16, 9 * 16, 4 * 16, 32];
        let slots = machine.upload(&[5i64, -1, 16, 15, 1, i64::MAX, 8]);
        let report = machine.upload(&[0u64; 3]);
        let units = RawBlockUnits { planes: 4, tokens: 7, segments: 2, unit_vectors: 3 };
        // 4 tokens a block, 100 tokens before, from plane 1 on, keys and values.
        let slots_args = [address(&slots), 4, u64::MAX / 4, 100, 1 | 2 << 32];
        let args = KernelArgs::new()
            .arg(pages)
            .arg(rows)
            .arg(units.dividers())
            .arg(slots_args)
            .arg(if reported { address(&report) } else { 0 });
        (vec![memory, planes, keys, values, slots, report], args)
    };
    Scenario { entry: "append_16", config: LaunchConfig::linear(6, 32), setup: Box::new(setup) }
}

/// Four planes of two tokens, whose rows are two segments, and two of a second part behind them if that has any;
/// every second plane has other strides if there are two kinds.
fn sum(kinds: u32, segment: u64, second: u64) -> Scenario {
    let setup = move |machine: &Machine| {
        let memory = machine.upload(&noise(16 * 1024));
        let planes = [2u64, 0, 1, 3].map(|plane| address(&memory) + plane * 17 * 16);
        let planes = machine.upload(&planes);
        let row = 2 * (segment + second);
        // Vectors of each count, with what makes a multiplication of a division by it.
        let counts =
            RawBlockUnits { planes: row, tokens: 2, segments: segment, unit_vectors: second };
        let counts: Vec<[u32; 3]> =
            counts.dividers().chunks(3).map(|count| count.try_into().unwrap()).collect();
        let [row_count, tokens, segment_count, second_count] = counts[..] else { unreachable!() };
        let part = |strides: [u64; 3], first: u64, count: [u32; 3]| -> Vec<u32> {
            let strides = strides.map(|vectors| 16 * vectors);
            let first = if first == 0 || second > 0 { first as u32 } else { u32::MAX };
            bytemuck::cast_slice::<u64, u32>(&strides)
                .iter()
                .copied()
                .chain([first])
                .chain(count)
                .collect()
        };
        let mut rows =
            bytemuck::cast_slice::<u64, u32>(&[address(&planes), 150 * 16, BLOCKS]).to_vec();
        rows.extend(part([2, 4, 60], 0, segment_count));
        rows.extend(part([5, 7, 9], 2 * segment, second_count));
        rows.extend(part([11, 13, 61], 0, segment_count));
        rows.extend(part([14, 10, 12], 2 * segment, second_count));
        rows.extend(row_count.into_iter().chain(tokens).chain([kinds, (8 * row) as u32]));
        let rows: [u32; 54] = rows.try_into().unwrap();
        let ids = machine.upload(&[3i32, -1, 0, 4, 3]);
        let sums = machine.upload(&[7u64; 6]);
        let report = machine.upload(&[0u64; 3]);
        let args = KernelArgs::new()
            .arg(rows)
            .arg(address(&ids))
            .arg(5u64)
            .arg(address(&sums))
            .arg(address(&report));
        (vec![memory, planes, ids, sums, report], args)
    };
    // Two warps, so that barriers matter, and several ids for a block of threads.
    let config = LaunchConfig { grid: [1, 2, 1], block: [64, 1, 1], shared_bytes: 0 };
    Scenario { entry: "sum_blocks_16", config, setup: Box::new(setup) }
}
