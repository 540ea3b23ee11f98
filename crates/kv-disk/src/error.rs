//! Why a tier was not opened.

use std::io;
use std::path::PathBuf;

use crate::layout::{Geometry, HeadingFault};

/// Why a tier was not opened. Nothing that was stored is lost, except where a variant says so.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The options name no folder.
    #[error("no folder was named")]
    NoFolder,
    /// There are more files than blocks can be striped over.
    #[error("{folders} folders are more than {max}")]
    TooManyFolders {
        /// Folders named.
        folders: usize,
        /// The most.
        max: usize,
    },
    /// A file of so many bytes has not one slot.
    #[error("{bytes} bytes a file have no room for a slot of {slot_bytes} bytes")]
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
    /// Another process, or another tier of this one, has the file.
    #[error("{} is in use by another tier", path.display())]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// The file is none of this crate's, or a link, a folder, or somebody else's. It is left as it is.
    #[error("{} is not used: {reason}", path.display())]
    Hostile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: Hostility,
    },
    /// The file has been spoilt, or is of another version.
    #[error("the file is not read")]
    Heading(#[from] HeadingFault),
    /// The file has records of another model.
    #[error("the file is of model {found:032x}, and this is {expected:032x}")]
    Model {
        /// The model's number in the file.
        found: u128,
        /// The number of this model.
        expected: u128,
    },
    /// The file has other slots, or has been cut off.
    #[error("the file of {bytes} bytes has {} slots of {} bytes, and this is of {} slots of {} bytes",
        found.slots, found.slot_bytes, expected.slots, expected.slot_bytes)]
    Geometry {
        /// Bytes of the file.
        bytes: u64,
        /// The slots that it says it has.
        found: Geometry,
        /// The slots that it should have.
        expected: Geometry,
    },
    /// The files are not those that belong together, in this order.
    #[error(
        "the file is number {stripe} of {stripes} in a set, and number {expected} of {count} of this set was expected"
    )]
    Stripe {
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
    #[error("{} has {free} bytes free, and {needed} are needed, {reserve} of which are to stay free", path.display())]
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
    #[error("no memory for the records of {slots} slots")]
    NoMemory {
        /// Slots.
        slots: u64,
    },
    /// The system refused something.
    #[error("{what} failed")]
    System {
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
    #[error("it is a symbolic link")]
    Link,
    /// It is a folder, a device or a pipe.
    #[error("it is no regular file")]
    NotRegular,
    /// It belongs to another user.
    #[error("it belongs to user {owner}, and this is user {user}")]
    Owner {
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Others may write it.
    #[error("others may write it: its mode is {mode:o}")]
    Writable {
        /// Its mode.
        mode: u32,
    },
    /// It has several names.
    #[error("it has {links} names")]
    Links {
        /// How many.
        links: u64,
    },
    /// It does not begin as a file of slots does.
    #[error("it has no heading of kv-disk")]
    Foreign,
}

impl OpenError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

kv_pool::one_line_debug!(OpenError);
