//! Why there is no placement.

use std::error::Error;
use std::fmt;

/// Why a model could not be placed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Too few or too many layers.
    #[error("a placement of {layers} layers, where 1 to {most} are possible")]
    Layers {
        /// Layers of the model.
        layers: usize,
        /// Most that there may be.
        most: usize,
    },
    /// Too few or too many GPUs.
    #[error("a placement on {gpus} GPUs, where 1 to {most} are possible")]
    Gpus {
        /// GPUs given.
        gpus: usize,
        /// Most that there may be.
        most: usize,
    },
    /// The model is of more bytes than any machine has.
    #[error("a placement of a model of {bytes} bytes, which no machine holds")]
    TooLarge {
        /// Weights, KV, workspace and activations, in bytes.
        bytes: u128,
    },
    /// The matrix of links is of another number of GPUs.
    #[error("a placement on {gpus} GPUs with a link matrix of {matrix}")]
    LinkMatrix {
        /// GPUs given.
        gpus: usize,
        /// GPUs of the matrix.
        matrix: usize,
    },
    /// Two GPUs have the same UUID.
    #[error("GPU {gpu} has the UUID of one before it")]
    GpuTwice {
        /// Position of the second one.
        gpu: usize,
    },
    /// A speed of zero bytes a second.
    #[error("the speed from GPU {from} to GPU {to} is 0 bytes a second")]
    NoSpeed {
        /// Position of the sender.
        from: usize,
        /// Position of the receiver; the sender itself for its memory.
        to: usize,
    },
    /// A layer is assigned to a GPU that there is not, or the assignment has another length.
    #[error("layer {layer} is assigned to no GPU of {gpus}")]
    Assignment {
        /// The layer.
        layer: usize,
        /// GPUs given.
        gpus: usize,
    },
    /// More GPUs than the search over their orders takes.
    #[error("the least cost is searched over the orders of at most {most} GPUs, not {gpus}")]
    SearchGpus {
        /// GPUs given.
        gpus: usize,
        /// Most that the search takes.
        most: usize,
    },
    /// The attention heads cannot be shared out.
    #[error(transparent)]
    Heads(#[from] HeadsError),
    /// A layer's KV block is not made of equal heads.
    #[error("layer {layer} has KV blocks of {kv_block_bytes} bytes, not of {kv_heads} equal heads")]
    HeadBytes {
        /// The layer.
        layer: usize,
        /// Its KV block, in bytes.
        kv_block_bytes: u64,
        /// KV heads of the model.
        kv_heads: u64,
    },
    /// The memory does not suffice.
    #[error("the model does not fit: {}", Shortages(short))]
    DoesNotFit {
        /// The GPUs that are short, and by how much.
        short: Vec<Shortage>,
        /// The most KV blocks with which the same placement would fit; none if even the weights do
        /// not.
        kv_blocks_fit: Option<u64>,
    },
}

/// A GPU whose memory does not suffice.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Shortage {
    /// Position of the GPU.
    pub gpu: usize,
    /// What it should hold, in bytes.
    pub needed_bytes: u64,
    /// What it can hold, in bytes.
    pub free_bytes: u64,
}

impl Shortage {
    /// By how much it is short, in bytes.
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

/// Why attention heads cannot be shared out.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadsError {
    /// No heads, no GPUs, or more KV heads than query heads can share.
    #[error(
        "{query_heads} query heads and {kv_heads} KV heads cannot be shared out to {gpus} GPUs"
    )]
    Counts {
        /// Query heads of the model.
        query_heads: u64,
        /// KV heads of the model.
        kv_heads: u64,
        /// GPUs to share them out to.
        gpus: usize,
    },
    /// The query heads do not divide evenly.
    #[error("{query_heads} query heads do not divide by {gpus} GPUs")]
    QueryHeads {
        /// Query heads of the model.
        query_heads: u64,
        /// GPUs to share them out to.
        gpus: usize,
    },
    /// The KV heads do not divide evenly, and replication was not asked for or does not help.
    #[error("{kv_heads} KV heads do not divide by {gpus} GPUs{}", replication(*kv_heads, *gpus))]
    KvHeads {
        /// KV heads of the model.
        kv_heads: u64,
        /// GPUs to share them out to.
        gpus: usize,
    },
}

fn replication(kv_heads: u64, gpus: usize) -> &'static str {
    if kv_heads != 0 && (gpus as u64).is_multiple_of(kv_heads) {
        "; each could be kept on several"
    } else {
        ""
    }
}

/// A text that is no placement.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ParsePlacementError {
    /// A line says what no placement says there.
    #[error("line {line}: {found:?} where {expected} was expected")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The line.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// The lines are well formed and say what cannot be.
    #[error("the text describes no placement")]
    Placement(#[from] PlacementError),
}

/// `Debug` of an error as one line with its causes: what `?` in `main` prints.
macro_rules! one_line_debug {
    ($($error:ty),+) => {$(
        impl fmt::Debug for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)?;
                let mut cause = Error::source(self);
                while let Some(error) = cause {
                    write!(f, ": {error}")?;
                    cause = error.source();
                }
                Ok(())
            }
        }
    )+};
}

one_line_debug!(PlacementError, HeadsError, ParsePlacementError);
