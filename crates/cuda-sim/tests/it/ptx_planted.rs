//! Every bug planted in `fixtures/*.cu` is found, with a message that leads to the line. The
//! versions without the bug give no finding.

use std::ops::RangeInclusive;

use crate::common::{
    PAGE, download, fill, free_host, host_write, map_page, pinned, seeded, sync, upload,
};
use cuda_driver::reference::KernelReference;
use cuda_driver::{Driver, DriverResult, ErrorCode, KernelArgs, LaunchConfig};
use cuda_sim::{FindingKind, RangeKind, SimDriver};

const BOUNDS: &str = include_str!("../fixtures/bounds.compute_80.ptx");
const OVERFLOW: &str = include_str!("../fixtures/overflow.compute_80.ptx");
const BARRIERS: &str = include_str!("../fixtures/barriers.compute_80.ptx");
const READS: &str = include_str!("../fixtures/reads.compute_80.ptx");

/// A machine with `ptx` loaded. No references are registered, so kernels run from their PTX.
struct Machine {
    sim: SimDriver,
    ptx: &'static str,
    module: u64,
}

impl Machine {
    fn new(ptx: &'static str) -> Self {
        let sim = seeded(0);
        let mut log = String::new();
        let module = sim.module_load_data(ptx, &mut log).unwrap_or_else(|_| panic!("{log}"));
        Self { sim, ptx, module }
    }

    fn memory(&self, bytes: u64) -> u64 {
        self.sim.mem_alloc(bytes).unwrap()
    }

    /// Allocates memory that holds these words.
    fn words(&self, words: &[u64]) -> u64 {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let memory = self.memory(bytes.len() as u64);
        upload(&self.sim, memory, &bytes, 0).unwrap();
        memory
    }

    /// Runs a kernel to its end, in blocks of `shape.1` threads.
    fn run(&self, entry: &str, shape: (u32, u32), args: &KernelArgs) -> DriverResult<()> {
        // SAFETY: the module is loaded, and is never unloaded.
        let function = unsafe { self.sim.module_get_function(self.module, entry) }.unwrap();
        let config = LaunchConfig::linear(shape.0, shape.1);
        // SAFETY: the simulated device checks the arguments and every access, and no other code
        // writes the pinned memory that a test names.
        unsafe { self.sim.launch_kernel(function, &config, args, 0) }?;
        sync(&self.sim, 0)
    }

    /// Runs the kernel with the bug. Checks that the finding names the kernel, the instruction and
    /// the thread, and describes the mistake.
    #[track_caller]
    fn assert_found(&self, entry: &str, shape: (u32, u32), args: &KernelArgs, planted: &Planted) {
        let outcome = self.run(entry, shape, args);
        let findings = self.sim.findings();
        let found = findings.iter().find(|found| found.kind == planted.kind);
        let found = found.unwrap_or_else(|| panic!("{entry}: not found, but {findings:?}"));
        let text = found.to_string();
        assert_eq!(outcome.err().map(|error| error.code), planted.code(), "{text}");
        let site = found.site.unwrap_or_else(|| panic!("no site: {text}"));
        let instruction = self.instruction(entry, site.line);
        assert!(instruction.contains(planted.instruction), "{instruction}: {text}");
        assert_eq!(site.block, [planted.block, 0, 0], "{text}");
        assert!(planted.threads.contains(&site.thread[0]), "{text}");
        assert_eq!(site.thread[1..], [0, 0], "{text}");
        if let Some(address) = planted.address {
            assert_eq!(found.address, Some(address), "{text}");
        }
        if let Some(missed) = planted.missed {
            let nearest = found.nearest.map(|near| (near.kind, near.missed_by, near.before));
            assert_eq!(nearest, Some(missed), "{text}");
        }
        let place = format!("{entry} on device 0 in stream 0x0 at PTX line {}", site.line);
        for words in planted.words.iter().chain([&place.as_str()]) {
            assert!(text.contains(words), "no {words:?} in: {text}");
        }
    }

