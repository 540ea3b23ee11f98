//! The simulated device notices when a kernel is made wrong: each small change to the committed PTX
//! changes the bytes that it leaves behind, or is found as what it is.

mod operations;

use crate::kernels::machine::{Machine, noise};
use cuda_driver::{DeviceBuffer, KernelArgs, LaunchConfig, Module};
use kv_testkit::raw_args::{RawArgs, WHOLE_ROWS};

const TRANSFER: &str = include_str!("../../ptx/transfer_16.compute_80.ptx");
const WALK: &str = include_str!("../../ptx/walk_16.compute_80.ptx");
const CHECKSUM: &str = include_str!("../../ptx/checksum.compute_80.ptx");
const PATTERN: &str = include_str!("../../ptx/pattern.compute_80.ptx");
const GATHER: &str = include_str!("../../ptx/gather.compute_80.ptx");

/// Memory as it is before a launch, and the arguments that name it.
type Setup = (Vec<DeviceBuffer>, KernelArgs);

/// One launch.
struct Scenario {
    entry: &'static str,
    config: LaunchConfig,
    setup: Box<dyn Fn(&Machine) -> Setup>,
}

/// What a launch leaves behind; `None` where something was found.
fn run(ptx: &str, scenario: &Scenario) -> Option<Vec<Vec<u8>>> {
    let machine = Machine::with(&[]);
    let (buffers, args) = (scenario.setup)(&machine);
    let module = Module::load(&machine.device, ptx).unwrap();
    let kernel = module.kernel(scenario.entry).unwrap();
    // SAFETY: the simulated device checks number and size of the arguments and every access, and no
    // argument names host memory.
    unsafe { kernel.launch(&machine.stream, &scenario.config, &args) }.unwrap();
    let ended = machine.stream.synchronize();
    if !machine.sim.findings().is_empty() {
        return None;
    }
    ended.unwrap();
    Some(buffers.iter().map(|buffer| machine.read(buffer.span())).collect())
}

/// What is changed in a line of PTX; nothing for a line that it does not apply to.
type Mutation = fn(&str) -> Option<String>;

/// The lines, by their changed text, after whose change nothing differs in any scenario.
fn unnoticed(ptx: &str, scenarios: &[Scenario], mutation: Mutation) -> (usize, Vec<String>) {
    let right: Vec<_> = scenarios.iter().map(|scenario| run(ptx, scenario).unwrap()).collect();
    let lines: Vec<&str> = ptx.lines().collect();
    let (mut tried, mut unnoticed) = (0, Vec::new());
    for (index, line) in lines.iter().enumerate() {
        let Some(changed) = mutation(line) else { continue };
        let mut lines = lines.clone();
        lines[index] = &changed;
        let wrong = lines.join("\n");
        tried += 1;
        let differs = |(scenario, right): (&Scenario, &Vec<Vec<u8>>)| {
            run(&wrong, scenario).is_none_or(|found| found != *right)
        };
        if !scenarios.iter().zip(&right).any(differs) {
            unnoticed.push(format!("{}: {line} -> {changed}", index + 1));
        }
    }
    (tried, unnoticed)
}

/// Moves an access to memory by eight bytes.
fn shift_access(line: &str) -> Option<String> {
    let access =
        ["ld.global", "st.global", "ld.u64", "ld.v2", "st.u64", "st.v2", "ld.shared", "st.shared"];
    if !access.iter().any(|access| line.trim_start().starts_with(access)) {
        return None;
    }
    let (before, after) = line.split_once(']')?;
    Some(match before.rsplit_once('+') {
        Some((base, offset)) => format!("{base}+{}]{after}", offset.parse::<i64>().ok()? + 8),
        None => format!("{before}+8]{after}"),
    })
}

/// Takes a barrier out.
fn remove_barrier(line: &str) -> Option<String> {
    line.contains("bar.sync").then(String::new)
}

/// Takes a store out.
fn remove_store(line: &str) -> Option<String> {
    ["st.global", "st.shared", "st.u64", "st.v2"]
        .iter()
        .any(|store| line.trim_start().starts_with(store))
        .then(String::new)
}

/// Adds where the kernel multiplies.
fn add_for_multiply(line: &str) -> Option<String> {
    line.contains("mul.lo.s64").then(|| line.replacen("mul.lo.s64", "add.s64", 1))
}

fn address(buffer: &DeviceBuffer) -> u64 {
    buffer.span().address()
}

/// Rows of every kind: of one word, of an odd number of words, of two words at a time, and of many.
const ROWS: [(u64, u32, u32); 5] =
    [(8, 3, 1), (24, 2, 2), (2048, 1, 1), (2056, 1, 2), (2064, 2, 1)];

/// Blocks of the planes, and tokens of each.
const BLOCKS: u64 = 3;
const BLOCK_TOKENS: u64 = 4;

