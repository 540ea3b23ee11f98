//! What a loop does about each error of this crate.

use kv_pool::{Classed, ErrorClass};

use crate::{
    AdmitError, BudgetError, BytesError, ChangeError, CommitError, CompletionError, DraftError,
    ExportRefused, Missing, OptionsError, PlanError, ReserveError, SequenceError, SlotError,
    StageError, StepError, SuspendError, TokensError,
};

use ErrorClass::{Restart, Retry, Shed};

/// Numbers, names and tokens that are refused whenever they come.
macro_rules! shed {
    ($($error:ty),+ $(,)?) => {$(
        impl Classed for $error {
            fn class(&self) -> ErrorClass {
                Shed
            }
        }
    )+};
}

shed!(OptionsError, TokensError, SlotError);

impl Classed for Missing {
    fn class(&self) -> ErrorClass {
        self.reason.class()
    }
}

impl Classed for AdmitError {
    /// Such a request is never admitted.
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for SequenceError {
    fn class(&self) -> ErrorClass {
        match self {
            // It has been set back, or what is under way will end.
            Self::Redo { .. } | Self::Arriving | Self::Loading { .. } => Retry,
            // The sequence alone is of no use here.
            Self::Foreign | Self::Suspended | Self::Lost { .. } => Shed,
        }
    }
}

impl Classed for ReserveError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Sequence(error) => error.class(),
            Self::TooLong { .. } | Self::Drafts { .. } => Shed,
        }
    }
}

impl Classed for CommitError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Sequence(error) => error.class(),
            Self::OutOfOrder { .. } => Retry,
            Self::NotStaged { .. } | Self::TooManyIds { .. } | Self::Tokens(_) => Shed,
        }
    }
}

impl Classed for DraftError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Sequence(error) => error.class(),
            Self::NoDraftModel
            | Self::NotStaged { .. }
            | Self::Beyond { .. }
            | Self::Back { .. } => Shed,
        }
    }
}

impl Classed for StageError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Sequence { reason, .. } => reason.class(),
            Self::NotOpen { .. }
            | Self::StagedAlready { .. }
            | Self::NothingReserved { .. }
            | Self::NothingKnown { .. } => Shed,
        }
    }
}

impl Classed for BudgetError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Tenant(error) => error.class(),
            Self::Pool(error) => error.class(),
            Self::NoGroup { .. }
            | Self::NotShared
            | Self::OverGranules { .. }
            | Self::Pins { .. } => Shed,
        }
    }
}

impl Classed for StepError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::StillOpen { .. } | Self::Busy { .. } => Retry,
            Self::Foreign { .. } => Shed,
        }
    }
}

impl Classed for CompletionError {
    fn class(&self) -> ErrorClass {
        match self {
            // It joins again, and begins with a snapshot.
            Self::Lost { .. } => Restart,
            Self::NoWorker { .. }
            | Self::NotLost { .. }
            | Self::NotStaged { .. }
            | Self::NotOpen { .. }
            | Self::NoBlock { .. }
            | Self::Again { .. }
            | Self::NoTier { .. } => Shed,
        }
    }
}

impl Classed for ChangeError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Sequence(error) => error.class(),
            Self::Later | Self::Writing { .. } => Retry,
            Self::NoRow { .. } | Self::Beyond { .. } | Self::Tokens(_) => Shed,
        }
    }
}

impl Classed for SuspendError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Sequence(error) => error.class(),
            Self::NoRoom(missing) => missing.class(),
            Self::NotSuspended => Shed,
        }
    }
}

impl Classed for ExportRefused {
    fn class(&self) -> ErrorClass {
        self.reason.class()
    }
}

impl Classed for PlanError {
    /// The worker's memory is not what the manager thinks: it joins again by a snapshot.
    fn class(&self) -> ErrorClass {
        Restart
    }
}

impl Classed for BytesError {
    /// Whoever says such things is no manager and no worker of this version.
    fn class(&self) -> ErrorClass {
        Restart
    }
}
