//! Encryption of records, with keys of the host program: whoever destroys a key has erased what was stored with it.

use std::fmt;
use std::sync::Arc;

use kv_manager::GroupId;
use kv_pool::BlockHash;

#[cfg(feature = "seal")]
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce, aead::AeadInPlace};

/// Bytes that an encrypted record is longer.
pub const TAG_BYTES: usize = 16;

/// The keys that records are encrypted with. The tier asks for a key at each store and load, and keeps none.
///
/// Needs the feature `seal`; without it, blocks that are to be encrypted are not stored.
pub trait Keys: fmt::Debug + Send + Sync {
    /// The number of the key that a block is to be encrypted with, such as its tenant's; `None` stores it as it is.
    fn key_of(&self, group: GroupId, name: BlockHash) -> Option<u64>;

    /// A key. `None` if it is gone: what was encrypted with it is a miss.
    fn key(&self, number: u64) -> Option<[u8; 32]>;
}

/// What the encryption of a record is bound to, beside its key: it opens in no other place.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "seal"), allow(dead_code, reason = "read by the encryption alone"))]
pub(crate) struct Binding {
    pub(crate) group: GroupId,
    pub(crate) name: BlockHash,
    pub(crate) model: u128,
    /// With the generation, what no two writes have in common.
    pub(crate) file: u128,
    pub(crate) generation: u64,
}

#[cfg(feature = "seal")]
impl Binding {
    fn nonce(&self) -> XNonce {
        let mut nonce = XNonce::default();
        nonce[..16].copy_from_slice(&self.file.to_le_bytes());
        nonce[16..].copy_from_slice(&self.generation.to_le_bytes());
        nonce
    }

    fn words(&self) -> [u8; 34] {
        let mut words = [0; 34];
        words[..16].copy_from_slice(&self.name.to_u128().to_le_bytes());
        words[16..32].copy_from_slice(&self.model.to_le_bytes());
        words[32..].copy_from_slice(&self.group.0.to_le_bytes());
        words
    }
}

/// Encrypts the first `length` bytes in place, and puts the tag behind them. False if that cannot be.
pub(crate) fn seal(keys: &Arc<dyn Keys>, number: u64, of: Binding, bytes: &mut [u8]) -> bool {
    #[cfg(feature = "seal")]
    {
        let Some(key) = keys.key(number) else { return false };
        let Some(length) = bytes.len().checked_sub(TAG_BYTES) else { return false };
        let (text, tag) = bytes.split_at_mut(length);
        let cipher = XChaCha20Poly1305::new(&key.into());
        let made = cipher.encrypt_in_place_detached(&of.nonce(), &of.words(), text);
        made.map(|made| tag.copy_from_slice(&made)).is_ok()
    }
    #[cfg(not(feature = "seal"))]
    {
        let _ = (keys, number, of, bytes);
        false
    }
}

/// Decrypts bytes in place, whose tag stands behind them. False if the key is gone, or they are not what was encrypted.
pub(crate) fn open(keys: &Arc<dyn Keys>, number: u64, of: Binding, bytes: &mut [u8]) -> bool {
    #[cfg(feature = "seal")]
    {
        let Some(key) = keys.key(number) else { return false };
        let Some(length) = bytes.len().checked_sub(TAG_BYTES) else { return false };
        let (text, tag) = bytes.split_at_mut(length);
        let cipher = XChaCha20Poly1305::new(&key.into());
        let tag = chacha20poly1305::Tag::clone_from_slice(tag);
        cipher.decrypt_in_place_detached(&of.nonce(), &of.words(), text, &tag).is_ok()
    }
    #[cfg(not(feature = "seal"))]
    {
        let _ = (keys, number, of, bytes);
        false
    }
}
