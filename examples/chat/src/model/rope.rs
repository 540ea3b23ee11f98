//! The angles of positions: pairs of neighbouring elements of a head are turned.

/// What each pair of a head is turned by, for a token a position further on.
#[derive(Debug)]
pub(super) struct Rope {
    frequencies: Vec<f32>,
}

impl Rope {
    /// `factors` divides the frequencies, where a model says so.
    pub(super) fn new(head_size: usize, base: f32, factors: Option<&[f32]>) -> Self {
        let frequency = |pair: usize| {
            let exponent = (2 * pair) as f32 / head_size as f32;
            let factor = factors.and_then(|factors| factors.get(pair)).copied().unwrap_or(1.0);
            base.powf(-exponent) / factor
        };
        Self { frequencies: (0..head_size / 2).map(frequency).collect() }
    }

    /// Turns every head of a row.
    pub(super) fn turn(&self, row: &mut [f32], position: u64) {
        let angles: Vec<(f32, f32)> = self
            .frequencies
            .iter()
            .map(|frequency| (position as f32 * frequency).sin_cos())
            .collect();
        for head in row.chunks_exact_mut(2 * self.frequencies.len()) {
            for (pair, (sin, cos)) in head.chunks_exact_mut(2).zip(&angles) {
                let (a, b) = (pair[0], pair[1]);
                pair[0] = a * cos - b * sin;
                pair[1] = a * sin + b * cos;
            }
        }
    }
}
