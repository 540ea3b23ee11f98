//! What a node says of its memory, so that its peers reach it: where it lies in the node's process, and its agent's metadata.

use kv_remote::message::Span;
use kv_tier::codec::{FieldError, Fields, Writer};

use crate::NixlError;
use crate::agent::Kind;

const MAGIC: [u8; 4] = *b"KVNX";
const VERSION: u8 = 2;
/// Bytes of a region.
const REGION: usize = 24;
/// Regions of a descriptor, at most: it has 64 KiB, with the metadata.
pub(crate) const REGIONS_MAX: usize = 1024;

/// Memory of another process that this one may read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Descriptor {
    pub(crate) kind: Kind,
    /// The number of its device; 0 for memory of the host.
    pub(crate) device: u64,
    /// In the order of their addresses, none of which is in two of them.
    pub(crate) regions: Vec<Region>,
    /// What the library of the other process has said of its agent.
    pub(crate) metadata: Vec<u8>,
}

/// Consecutive bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Region {
    /// The first one's address, as nodes name it.
    pub(crate) address: u64,
    /// Where that is in its process.
    pub(crate) base: u64,
    pub(crate) bytes: u64,
}

impl Descriptor {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Writer::default();
        bytes.raw(&MAGIC);
        bytes.u8(VERSION);
        bytes.u8(self.kind.number());
        bytes.u64(self.device);
        bytes.list(&self.regions, |bytes, region| {
            [region.address, region.base, region.bytes].into_iter().for_each(|of| bytes.u64(of));
        });
        bytes.raw(&self.metadata);
        bytes.0
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, NixlError> {
        let mut fields = Fields::new(bytes);
        let read = Self::read(&mut fields);
        let there = read.map_err(|error| NixlError::Descriptor {
            field: match error {
                FieldError::Value { field, .. } => field,
                FieldError::TooMany { .. } => "regions",
                _ => "length",
            },
        })?;
        let wrong = |field| NixlError::Descriptor { field };
        let mut end = 0;
        for Region { address, base, bytes } in &there.regions {
            if *base == 0 {
                return Err(wrong("base"));
            }
            let is_there = base.checked_add(*bytes).is_some() && *address >= end;
            end = address.checked_add(*bytes).filter(|_| is_there).ok_or(wrong("bytes"))?;
        }
        if there.metadata.is_empty() {
            return Err(wrong("metadata"));
        }
        Ok(there)
    }

    fn read(fields: &mut Fields<'_>) -> Result<Self, FieldError> {
        let wrong = |field, value: u8| FieldError::Value { field, value: value.into() };
        if fields.array()? != MAGIC {
            return Err(wrong("magic", 0));
        }
        let (version, kind, device) = (fields.u8()?, fields.u8()?, fields.u64()?);
        if version != VERSION {
            return Err(wrong("version", version));
        }
        let kind = Kind::of(kind).ok_or(wrong("kind", kind))?;
        let regions = fields.list(REGIONS_MAX, REGION, |fields| {
            let (address, base, bytes) = (fields.u64()?, fields.u64()?, fields.u64()?);
            Ok(Region { address, base, bytes })
        })?;
        if regions.is_empty() {
            return Err(wrong("regions", 0));
        }
        Ok(Self { kind, device, regions, metadata: fields.rest().to_vec() })
    }

    /// Where the last region ends.
    pub(crate) fn end(&self) -> u64 {
        self.regions.last().map_or(0, |last| last.address.saturating_add(last.bytes))
    }

    /// Where the bytes of a span are in their process, piece behind piece: none if some are in no region.
    pub(crate) fn pieces(&self, span: Span) -> Option<Vec<(usize, usize)>> {
        let (mut address, mut left) = (span.address, u64::from(span.bytes));
        let mut pieces = Vec::with_capacity(1);
        loop {
            let behind = self.regions.partition_point(|region| region.address <= address);
            let region = self.regions.get(behind.checked_sub(1)?)?;
            let offset = address - region.address;
            let bytes = left.min(region.bytes.checked_sub(offset).filter(|bytes| *bytes > 0)?);
            pieces.push(((region.base + offset) as usize, bytes as usize));
            (address, left) = (address + bytes, left - bytes);
            if left == 0 {
                return Some(pieces);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes before the regions.
    const HEAD: usize = 18;

    fn region(address: u64, base: u64, bytes: u64) -> Region {
        Region { address, base, bytes }
    }

    fn whole() -> Descriptor {
        Descriptor {
            kind: Kind::Device,
            device: 3,
            regions: vec![region(0, 4096, 1 << 30), region(1 << 30, 1 << 40, 100)],
            metadata: vec![7; 100],
        }
    }

    #[test]
    fn a_descriptor_has_the_bytes_that_it_had() {
        let bytes = Descriptor { metadata: b"its agent".to_vec(), ..whole() }.to_bytes();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "4b564e58020103000000000000000200000000000000000000000010000000000000000000400000\
             0000000000400000000000000000000100006400000000000000697473206167656e74"
        );
    }

    #[test]
    fn a_descriptor_is_read_as_it_was_written_or_its_fault_is_named() {
        let (whole, bytes) = (whole(), whole().to_bytes());
        assert_eq!(Descriptor::parse(&bytes), Ok(whole.clone()));
        let before_metadata = HEAD + 2 * REGION;
        for length in 0..=before_metadata {
            let field = if length < before_metadata { "length" } else { "metadata" };
            assert_eq!(Descriptor::parse(&bytes[..length]), Err(NixlError::Descriptor { field }));
        }
        let changed = |at: usize, to: &[u8]| {
            let mut bytes = bytes.clone();
            bytes[at..at + to.len()].copy_from_slice(to);
            Descriptor::parse(&bytes)
        };
        let second = HEAD + REGION;
        for (at, to, field) in [
            (0, &b"K"[..], None),
            (1, b"W", Some("magic")),
            (4, &[1], Some("version")),
            (5, &[2], Some("kind")),
            (14, &[0; 4], Some("regions")),
            (14, &[1, 4, 0, 0], Some("regions")),
            (14, &[200, 0, 0, 0], Some("length")),
            (HEAD + 8, &[0; 8], Some("base")),
            (HEAD + 16, &[0xff; 8], Some("bytes")),
            // One within the other.
            (second, &[0; 8], Some("bytes")),
            (second, &[0xff; 8], Some("bytes")),
        ] {
            let found = changed(at, to);
            match field {
                None => assert_eq!(found, Ok(whole.clone())),
                Some(field) => assert_eq!(found, Err(NixlError::Descriptor { field }), "{at}"),
            }
        }
    }

    #[test]
    fn a_span_is_found_in_the_regions_that_it_goes_through() {
        let there = Descriptor {
            regions: vec![region(0, 1000, 100), region(100, 5000, 50), region(200, 9000, 10)],
            ..whole()
        };
        assert_eq!(there.end(), 210);
        let pieces = |address, bytes| there.pieces(Span { address, bytes });
        assert_eq!(pieces(10, 20), Some(vec![(1010, 20)]));
        assert_eq!(pieces(90, 30), Some(vec![(1090, 10), (5000, 20)]));
        assert_eq!(pieces(200, 10), Some(vec![(9000, 10)]));
        assert_eq!(pieces(100, 0), Some(vec![(5000, 0)]));
        for (address, bytes) in [(149, 2), (150, 1), (199, 1), (209, 2), (210, 0), (u64::MAX, 1)] {
            assert_eq!(pieces(address, bytes), None, "{address}, {bytes}");
        }
    }
}
