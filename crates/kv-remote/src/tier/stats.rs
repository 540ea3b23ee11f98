//! Counts of what a tier of peers has done, and why it did not do more.

use std::collections::BTreeMap;

use crate::{PeerError, Refusal, Unfit};

/// Why a member did not give a block that it was asked for.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum Miss {
    /// The member does not have it.
    Absent,
    /// Its slot was written anew, or its lease had ended, before it was read.
    Stale,
    /// Its bytes are not those of its checksum or its name.
    Torn,
    /// The member was not reached, or did not answer in time.
    Down,
    /// The member has said what cannot be true.
    Lie,
    /// The member refused.
    Refused,
    /// The record is of another format, or the worker has taken its memory back.
    Foreign,
    /// No member has given it in time.
    Late,
}

impl Miss {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::Absent,
        Self::Stale,
        Self::Torn,
        Self::Down,
        Self::Lie,
        Self::Refused,
        Self::Foreign,
        Self::Late,
    ];

    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Stale => "stale",
            Self::Torn => "torn",
            Self::Down => "down",
            Self::Lie => "lie",
            Self::Refused => "refused",
            Self::Foreign => "foreign",
            Self::Late => "late",
        }
    }

    pub(super) fn of(unfit: Unfit) -> Self {
        match unfit {
            Unfit::Stale => Self::Stale,
            Unfit::Torn | Unfit::Foreign | Unfit::Short => Self::Torn,
        }
    }

    pub(super) fn of_error(error: &PeerError) -> Self {
        match error {
            PeerError::Refused(Refusal::NoLease) => Self::Stale,
            PeerError::Refused(_) => Self::Refused,
            PeerError::Lie(_) | PeerError::Frame(_) => Self::Lie,
            _ => Self::Down,
        }
    }
}

/// Counts of a tier of peers.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct RemoteStats {
    /// Blocks that at least one member keeps.
    pub stored: u64,
    /// Blocks that none has kept.
    pub unstored: u64,
    /// Records that members were given, of one block as many as it has replicas.
    pub put: u64,
    /// Blocks that were loaded, by the name of the member that they came from; of all that were members at some time.
    pub loaded: BTreeMap<String, u64>,
    /// Blocks whose bytes were read, used or not.
    pub read: u64,
    /// Reasons for which members did not give a block, of one load as many as members were asked.
    pub missed: BTreeMap<Miss, u64>,
    /// Loads for which another member was asked while one had not answered.
    pub hedged: u64,
    /// Calls after which a member was down.
    pub downs: u64,
}

impl RemoteStats {
    /// Members that did not give a block, for this reason.
    #[must_use]
    pub fn missed_as(&self, miss: Miss) -> u64 {
        self.missed.get(&miss).copied().unwrap_or(0)
    }
}
