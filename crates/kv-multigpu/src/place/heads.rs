//! Tensor parallelism: which GPU has which attention heads.

use std::ops::Range;

use super::PlacementError;

/// The treatment of KV heads when there are more GPUs than KV heads.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum KvReplication {
    /// An error.
    #[default]
    Refuse,
    /// Each KV head is kept on `gpus / kv_heads` neighbouring GPUs, as engines do for grouped
    /// queries. These GPUs then hold the same KV bytes.
    Allow,
}

/// Attention heads divided among a number of GPUs, evenly and in order.
///
/// ```
/// use kv_multigpu::place::{HeadShards, KvReplication};
///
/// # fn main() -> Result<(), kv_multigpu::place::PlacementError> {
/// let shards = HeadShards::new(64, 8, 4, KvReplication::Refuse)?;
/// assert_eq!(shards.kv_heads_of(1), 2..4);
/// assert_eq!(shards.query_heads_of(1), 16..32);
/// // Sixteen GPUs: each of the 8 KV heads is on two.
/// assert!(HeadShards::new(64, 8, 16, KvReplication::Refuse).is_err());
/// let replicated = HeadShards::new(64, 8, 16, KvReplication::Allow)?;
/// assert_eq!((replicated.kv_heads_of(2), replicated.kv_heads_of(3)), (1..2, 1..2));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct HeadShards {
    /// # Invariants
    /// Not 0, and a multiple of `kv_heads` and of `gpus`.
    query_heads: u64,
    /// # Invariants
    /// Not 0; a multiple of `gpus` or, only with `Allow`, a divisor.
    kv_heads: u64,
    /// # Invariants
    /// Not 0.
    gpus: usize,
    replication: KvReplication,
}

impl HeadShards {
    /// Divides `query_heads` and `kv_heads` among `gpus` GPUs.
    ///
    /// # Errors
    /// [`PlacementError`] if they do not divide evenly. With fewer KV heads than GPUs this is
    /// [`PlacementError::KvHeads`], unless `replication` allows it.
    pub fn new(
        query_heads: u64,
        kv_heads: u64,
        gpus: usize,
        replication: KvReplication,
    ) -> Result<Self, PlacementError> {
        if kv_heads == 0 || gpus == 0 || query_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
            return Err(PlacementError::HeadCounts { query_heads, kv_heads, gpus });
        }
        let count = gpus as u64;
        if !query_heads.is_multiple_of(count) {
            return Err(PlacementError::QueryHeads { query_heads, gpus });
        }
        let replicated = replication == KvReplication::Allow && count.is_multiple_of(kv_heads);
        if !kv_heads.is_multiple_of(count) && !replicated {
            return Err(PlacementError::KvHeads { kv_heads, gpus });
        }
        Ok(Self { query_heads, kv_heads, gpus, replication })
    }

    pub(crate) fn query_heads(&self) -> u64 {
        self.query_heads
    }

    /// KV heads of the model.
    #[must_use]
    pub fn kv_heads(&self) -> u64 {
        self.kv_heads
    }

    pub(crate) fn replication(&self) -> KvReplication {
        self.replication
    }

    /// Number of GPUs that keep each KV head: 1 unless there are more GPUs than KV heads.
    pub(crate) fn replicas(&self) -> u64 {
        (self.gpus as u64 / self.kv_heads).max(1)
    }

    /// Number of KV heads of each GPU.
    pub(crate) fn kv_heads_each(&self) -> u64 {
        (self.kv_heads / self.gpus as u64).max(1)
    }

    /// The query heads of GPU `gpu`; empty if the GPU does not exist.
    #[must_use]
    pub fn query_heads_of(&self, gpu: usize) -> Range<u64> {
        if gpu >= self.gpus {
            return 0..0;
        }
        let each = self.query_heads / self.gpus as u64;
        gpu as u64 * each..(gpu as u64 + 1) * each
    }

    /// The KV heads of GPU `gpu`; empty if the GPU does not exist.
    #[must_use]
    pub fn kv_heads_of(&self, gpu: usize) -> Range<u64> {
        if gpu >= self.gpus {
            return 0..0;
        }
        let each = self.kv_heads_each();
        let shard = gpu as u64 / self.replicas();
        shard * each..(shard + 1) * each
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kv_head_is_kept_the_same_number_of_times_beside_its_queries() {
        for kv_heads in 1..=16 {
            for group in 1..=8 {
                for gpus in 1..=16 {
                    let query_heads = kv_heads * group;
                    let Ok(shards) =
                        HeadShards::new(query_heads, kv_heads, gpus, KvReplication::Allow)
                    else {
                        let count = gpus as u64;
                        let even = query_heads.is_multiple_of(count)
                            && (kv_heads.is_multiple_of(count) || count.is_multiple_of(kv_heads));
                        assert!(!even, "{kv_heads} {group} {gpus}");
                        continue;
                    };
                    let mut kept = vec![0; kv_heads as usize];
                    for gpu in 0..gpus {
                        let kv = shards.kv_heads_of(gpu);
                        kv.clone().for_each(|head| kept[head as usize] += 1);
                        for query in shards.query_heads_of(gpu) {
                            assert!(kv.contains(&(query / group)), "{shards:?} gpu {gpu}");
                        }
                    }
                    assert!(kept.iter().all(|&times| times == shards.replicas()), "{shards:?}");
                }
            }
        }
    }
}
