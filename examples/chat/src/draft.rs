//! Drafts by prompt lookup: what has followed the last tokens before is tried again.

/// Last tokens that are looked up: the longest of these that has occurred.
const LOOKED_UP: [usize; 2] = [3, 2];

/// Up to `most` tokens that may come next: those behind the latest earlier place of the last tokens.
#[must_use]
pub fn drafts(ids: &[u32], most: usize) -> &[u32] {
    for length in LOOKED_UP {
        let Some(start) = ids.len().checked_sub(length).filter(|&start| start > 0) else {
            continue;
        };
        let last = &ids[start..];
        let place = (0..start).rev().find(|&at| &ids[at..at + length] == last);
        if let Some(place) = place {
            let found = &ids[place + length..];
            return &found[..most.min(found.len())];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_before_is_drafted() {
        assert_eq!(drafts(&[1, 2, 3, 4, 5, 9, 2, 3], 2), [4, 5]);
        assert_eq!(drafts(&[1, 2, 3, 7, 2, 3, 8, 2, 3], 4), [8, 2, 3]);
        assert_eq!(drafts(&[5, 1, 2, 3, 6, 9, 2, 3, 7, 1, 2, 3], 1), [6]);
        assert_eq!(drafts(&[1, 2, 3], 2), [] as [u32; 0]);
        assert_eq!(drafts(&[], 2), [] as [u32; 0]);
    }
}
