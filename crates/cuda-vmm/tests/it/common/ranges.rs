//! Kernels that write and check whole ranges of device memory, many in one launch.

use bytemuck::NoUninit;
use cuda_driver::{Device, DeviceBuffer, Kernel, KernelArgs, LaunchConfig, Module, Stream};

const PTX: &str = include_str!("../../fixtures/ranges.compute_80.ptx");
const THREADS: u32 = 256;

/// Words of 8 bytes from `address` on. Word `i` holds `key + (first + i) * GOLDEN`.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
pub(crate) struct Range {
    pub(crate) address: u64,
    pub(crate) words: u64,
    pub(crate) first: u64,
    pub(crate) key: u64,
}

/// The kernels, and space for the ranges of one launch of each, on one stream.
pub(crate) struct Ranges {
    stamp: Kernel,
    check: Kernel,
    table: DeviceBuffer,
    wrong: DeviceBuffer,
    checked: usize,
}

impl Ranges {
    /// Creates it for launches over up to `ranges_max` ranges.
    pub(crate) fn new(device: &Device, ranges_max: u64) -> Self {
        let module = Module::load(device, PTX).unwrap();
        Self {
            stamp: module.kernel("stamp_ranges").unwrap(),
            check: module.kernel("check_ranges").unwrap(),
            table: DeviceBuffer::alloc(device, 2 * ranges_max * size_of::<Range>() as u64).unwrap(),
            wrong: DeviceBuffer::alloc(device, ranges_max * 8).unwrap(),
            checked: 0,
        }
    }

    /// Enqueues the writing of `stamps` and then the reading of `checks`, with `parts` thread
    /// blocks for each range. Returns while they may still run.
    pub(crate) fn enqueue(
        &mut self,
        stream: &Stream,
        stamps: &[Range],
        checks: &[Range],
        parts: u32,
    ) {
        self.checked = checks.len();
        let all = [stamps, checks].concat();
        if all.is_empty() {
            return;
        }
        let bytes = bytemuck::cast_slice(&all);
        stream.upload(self.table.span().slice(0, bytes.len() as u64).unwrap(), bytes).unwrap();
        let table = self.table.address();
        if !stamps.is_empty() {
            let args = KernelArgs::new().arg(table);
            // SAFETY: the kernel takes one pointer, and reads and writes only device memory.
            unsafe { self.stamp.launch(stream, &grid(stamps, parts), &args) }.unwrap();
        }
        if !checks.is_empty() {
            let counts = self.wrong.span().slice(0, 8 * checks.len() as u64).unwrap();
            stream.fill(counts, 0).unwrap();
            let checks_at = table + size_of_val(stamps) as u64;
            let args = KernelArgs::new().arg(checks_at).arg(self.wrong.address());
            // SAFETY: the kernel takes two pointers, and reads and writes only device memory.
            unsafe { self.check.launch(stream, &grid(checks, parts), &args) }.unwrap();
        }
    }

    /// Number of wrong words in each range of the last reading. Waits for it.
    pub(crate) fn wrong(&self, stream: &Stream) -> Vec<u64> {
        let mut wrong = vec![0; self.checked];
        if !wrong.is_empty() {
            let counts = self.wrong.span().slice(0, 8 * wrong.len() as u64).unwrap();
            stream.download(bytemuck::cast_slice_mut(&mut wrong), counts).unwrap();
        }
        wrong
    }
}

fn grid(ranges: &[Range], parts: u32) -> LaunchConfig {
    let grid = [ranges.len() as u32, parts, 1];
    LaunchConfig { grid, block: [THREADS, 1, 1], shared_bytes: 0 }
}
