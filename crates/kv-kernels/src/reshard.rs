//! Which heads go where when a KV cache of one tensor-parallel degree is read by another.

use crate::RowRange;

/// Heads of one source shard that become heads of one destination shard.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct HeadMove {
    /// Rank of the shard that has them.
    pub source: u32,
    /// Rank of the shard that wants them.
    pub destination: u32,
    /// The first of them in a row of the source shard.
    pub from_head: u32,
    /// The first of them in a row of the destination shard.
    pub to_head: u32,
    /// How many.
    pub heads: u32,
}

impl HeadMove {
    /// The bytes of every row that these heads are, for
    /// [`copy_block_rows`](crate::KvKernels::copy_block_rows).
    ///
    /// Heads of 4 GiB or more do not exist: products are of 32-bit numbers.
    #[must_use]
    pub fn rows(&self, head_bytes: u32) -> RowRange {
        let bytes = |heads: u32| u64::from(heads) * u64::from(head_bytes);
        RowRange {
            from_byte: bytes(self.from_head),
            to_byte: bytes(self.to_head),
            bytes: bytes(self.heads),
        }
    }
}

/// Most shards of a side.
const SHARDS_MAX: u32 = 1 << 16;

/// Why there are no moves of heads.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReshardError {
    /// Heads that cannot be spread evenly over the shards, nor shards over the heads.
    #[error("{heads} heads cannot be spread over {shards} shards")]
    Uneven {
        /// Heads of the whole model.
        heads: u32,
        /// Shards of one side.
        shards: u32,
    },
    /// More shards than are listed.
    #[error("{shards} shards, of at most {most}")]
    TooMany {
        /// Shards of one side.
        shards: u32,
        /// Most shards.
        most: u32,
    },
}

/// Every move of heads that turns `from` shards into `to` shards of a model with `heads` KV heads,
/// in the order of destinations and then of heads.
///
/// With up to as many shards as heads, shard `r` of `n` has heads `r * heads / n` to
/// `(r + 1) * heads / n`; with more, head `h` is on the `n / heads` shards from `h * n / heads` on.
/// Where a head is on several sources, destinations that share it are spread over them. A cache whose
/// rows are the same on every shard, as of multi-head latent attention, has one head: its row.
///
/// # Errors
/// [`ReshardError::Uneven`] where either number of shards neither divides the heads nor is a multiple of
/// them, [`ReshardError::TooMany`] for more than 65,536.
///
/// # Examples
/// ```
/// use kv_kernels::{HeadMove, reshard};
///
/// // 8 heads, 4 on each of two shards, become 2 on each of four.
/// let moves = reshard(8, 2, 4).unwrap();
/// let second = HeadMove { source: 0, destination: 1, from_head: 2, to_head: 0, heads: 2 };
/// assert_eq!((moves.len(), moves[1]), (4, second));
/// ```
pub fn reshard(heads: u32, from: u32, to: u32) -> Result<Vec<HeadMove>, ReshardError> {
    let (from, to) = (Sharding::new(heads, from)?, Sharding::new(heads, to)?);
    let mut moves: Vec<HeadMove> = Vec::new();
    for destination in 0..to.shards {
        let first = to.first_head(destination);
        // Which of the shards with the same heads this is.
        let copy = destination % to.copies;
        let mut head = first;
        while head < first + to.heads_of_shard {
            let of_copies = head / from.heads_of_shard * from.copies;
            // Less than `from.copies`, in 64 bits.
            let nearest = u64::from(copy) * u64::from(from.copies) / u64::from(to.copies);
            let source = of_copies + nearest as u32;
            let from_head = head - from.first_head(source);
            let heads = (from.heads_of_shard - from_head).min(first + to.heads_of_shard - head);
            moves.push(HeadMove { source, destination, from_head, to_head: head - first, heads });
            head += heads;
        }
    }
    Ok(moves)
}

/// How heads lie on shards.
struct Sharding {
    shards: u32,
    heads_of_shard: u32,
    /// Shards that have the same heads.
    copies: u32,
}

impl Sharding {
    fn new(heads: u32, shards: u32) -> Result<Self, ReshardError> {
        if shards > SHARDS_MAX {
            return Err(ReshardError::TooMany { shards, most: SHARDS_MAX });
        }
        let even = heads != 0 && shards != 0;
        if even && heads.is_multiple_of(shards) {
            return Ok(Self { shards, heads_of_shard: heads / shards, copies: 1 });
        }
        if even && shards.is_multiple_of(heads) {
            return Ok(Self { shards, heads_of_shard: 1, copies: shards / heads });
        }
        Err(ReshardError::Uneven { heads, shards })
    }

    fn first_head(&self, shard: u32) -> u32 {
        shard / self.copies * self.heads_of_shard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every destination gets each of its heads once, from a shard that has it.
    #[test]
    fn every_head_comes_from_a_shard_that_has_it() {
        let degrees = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48];
        let mut tried = 0;
        for heads in [1, 2, 8, 12] {
            for from in degrees {
                for to in degrees {
                    let Ok(moves) = reshard(heads, from, to) else { continue };
                    tried += 1;
                    let head_of = |shards: u32, shard: u32, local: u32| {
                        if shards <= heads {
                            shard * (heads / shards) + local
                        } else {
                            shard / (shards / heads)
                        }
                    };
                    let mut next = vec![0; to as usize];
                    for m in moves {
                        let at = &mut next[m.destination as usize];
                        assert_eq!(m.to_head, *at, "{heads} {from} {to} {m:?}");
                        *at += m.heads;
                        assert!(m.heads > 0 && m.source < from);
                        for i in 0..m.heads {
                            assert!(m.from_head + i < (heads / from).max(1));
                            assert_eq!(
                                head_of(from, m.source, m.from_head + i),
                                head_of(to, m.destination, m.to_head + i),
                                "{heads} {from} {to} {m:?}"
                            );
                        }
                    }
                    assert!(next.iter().all(|&got| got == (heads / to).max(1)));
                }
            }
        }
        assert!(tried > 100, "{tried}");
    }

    #[test]
    fn replicas_are_spread_over_replicas() {
        let sources = |heads, from, to| -> Vec<u32> {
            reshard(heads, from, to).unwrap().iter().map(|m| m.source).collect()
        };
        assert_eq!(sources(1, 4, 4), [0, 1, 2, 3]);
        assert_eq!(sources(1, 2, 8), [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(sources(1, 8, 2), [0, 4]);
        assert_eq!(sources(2, 4, 8), [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn uneven_shards_are_refused() {
        assert_eq!(reshard(8, 3, 1), Err(ReshardError::Uneven { heads: 8, shards: 3 }));
        assert_eq!(reshard(8, 8, 0), Err(ReshardError::Uneven { heads: 8, shards: 0 }));
        assert_eq!(reshard(0, 1, 1), Err(ReshardError::Uneven { heads: 0, shards: 1 }));
        assert_eq!(
            reshard(8, 8, 12).unwrap_err().to_string(),
            "8 heads cannot be spread over 12 shards"
        );
    }
}
