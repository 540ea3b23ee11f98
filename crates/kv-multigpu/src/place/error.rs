//! Errors of placements.

use std::fmt;

/// The reason why a model could not be placed, its heads not be divided or moved, or a text is no placement.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// The number of layers is 0 or too large.
    #[error("cannot place {layers} layers: the number must be 1 to {most}")]
    Layers {
        /// Number of layers of the model.
        layers: usize,
        /// Maximum number of layers.
        most: usize,
    },
    /// The number of GPUs is 0 or too large.
    #[error("cannot place on {gpus} GPUs: the number must be 1 to {most}")]
    Gpus {
        /// Number of given GPUs.
        gpus: usize,
        /// Maximum number of GPUs.
        most: usize,
    },
    /// The model is larger than the memory of any machine.
    #[error("cannot place a model of {bytes} bytes: no machine holds it")]
    TooLarge {
        /// Bytes of weights, KV, workspace and activations.
        bytes: u128,
    },
    /// The link matrix has another number of GPUs.
    #[error("cannot place on {gpus} GPUs with a link matrix of {matrix} GPUs")]
    LinkMatrix {
        /// Number of given GPUs.
        gpus: usize,
        /// Number of GPUs of the matrix.
        matrix: usize,
    },
    /// Two GPUs have the same UUID.
    #[error("cannot place: GPU {gpu} has the same UUID as an earlier GPU")]
    GpuTwice {
        /// Index of the second one.
        gpu: usize,
    },
    /// A speed is 0 bytes per second.
    #[error("cannot place: the speed from GPU {from} to GPU {to} is 0 bytes per second")]
    NoSpeed {
        /// Index of the sender.
        from: usize,
        /// Index of the receiver; equal to the sender for the speed of its own memory.
        to: usize,
    },
    /// A layer is assigned to a GPU that does not exist, or the assignment has the wrong length.
    #[error("cannot place: layer {layer} is assigned to none of the {gpus} GPUs")]
    Assignment {
        /// The layer.
        layer: usize,
        /// Number of given GPUs.
        gpus: usize,
    },
    /// Too many GPUs for the search over their orders.
    #[error("cannot search for the least cost on {gpus} GPUs: at most {most} are possible")]
    SearchGpus {
        /// Number of given GPUs.
        gpus: usize,
        /// Maximum number of GPUs of the search.
        most: usize,
    },
    /// There are no heads, no GPUs, or more KV heads than query heads.
    #[error(
        "{query_heads} query heads and {kv_heads} KV heads cannot be divided among {gpus} GPUs"
    )]
    HeadCounts {
        /// Number of query heads of the model.
        query_heads: u64,
        /// Number of KV heads of the model.
        kv_heads: u64,
        /// Number of GPUs.
        gpus: usize,
    },
    /// The query heads do not divide evenly.
    #[error("{query_heads} query heads do not divide by {gpus} GPUs")]
    QueryHeads {
        /// Number of query heads of the model.
        query_heads: u64,
        /// Number of GPUs.
        gpus: usize,
    },
    /// The KV heads do not divide evenly, and replication was not allowed or does not help.
    #[error("{kv_heads} KV heads do not divide by {gpus} GPUs{}", replication(*kv_heads, *gpus))]
    KvHeads {
        /// Number of KV heads of the model.
        kv_heads: u64,
        /// Number of GPUs.
        gpus: usize,
    },
    /// A layer's KV block does not consist of equal heads.
    #[error(
        "cannot place: KV blocks of layer {layer} have {kv_block_bytes} bytes, which do not divide into {kv_heads} equal heads"
    )]
    HeadBytes {
        /// The layer.
        layer: usize,
        /// Size of its KV block, in bytes.
        kv_block_bytes: u64,
        /// Number of KV heads of the model.
        kv_heads: u64,
    },
    /// A line of a text does not have the form that it has in a placement.
    #[error("line {line}: expected {expected}, found {found:?}")]
    Line {
        /// Line number, from 1.
        line: usize,
        /// The line.
        found: String,
        /// The expected form.
        expected: &'static str,
    },
    /// The memory does not suffice.
    #[error("the model does not fit: {}", Shortages(short))]
    DoesNotFit {
        /// The GPUs without enough memory, with the missing bytes.
        short: Vec<Shortage>,
        /// The largest number of KV blocks with which the same placement would fit; `None` if even
        /// the weights do not fit.
        kv_blocks_fit: Option<u64>,
    },
}

/// A GPU without enough memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Shortage {
    /// Index of the GPU.
    pub gpu: usize,
    /// Bytes that it should hold.
    pub needed_bytes: u64,
    /// Bytes that it can hold.
    pub free_bytes: u64,
}

impl Shortage {
    /// Number of missing bytes.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.needed_bytes.saturating_sub(self.free_bytes)
    }
}

struct Shortages<'a>(&'a [Shortage]);

impl fmt::Display for Shortages<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, short) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            let (gpu, missing) = (short.gpu, short.missing_bytes());
            let (needed, free) = (short.needed_bytes, short.free_bytes);
            write!(f, "{comma}GPU {gpu} lacks {missing} bytes ({needed} of {free})")?;
        }
        Ok(())
    }
}

fn replication(kv_heads: u64, gpus: usize) -> &'static str {
    if kv_heads != 0 && (gpus as u64).is_multiple_of(kv_heads) {
        "; each could be kept on several"
    } else {
        ""
    }
}

kv_errors::one_line_debug!(PlacementError);
