//! Protections that tests can take out.

/// Names a protection, and is its second argument: nothing else, unless the build has `--cfg removals`.
///
/// Such a build, which `cargo xtask removals` makes, takes out the protection whose name is in the
/// environment variable `KV_REMOVE`: `guard!("name", kept)` then does nothing, and
/// `guard!("name", kept, else other)` does `other`.
#[cfg(not(removals))]
#[doc(hidden)]
#[macro_export]
macro_rules! guard {
    ($name:literal, $kept:expr $(, else $other:expr)?) => {
        $kept
    };
}

/// As above, in the build whose protections can be taken out.
#[cfg(removals)]
#[doc(hidden)]
#[macro_export]
macro_rules! guard {
    ($name:literal, $kept:expr) => {
        $crate::guard!($name, $kept, else ())
    };
    ($name:literal, $kept:expr, else $other:expr) => {{
        static IS_OUT: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        let is_out = || std::env::var("KV_REMOVE").is_ok_and(|name| name == $name);
        if *IS_OUT.get_or_init(is_out) { $other } else { $kept }
    }};
}
