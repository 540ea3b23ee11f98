//! Launches of few words, made ready once for each staging buffer.

use std::collections::HashMap;

use cuda_driver::DeviceSpan;

use crate::scatter::Scatter;
use crate::{PreparedScatter, ScatterError, ScatterKernel, ScatterPacket, SubmittedView};

/// Packets of so many words have launches of their own, which read less.
const WORDS_FEW: u32 = 32;

/// The launches that one stager has made ready.
#[derive(Debug, Default)]
pub(crate) struct Packets {
    /// By the address of the staging buffer, for few words and for more: no more than twice as many as
    /// the pool has buffers. The stager's memory, the other argument, is always the same.
    ready: HashMap<(u64, u32), Box<dyn PreparedScatter>>,
    /// Whether the kernel has no launches that are made ready.
    lacking: bool,
}

impl Packets {
    /// Whether a step of `count` words goes into a packet, in a buffer of `buffer_bytes` bytes.
    pub(crate) fn fits(count: u32, buffer_bytes: u64) -> bool {
        count <= ScatterPacket::WORDS_MAX && ScatterPacket::BYTES <= buffer_bytes
    }

    /// Enqueues the packet of `count` words in the view's buffer, by a launch that is ready if one can
    /// be had.
    pub(crate) fn send(
        &mut self,
        view: &SubmittedView<'_>,
        out: DeviceSpan,
        count: u32,
        kernel: &dyn ScatterKernel,
    ) -> Result<(), ScatterError> {
        let source = view.span();
        let words_max = if count <= WORDS_FEW { WORDS_FEW } else { ScatterPacket::WORDS_MAX };
        let key = (source.raw_address(), words_max);
        if !self.lacking && !self.ready.contains_key(&key) {
            match kernel.prepare(&ScatterPacket { out, source, words_max }) {
                Ok(Some(ready)) => {
                    self.ready.insert(key, ready);
                }
                Ok(None) => self.lacking = true,
                // Tried again by the next step that uses the buffer.
                Err(error) => tracing::debug!(%error, "a launch was not made ready"),
            }
        }
        match self.ready.get(&key) {
            Some(ready) => ready.launch(view.stream(), source),
            None => {
                let index_offset = ScatterPacket::INDEX_OFFSET;
                kernel.scatter(view.stream(), &Scatter { out, source, index_offset, count })
            }
        }
    }
}
