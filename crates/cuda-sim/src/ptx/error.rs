//! Why PTX was not loaded, with the line to look at.

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

/// What a step of loading gives.
pub(crate) type Loaded<T> = Result<T, LoadError>;
