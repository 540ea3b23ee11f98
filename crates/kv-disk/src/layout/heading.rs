//! What a file says of itself.

use kv_tier::codec::{FieldError, Fields, Writer};
use xxhash_rust::xxh3::xxh3_64;

use super::{Geometry, VERSION};
use crate::io::PAGE_BYTES;

const MAGIC: [u8; 8] = *b"KVDISK01";
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

impl From<FieldError> for HeadingFault {
    fn from(_: FieldError) -> Self {
        Self::Foreign
    }
}

impl Heading {
    /// The page.
    #[must_use]
    pub fn to_page(&self) -> Vec<u8> {
        let mut page = Writer(Vec::with_capacity(PAGE_BYTES));
        page.raw(&MAGIC);
        page.u32(VERSION);
        page.u16(self.stripe);
        page.u16(self.stripes);
        page.u128(self.set);
        page.u128(self.file);
        page.u128(self.model);
        let Geometry { slots, slot_bytes } = self.geometry;
        for number in [slots, slot_bytes, self.epoch, self.ceiling, self.sequence] {
            page.u64(number);
        }
        page.u8(self.sealed.into());
        page.0.resize(CHECKSUM, 0);
        page.u64(xxh3_64(&page.0));
        page.0.resize(PAGE_BYTES, 0);
        page.0
    }

    /// Reads a heading from the first bytes of `page`.
    ///
    /// # Errors
    /// [`HeadingFault`].
    pub fn parse(page: &[u8]) -> Result<Self, HeadingFault> {
        let bytes = page.get(..END).ok_or(HeadingFault::Foreign)?;
        let mut fields = Fields::new(bytes);
        if fields.array()? != MAGIC {
            return Err(HeadingFault::Foreign);
        }
        let version = fields.u32()?;
        if version != VERSION {
            return Err(HeadingFault::Version { version });
        }
        if bytes[CHECKSUM..] != xxh3_64(&bytes[..CHECKSUM]).to_le_bytes() {
            return Err(HeadingFault::Checksum);
        }
        let (stripe, stripes) = (fields.u16()?, fields.u16()?);
        let (set, file, model) = (fields.u128()?, fields.u128()?, fields.u128()?);
        let geometry = Geometry { slots: fields.u64()?, slot_bytes: fields.u64()? };
        let (epoch, ceiling, sequence) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let sealed = fields.flag("sealed").map_err(|_| HeadingFault::Field)?;
        let reserved: [u8; 15] = fields.array()?;
        if stripe >= stripes || !geometry.is_valid() || reserved != [0; 15] {
            return Err(HeadingFault::Field);
        }
        Ok(Self { set, file, stripe, stripes, model, sealed, geometry, epoch, ceiling, sequence })
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
            let mut torn = new.clone();
            torn[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Heading::newer(&torn, &old), Ok(heading(8)), "bit {bit}");
            assert!(Heading::newer(&torn, &torn).is_err());
        }
        assert_eq!(Heading::newer(&[0; 10], &[7; 4096]), Err(HeadingFault::Foreign));
    }
}
