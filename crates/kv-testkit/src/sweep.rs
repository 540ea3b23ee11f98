//! The values at which a function's numbers are tried: the ends, ordinary values, and those whose
//! products overflow.

/// Numbers of bytes, as `u64`.
pub const BYTES: &[u64] =
    &[0, 1, 255, 4096, 1 << 40, 1 << 62, i64::MAX as u64, 1 << 63, u64::MAX - 255, u64::MAX];

/// Counts and indices, as `usize`.
pub const COUNTS: &[usize] =
    &[0, 1, 3, 4096, 1 << 21, 1 << 40, 1 << 60, isize::MAX as usize, usize::MAX];

/// Counts and indices, as `u32`.
pub const WORDS: &[u32] = &[0, 1, 3, 4096, 1 << 16, 1 << 31, i32::MAX as u32, u32::MAX];

/// Calls `try_one` with every pair of one value of `a` and one of `b`, and answers how many calls were
/// answered with `true`, and how many with `false`: a sweep sees both, or tries too little.
pub fn pairs<A: Copy, B: Copy>(
    a: &[A],
    b: &[B],
    mut try_one: impl FnMut(A, B) -> bool,
) -> (usize, usize) {
    let (mut accepted, mut refused) = (0, 0);
    for &first in a {
        for &second in b {
            if try_one(first, second) { accepted += 1 } else { refused += 1 }
        }
    }
    (accepted, refused)
}
