//! Parts of error messages: readable sizes, and a chain of causes as one line.

use std::error::Error;
use std::fmt;

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
/// cuda_driver::messages::one_line_debug!(Free);
/// assert_eq!(format!("{:?}", Free(7)), "block 7 is free");
/// ```
#[doc(inline)]
pub use crate::__one_line_debug as one_line_debug;

#[doc(hidden)]
#[macro_export]
macro_rules! __one_line_debug {
    ($($error:ty),+ $(,)?) => {$(
        impl ::core::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::fmt::Display::fmt(&$crate::messages::Chain(self), f)
            }
        }
    )+};
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceError, DriverError, ErrorCode, ModuleError};

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

    #[test]
    fn a_chain_is_one_line_and_so_is_debug() {
        let source = DriverError::new("cuModuleGetFunction", ErrorCode::NOT_FOUND).on_device(1);
        let error = ModuleError::Kernel { name: "put".into(), source: DeviceError::Driver(source) };
        let line = "the module has no kernel \"put\": \
                    cuModuleGetFunction on GPU 1: CUDA_ERROR_NOT_FOUND (500)";
        assert_eq!(Chain(&error).to_string(), line);
        assert_eq!(format!("{error:?}"), line);
        assert_eq!(format!("{error:#?}"), line);
    }
}