/// Planes with room for the blocks, and the table of their addresses.
fn planes(machine: &Machine, planes: u64, row_bytes: u64) -> (DeviceBuffer, DeviceBuffer) {
    let plane_bytes = BLOCKS * BLOCK_TOKENS * row_bytes;
    let pages = machine.upload(&noise(planes * plane_bytes));
    let table: Vec<u64> = (0..planes).map(|p| address(&pages) + p * plane_bytes).collect();
    let table = machine.upload(&table);
    (pages, table)
}

/// Transfers, which cover their items exactly, by entry; rows whole and in three pieces; by slots and by
/// blocks; both ways; in one chunk and in two; with loads of both kinds. One width stands for all: they are
/// one source.
fn transfers(entry: &'static str) -> Vec<Scenario> {
    let alone = entry == "transfer_16";
    let mut all = Vec::new();
    for (segments, streams) in [(3, false), (3, true), (1, false), (1, true)] {
        for (skip, by_blocks, direction, split_rows) in
            [(2, false, 0, 11), (3, true, 1, 0), (1, true, 0, 0), (0, false, 1, 13)]
        {
            let split_rows = if alone { 0 } else { split_rows };
            let rows = RawArgs { by_blocks, skip, split_rows, segments, ..ROWS_OF_18_VECTORS };
            let shape = RawArgs { direction, streams, ..rows };
            let rows = (4 * (9 - skip) - split_rows).max(split_rows);
            let chunks = 1 + u32::from(split_rows > 0);
            let grid = [(rows * 18).div_ceil(64) as u32, chunks, 1];
            let config = LaunchConfig { grid, block: [64, 1, 1], shared_bytes: 0 };
            let setup = if alone {
                operands(shape, |args, report| args.one(report))
            } else {
                operands(shape, |args, report| args.several(report))
            };
            all.push(Scenario { entry, config, setup });
        }
    }
    all
}

/// Walks, whose tiles of 128 items, or 64 of wide rows, are not all full: by slots, and wide by slots and by
/// blocks, also with 16 bytes of each row in a second part.
fn walks() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (segments, tail_bytes) in [(3, 0), (1, 0), (1, 16)] {
        for (skip, by_blocks, direction, split_rows) in
            [(2, false, 0, 11), (3, true, 1, 0), (1, true, 0, 0), (0, false, 1, 13)]
        {
            let shape = RawArgs {
                by_blocks,
                skip,
                split_rows,
                segments,
                tail_bytes,
                direction,
                ..ROWS_OF_18_VECTORS
            };
            let config = LaunchConfig::linear(2, 32);
            let wide = operands(shape, |args, report| args.walk(report, true));
            all.push(Scenario { entry: "walk_16", config, setup: wide });
            let shape = RawArgs { by_blocks: false, ..shape };
            if tail_bytes == 0 {
                let setup = operands(shape, |args, report| args.walk(report, false));
                all.push(Scenario { entry: "walk_16", config, setup });
            }
        }
    }
    all
}

const ROWS_OF_18_VECTORS: RawArgs =
    RawArgs { layers: 2, kv_count: 2, row_bytes: 18 * 16, vector_bytes: 16, ..WHOLE_ROWS };

/// Chunk, pages, mapping and report, and the arguments that name them.
fn operands(
    shape: RawArgs,
    args: fn(&RawArgs, u64) -> KernelArgs,
) -> Box<dyn Fn(&Machine) -> Setup> {
    Box::new(move |machine: &Machine| {
        let (row_bytes, count) = (shape.row_bytes, u64::from(shape.layers * shape.kv_count));
        // No slot, the last that is ready, the first that is not, and one far beyond.
        let slots = [8i64, 3, 1, 0, 7, 12, 5, i64::MAX, 11];
        let ids = [2i32, 7, 1];
        let tokens = slots.len() as u64;
        let chunk = machine.upload(&noise(tokens * count * row_bytes));
        let (pages, table) = planes(machine, count, row_bytes);
        let mapping = if shape.by_blocks { machine.upload(&ids) } else { machine.upload(&slots) };
        let report = machine.upload(&[0u64; 2]);
        let described = RawArgs {
            chunk: address(&chunk),
            planes: address(&table),
            mapping: address(&mapping),
            tokens,
            block_tokens: BLOCK_TOKENS,
            block_stride: BLOCK_TOKENS * row_bytes,
            num_blocks: BLOCKS,
            ..shape
        };
        let args = args(&described, address(&report));
        (vec![chunk, pages, table, mapping, report], args)
    })
}

