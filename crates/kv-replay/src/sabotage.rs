//! Disables protections, to check that the reader notices.

use std::str::FromStr;

use kv_plane::manager::{GroupId, Manager};
use kv_plane::{KvCache, Part};
use kv_replay::command_line::{name_of, named};
use kv_replay::engine::contiguous::Ranges;

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
    /// The pages of a request that has left are given to the next one, while they are still read.
    Recycle,
}

impl Sabotage {
    const NAMES: [(Self, &'static str); 5] = [
        (Self::Staging, "staging"),
        (Self::Claim, "claim"),
        (Self::ClaimUnseen, "claim-unseen"),
        (Self::Skip, "skip"),
        (Self::Recycle, "recycle"),
    ];

    pub(crate) fn name(self) -> &'static str {
        name_of(&Self::NAMES, self)
    }

    /// Checks that the run has the protection.
    pub(crate) fn check(self, contiguous: bool) -> Result<(), String> {
        let known = match self {
            Self::Staging => true,
            Self::Claim | Self::ClaimUnseen | Self::Skip => !contiguous,
            Self::Recycle => contiguous,
        };
        let kind = if contiguous { "with" } else { "without" };
        known.then_some(()).ok_or_else(|| {
            let name = self.name();
            format!(
                "a run {kind} --contiguous has no protection that --drill sabotage={name} disables"
            )
        })
    }

    pub(crate) fn apply_to_ranges(self, ranges: &Ranges) {
        match self {
            Self::Staging => ranges.staging().sabotage_reuse_before_event(),
            Self::Recycle => ranges.space().sabotage_rest_at_once(),
            Self::Claim | Self::ClaimUnseen | Self::Skip => {}
        }
    }

    pub(crate) fn apply(self, cache: &KvCache) {
        self.apply_to_manager(cache.manager());
        self.apply_to_parts(cache.parts());
    }

    pub(crate) fn apply_to_manager(self, manager: &Manager) {
        match self {
            Self::Claim | Self::ClaimUnseen => {
                let pool = manager.pool(GroupId(0));
                pool.into_iter().for_each(|pool| pool.sabotage_peek_then_claim());
            }
            Self::Staging | Self::Skip | Self::Recycle => {}
        }
    }

    pub(crate) fn apply_to_parts(self, parts: &[Part]) {
        for part in parts {
            match self {
                Self::Staging => part.staging().sabotage_reuse_before_event(),
                Self::Claim | Self::Recycle => {}
                Self::ClaimUnseen => part.kernels().sabotage_allow_stored_twice(true),
                Self::Skip => part.kernels().sabotage_ignore_skip(true),
            }
        }
    }
}

impl FromStr for Sabotage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        named("sabotage", &Self::NAMES, text)
    }
}
