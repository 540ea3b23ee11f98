//! What the errors of all crates share: their class, and their text in one line.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

use std::error::Error;
use std::fmt;

/// What a loop does about an error. The least that it takes comes first.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum ErrorClass {
    /// The same call may succeed later, and nothing has to be given up for it: work that is under way will end.
    Retry,
    /// The call does not succeed with what there is: give room up, or send the request away. All others go on. Numbers
    /// that no call takes are of this class too: the one who asks with them is sent away.
    Shed,
    /// What the call was made on is of no use, or was not made: make the device, the context, the file or the
    /// connection anew, after the cause that the error names is gone.
    Restart,
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Retry => "retry",
            Self::Shed => "shed",
            Self::Restart => "restart",
        })
    }
}

/// An error that says what to do about it. All error families of the workspace's libraries do.
pub trait Classed: Error {
    /// What a loop does about it.
    fn class(&self) -> ErrorClass;
}

/// A number of bytes for a message: `8.0 GiB`, `512 bytes`, `2.0 MiB (2097153 bytes)`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ByteSize(pub u64);

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let Some(power) = bytes.checked_ilog2().map(|log| log / 10).filter(|power| *power > 0)
        else {
            return write!(f, "{bytes} {}", if bytes == 1 { "byte" } else { "bytes" });
        };
        // In tenths, rounded down: 1023.99 KiB is not 1024.0 KiB.
        let tenths = (u128::from(bytes) * 10) >> (10 * power);
        write!(f, "{}.{} {}", tenths / 10, tenths % 10, UNITS[power as usize - 1])?;
        if tenths << (10 * power) == u128::from(bytes) * 10 {
            Ok(())
        } else {
            write!(f, " ({bytes} bytes)")
        }
    }
}

/// An error and its causes, as one line: `the copy failed: cuMemcpyDtoDAsync of 4.0 KiB on GPU 0: …`.
#[derive(Clone, Copy)]
pub struct Chain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl fmt::Debug for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Implements `Debug` of error types as [`Chain`]: `?` in `main` prints `Debug`.
///
/// ```
/// #[derive(thiserror::Error)]
/// #[error("block {0} is free")]
/// struct Free(u32);
///
/// kv_errors::one_line_debug!(Free);
/// assert_eq!(format!("{:?}", Free(7)), "block 7 is free");
/// ```
#[macro_export]
macro_rules! one_line_debug {
    ($($error:ty),+ $(,)?) => {$(
        impl ::core::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::fmt::Display::fmt(&$crate::Chain(self), f)
            }
        }
    )+};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short_where_that_is_exact() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            (1025, "1.0 KiB (1025 bytes)"),
            (1 << 20, "1.0 MiB"),
            ((1 << 20) - 1, "1023.9 KiB (1048575 bytes)"),
            (3 << 29, "1.5 GiB"),
            (8 << 30, "8.0 GiB"),
            (u64::MAX, "15.9 EiB (18446744073709551615 bytes)"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }

    #[derive(thiserror::Error)]
    enum Refused {
        #[error("the batch was refused")]
        Batch(#[source] Box<Self>),
        #[error("row {0} is taken")]
        Row(u32),
    }

    one_line_debug!(Refused);

    #[test]
    fn a_chain_is_one_line_and_so_is_debug() {
        let error = Refused::Batch(Box::new(Refused::Row(7)));
        let line = "the batch was refused: row 7 is taken";
        assert_eq!(Chain(&error).to_string(), line);
        assert_eq!(format!("{error:?}"), line);
        assert_eq!(format!("{error:#?}"), line);
    }

    #[test]
    fn classes_are_ordered_by_what_they_take() {
        assert!(ErrorClass::Retry < ErrorClass::Shed && ErrorClass::Shed < ErrorClass::Restart);
        assert_eq!(ErrorClass::Shed.to_string(), "shed");
    }
}
