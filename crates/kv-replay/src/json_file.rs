//! Files that are either written whole or not at all.
