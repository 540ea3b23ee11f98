//! Encryption of records, with keys of the host program: whoever destroys a key has erased what was stored with it.

use std::fmt;
use std::sync::Arc;

use kv_pool::{BlockHash, GroupId};

#[cfg(feature = "seal")]
use chacha20poly1305::{KeyInit, Tag, XChaCha20Poly1305, XNonce, aead::AeadInPlace};

#[cfg(feature = "seal")]
use cuda_driver::guard;

#[cfg(feature = "seal")]
use crate::random::random;

/// Bytes of a tag, and of a nonce.
const TAG: usize = 16;
const NONCE: usize = 24;

/// Bytes that an encrypted record is longer: the tag, and behind it the nonce, which is random.
pub(crate) const SEAL_BYTES: usize = TAG + NONCE;

/// The keys that records are encrypted with. The tier asks for a key at each store and load, and keeps none.
///
/// Needs the feature `seal`; without it, blocks that are to be encrypted are not stored.
pub trait Keys: fmt::Debug + Send + Sync {
    /// The number of the key that a block is to be encrypted with, such as its tenant's; `None` stores it as it is. Asked when a
    /// block is stored and loaded, and of each record that is there when a file is opened. A record of another key, or of none,
    /// is not of that block.
    fn key_of(&self, group: GroupId, name: BlockHash) -> Option<u64>;

    /// A key. `None` if it is gone: what was encrypted with it is a miss.
    fn key(&self, number: u64) -> Option<[u8; 32]>;
}

/// What the encryption of a record is bound to, beside its key: it opens for no other block, model, file or write.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "seal"), allow(dead_code, reason = "read by the encryption alone"))]
pub(crate) struct Binding {
    pub(crate) group: GroupId,
    pub(crate) name: BlockHash,
    pub(crate) model: u128,
    pub(crate) file: u128,
    pub(crate) generation: u64,
}

#[cfg(feature = "seal")]
impl Binding {
    fn words(&self) -> [u8; 58] {
        let mut words = [0; 58];
        let name = self.name.to_u128().to_le_bytes();
        guard!("disk.binds-records-to-names", words[..16].copy_from_slice(&name));
        words[16..32].copy_from_slice(&self.model.to_le_bytes());
        words[32..34].copy_from_slice(&self.group.0.to_le_bytes());
        words[34..50].copy_from_slice(&self.file.to_le_bytes());
        words[50..].copy_from_slice(&self.generation.to_le_bytes());
        words
    }
}

/// Encrypts all bytes but the last [`SEAL_BYTES`] in place, and puts tag and nonce there. False if that cannot be.
pub(crate) fn seal(keys: &Arc<dyn Keys>, number: u64, of: Binding, bytes: &mut [u8]) -> bool {
    #[cfg(feature = "seal")]
    {
        let Some(key) = keys.key(number) else { return false };
        let Some(length) = bytes.len().checked_sub(SEAL_BYTES) else { return false };
        let (text, behind) = bytes.split_at_mut(length);
        let (tag, nonce) = behind.split_at_mut(TAG);
        // Not counted: a file that is brought back, or is there twice, would count the same again.
        let random = guard!("disk.draws-nonces", random::<NONCE>(), else Ok([7; NONCE]));
        let Ok(random) = random else { return false };
        nonce.copy_from_slice(&random);
        let cipher = XChaCha20Poly1305::new(&key.into());
        let made = cipher.encrypt_in_place_detached(XNonce::from_slice(nonce), &of.words(), text);
        made.map(|made| tag.copy_from_slice(&made)).is_ok()
    }
    #[cfg(not(feature = "seal"))]
    {
        let _ = (keys, number, of, bytes);
        false
    }
}

/// Decrypts bytes in place, with tag and nonce behind them. False if the key is gone, or they are not what was encrypted.
pub(crate) fn open(keys: &Arc<dyn Keys>, number: u64, of: Binding, bytes: &mut [u8]) -> bool {
    #[cfg(feature = "seal")]
    {
        let Some(key) = keys.key(number) else { return false };
        let Some(length) = bytes.len().checked_sub(SEAL_BYTES) else { return false };
        let (text, behind) = bytes.split_at_mut(length);
        let (tag, nonce) = behind.split_at(TAG);
        let cipher = XChaCha20Poly1305::new(&key.into());
        let (nonce, tag) = (XNonce::from_slice(nonce), Tag::from_slice(tag));
        cipher.decrypt_in_place_detached(nonce, &of.words(), text, tag).is_ok()
    }
    #[cfg(not(feature = "seal"))]
    {
        let _ = (keys, number, of, bytes);
        false
    }
}
