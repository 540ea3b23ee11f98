//! Scenarios that cross crates; the tests live in `tests/`.
