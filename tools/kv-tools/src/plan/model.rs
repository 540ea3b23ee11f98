//! What is known of a model: the bytes of its KV, and what its computation takes on a GPU.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use kv_replay::shape::{Dtype, KvModelShape};

/// A model, as far as a plan needs it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Layers with keys and values.
    pub layers: u32,
    /// Heads of K, and of V, in a layer.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_size: u32,
    /// Parameters, in billions.
    pub parameters_b: f64,
    /// Parameters that a token uses, in billions; fewer where experts are chosen.
    pub active_b: f64,
}

/// Models by name: layers, KV heads, head size, billions of parameters, and of those that a token uses.
const MODELS: [(&str, u32, u32, u32, f64, f64); 11] = [
    ("llama-3.2-1b", 16, 8, 64, 1.24, 1.24),
    ("llama-3.2-3b", 28, 8, 128, 3.21, 3.21),
    ("llama-3.1-8b", 32, 8, 128, 8.03, 8.03),
    ("llama-3.1-70b", 80, 8, 128, 70.6, 70.6),
    ("mistral-7b", 32, 8, 128, 7.25, 7.25),
    ("mixtral-8x7b", 32, 8, 128, 46.7, 12.9),
    ("qwen2.5-7b", 28, 4, 128, 7.62, 7.62),
    ("qwen2.5-32b", 64, 8, 128, 32.8, 32.8),
    ("qwen3-8b", 36, 8, 128, 8.19, 8.19),
    ("qwen3-32b", 64, 8, 128, 32.8, 32.8),
    ("qwen3-30b-a3b", 48, 4, 128, 30.5, 3.3),
];

/// The reason why a model is not known.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No built-in model, and no file.
    #[error(
        "no model {name:?}: neither a file nor one of {}; or give --layers, --kv-heads, --head-size, --prefill-rate and --decode-step-us",
        names()
    )]
    Unknown {
        /// The name.
        name: String,
        /// Why it is no file.
        source: std::io::Error,
    },
    /// The file is no JSON.
    #[error("{} is not a model's config.json", path.display())]
    NoJson {
        /// The file.
        path: PathBuf,
        /// What was expected.
        source: serde_json::Error,
    },
    /// A field is missing, or is no number that a model can have.
    #[error("{}: {field} is {found}, expected a whole number from 1 to 1000000", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// What is there.
        found: String,
    },
    /// The model keeps something else than keys and values of heads.
    #[error(
        "{} has {field}: its KV is compressed; give --layers, --kv-heads, --head-size, --prefill-rate and --decode-step-us",
        path.display()
    )]
    Compressed {
        /// The file.
        path: PathBuf,
        /// The field that says so.
        field: &'static str,
    },
}

cuda_driver::messages::one_line_debug!(ModelError);

fn names() -> String {
    MODELS.map(|model| model.0).join(", ")
}

impl Model {
    /// A built-in model by its name, or that of a `config.json`.
    ///
    /// # Errors
    ///
    /// [`ModelError`].
    pub fn read(name: &str) -> Result<Self, ModelError> {
        if let Some(model) = MODELS.iter().find(|model| model.0 == name) {
            let &(_, layers, kv_heads, head_size, parameters_b, active_b) = model;
            let name = name.to_owned();
            return Ok(Self { name, layers, kv_heads, head_size, parameters_b, active_b });
        }
        let unknown = |source| ModelError::Unknown { name: name.to_owned(), source };
        let bytes = std::fs::read(name).map_err(unknown)?;
        Self::parse(Path::new(name), &bytes)
    }

