//! Moves of content between tiers: out of the primary tier by its eviction, and back by request.

pub use crate::error::OnboardError;
pub use crate::offload::Offload;
pub use crate::onboard::{Onboard, OnboardRefused, Onboarded};
