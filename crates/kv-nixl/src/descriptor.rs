//! What a node says of its memory, so that its peers reach it: where it lies in the node's process, and its agent's metadata.

use crate::NixlError;
use crate::agent::Kind;

const MAGIC: [u8; 4] = *b"KVNX";
const VERSION: u8 = 1;
/// Bytes before the metadata.
const HEAD: usize = 30;

/// Memory of another process that this one may read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Descriptor {
    pub(crate) kind: Kind,
    /// The number of its device; 0 for memory of the host.
    pub(crate) device: u64,
    /// Where it begins in its process.
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    /// What the library of the other process has said of its agent.
    pub(crate) metadata: Vec<u8>,
}

impl Descriptor {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.metadata.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.push(VERSION);
        bytes.push(self.kind.number());
        for word in [self.device, self.base, self.bytes] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&self.metadata);
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, NixlError> {
        let wrong = |field| NixlError::Descriptor { field };
        let (head, metadata) = bytes.split_at_checked(HEAD).ok_or(wrong("length"))?;
        let (magic, rest) = head.split_first_chunk().ok_or(wrong("length"))?;
        if *magic != MAGIC {
            return Err(wrong("magic"));
        }
        let ([version, kind], words) = rest.split_first_chunk().ok_or(wrong("length"))?;
        if *version != VERSION {
            return Err(wrong("version"));
        }
        let kind = Kind::of(*kind).ok_or(wrong("kind"))?;
        let (words, _) = words.as_chunks::<8>();
        let word = |at: usize| words.get(at).map_or(0, |word| u64::from_le_bytes(*word));
        let (device, base, bytes) = (word(0), word(1), word(2));
        if base == 0 {
            return Err(wrong("base"));
        }
        if base.checked_add(bytes).is_none() {
            return Err(wrong("bytes"));
        }
        if metadata.is_empty() {
            return Err(wrong("metadata"));
        }
        Ok(Self { kind, device, base, bytes, metadata: metadata.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_read_as_it_was_written_or_its_fault_is_named() {
        let whole = Descriptor {
            kind: Kind::Device,
            device: 3,
            base: 4096,
            bytes: 1 << 30,
            metadata: vec![7; 100],
        };
        let bytes = whole.to_bytes();
        assert_eq!(Descriptor::parse(&bytes), Ok(whole.clone()));
        for length in 0..=HEAD {
            let field = if length < HEAD { "length" } else { "metadata" };
            assert_eq!(Descriptor::parse(&bytes[..length]), Err(NixlError::Descriptor { field }));
        }
        let changed = |at: usize, to: &[u8]| {
            let mut bytes = bytes.clone();
            bytes[at..at + to.len()].copy_from_slice(to);
            Descriptor::parse(&bytes)
        };
        for (at, to, field) in [
            (0, &b"K"[..], None),
            (1, b"W", Some("magic")),
            (4, &[2], Some("version")),
            (5, &[2], Some("kind")),
            (14, &[0; 8], Some("base")),
            (22, &[0xff; 8], Some("bytes")),
        ] {
            let found = changed(at, to);
            match field {
                None => assert_eq!(found, Ok(whole.clone())),
                Some(field) => assert_eq!(found, Err(NixlError::Descriptor { field })),
            }
        }
    }
}
