//! What a file says of itself.

use xxhash_rust::xxh3::xxh3_64;

use super::{Geometry, VERSION, field};
use crate::io::PAGE_BYTES;

const MAGIC: [u8; 8] = *b"KVDISK01";
const VERSION_AT: usize = 8;
const STRIPE: usize = 12;
const STRIPES: usize = 14;
const SET: usize = 16;
const FILE: usize = 32;
const MODEL: usize = 48;
const SLOTS: usize = 64;
const SLOT_BYTES: usize = 72;
const EPOCH: usize = 80;
const CEILING: usize = 88;
const SEQUENCE: usize = 96;
const SEALED: usize = 104;
const RESERVED: usize = 105;
const CHECKSUM: usize = 120;
const END: usize = 128;

/// What a file says of itself. It is written anew in turn at its two places, so that one of them is always whole.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Heading {
    /// The files that belong together, over which blocks are striped: a random number.
    pub set: u128,
    /// The file: a random number.
    pub file: u128,
    /// The file's place among them.
    pub stripe: u16,
    /// How many files belong together.
    pub stripes: u16,
    /// The model that its records are of.
    pub model: u128,
    /// Whether it was ever opened with keys: then records in it may be encrypted, which nobody without keys can judge.
    pub sealed: bool,
    /// Its slots.
    pub geometry: Geometry,
    /// How often it was cleared. Records of earlier epochs are gone.
    pub epoch: u64,
    /// All generations used so far are below this.
    pub ceiling: u64,
    /// How often the heading was written.
    pub sequence: u64,
}

/// Why bytes are no heading.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadingFault {
    /// They do not begin as a heading does.
    #[error("the file has no heading of kv-disk")]
    Foreign,
    /// The heading is of another version.
    #[error("the file has version {version}, and {VERSION} is read")]
    Version {
        /// The version found.
        version: u32,
    },
    /// The checksum is wrong.
    #[error("the heading's checksum is wrong")]
    Checksum,
    /// A field has a value that no heading has.
    #[error("the heading has a field that no heading has")]
    Field,
}

impl Heading {
    /// The page.
    #[must_use]
    pub fn to_page(&self) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        let mut put = |at: usize, field: &[u8]| page[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(VERSION_AT, &VERSION.to_le_bytes());
        put(STRIPE, &self.stripe.to_le_bytes());
        put(STRIPES, &self.stripes.to_le_bytes());
        put(SET, &self.set.to_le_bytes());
        put(FILE, &self.file.to_le_bytes());
        put(MODEL, &self.model.to_le_bytes());
        put(SLOTS, &self.geometry.slots.to_le_bytes());
        put(SLOT_BYTES, &self.geometry.slot_bytes.to_le_bytes());
        put(EPOCH, &self.epoch.to_le_bytes());
        put(CEILING, &self.ceiling.to_le_bytes());
        put(SEQUENCE, &self.sequence.to_le_bytes());
        put(SEALED, &[self.sealed.into()]);
        let sum = xxh3_64(&page[..CHECKSUM]);
        page[CHECKSUM..END].copy_from_slice(&sum.to_le_bytes());
        page
    }

    /// Reads a heading from the first bytes of `page`.
    ///
    /// # Errors
    /// [`HeadingFault`].
    pub fn parse(page: &[u8]) -> Result<Self, HeadingFault> {
        let bytes: &[u8; END] = page.first_chunk().ok_or(HeadingFault::Foreign)?;
        if bytes[..8] != MAGIC {
            return Err(HeadingFault::Foreign);
        }
        let version = u32::from_le_bytes(field(bytes, VERSION_AT));
        if version != VERSION {
            return Err(HeadingFault::Version { version });
        }
        if bytes[CHECKSUM..END] != xxh3_64(&bytes[..CHECKSUM]).to_le_bytes() {
            return Err(HeadingFault::Checksum);
        }
        let geometry = Geometry {
            slots: u64::from_le_bytes(field(bytes, SLOTS)),
            slot_bytes: u64::from_le_bytes(field(bytes, SLOT_BYTES)),
        };
        let (stripe, stripes) =
            (u16::from_le_bytes(field(bytes, STRIPE)), u16::from_le_bytes(field(bytes, STRIPES)));
        let reserved = &bytes[RESERVED..CHECKSUM];
        let is_known = bytes[SEALED] <= 1 && reserved.iter().all(|byte| *byte == 0);
        if stripe >= stripes || !geometry.is_valid() || !is_known {
            return Err(HeadingFault::Field);
        }
        Ok(Self {
            set: u128::from_le_bytes(field(bytes, SET)),
            file: u128::from_le_bytes(field(bytes, FILE)),
            stripe,
            stripes,
            model: u128::from_le_bytes(field(bytes, MODEL)),
            sealed: bytes[SEALED] == 1,
            geometry,
            epoch: u64::from_le_bytes(field(bytes, EPOCH)),
            ceiling: u64::from_le_bytes(field(bytes, CEILING)),
            sequence: u64::from_le_bytes(field(bytes, SEQUENCE)),
        })
    }

    /// The newer of two pages that is whole.
    ///
    /// # Errors
    /// [`HeadingFault`] of the page that came nearest to being one.
    pub fn newer(first: &[u8], second: &[u8]) -> Result<Self, HeadingFault> {
        match (Self::parse(first), Self::parse(second)) {
            (Ok(a), Ok(b)) => Ok(if a.sequence >= b.sequence { a } else { b }),
            (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(one),
            (Err(HeadingFault::Foreign), Err(fault)) | (Err(fault), Err(_)) => Err(fault),
        }
    }

    /// Where the heading is to be written: at the place of the older one.
    #[must_use]
    pub fn place(&self) -> u64 {
        (self.sequence % 2) * PAGE_BYTES as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heading(sequence: u64) -> Heading {
        let geometry = Geometry { slots: 17, slot_bytes: 8192 };
        let (set, file, model) = (1, 2, 3);
        Heading {
            set,
            file,
            stripe: 1,
            stripes: 2,
            model,
            sealed: sequence % 2 == 1,
            geometry,
            epoch: 4,
            ceiling: 5,
            sequence,
        }
    }

    #[test]
    fn the_newer_whole_heading_counts() {
        let (old, new) = (heading(8).to_page(), heading(9).to_page());
        assert_eq!(Heading::newer(&old, &new), Ok(heading(9)));
        assert_eq!(Heading::newer(&new, &old), Ok(heading(9)));
        assert_ne!(heading(8).place(), heading(9).place());
        for bit in 0..END * 8 {
            let mut torn = new;
            torn[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Heading::newer(&torn, &old), Ok(heading(8)), "bit {bit}");
            assert!(Heading::newer(&torn, &torn).is_err());
        }
        assert_eq!(Heading::newer(&[0; 10], &[7; 4096]), Err(HeadingFault::Foreign));
    }
}
