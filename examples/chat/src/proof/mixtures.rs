//! The mixtures: what an engine does with its cache in the course of a day, each so small that it happens at once.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_plane::tier::{FaultRules, FaultsMade, MemoryTier, MemoryTierOptions};
use kv_plane::{GroupId, KvCacheOptions, LowerTiers};
use kv_pool::Tier;

use crate::engine::Engine;

/// Tokens of a block: few, so that short prompts have several.
pub const BLOCK_TOKENS: u32 = 8;

/// One way of using the cache.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mixture {
    /// All at once, with room for all: hits, hits on what is still being computed, forks, drafts.
    Shared,
    /// Too few device blocks, and a host tier: eviction, onboarding, suspension.
    Host,
    /// Too few of both, and a tier below that is late, loses, tears, swaps and corrupts.
    Below,
    /// Every few steps the youngest sequence is suspended.
    Suspended,
    /// Every few steps the budget is lowered, and then raised again.
    Budget,
    /// Too few device blocks and nowhere to go: what gives way is computed again.
    Restarted,
    /// The layers lie on two devices, with too few blocks.
    Split,
}

impl Mixture {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Shared,
        Self::Host,
        Self::Below,
        Self::Suspended,
        Self::Budget,
        Self::Restarted,
        Self::Split,
    ];

    /// A few words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared prefixes, forks and drafts",
            Self::Host => "eviction to host memory and back",
            Self::Below => "a tier below that fails",
            Self::Suspended => "suspension at any time",
            Self::Budget => "budget swings",
            Self::Restarted => "no room anywhere",
            Self::Split => "layers on two devices",
        }
    }

    /// Tokens of prompts in a step: some mixtures cut prompts into small chunks, and some do not.
    #[must_use]
    pub fn chunk_tokens(self) -> u64 {
        match self {
            Self::Shared | Self::Host => 24,
            Self::Suspended | Self::Split => 80,
            _ => 512,
        }
    }

    /// How often all jobs are submitted to one cache. From the second time on their prompts are cached somewhere.
    #[must_use]
    pub fn rounds(self) -> usize {
        if self == Self::Below { 4 } else { 2 }
    }

    /// The options of the cache. `most` is the number of blocks of the longest sequence.
    pub(super) fn adapt(self, options: &mut KvCacheOptions, most: u32) -> Option<MadeFaults> {
        let tight = most + 4;
        let group = &mut options.groups[0];
        (group.device_blocks, group.host_blocks) = match self {
            Self::Shared => (40 * most, 0),
            Self::Host | Self::Split => (tight, 20 * most),
            Self::Below => (most + 2, most / 2 + 1),
            Self::Suspended | Self::Budget => (20 * most, 20 * most),
            Self::Restarted => (tight, 0),
        };
        // The simulator's devices are as many as are asked for; a machine with one GPU has one.
        options.parts_share_devices = self == Self::Split;
        if self != Self::Below {
            return None;
        }
        let made: MadeFaults = Arc::default();
        let told = Arc::clone(&made);
        let mut tiers = LowerTiers::new(b"the proof");
        tiers.push(move || {
            let faults = FaultRules::all(5);
            let tier =
                MemoryTier::new(MemoryTierOptions { faults, ..MemoryTierOptions::default() });
            if let Ok(mut made) = told.lock() {
                made.push(tier.faults());
            }
            Box::new(tier)
        });
        // However slow the machine is, a load that is late is waited for.
        tiers.rules.wait_max = Duration::from_secs(600);
        options.tiers = tiers;
        Some(made)
    }

    /// What is done before a step.
    ///
    /// # Errors
    /// What the cache says.
    pub(super) fn disturb(self, engine: &mut Engine, step: u64, most: u32) -> anyhow::Result<()> {
        match (self, step % 8) {
            (Self::Suspended, 3 | 6) => drop(engine.suspend_youngest()?),
            (Self::Budget, 3) => {
                engine.cache_mut().set_budget(GroupId(0), Tier::Primary, u64::from(most) + 2)?;
            }
            (Self::Budget, 7) => {
                let all = engine.cache().options().groups[0].device_blocks;
                engine.cache_mut().set_budget(GroupId(0), Tier::Primary, all.into())?;
            }
            _ => {}
        }
        Ok(())
    }
}

/// What the tiers below have done wrong.
pub(super) type MadeFaults = Arc<Mutex<Vec<Arc<FaultsMade>>>>;
