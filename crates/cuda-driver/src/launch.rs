//! Geometry and arguments of a kernel launch.

use bytemuck::NoUninit;
use smallvec::SmallVec;

/// Grid, block and dynamic shared memory of one launch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LaunchConfig {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of each block, in bytes.
    pub shared_bytes: u32,
}

impl LaunchConfig {
    /// A one-dimensional launch of `blocks` blocks with `threads` threads each.
    #[must_use]
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 }
    }
}

/// The arguments of a kernel, by value and in order.
///
/// Each argument keeps its size and is aligned to its own alignment, at most 16 bytes, in one
/// buffer, so that a driver can point at it (`kernelParams`) and a simulated device can read it.
#[derive(Clone, Debug, Default)]
pub struct KernelArgs {
    words: SmallVec<[u128; 12]>,
    used_bytes: usize,
    spans: SmallVec<[(u32, u32); 16]>,
}

impl KernelArgs {
    /// No arguments yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends one plain-data argument, such as an integer, a device address or a `#[repr(C)]` struct.
    #[must_use]
    pub fn arg<T: NoUninit>(mut self, value: T) -> Self {
        self.push(value);
        self
    }

    /// Appends one plain-data argument in place.
    fn push<T: NoUninit>(&mut self, value: T) {
        let align = align_of::<T>().min(16);
        let start = self.used_bytes.next_multiple_of(align);
        let end = start + size_of::<T>();
        self.words.resize(end.div_ceil(16), 0);
        bytemuck::cast_slice_mut::<u128, u8>(&mut self.words)[start..end]
            .copy_from_slice(bytemuck::bytes_of(&value));
        self.used_bytes = end;
        self.spans.push((start as u32, (end - start) as u32));
    }

    /// Number of arguments.
    #[must_use]
    pub fn count(&self) -> usize {
        self.spans.len()
    }

    /// The bytes of argument `index`, if there is one.
    #[must_use]
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        let &(start, len) = self.spans.get(index)?;
        bytemuck::cast_slice::<u128, u8>(&self.words).get(start as usize..(start + len) as usize)
    }

    /// Argument `index` as a `T`, if it has exactly that size.
    #[must_use]
    pub fn get<T: bytemuck::AnyBitPattern>(&self, index: usize) -> Option<T> {
        bytemuck::try_pod_read_unaligned(self.bytes(index)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_value_size_and_alignment() {
        let args = KernelArgs::new().arg(7u32).arg(9u64).arg([1u8, 2, 3]).arg(-1i32);
        assert_eq!(args.count(), 4);
        assert_eq!(args.get::<u32>(0), Some(7));
        assert_eq!(args.get::<u64>(1), Some(9));
        assert_eq!(args.bytes(2), Some(&[1u8, 2, 3][..]));
        assert_eq!(args.get::<i32>(3), Some(-1));
        assert_eq!(args.get::<u64>(0), None);
        assert_eq!(args.bytes(4), None);
        assert_eq!(args.bytes(1).map(|b| b.as_ptr().align_offset(8)), Some(0));
    }

    #[test]
    fn many_arguments_spill_to_the_heap_intact() {
        let mut args = KernelArgs::new();
        for i in 0..100u64 {
            args = args.arg(i * 3);
        }
        assert!((0..100).all(|i| args.get::<u64>(i) == Some(i as u64 * 3)));
    }
}
