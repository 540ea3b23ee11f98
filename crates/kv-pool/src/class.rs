//! What a loop does about each error of this crate.

use crate::moves::OnboardRefused;
use crate::tenants::TenantError;
use crate::{
    BudgetError, ClaimError, Classed, ConfigError, ErrorClass, HandleError, IntegrityError,
};

use ErrorClass::{Restart, Retry, Shed};

impl Classed for ConfigError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for ClaimError {
    fn class(&self) -> ErrorClass {
        match self {
            // What is retiring comes back by itself.
            Self::Exhausted { requested, claimable, retiring }
                if claimable.saturating_add(*retiring) >= *requested =>
            {
                Retry
            }
            Self::Exhausted { .. } | Self::NoTier { .. } => Shed,
            Self::Tenant(error) => error.class(),
        }
    }
}

impl Classed for TenantError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for HandleError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for OnboardRefused {
    fn class(&self) -> ErrorClass {
        self.reason.class()
    }
}

impl Classed for BudgetError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for IntegrityError {
    fn class(&self) -> ErrorClass {
        Restart
    }
}
