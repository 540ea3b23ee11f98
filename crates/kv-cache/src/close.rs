//! Clean-up: wait, unmap, free, and say what was refused.

use crate::{CloseError, KvCache};

impl KvCache {
    /// Waits for all devices and gives everything back: mappings, addresses, physical and pinned
    /// memory. Sequences that are still alive lose their memory, and nothing else of them.
    ///
    /// Dropping a cache instead is safe at any time and gives back what is provably at rest.
    ///
    /// # Ordering
    /// Waits on the host for the compute and transfer streams. An [`OpenStep`](crate::OpenStep) that
    /// is still open must be finished or dropped before, or this waits for it forever.
    ///
    /// # Errors
    /// Every device is tried; all that was refused is returned.
    pub fn close(self) -> Result<(), Vec<CloseError>> {
        let mut errors = Vec::new();
        for part in self.parts {
            let ordinal = part.device().ordinal();
            let at_rest = part.transfer.synchronize().is_ok() & part.compute.synchronize().is_ok();
            // A lost device runs nothing any more, so its memory is at rest as well.
            if !at_rest && part.device().poison().is_none() {
                errors.push(CloseError::NotAtRest { ordinal });
                continue;
            }
            if let Err(error) = part.staging().clone().close() {
                errors.push(error.into());
            }
            match part.memory.close(&[]).wait() {
                Ok(report) => {
                    let leaked_bytes = report.leaked_bytes;
                    errors.extend(
                        report.errors.into_iter().take(1).map(|source| CloseError::Refused {
                            ordinal,
                            leaked_bytes,
                            source,
                        }),
                    );
                }
                Err(_) => errors.push(CloseError::NotAtRest { ordinal }),
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }
}