    fn parse(path: &Path, bytes: &[u8]) -> Result<Self, ModelError> {
        let at = || path.to_owned();
        let config: Value = serde_json::from_slice(bytes)
            .map_err(|source| ModelError::NoJson { path: at(), source })?;
        if config.get("kv_lora_rank").is_some_and(|rank| !rank.is_null()) {
            return Err(ModelError::Compressed { path: at(), field: "kv_lora_rank" });
        }
        let maybe = |field: &'static str| match config.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number @ 1..=1_000_000) => Ok(Some(number)),
                _ => Err(ModelError::Field { path: at(), field, found: value.to_string() }),
            },
        };
        let must = |field: &'static str| {
            maybe(field)?.ok_or_else(|| ModelError::Field {
                path: at(),
                field,
                found: "missing".to_owned(),
            })
        };
        let (layers, heads, hidden) =
            (must("num_hidden_layers")?, must("num_attention_heads")?, must("hidden_size")?);
        let kv_heads = maybe("num_key_value_heads")?.unwrap_or(heads);
        let head_size = maybe("head_dim")?.unwrap_or((hidden / heads).max(1));
        let inner = must("intermediate_size")?;
        let (experts, chosen) = match (maybe("num_local_experts")?, maybe("num_experts")?) {
            (None, None) => (1, 1),
            (of, or) => (of.or(or).unwrap_or(1), maybe("num_experts_per_tok")?.unwrap_or(1)),
        };
        let inner = maybe("moe_intermediate_size")?.filter(|_| experts > 1).unwrap_or(inner);
        let tied = config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false);
        let embeddings = must("vocab_size")? * hidden * if tied { 1 } else { 2 };
        let attention = 2 * hidden * head_size * (heads + kv_heads);
        let of = |experts: u64| {
            (layers as f64
                * (attention as f64 + 3.0 * hidden as f64 * inner as f64 * experts as f64)
                + embeddings as f64)
                / 1e9
        };
        let name = path.parent().and_then(Path::file_name).unwrap_or(path.as_os_str());
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            layers: layers as u32,
            kv_heads: kv_heads as u32,
            head_size: head_size as u32,
            parameters_b: of(experts),
            active_b: of(chosen.min(experts)),
        })
    }

    /// The shape of its KV.
    #[must_use]
    pub fn shape(&self, dtype: Dtype) -> KvModelShape {
        let Self { layers, kv_heads, head_size, .. } = *self;
        KvModelShape { layers, kv_heads, head_size, dtype }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn parse(text: &str) -> Result<Model, ModelError> {
        Model::parse(Path::new("models/mine/config.json"), text.as_bytes())
    }

    /// The published configuration of Llama 3.1 8B, as far as it counts.
    const LLAMA: &str = r#"{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": false}"#;

    #[test]
    fn a_configuration_has_the_parameters_that_are_published() {
        let (read, built_in) = (parse(LLAMA).unwrap(), Model::read("llama-3.1-8b").unwrap());
        assert_eq!(read.name, "mine");
        assert_eq!(read.shape(Dtype::Bf16), built_in.shape(Dtype::Bf16));
        assert!((read.parameters_b - built_in.parameters_b).abs() < 0.01, "{read:?}");
        // Mixtral 8x7B: 46.7 billion, of which a token uses 12.9.
        let experts = LLAMA
            .replace("128256", "32000")
            .replace("}", ", \"num_local_experts\": 8, \"num_experts_per_tok\": 2}");
        let read = parse(&experts).unwrap();
        assert!(
            (read.parameters_b - 46.7).abs() < 0.1 && (read.active_b - 12.9).abs() < 0.1,
            "{read:?}"
        );
    }

    #[test]
    fn what_is_no_such_configuration_is_named() {
        let says = |text: &str| parse(text).unwrap_err().to_string();
        assert!(says("[").ends_with("config.json is not a model's config.json"));
        assert!(says("{}").contains("num_hidden_layers is missing"));
        let zero = LLAMA.replace("\"num_attention_heads\": 32", "\"num_attention_heads\": 0");
        assert!(says(&zero).contains("num_attention_heads is 0, expected a whole number"));
        let huge = LLAMA.replace("4096", "99999999999999");
        assert!(says(&huge).contains("hidden_size is 99999999999999"));
        assert!(says(r#"{"kv_lora_rank": 512}"#).contains("has kv_lora_rank"));
        let unknown = Model::read("gpt-9").unwrap_err().to_string();
        assert!(unknown.contains("\"gpt-9\"") && unknown.contains("llama-3.1-8b"), "{unknown}");
    }
}
