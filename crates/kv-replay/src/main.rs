//! The `kv-replay` program.
fn main() {}
