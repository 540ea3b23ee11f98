//! The line of a summary that describes the model.

use crate::report::{ReportShape, bytes};

/// Layers, heads and blocks, and what layers keep that are not all alike.
pub(crate) fn model_line(shape: &ReportShape) -> String {
    let ReportShape { layers, kv_heads, head_size, dtype, block_tokens, block_bytes, .. } = *shape;
    let mut line = format!(
        "{layers} layers, {kv_heads} KV heads of {head_size} x {dtype}; blocks of \
         {block_tokens} tokens, {} each",
        bytes(block_bytes),
    );
    if let Some(tokens) = shape.window {
        line.push_str(&format!("; a window of {tokens} tokens in {} layers", shape.window_layers));
    }
    if shape.state_layers > 0 {
        line.push_str(&format!("; {} layers with a state", shape.state_layers));
    }
    if shape.draft_layers > 0 {
        line.push_str(&format!("; {} of a draft model", shape.draft_layers));
    }
    line
}
