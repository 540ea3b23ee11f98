//! Who may speak: a key that all nodes share, and proofs that a peer has it now.
//!
//! Each side sends 32 random bytes and proves that it can compute a keyed BLAKE3 hash over both sides' bytes, its role and
//! the node's name. So what was recorded of an earlier handshake proves nothing. Both sides then have two
//! session keys, one for each direction. The tag of a frame covers its number in its direction: a frame that is
//! changed, repeated, left out, or sent back is refused.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

use blake3::{Hash, Hasher, KEY_LEN};
use kv_pool::guard;

use crate::{FrameError, NodeError, PeerError};

/// What keys of proofs and of sessions are derived for, so that neither is of use for the other.
const PROOFS: &str = "kv-remote 2026-11-27 version 3 proofs of a handshake";
const SESSIONS: &str = "kv-remote 2026-11-27 version 3 keys of sessions";

/// Bytes of the shortest key.
const KEY_MIN: usize = 16;
/// Bytes of a nonce.
pub(crate) const NONCE_BYTES: usize = 32;
/// Bytes of a proof.
pub(crate) const PROOF_BYTES: usize = 32;
/// Bytes of a frame's tag.
pub(crate) const TAG_BYTES: usize = 16;

/// The key that all nodes share. It is not shown.
#[derive(Clone)]
pub struct Key {
    proofs: [u8; KEY_LEN],
    sessions: [u8; KEY_LEN],
}

impl Key {
    /// A key of these bytes, which should be random: 16 at least, 32 for good.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn new(bytes: &[u8]) -> Result<Self, NodeError> {
        if bytes.len() < KEY_MIN {
            return Err(NodeError::Key { bytes: bytes.len(), min: KEY_MIN });
        }
        let derived = |context| blake3::derive_key(context, bytes);
        Ok(Self { proofs: derived(PROOFS), sessions: derived(SESSIONS) })
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Who proves something.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Role {
    Client,
    Server,
}

impl Role {
    fn label(self) -> &'static [u8] {
        match self {
            Self::Client => b"kv-remote client",
            Self::Server => b"kv-remote server",
        }
    }
}

/// What both sides have said before a proof.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transcript<'a> {
    pub(crate) version: u16,
    pub(crate) client: &'a [u8; NONCE_BYTES],
    pub(crate) server: &'a [u8; NONCE_BYTES],
    /// The node's name.
    pub(crate) name: &'a str,
    /// What the node says of itself.
    pub(crate) facts: &'a [u8],
}

impl Transcript<'_> {
    /// A hash of all that was said, for a role.
    fn hash(&self, key: &[u8; KEY_LEN], role: Role) -> Hash {
        let mut hasher = Hasher::new_keyed(key);
        let Self { version, client, server, name, facts } = self;
        let version = version.to_le_bytes();
        let parts: [&[u8]; 6] = [role.label(), &version, *client, *server, facts, name.as_bytes()];
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }

    /// What proves that `role` has the key.
    pub(crate) fn prove(&self, key: &Key, role: Role) -> [u8; PROOF_BYTES] {
        self.hash(&key.proofs, role).into()
    }

    /// Checks what `role` has sent, in a time that does not depend on the bytes.
    pub(crate) fn check(&self, key: &Key, role: Role, proof: &[u8]) -> Result<(), PeerError> {
        // Hashes are compared in constant time.
        let proof = Hash::from_slice(proof).map_err(|_| PeerError::Key)?;
        if self.hash(&key.proofs, role) == proof { Ok(()) } else { Err(PeerError::Key) }
    }

    /// The session's tags for what `role` sends.
    pub(crate) fn tags(&self, key: &Key, role: Role) -> Tags {
        Tags { key: self.hash(&key.sessions, role).into(), number: 0 }
    }
}

/// The tags of one direction of a session.
pub(crate) struct Tags {
    key: [u8; KEY_LEN],
    /// Frames so far.
    number: u64,
}

impl Tags {
    /// Of which a tag is the beginning.
    fn hash(&self, body: &[u8]) -> [u8; PROOF_BYTES] {
        let mut hasher = Hasher::new_keyed(&self.key);
        // The number last: so the body lies at whole chunks of the hash, and is hashed several at a time.
        hasher.update(body);
        guard!("remote.numbers-frames", {
            hasher.update(&self.number.to_le_bytes());
        });
        hasher.finalize().into()
    }

    /// The tag of the next frame.
    pub(crate) fn next(&mut self, body: &[u8]) -> [u8; TAG_BYTES] {
        let hash = self.hash(body);
        self.number += 1;
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(&hash[..TAG_BYTES]);
        tag
    }

    /// Checks the tag of the next frame, in a time that does not depend on the bytes.
    pub(crate) fn check(&mut self, body: &[u8], tag: &[u8]) -> Result<(), FrameError> {
        let (number, hash) = (self.number, self.hash(body));
        // What is behind a tag is no part of it. Whole hashes are compared, since that takes constant time.
        let mut said = hash;
        let tag: &[u8; TAG_BYTES] = tag.try_into().map_err(|_| FrameError::Tag { number })?;
        said[..TAG_BYTES].copy_from_slice(tag);
        if Hash::from_bytes(hash) != Hash::from_bytes(said) {
            return Err(FrameError::Tag { number });
        }
        self.number += 1;
        Ok(())
    }
}

impl fmt::Debug for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tags").field("number", &self.number).finish_non_exhaustive()
    }
}

/// Random bytes of the system.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript<'a>(client: &'a [u8; 32], server: &'a [u8; 32], name: &'a str) -> Transcript<'a> {
        Transcript { version: 1, client, server, name, facts: b"facts" }
    }

    #[test]
    fn a_tag_is_of_its_frame_its_place_its_direction_and_its_session() {
        let key = Key::new(&[1; 32]).unwrap();
        let (a, b) = ([3; 32], [4; 32]);
        let said = transcript(&a, &b, "node");
        let tags = || said.tags(&key, Role::Client);
        let mut sender = tags();
        let (first, second) = (sender.next(b"body"), sender.next(b"body"));
        let mut receiver = tags();
        assert_eq!(receiver.check(b"body", &second), Err(FrameError::Tag { number: 0 }));
        assert_eq!(receiver.check(b"Body", &first), Err(FrameError::Tag { number: 0 }));
        for at in 0..TAG_BYTES {
            let mut wrong = first;
            wrong[at] ^= 1;
            assert_eq!(receiver.check(b"body", &wrong), Err(FrameError::Tag { number: 0 }), "{at}");
        }
        for short in [&first[..15], &[]] {
            assert_eq!(receiver.check(b"body", short), Err(FrameError::Tag { number: 0 }));
        }
        assert_eq!(receiver.check(b"body", &first), Ok(()));
        assert_eq!(receiver.check(b"body", &first), Err(FrameError::Tag { number: 1 }));
        assert_eq!(receiver.check(b"body", &second), Ok(()));
        let back = said.tags(&key, Role::Server).check(b"body", &first);
        assert_eq!(back, Err(FrameError::Tag { number: 0 }));
        let later = transcript(&b, &a, "node").tags(&key, Role::Client).check(b"body", &first);
        assert_eq!(later, Err(FrameError::Tag { number: 0 }));
    }
}
