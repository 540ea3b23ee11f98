//! How far a run has come, for those who watch it.

/// The progress of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgressState {
    /// Number of requests of the trace.
    pub requests: u64,
    /// Number of requests that have finished.
    pub finished: u64,
    /// Number of requests in the batch.
    pub running: u64,
    /// Number of iterations so far.
    pub iterations: u64,
    /// Number of blocks that held bytes of another request.
    pub corrupt_blocks: u64,
    /// Number of blocks that were compared.
    pub verified_blocks: u64,
    /// Number of device blocks in use.
    pub device_blocks_in_use: u64,
    /// Share of block lookups that hit, from 0 to 1.
    pub hit_rate: f64,
}

/// Receives the progress of a run.
pub trait Progress {
    /// Called on the run's own thread, up to once per iteration. It must be fast.
    fn update(&mut self, state: &ProgressState);
}

/// Ignores the progress.
impl Progress for () {
    fn update(&mut self, _state: &ProgressState) {}
}
