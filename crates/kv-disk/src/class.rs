//! What a loop does about the error of this crate.

use kv_pool::{Classed, ErrorClass};

use crate::OpenError;

use ErrorClass::{Restart, Retry, Shed};

impl Classed for OpenError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Locked { .. } => Retry,
            Self::NoFolder
            | Self::TooManyFolders { .. }
            | Self::TooSmall { .. }
            | Self::Depth { .. }
            | Self::Rate { .. }
            | Self::NoRoom { .. }
            | Self::NoMemory { .. } => Shed,
            // The file, or the folder, has to be another or made anew.
            Self::Hostile { .. }
            | Self::Heading { .. }
            | Self::Model { .. }
            | Self::NoKeys { .. }
            | Self::Geometry { .. }
            | Self::Stripe { .. }
            | Self::System { .. } => Restart,
        }
    }
}
