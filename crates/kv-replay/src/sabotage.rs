//! Disables protections, to check that the reader notices.

use std::str::FromStr;

use kv_cache::KvCache;

/// A published defect, reproduced on purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sabotage {
    /// Staging buffers are overwritten before the device has read them (H13, H14).
    Staging,
    /// Two callers check the free blocks before either claims (H10).
    Claim,
    /// The same, and stores that name a slot twice are not refused.
    ClaimUnseen,
    /// Transfers ignore the number of tokens to skip (H12).
    Skip,
}

impl Sabotage {
    /// Disables the protection of `cache` permanently.
    pub(crate) fn apply(self, cache: &KvCache) {
        for part in cache.parts() {
            match self {
                Self::Staging => part.staging().sabotage_reuse_before_event(),
                Self::Claim => cache.pool().sabotage_peek_then_claim(),
                Self::ClaimUnseen => {
                    cache.pool().sabotage_peek_then_claim();
                    part.kernels().sabotage_allow_stored_twice(true);
                }
                Self::Skip => part.kernels().sabotage_ignore_skip(true),
            }
        }
    }
}

impl FromStr for Sabotage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "staging" => Ok(Self::Staging),
            "claim" => Ok(Self::Claim),
            "claim-unseen" => Ok(Self::ClaimUnseen),
            "skip" => Ok(Self::Skip),
            _ => Err(format!(
                "unknown sabotage {text:?}; expected staging, claim, claim-unseen or skip"
            )),
        }
    }
}
