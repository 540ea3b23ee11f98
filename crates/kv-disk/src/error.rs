//! Why a tier was not opened.

use std::io;
use std::path::{Path, PathBuf};

use crate::layout::{Geometry, HeadingFault, SLOT_BYTES_MAX};

/// Why a tier was not opened. Nothing that was stored is lost, except where a variant says so. A path is empty where the
/// file has no name.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The options name no folder.
    #[error("no folder was named: name one in `folders`")]
    NoFolder,
    /// There are more files than blocks can be striped over.
    #[error("{folders} folders are more than {max}: name fewer")]
    TooManyFolders {
        /// Folders named.
        folders: usize,
        /// The most.
        max: usize,
    },
    /// A file of so many bytes has not one slot.
    #[error("{bytes} bytes a file have no room for a slot of {slot_bytes} bytes: {}", least(*slot_bytes))]
    TooSmall {
        /// Bytes of each file.
        bytes: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
    },
    /// A depth is 0.
    #[error(
        "a read depth of {reads} and a write depth of {writes}: neither may be 0 or above {max}"
    )]
    Depth {
        /// Reads at a time.
        reads: u32,
        /// Writes at a time.
        writes: u32,
        /// The most of each.
        max: u32,
    },
    /// A rate is 0: what waits for it would wait for good.
    #[error("0 bytes a second for {act}: leave the rate out for no bound, or name at least 1")]
    Rate {
        /// What it is a rate of: reads or writes.
        act: &'static str,
    },
    /// Another process, or another tier of this one, has the file.
    #[error(
        "{} is in use by another tier: end that one, wait longer in `lock_wait`, or name another folder",
        shown(path)
    )]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// The file is none of this crate's, or a link, a folder, or somebody else's. It is left as it is.
    #[error("{} is not used: {reason}", shown(path))]
    Hostile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: Hostility,
    },
    /// The file has been spoilt, or is of another version.
    #[error("{} is not read: remove it, or give its content up with `Mismatch::Wipe`", shown(path))]
    Heading {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: HeadingFault,
    },
    /// The file has records of another model.
    #[error(
        "{} is of model {found:032x}, and this is {expected:032x}: name another folder, or give its content up with `Mismatch::Wipe`",
        shown(path)
    )]
    Model {
        /// The file.
        path: PathBuf,
        /// The model's number in the file.
        found: u128,
        /// The number of this model.
        expected: u128,
    },
    /// The file was opened with keys before, and is opened without, or without the feature `seal`.
    #[error(
        "{} may have encrypted records, and there are no keys: give it `SlotRules::keys` and the feature `seal`, name another \
        folder, or give its content up with `Mismatch::Wipe`",
        shown(path)
    )]
    NoKeys {
        /// The file.
        path: PathBuf,
    },
    /// The file has other slots, or has been cut off.
    #[error("{} of {bytes} bytes has {} slots of {} bytes, and this is of {} slots of {} bytes: name another folder, use the \
        options that it was made with, or give its content up with `Mismatch::Wipe`",
        shown(path), found.0, found.1, expected.0, expected.1)]
    Geometry {
        /// The file.
        path: PathBuf,
        /// Bytes of the file.
        bytes: u64,
        /// The slots that it says it has, and the bytes of each.
        found: (u64, u64),
        /// Those that it should have.
        expected: (u64, u64),
    },
    /// The files are not those that belong together, in this order.
    #[error(
        "{} is number {stripe} of {stripes} in a set, and number {expected} of {count} of this set was expected: name the \
        folders in the order in which the set was made, or give its content up with `Mismatch::Wipe`",
        shown(path)
    )]
    Stripe {
        /// The file.
        path: PathBuf,
        /// The number that the file has.
        stripe: u16,
        /// Of how many.
        stripes: u16,
        /// The number that it should have.
        expected: u16,
        /// Of how many.
        count: u16,
    },
    /// The file system has not enough room.
    #[error(
        "{} has {free} bytes free, and {needed} are needed, {reserve} of which are to stay free: free some, or ask for fewer \
        in `bytes` or `reserve_bytes`",
        shown(path)
    )]
    NoRoom {
        /// The folder.
        path: PathBuf,
        /// Bytes free.
        free: u64,
        /// Bytes needed.
        needed: u64,
        /// Bytes to stay free.
        reserve: u64,
    },
    /// The host has no memory for the records of so many slots.
    #[error("no memory for the records of {slots} slots: ask for fewer `bytes`")]
    NoMemory {
        /// Slots.
        slots: u64,
    },
    /// The system refused something.
    #[error("{what} failed{}", of(path))]
    System {
        /// The file or folder; empty if it is neither's fault.
        path: PathBuf,
        /// What.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// What is wrong with a file that was found where a file of slots should be.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Hostility {
    /// It is a symbolic link.
    #[error("it is a symbolic link; name the folder that has the file itself")]
    Link,
    /// It is a folder, a device or a pipe.
    #[error("it is no regular file; move it away, or name another folder")]
    NotRegular,
    /// It belongs to another user.
    #[error(
        "it belongs to user {owner}, and this is user {user}; move it away, or name another folder"
    )]
    Owner {
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Others may write it.
    #[error("others may write it: its mode is {mode:o}; chmod 600 it if nobody has, or remove it")]
    Writable {
        /// Its mode.
        mode: u32,
    },
    /// It has several names.
    #[error("it has {links} names; remove the others, or move it away")]
    Links {
        /// How many.
        links: u64,
    },
    /// It does not begin as a file of slots does.
    #[error("it has no heading of kv-disk; move it away, or name another folder")]
    Foreign,
}

impl OpenError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { path: PathBuf::new(), what, source }
    }

    /// Says of which file it is, unless it is said.
    pub(crate) fn at(mut self, named: &Path) -> Self {
        match &mut self {
            Self::Hostile { path, .. }
            | Self::Heading { path, .. }
            | Self::Model { path, .. }
            | Self::NoKeys { path }
            | Self::Geometry { path, .. }
            | Self::Stripe { path, .. }
            | Self::System { path, .. }
                if path.as_os_str().is_empty() =>
            {
                named.clone_into(path);
            }
            _ => {}
        }
        self
    }
}

/// A path in a message.
fn shown(path: &Path) -> String {
    if path.as_os_str().is_empty() { "the file".to_owned() } else { path.display().to_string() }
}

fn of(path: &Path) -> String {
    if path.as_os_str().is_empty() { String::new() } else { format!(" for {}", path.display()) }
}

/// The least bytes of a file.
fn least(slot_bytes: u64) -> String {
    let bytes = Geometry { slots: 1, slot_bytes: slot_bytes.min(SLOT_BYTES_MAX) }.bytes();
    if slot_bytes > SLOT_BYTES_MAX {
        return format!("a slot has at most {SLOT_BYTES_MAX}, so `record_bytes` has to be less");
    }
    format!("`bytes` has to be at least {bytes} for each folder")
}

kv_pool::one_line_debug!(OpenError);
