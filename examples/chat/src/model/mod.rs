//! A model of the Llama family: its dense layers, on the CPU. Attention is not here.
//!
//! Everything works row by row: the result of a token depends on no other token of the batch, and not on how many there
//! are, bit for bit. So the only way in which tokens meet is attention, over the KV that the cache keeps.

mod config;
mod linear;
mod rope;

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

use anyhow::Context as _;
use candle_core::Device;
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::tokenizer::TokenizerFromGguf as _;
pub use config::ModelConfig;
pub(crate) use config::number;
use linear::Linear;
use rope::Rope;

/// The dense layers of a model.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    embedding: Linear,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// `None` where the embedding is used.
    output: Option<Linear>,
    rope: Rope,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Vec<f32>,
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    mlp_norm: Vec<f32>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// What attention takes of some tokens in one layer, a row for each token.
#[derive(Clone, Debug)]
pub struct Qkv {
    /// Queries.
    pub queries: Vec<f32>,
    /// Keys, which go to the cache.
    pub keys: Vec<f32>,
    /// Values, which go to the cache.
    pub values: Vec<f32>,
}

impl Model {
    /// Reads a GGUF file: the model, and its tokenizer.
    ///
    /// # Errors
    /// A file that cannot be read, or is of another family of models.
    pub fn open(path: &Path) -> anyhow::Result<(Self, crate::text::Text)> {
        let opened = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let mut reader = BufReader::new(opened);
        let content = Content::read(&mut reader)
            .with_context(|| format!("{} is no GGUF file", path.display()))?;
        let model = Self::read(&content, &mut reader)
            .with_context(|| format!("cannot read the model in {}", path.display()))?;
        let tokenizer = tokenizers::Tokenizer::from_gguf(&content)
            .with_context(|| format!("cannot read the tokenizer in {}", path.display()))?;
        Ok((model, crate::text::Text::new(tokenizer, &content)))
    }

    fn read<R: Read + Seek>(content: &Content, reader: &mut R) -> anyhow::Result<Self> {
        let config = ModelConfig::read(content)?;
        let size = config.heads.head_size as usize;
        let factors = match content.tensor_infos.contains_key("rope_freqs.weight") {
            true => Some(floats(content, reader, "rope_freqs.weight")?),
            false => None,
        };
        let output = match content.tensor_infos.contains_key("output.weight") {
            true => Some(Linear::read(content, reader, "output.weight")?),
            false => None,
        };
        let layers = (0..config.layers).map(|layer| Layer::read(content, reader, layer));
        Ok(Self {
            layers: layers.collect::<anyhow::Result<_>>()?,
            embedding: Linear::read(content, reader, "token_embd.weight")?,
            norm: floats(content, reader, "output_norm.weight")?,
            output,
            rope: Rope::new(size, config.rope_base, factors.as_deref()),
            config,
        })
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The hidden states that tokens begin with, one row after another.
    ///
    /// # Errors
    /// Ids that the model does not have.
    pub fn embed(&self, ids: &[u32]) -> anyhow::Result<Vec<f32>> {
        self.embedding.rows_at(ids)
    }

    /// Queries, keys and values of tokens at these positions, whose hidden states come in.
    ///
    /// # Errors
    /// Hidden states of another size.
    pub fn qkv(&self, layer: usize, hidden: &[f32], positions: &[u64]) -> anyhow::Result<Qkv> {
        let layer = &self.layers[layer];
        let input = self.normed(hidden, &layer.attention_norm);
        let mut qkv = Qkv {
            queries: layer.query.apply(&input)?,
            keys: layer.key.apply(&input)?,
            values: layer.value.apply(&input)?,
        };
        let heads = self.config.heads;
        let queries = qkv.queries.chunks_exact_mut(heads.query_floats());
        let keys = qkv.keys.chunks_exact_mut(heads.kv_floats());
        for ((query, key), &position) in queries.zip(keys).zip(positions) {
            self.rope.turn(query, position);
            self.rope.turn(key, position);
        }
        Ok(qkv)
    }

    /// Takes the outcome of attention into the hidden states, and passes them through the rest of the layer.
    ///
    /// # Errors
    /// Rows of another size.
    pub fn after_attention(
        &self,
        layer: usize,
        hidden: &mut [f32],
        attended: &[f32],
    ) -> anyhow::Result<()> {
        let layer = &self.layers[layer];
        add(hidden, &layer.attention_output.apply(attended)?);
        let input = self.normed(hidden, &layer.mlp_norm);
        let mut gate = layer.gate.apply(&input)?;
        for (gate, up) in gate.iter_mut().zip(layer.up.apply(&input)?) {
            *gate = *gate / (1.0 + (-*gate).exp()) * up;
        }
        add(hidden, &layer.down.apply(&gate)?);
        Ok(())
    }

    /// The logits of tokens, from their hidden states behind the last layer.
    ///
    /// # Errors
    /// Hidden states of another size.
    pub fn logits(&self, hidden: &[f32]) -> anyhow::Result<Vec<f32>> {
        let output = self.output.as_ref().unwrap_or(&self.embedding);
        output.apply(&self.normed(hidden, &self.norm))
    }

    /// Each row, divided by the root of its mean square, times the weights.
    fn normed(&self, rows: &[f32], weights: &[f32]) -> Vec<f32> {
        let mut normed = Vec::with_capacity(rows.len());
        for row in rows.chunks_exact(weights.len()) {
            let square: f32 = row.iter().map(|x| x * x).sum();
            let scale = 1.0 / (square / row.len() as f32 + self.config.norm_epsilon).sqrt();
            normed.extend(row.iter().zip(weights).map(|(x, weight)| x * scale * weight));
        }
        normed
    }
}

impl Layer {
    fn read<R: Read + Seek>(content: &Content, reader: &mut R, layer: u32) -> anyhow::Result<Self> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let mut linear = |part| Linear::read(content, reader, &name(part));
        Ok(Self {
            query: linear("attn_q")?,
            key: linear("attn_k")?,
            value: linear("attn_v")?,
            attention_output: linear("attn_output")?,
            gate: linear("ffn_gate")?,
            up: linear("ffn_up")?,
            down: linear("ffn_down")?,
            attention_norm: floats(content, reader, &name("attn_norm"))?,
            mlp_norm: floats(content, reader, &name("ffn_norm"))?,
        })
    }
}

/// A vector of floats of the file.
fn floats<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    name: &str,
) -> anyhow::Result<Vec<f32>> {
    let tensor = content.tensor(reader, name, &Device::Cpu);
    let tensor = tensor.with_context(|| format!("the file has no {name}"))?;
    Ok(tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?)
}

fn add(rows: &mut [f32], more: &[f32]) {
    rows.iter_mut().zip(more).for_each(|(row, more)| *row += more);
}
