//! The plainest cache: keys and values of one sequence, one after another, in memory of the host.
//!
//! What the engine computes is compared with what this computes, bit for bit.

use crate::attention::arithmetic::attend;
use crate::job::Job;
use crate::model::Model;

/// The answer to a prompt, and the logits that each of its tokens was chosen by.
#[derive(Clone, Debug, Default)]
pub struct PlainAnswer {
    /// The prompt and the answer.
    pub ids: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of each token of the answer.
    pub logits: Vec<Vec<f32>>,
}

/// The keys and values of each layer.
struct Layers(Vec<[Vec<f32>; 2]>);

/// Answers a job, alone.
///
/// # Errors
/// Ids that the model does not have.
pub fn answer(model: &Model, job: &Job, answer: u32) -> anyhow::Result<PlainAnswer> {
    let sampling = job.sampling.for_answer(answer);
    let mut layers = Layers(vec![Default::default(); model.config().layers as usize]);
    let mut out = PlainAnswer {
        ids: job.prompt.clone(),
        prompt_tokens: job.prompt.len(),
        logits: Vec::new(),
    };
    let mut first = 0;
    while !job.is_over(&out.ids) {
        let hidden = layers.forward(model, &out.ids[first..], first as u64)?;
        first = out.ids.len();
        let last = &hidden[hidden.len() - model.config().hidden..];
        let logits = model.logits(last)?;
        out.ids.push(sampling.choose(&logits, first as u64));
        out.logits.push(logits);
    }
    Ok(out)
}

impl Layers {
    /// The hidden states of further tokens, behind all layers.
    fn forward(&mut self, model: &Model, ids: &[u32], first: u64) -> anyhow::Result<Vec<f32>> {
        let heads = model.config().heads;
        let size = heads.head_size as usize;
        let (query_row, kv_row) = (heads.query_floats(), heads.kv_floats());
        let group = (heads.heads / heads.kv_heads) as usize;
        let positions: Vec<u64> = (first..first + ids.len() as u64).collect();
        let mut hidden = model.embed(ids)?;
        for (layer, [keys, values]) in self.0.iter_mut().enumerate() {
            let qkv = model.qkv(layer, &hidden, &positions)?;
            keys.extend(&qkv.keys);
            values.extend(&qkv.values);
            let mut attended = vec![0.0; qkv.queries.len()];
            let heads = qkv.queries.chunks_exact(size).zip(attended.chunks_exact_mut(size));
            for (index, (query, out)) in heads.enumerate() {
                let (token, head) = (index * size / query_row, index * size % query_row / size);
                let context = positions[token] as usize + 1;
                let start = |j: usize| j * kv_row + head / group * size;
                let range = |j| start(j)..start(j) + size;
                attend(
                    query,
                    context,
                    model.config().heads.scale(),
                    |j| &keys[range(j)],
                    |j| &values[range(j)],
                    out,
                );
            }
            model.after_attention(layer, &mut hidden, &attended)?;
        }
        Ok(hidden)
    }
}
