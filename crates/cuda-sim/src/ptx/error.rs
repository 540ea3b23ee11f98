//! The error for PTX that cannot be loaded, with its line.

/// A line of PTX that cannot run here.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("ptx line {line}; fatal: {message}")]
pub(crate) struct LoadError {
    pub(crate) line: u32,
    pub(crate) message: String,
}

impl LoadError {
    pub(crate) fn new(line: u32, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }
}

/// The result of a step of loading.
pub(crate) type Loaded<T> = Result<T, LoadError>;