fn checksums() -> Vec<Scenario> {
    let scenario = |(row_bytes, layers, kv_count): (u64, u32, u32)| {
        let setup = move |machine: &Machine| {
            let count = layers * kv_count;
            let (pages, planes) = planes(machine, count.into(), row_bytes);
            let (blocks, stride) = (BLOCKS, 3u64);
            // Some that are no blocks, and lengths that end anywhere.
            let table = machine.upload(&[2i32, 0, 1, 1, -1, 2, 0, 3, 1, 2, 1, 0]);
            let lens = machine.upload(&[12u32, 9, 12, 0]);
            let sums = machine.upload(&[7u64; 12]);
            let args = KernelArgs::new()
                .arg(address(&table))
                .arg(stride)
                .arg(address(&lens))
                .arg(4u32)
                .arg(address(&planes))
                .arg(count)
                .arg(row_bytes)
                .arg(BLOCK_TOKENS)
                .arg(BLOCK_TOKENS * row_bytes)
                .arg(row_bytes)
                .arg(blocks)
                .arg(address(&sums));
            (vec![pages, planes, table, lens, sums], args)
        };
        let config = LaunchConfig { grid: [2, 3, 1], block: [64, 1, 1], shared_bytes: 0 };
        Scenario { entry: "paged_checksum", config, setup: Box::new(setup) }
    };
    ROWS.map(scenario).into()
}

fn fills() -> Vec<Scenario> {
    let scenario = |(row_bytes, layers, kv_count): (u64, u32, u32)| {
        let setup = move |machine: &Machine| {
            let keys: Vec<u64> = (5..14).map(|t| kv_kernels::verify::token_word(0, t)).collect();
            let tokens = keys.len() as u64;
            let chunk = machine.upload(&noise(tokens * u64::from(layers * kv_count) * row_bytes));
            let keys = machine.upload(&keys);
            let args = KernelArgs::new()
                .arg(address(&chunk))
                .arg(address(&keys))
                .arg(tokens)
                .arg(layers)
                .arg(kv_count)
                .arg(row_bytes);
            (vec![chunk, keys], args)
        };
        Scenario {
            entry: "fill_pattern",
            config: LaunchConfig::linear(2, 64),
            setup: Box::new(setup),
        }
    };
    ROWS.map(scenario).into()
}

fn gathers() -> Vec<Scenario> {
    let setup = |machine: &Machine| {
        let (width, out_stride, table_stride) = (70u32, 72u64, 71u64);
        let table: Vec<i32> = (0..3 * table_stride as i32).map(|entry| entry * 7 + 1).collect();
        let table = machine.upload(&table);
        let rows = machine.upload(&[2u32, 0, 3, 1, u32::MAX]);
        let out = machine.upload(&vec![9i32; (5 * out_stride) as usize]);
        let args = KernelArgs::new()
            .arg(address(&out))
            .arg(out_stride)
            .arg(address(&table))
            .arg(table_stride)
            .arg(address(&rows))
            .arg(5u32)
            .arg(width)
            .arg(3u32);
        (vec![out, table, rows], args)
    };
    let config = LaunchConfig { grid: [2, 2, 1], block: [32, 1, 1], shared_bytes: 0 };
    vec![Scenario { entry: "gather_rows", config, setup: Box::new(setup) }]
}

/// Every change of `mutation` to a kernel is noticed in one of its scenarios; how many there were.
#[track_caller]
fn assert_noticed(mutation: Mutation) -> usize {
    let kernels = [
        (TRANSFER, ["transfer_16", "transfers_16"].into_iter().flat_map(transfers).collect()),
        (WALK, walks()),
        (CHECKSUM, checksums()),
        (PATTERN, fills()),
        (GATHER, gathers()),
    ];
    let mut all = 0;
    for (ptx, scenarios) in kernels {
        let (tried, unnoticed) = unnoticed(ptx, &scenarios, mutation);
        assert_eq!(unnoticed, [""; 0], "{}", scenarios[0].entry);
        all += tried;
    }
    for (ptx, scenarios) in operations::operations() {
        let (tried, unnoticed) = unnoticed(&ptx, &scenarios, mutation);
        assert_eq!(unnoticed, [""; 0], "{}", scenarios[0].entry);
        all += tried;
    }
    all
}

#[test]
fn an_access_to_the_neighbouring_word_is_noticed() {
    assert!(assert_noticed(shift_access) >= 60);
}

#[test]
fn a_store_that_is_missing_is_noticed() {
    assert!(assert_noticed(remove_store) >= 16);
}

#[test]
fn a_product_that_is_a_sum_is_noticed() {
    assert!(assert_noticed(add_for_multiply) >= 50);
}

/// How rows are loaded changes no byte.
#[test]
fn streamed_loads_move_the_same_rows() {
    for entry in ["transfer_16", "transfers_16"] {
        let scenarios = transfers(entry);
        // By segments, then by kind of load, and then the others.
        for alike in scenarios.chunks(8) {
            let (cached, streamed) = alike.split_at(4);
            for (cached, streamed) in cached.iter().zip(streamed) {
                let moved = run(TRANSFER, cached);
                assert!(moved.is_some() && moved == run(TRANSFER, streamed), "{entry}");
            }
        }
    }
}

/// Here no byte need differ: what is found is the conflict.
#[test]
fn a_barrier_that_is_missing_is_noticed() {
    assert_eq!(assert_noticed(remove_barrier), 4);
}
