//! What each kernel computes, over any device memory: the oracle of tests, and what a simulated
//! device runs.
//!
//! They are exact and geometry does not matter to them. They are also fast, because a replay on a
//! simulated device moves and reads terabytes through them.

mod append;
mod block_copy;
mod block_sum;
mod checksum;
mod fill;
mod gather;
mod transfer;

use bytemuck::AnyBitPattern;
use cuda_driver::KernelArgs;
use cuda_driver::reference::{DeviceMemory, KernelReference, ReferenceError, ReferenceFn};

use crate::entry;

/// The references of all kernels, to register with a simulated device.
#[must_use]
pub fn references() -> &'static [KernelReference] {
    const {
        &[
            of(entry::TRANSFERS[0][0], transfer::run_one),
            of(entry::TRANSFERS[0][1], transfer::run_several),
            of(entry::TRANSFERS[1][0], transfer::run_one),
            of(entry::TRANSFERS[1][1], transfer::run_several),
            of(entry::TRANSFERS[2][0], transfer::run_one),
            of(entry::TRANSFERS[2][1], transfer::run_several),
            of(entry::TRANSFERS[3][0], transfer::run_one),
            of(entry::TRANSFERS[3][1], transfer::run_several),
            of(entry::TRANSFERS[4][0], transfer::run_one),
            of(entry::TRANSFERS[4][1], transfer::run_several),
            of(entry::WALKS[0], transfer::run_walk),
            of(entry::WALKS[1], transfer::run_walk),
            of(entry::WALKS[2], transfer::run_walk),
            of(entry::WALKS[3], transfer::run_walk),
            of(entry::WALKS[4], transfer::run_walk),
            of(entry::CHECKSUM, checksum::run),
            of(entry::FILL, fill::run),
            of(entry::GATHER, gather::run),
            of(entry::APPEND[0], |m, _, a| append::run(m, a, 1)),
            of(entry::APPEND[1], |m, _, a| append::run(m, a, 2)),
            of(entry::APPEND[2], |m, _, a| append::run(m, a, 4)),
            of(entry::APPEND[3], |m, _, a| append::run(m, a, 8)),
            of(entry::APPEND[4], |m, _, a| append::run(m, a, 16)),
            of(entry::SUM_BLOCKS[0], |m, _, a| block_sum::run(m, a, 1)),
            of(entry::SUM_BLOCKS[1], |m, _, a| block_sum::run(m, a, 2)),
            of(entry::SUM_BLOCKS[2], |m, _, a| block_sum::run(m, a, 4)),
            of(entry::SUM_BLOCKS[3], |m, _, a| block_sum::run(m, a, 8)),
            of(entry::SUM_BLOCKS[4], |m, _, a| block_sum::run(m, a, 16)),
            of(entry::COPY_BLOCKS[0], |m, _, a| block_copy::run(m, a, 1)),
            of(entry::COPY_BLOCKS[1], |m, _, a| block_copy::run(m, a, 2)),
            of(entry::COPY_BLOCKS[2], |m, _, a| block_copy::run(m, a, 4)),
            of(entry::COPY_BLOCKS[3], |m, _, a| block_copy::run(m, a, 8)),
            of(entry::COPY_BLOCKS[4], |m, _, a| block_copy::run(m, a, 16)),
            of(entry::COPY_BLOCKS[5], |m, _, a| block_copy::run(m, a, 1)),
            of(entry::COPY_BLOCKS[6], |m, _, a| block_copy::run(m, a, 2)),
            of(entry::COPY_BLOCKS[7], |m, _, a| block_copy::run(m, a, 4)),
            of(entry::COPY_BLOCKS[8], |m, _, a| block_copy::run(m, a, 8)),
            of(entry::COPY_BLOCKS[9], |m, _, a| block_copy::run(m, a, 16)),
        ]
    }
}

const fn of(name: &'static str, run: ReferenceFn) -> KernelReference {
    KernelReference { name, run }
}

/// Takes arguments one after another.
struct Arguments<'a> {
    args: &'a KernelArgs,
    next: usize,
}

impl<'a> Arguments<'a> {
    fn new(args: &'a KernelArgs) -> Self {
        Self { args, next: 0 }
    }

    fn take<T: AnyBitPattern>(&mut self) -> Result<T, ReferenceError> {
        let index = self.next;
        self.next += 1;
        self.args.get(index).ok_or(ReferenceError::Argument { index })
    }

    /// An argument that divides, and so is never 0.
    fn take_divisor(&mut self) -> Result<u64, ReferenceError> {
        let index = self.next;
        match self.take()? {
            0 => Err(ReferenceError::Argument { index }),
            divisor => Ok(divisor),
        }
    }
}

/// The address `index` steps of `stride` bytes after `base`, wrapping as it does on a device.
fn at(base: u64, index: u64, stride: u64) -> u64 {
    base.wrapping_add(index.wrapping_mul(stride))
}

/// `count` values at `address`, as the device has them.
fn load_array<T: AnyBitPattern>(
    memory: &dyn DeviceMemory,
    address: u64,
    count: u64,
) -> Result<Vec<T>, ReferenceError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let size = size_of::<T>() as u64;
    // More bytes than 64 bits can count are more than any memory has.
    let bytes = memory.load(address, count.saturating_mul(size))?;
    Ok(bytes.chunks_exact(size as usize).map(bytemuck::pod_read_unaligned).collect())
}

/// Counts `count` indices out of range, the lowest at `place`, as the kernels do.
fn report_bad(
    memory: &mut dyn DeviceMemory,
    report: u64,
    count: u64,
    place: u64,
) -> Result<(), ReferenceError> {
    if report == 0 || count == 0 {
        return Ok(());
    }
    let was = load_array::<u64>(memory, report, 2)?;
    let now = [was[0].wrapping_add(count), was[1].max(!place)];
    memory.store(report, bytemuck::cast_slice(&now))?;
    Ok(())
}