    /// The text of this PTX line, which must belong to the kernel.
    #[track_caller]
    fn instruction(&self, entry: &str, line: u32) -> &'static str {
        let lines: Vec<&str> = self.ptx.lines().collect();
        let start = lines.iter().position(|text| text.contains(&format!(".entry {entry}(")));
        let start = start.unwrap();
        let length = lines[start..].iter().position(|text| text.starts_with('}')).unwrap();
        let index = line as usize - 1;
        assert!((start..start + length).contains(&index), "line {line} is not of {entry}");
        lines[index].trim()
    }
}

/// The expected finding of a bug.
struct Planted {
    kind: FindingKind,
    /// The instruction on the named PTX line.
    instruction: &'static str,
    block: u32,
    threads: RangeInclusive<u32>,
    address: Option<u64>,
    /// The nearest range, the distance of the access from it, and whether the access was before its
    /// start.
    missed: Option<(RangeKind, u64, bool)>,
    words: &'static [&'static str],
}

/// A finding of any thread of block 0, at any address.
fn found(kind: FindingKind, instruction: &'static str, words: &'static [&'static str]) -> Planted {
    Planted { kind, instruction, block: 0, threads: 0..=127, address: None, missed: None, words }
}

impl Planted {
    fn by(self, block: u32, threads: RangeInclusive<u32>) -> Self {
        Self { block, threads, ..self }
    }

    fn at(self, address: u64) -> Self {
        Self { address: Some(address), ..self }
    }

    fn missed(self, kind: RangeKind, by: u64, before: bool) -> Self {
        Self { missed: Some((kind, by, before)), ..self }
    }

    /// The launch's result. Hardware does not report conflicts or reads of unwritten memory.
    fn code(&self) -> Option<ErrorCode> {
        match self.kind {
            FindingKind::Conflict | FindingKind::Uninitialised => None,
            FindingKind::Misaligned => Some(ErrorCode::MISALIGNED_ADDRESS),
            FindingKind::Barrier => Some(ErrorCode::LAUNCH_FAILED),
            FindingKind::Endless => Some(ErrorCode::LAUNCH_TIMEOUT),
            _ => Some(ErrorCode::ILLEGAL_ADDRESS),
        }
    }
}

/// Runs a kernel with a bug, which is found, and then `entry`_twin without it: nothing is found. `setup`
/// makes the arguments, and says what is to be found.
#[track_caller]
fn check(
    ptx: &'static str,
    entry: &str,
    shape: (u32, u32),
    setup: impl Fn(&Machine) -> (KernelArgs, Planted),
) {
    let machine = Machine::new(ptx);
    let (args, planted) = setup(&machine);
    machine.assert_found(entry, shape, &args, &planted);
    let machine = Machine::new(ptx);
    let (args, _) = setup(&machine);
    machine.run(&format!("{entry}_twin"), shape, &args).unwrap();
    assert_eq!(machine.sim.findings(), [], "{entry}_twin");
}

use FindingKind::{Barrier, Conflict, Endless, IllegalAccess, Misaligned, Uninitialised};
use RangeKind::{Allocation, PinnedHost, Reservation};

#[test]
fn one_element_too_many() {
    check(BOUNDS, "off_by_one", (1, 128), |machine| {
        let to = machine.memory(400);
        let planted =
            found(IllegalAccess, "st.global.u32", &["4 bytes past the end of", "allocation"]);
        let planted = planted.by(0, 100..=100).at(to + 400).missed(Allocation, 4, false);
        (KernelArgs::new().arg(to).arg(100u32), planted)
    });
}

#[test]
fn a_stride_in_bytes_used_as_one_in_elements() {
    check(BOUNDS, "stride_in_bytes", (4, 32), |machine| {
        let (table, to) = (machine.words(&[7; 32]), machine.memory(4 * 8 * 4));
        let planted = found(IllegalAccess, "ld.global.u32", &["past the end of", "allocation"]);
        let planted = planted.by(1, 0..=7).at(table + 64 * 4).missed(Allocation, 4, false);
        (KernelArgs::new().arg(to).arg(table).arg(8u32).arg(64u64), planted)
    });
}

#[test]
fn a_stride_that_forgets_the_gap_between_rows() {
    check(BOUNDS, "stride_without_gap", (4, 32), |machine| {
        let (table, to) = (machine.memory(4 * 64), machine.memory(4 * 32));
        for row in 0..4 {
            upload(&machine.sim, table + row * 64, &[row as u8; 32], 0).unwrap();
        }
        let planted = found(Uninitialised, "ld.global.u32", &["never written: inside allocation"]);
        let planted = planted.by(1, 0..=7).at(table + 32);
        (KernelArgs::new().arg(to).arg(table).arg(8u32).arg(16u64), planted)
    });
}

#[test]
fn a_negative_slot_used_as_an_index() {
    check(BOUNDS, "negative_slot", (1, 32), |machine| {
        let (to, plane) = (machine.memory(32), machine.words(&[1, 2, 3, 4]));
        let slots = machine.words(&[3, 0, u64::MAX, 1]);
        let words = &["8 bytes before the start of", "allocation"];
        let planted = found(IllegalAccess, "ld.global.u64", words);
        let planted = planted.by(0, 2..=2).at(plane - 8).missed(Allocation, 8, true);
        (KernelArgs::new().arg(to).arg(plane).arg(slots).arg(4u32), planted)
    });
}

#[test]
fn two_words_at_an_address_for_one() {
    check(BOUNDS, "misaligned_pairs", (1, 32), |machine| {
        let (to, from) = (machine.memory(32), machine.words(&[1, 2, 3, 4, 5]) + 8);
        let words = &["not a multiple of 16: inside allocation"];
        let planted = found(Misaligned, "ld.global.v2.u64", words).by(0, 0..=0).at(from);
        (KernelArgs::new().arg(to).arg(from).arg(4u32), planted)
    });
}

/// A reservation of 6 GiB. A single page is mapped and written, `offset` bytes from the start.
fn sparse(machine: &Machine, offset: u64) -> u64 {
    let plane = machine.sim.mem_address_reserve(6 << 30, 0, 0).unwrap();
    map_page(&machine.sim, plane + offset);
    fill(&machine.sim, plane + offset, 7, PAGE, 0).unwrap();
    plane
}

#[test]
fn an_offset_that_wraps_beyond_32_bits() {
    check(OVERFLOW, "offset_wraps", (1, 32), |machine| {
        let (plane, to) = (sparse(machine, 5 << 30), machine.memory(32));
        let planted = found(IllegalAccess, "ld.global.u8", &["reserved but not mapped"]);
        let planted = planted.at(plane + (1 << 30)).missed(Reservation, 0, false);
        (KernelArgs::new().arg(to).arg(plane).arg(5u32).arg(1u32 << 30), planted)
    });
}

#[test]
fn an_offset_that_turns_negative_beyond_31_bits() {
    check(OVERFLOW, "offset_turns_negative", (1, 32), |machine| {
        let (plane, to) = (sparse(machine, 3 << 30), machine.memory(32));
        let words = &["before the start of", "reservation"];
        let planted = found(IllegalAccess, "ld.global.u8", words).at(plane - (1 << 30));
        let planted = planted.missed(Reservation, 1 << 30, true);
        (KernelArgs::new().arg(to).arg(plane).arg(3u32).arg(1u32 << 30), planted)
    });
}

/// 128 words to sum.
fn summing(machine: &Machine) -> KernelArgs {
    let words: Vec<u64> = (0..128).collect();
    KernelArgs::new().arg(machine.memory(8)).arg(machine.words(&words))
}

#[test]
fn a_sum_without_a_barrier_before_it_or_with_one_after_its_loop() {
    for entry in ["missing_barrier", "barrier_after_loop"] {
        let machine = Machine::new(BARRIERS);
        let planted = found(Conflict, "shared.u64", &["barrier"]);
        machine.assert_found(entry, (1, 128), &summing(&machine), &planted);
    }
    let machine = Machine::new(BARRIERS);
    let args = summing(&machine);
    machine.run("missing_barrier_twin", (1, 128), &args).unwrap();
    assert_eq!(machine.sim.findings(), []);
    let bytes = download(&machine.sim, args.get::<u64>(0).unwrap(), 8, 0).unwrap();
    assert_eq!(u64::from_le_bytes(bytes.try_into().unwrap()), 127 * 64);
}

#[test]
fn a_barrier_that_some_threads_never_reach() {
    check(BARRIERS, "barrier_in_branch", (1, 128), |machine| {
        let words: Vec<u64> = (0..128).collect();
        let args = KernelArgs::new().arg(machine.memory(40 * 8)).arg(machine.words(&words));
        (args.arg(40u32), found(Barrier, "bar.sync", &["barrier"]))
    });
}

#[test]
fn two_threads_that_write_one_element() {
    let machine = Machine::new(BARRIERS);
    let to = machine.memory(64 * 4);
    let planted = found(Conflict, "st.global.u32", &["thread"]).by(0, 0..=1).at(to);
    machine.assert_found(
        "shared_element",
        (1, 64),
        &KernelArgs::new().arg(to).arg(64u32),
        &planted,
    );
    // Two blocks write the same element. No barrier can order them.
    let machine = Machine::new(BARRIERS);
    let to = machine.memory(64 * 4);
    let planted = found(Conflict, "st.global.u32", &["block"]).by(1, 0..=0).at(to);
    machine.assert_found(
        "block_forgotten",
        (2, 32),
        &KernelArgs::new().arg(to).arg(64u32),
        &planted,
    );
    let machine = Machine::new(BARRIERS);
    let args = KernelArgs::new().arg(machine.memory(64 * 4)).arg(64u32);
    machine.run("shared_element_twin", (2, 32), &args).unwrap();
    assert_eq!(machine.sim.findings(), []);
}

#[test]
fn more_values_than_were_filled() {
    check(READS, "sum_of_capacity", (1, 1), |machine| {
        let (sum, values) = (machine.memory(8), machine.memory(64));
        upload(&machine.sim, values, &[1; 24], 0).unwrap();
        let planted = found(Uninitialised, "ld.global.u64", &["never written: inside allocation"]);
        let planted = planted.by(0, 0..=0).at(values + 24);
        (KernelArgs::new().arg(sum).arg(values).arg(3u32).arg(8u32), planted)
    });
}

#[test]
fn pinned_memory_that_was_freed() {
    let setup = || {
        let machine = Machine::new(READS);
        let host = pinned(&machine.sim, 64);
        host_write(host, &[3; 64]);
        let args = KernelArgs::new().arg(machine.memory(64)).arg(host).arg(8u32);
        (machine, host, args)
    };
    let (machine, host, args) = setup();
    free_host(&machine.sim, host).unwrap();
    let words = &["inside freed pinned host memory"];
    let planted = found(IllegalAccess, "ld.global.u64", words).by(0, 0..=0).at(host);
    machine.assert_found("copy_words", (1, 32), &args, &planted.missed(PinnedHost, 0, false));
    let (machine, _, args) = setup();
    machine.run("copy_words", (1, 32), &args).unwrap();
    assert_eq!(machine.sim.findings(), []);
}

#[test]
fn a_loop_that_never_ends() {
    check(READS, "step_of_zero", (1, 1), |machine| {
        let args = KernelArgs::new().arg(machine.memory(800)).arg(100u32);
        (args, found(Endless, "", &["instructions"]).by(0, 0..=0))
    });
}

/// A reference that does nothing, with the name of the summing kernel.
const WRONG: &[KernelReference] =
    &[KernelReference { name: "sum_of_capacity_twin", run: |_, _, _| Ok(()) }];

#[test]
fn a_reference_is_run_unless_the_ptx_is_preferred() {
    let machine = Machine::new(READS);
    machine.sim.register_kernels(WRONG);
    let (sum, values) = (machine.words(&[0]), machine.words(&[10, 20, 12]));
    let args = KernelArgs::new().arg(sum).arg(values).arg(3u32).arg(3u32);
    for (prefer_ptx, expected) in [(false, 0), (true, 42), (false, 42)] {
        machine.sim.prefer_ptx(prefer_ptx);
        machine.run("sum_of_capacity_twin", (1, 1), &args).unwrap();
        let found = download(&machine.sim, sum, 8, 0).unwrap();
        assert_eq!(found, u64::to_le_bytes(expected), "prefer_ptx({prefer_ptx})");
    }
}
