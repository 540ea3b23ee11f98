//! The order in which blocks and remembered names are looked at, a few with each release.

/// Releases from one renewal of the rates to the next: a quarter of all so far, in these bounds.
const RELEASES_MIN: usize = 512;
const RELEASES_MAX: usize = 1 << 14;

/// Places that are looked at for one renewal, at most.
const SAMPLE_MAX: usize = 1 << 14;

/// Goes through a sample of the places of a table, and begins again with those next to them.
#[derive(Debug)]
pub(super) struct Census {
    /// Releases so far.
    releases: usize,
    places: usize,
    /// One place in so many is looked at.
    stride: usize,
    /// The place where this round began, below the stride.
    first: usize,
    next: usize,
    /// How many are looked at with each release.
    step: usize,
}

impl Census {
    pub(super) fn new(places: usize) -> Self {
        let stride = places.div_ceil(SAMPLE_MAX).max(1);
        let mut census = Self { releases: 0, places, stride, first: 0, next: 0, step: 1 };
        census.begin();
        census
    }

    /// Counts a release. Places to look at with it.
    pub(super) fn release(&mut self) -> usize {
        self.releases = self.releases.saturating_add(1);
        self.step
    }

    /// The next place of this round, if there is one.
    pub(super) fn next(&mut self) -> Option<usize> {
        let place = self.next;
        self.next += self.stride;
        (place < self.places).then_some(place)
    }

    /// How many places one stands for that was looked at.
    pub(super) fn weight(&self) -> f64 {
        self.stride as f64
    }

    /// Begins another round. Whether all places have been looked at since it was so the last time.
    pub(super) fn begin(&mut self) -> bool {
        let all = self.first == 0;
        let releases = (self.releases / 4).clamp(RELEASES_MIN, RELEASES_MAX);
        self.step = self.places.div_ceil(self.stride * releases).max(1);
        self.first = (self.first + 1) % self.stride;
        self.next = self.first;
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places of one round, and the releases that it took.
    fn round(census: &mut Census) -> (Vec<usize>, usize) {
        let mut places = Vec::new();
        for releases in 1..100_000 {
            for _ in 0..census.release() {
                match census.next() {
                    Some(place) => places.push(place),
                    None => {
                        census.begin();
                        return (places, releases);
                    }
                }
            }
        }
        panic!("a round without an end");
    }

    #[test]
    fn rounds_take_turns_at_the_places_of_a_large_table() {
        let mut census = Census::new(3 * SAMPLE_MAX);
        assert_eq!(census.weight(), 3.0);
        let mut all = Vec::new();
        for length in [512, 512, 512] {
            let (places, releases) = round(&mut census);
            assert_eq!((places.len(), releases), (SAMPLE_MAX, length + 1));
            all.extend(places);
        }
        all.sort_unstable();
        assert!(all.into_iter().eq(0..3 * SAMPLE_MAX));
        // Rounds become longer, until one place is looked at with each release.
        let lengths: Vec<_> = (0..40).map(|_| round(&mut census).1).collect();
        assert!(lengths.is_sorted());
        assert_eq!(lengths.last(), Some(&(SAMPLE_MAX + 1)));
    }
}
