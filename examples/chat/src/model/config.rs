//! What a GGUF file says of a model of the Llama family.

use anyhow::{Context as _, ensure};
use candle_core::quantized::gguf_file::{Content, Value};

use crate::attention::Heads;

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Its name.
    pub name: String,
    /// Layers.
    pub layers: u32,
    /// Elements of a hidden state.
    pub hidden: usize,
    /// The heads of attention.
    pub heads: Heads,
    /// Most tokens of a sequence.
    pub context_tokens: u32,
    /// The base of the angles of positions.
    pub rope_base: f32,
    /// What is added to the mean square before its root is taken.
    pub norm_epsilon: f32,
}

impl ModelConfig {
    /// Reads the metadata.
    ///
    /// # Errors
    /// A file of another family, and one in which a number is missing or cannot be.
    pub fn read(content: &Content) -> anyhow::Result<Self> {
        let family = text(content, "general.architecture")?;
        ensure!(family == "llama", "a model of the family {family:?}, and not \"llama\"");
        let hidden = number(content, "llama.embedding_length")?;
        let heads = number(content, "llama.attention.head_count")?;
        let kv_heads = number(content, "llama.attention.head_count_kv").unwrap_or(heads);
        ensure!(
            heads > 0 && hidden % heads == 0,
            "{hidden} elements do not divide into {heads} heads"
        );
        let head_size = number(content, "llama.attention.key_length").unwrap_or(hidden / heads);
        let rope = number(content, "llama.rope.dimension_count").unwrap_or(head_size);
        ensure!(rope == head_size, "positions turn {rope} of {head_size} elements of a head");
        Ok(Self {
            name: text(content, "general.name").unwrap_or_else(|_| "a model".to_owned()),
            layers: number(content, "llama.block_count")?,
            hidden: hidden as usize,
            heads: Heads { heads, kv_heads, head_size },
            context_tokens: number(content, "llama.context_length")?,
            rope_base: float(content, "llama.rope.freq_base").unwrap_or(10_000.0),
            norm_epsilon: float(content, "llama.attention.layer_norm_rms_epsilon")?,
        })
    }
}

fn value<'a>(content: &'a Content, key: &str) -> anyhow::Result<&'a Value> {
    content.metadata.get(key).with_context(|| format!("the file does not say {key}"))
}

fn text(content: &Content, key: &str) -> anyhow::Result<String> {
    Ok(value(content, key)?.to_string()?.clone())
}

/// An unsigned number, of whatever width.
pub(crate) fn number(content: &Content, key: &str) -> anyhow::Result<u32> {
    Ok(match value(content, key)? {
        Value::U64(number) => u32::try_from(*number)?,
        Value::I32(number) => u32::try_from(*number)?,
        other => other.to_u32()?,
    })
}

fn float(content: &Content, key: &str) -> anyhow::Result<f32> {
    Ok(value(content, key)?.to_f32()?)
}
