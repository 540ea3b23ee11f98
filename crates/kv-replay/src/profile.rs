//! The timing profile of simulated devices: a built-in one, or one from a file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cuda_sim::{Profile, ProfileError};

/// The reason why a profile was not read.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ProfileReadError {
    /// The file cannot be read.
    #[error("cannot read the profile {}: neither h100 nor h200, nor a file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file does not contain a profile.
    #[error("{} is not a profile", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The cause, with the line.
        source: ProfileError,
    },
}

cuda_driver::messages::one_line_debug!(ProfileReadError);

/// The profile `h100`, `h200`, or that of a file in the form of [`Profile::parse`].
///
/// # Errors
///
/// [`ProfileReadError`], which names the file.
///
/// # Examples
///
/// ```
/// assert_eq!(kv_replay::profile::read("h200")?.name, "H200");
/// assert!(kv_replay::profile::read("no such file").is_err());
/// # Ok::<(), kv_replay::profile::ProfileReadError>(())
/// ```
pub fn read(name: &str) -> Result<Profile, ProfileReadError> {
    if let Some(profile) = Profile::built_in(name) {
        return Ok(profile);
    }
    let path = || Path::new(name).to_owned();
    let text = fs::read_to_string(name)
        .map_err(|source| ProfileReadError::Read { path: path(), source })?;
    Profile::parse(&text).map_err(|source| ProfileReadError::Parse { path: path(), source })
}
