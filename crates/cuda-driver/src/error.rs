//! Answers of driver calls: codes, the call of each, and why there may be no driver.

use core::fmt;

use crate::guard;

use crate::LaunchConfig;
use crate::messages::{ByteSize, one_line_debug};

/// A `CUresult` other than success, kept as the plain number the driver returned.
///
/// The number is never turned into an enum: a newer driver may return codes this crate has no
/// name for, and they must still be carried and printed.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub struct ErrorCode(pub u32);

/// Names each code once, for the constants and for `Display`.
macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        impl ErrorCode {
            $($(#[$doc])* pub const $name: ErrorCode = ErrorCode($value);)*

            /// The driver's own name of this code, if this crate has it.
            #[must_use]
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

error_codes! {
    /// An argument was out of range or of the wrong kind.
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE";
    /// The device has too little free memory.
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY";
    /// The driver was not initialised.
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED";
    /// The driver is shutting down.
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED";
    /// Only a stub of the driver library is installed.
    STUB_LIBRARY = 34, "CUDA_ERROR_STUB_LIBRARY";
    /// The call needs a newer driver.
    CALL_REQUIRES_NEWER_DRIVER = 36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER";
    /// The device is in use by another process, or out of service.
    DEVICE_UNAVAILABLE = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE";
    /// There is no CUDA device.
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE";
    /// The ordinal names no device.
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE";
    /// The module image could not be read.
    INVALID_IMAGE = 200, "CUDA_ERROR_INVALID_IMAGE";
    /// No context is current on the thread, or the context is not valid.
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT";
    /// The module has no code that this device can run.
    NO_BINARY_FOR_GPU = 209, "CUDA_ERROR_NO_BINARY_FOR_GPU";
    /// Uncorrectable memory error.
    ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE";
    /// Peer access between the two devices is not possible.
    PEER_ACCESS_UNSUPPORTED = 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED";
    /// The PTX could not be compiled.
    INVALID_PTX = 218, "CUDA_ERROR_INVALID_PTX";
    /// Uncorrectable error of a link between GPUs.
    NVLINK_UNCORRECTABLE = 220, "CUDA_ERROR_NVLINK_UNCORRECTABLE";
    /// The driver's PTX compiler is not installed.
    JIT_COMPILER_NOT_FOUND = 221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND";
    /// The PTX is of a version this driver's compiler does not know.
    UNSUPPORTED_PTX_VERSION = 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
    /// A device exception, such as an invalid access of a peer's memory, that the GPU contained.
    CONTAINED = 226, "CUDA_ERROR_CONTAINED";
    /// A call of the operating system failed.
    OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM";
    /// The handle is not valid.
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE";
    /// A resource is not in the state that the call needs.
    ILLEGAL_STATE = 401, "CUDA_ERROR_ILLEGAL_STATE";
    /// A named symbol was not found.
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND";
    /// The work has not completed yet.
    NOT_READY = 600, "CUDA_ERROR_NOT_READY";
    /// A kernel accessed an address that is not mapped or not accessible.
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
    /// The launch needs more registers, threads or shared memory than there are.
    LAUNCH_OUT_OF_RESOURCES = 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
    /// A kernel ran too long, or work can never run.
    LAUNCH_TIMEOUT = 702, "CUDA_ERROR_LAUNCH_TIMEOUT";
    /// Peer access was enabled before.
    PEER_ACCESS_ALREADY_ENABLED = 704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED";
    /// Peer access was not enabled.
    PEER_ACCESS_NOT_ENABLED = 705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED";
    /// The context was destroyed.
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED";
    /// A device-side assertion failed.
    ASSERT = 710, "CUDA_ERROR_ASSERT";
    /// The host range is registered already.
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    /// The host range is not registered.
    HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    /// A kernel's stack or return was corrupted.
    HARDWARE_STACK_ERROR = 714, "CUDA_ERROR_HARDWARE_STACK_ERROR";
    /// A kernel met an illegal instruction.
    ILLEGAL_INSTRUCTION = 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION";
    /// A kernel accessed an address that is not aligned to the width of the access.
    MISALIGNED_ADDRESS = 716, "CUDA_ERROR_MISALIGNED_ADDRESS";
    /// A kernel used an address of the wrong space.
    INVALID_ADDRESS_SPACE = 717, "CUDA_ERROR_INVALID_ADDRESS_SPACE";
    /// A kernel's program counter left its code.
    INVALID_PC = 718, "CUDA_ERROR_INVALID_PC";
    /// A kernel failed for another reason.
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED";
    /// The operation is not permitted.
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED";
    /// The operation is not supported.
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED";
    /// The driver and the kernel module do not match.
    SYSTEM_DRIVER_MISMATCH = 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    /// The client of the Multi-Process Service was terminated.
    MPS_CLIENT_TERMINATED = 810, "CUDA_ERROR_MPS_CLIENT_TERMINATED";
    /// The call is not permitted while the stream, or a stream of the process, is being captured.
    STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    /// The capture met a call that cannot be captured, and has no graph.
    STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    /// Unknown internal error.
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN";
}

impl ErrorCode {
    /// Whether the context is unusable after this error.
    ///
    /// After one of these every later call in the context fails with the same code
    /// (CUDA C++ Programming Guide, "Error Checking"; driver API notes of each code). So the first
    /// of these errors is the cause, and the later ones repeat it.
    #[must_use]
    pub fn is_sticky(self) -> bool {
        matches!(
            self,
            Self::ECC_UNCORRECTABLE
                | Self::DEVICE_UNAVAILABLE
                | Self::NVLINK_UNCORRECTABLE
                | Self::CONTAINED
                | Self::MPS_CLIENT_TERMINATED
                | Self::ILLEGAL_ADDRESS
                | Self::LAUNCH_TIMEOUT
                | Self::ASSERT
                | Self::HARDWARE_STACK_ERROR
                | Self::ILLEGAL_INSTRUCTION
                | Self::MISALIGNED_ADDRESS
                | Self::INVALID_ADDRESS_SPACE
                | Self::INVALID_PC
                | Self::LAUNCH_FAILED
        )
    }

    /// Whether the code says that the call which returned it did nothing.
    ///
    /// Most codes do not say this: a call that destroys or frees may return an error of earlier
    /// asynchronous work and still do its own work (driver API notes of each call). Two codes are
    /// about the call alone, by the notes of `CUresult`: the call had too little memory or other
    /// resources, or is not permitted during a capture.
    #[must_use]
    pub(crate) fn is_of_call_not_made(self) -> bool {
        let says_so = matches!(self, Self::OUT_OF_MEMORY | Self::STREAM_CAPTURE_UNSUPPORTED);
        guard!("driver.not-destroyed-twice", says_so, else !self.is_sticky())
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "CUDA error {}", self.0),
        }
    }
}

impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A driver call that did not succeed: `cuMemAlloc of 8.0 GiB on GPU 0: CUDA_ERROR_OUT_OF_MEMORY (2)`.
///
/// Two errors are equal if their calls and codes are. Size, address and GPU are for the reader of
/// the message.
#[derive(Clone, Copy)]
pub struct DriverError {
    /// The driver's name of the call, such as `cuMemMap`.
    pub call: &'static str,
    /// The driver's answer.
    pub code: ErrorCode,
    /// [`NO_DEVICE`] if the GPU is not known. An `Option` would make every result of the step path
    /// larger.
    device: i32,
    object: Object,
}

const NO_DEVICE: i32 = i32::MIN;
const _: () = assert!(size_of::<DriverError>() <= 48);

/// The object of a call.
#[derive(Clone, Copy)]
enum Object {
    Unnamed,
    Size(u64),
    Range { address: u64, bytes: u64 },
    Launch { blocks: [u32; 3], threads: u32 },
}

impl DriverError {
    /// The answer `code` of the call `call`.
    #[must_use]
    pub const fn new(call: &'static str, code: ErrorCode) -> Self {
        Self { call, code, device: NO_DEVICE, object: Object::Unnamed }
    }

    /// This error of a call on GPU `ordinal`, unless the error names a GPU already.
    #[must_use]
    pub(crate) const fn on_device(self, ordinal: i32) -> Self {
        match self.device {
            NO_DEVICE => Self { device: ordinal, ..self },
            _ => self,
        }
    }

    /// This error of a call for `bytes` bytes.
    #[must_use]
    pub(crate) const fn of_bytes(self, bytes: u64) -> Self {
        Self { object: Object::Size(bytes), ..self }
    }

    /// This error of a call for the bytes at `address`.
    #[must_use]
    pub(crate) const fn of_range(self, address: u64, bytes: u64) -> Self {
        Self { object: Object::Range { address, bytes }, ..self }
    }

    /// This error of a launch.
    #[must_use]
    pub(crate) const fn of_launch(self, config: &LaunchConfig) -> Self {
        let [x, y, z] = config.block;
        let threads = x.saturating_mul(y).saturating_mul(z);
        Self { object: Object::Launch { blocks: config.grid, threads }, ..self }
    }
}

impl PartialEq for DriverError {
    fn eq(&self, other: &Self) -> bool {
        (self.call, self.code) == (other.call, other.code)
    }
}

impl Eq for DriverError {}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.call)?;
        match self.object {
            Object::Unnamed => {}
            Object::Size(bytes) => write!(f, " of {}", ByteSize(bytes))?,
            Object::Range { address, bytes } => {
                write!(f, " of {} at {address:#x}", ByteSize(bytes))?;
            }
            Object::Launch { blocks: [x, y, z], threads } => {
                write!(f, " of {x}x{y}x{z} blocks of {threads} threads")?;
            }
        }
        if self.device != NO_DEVICE {
            write!(f, " on GPU {}", self.device)?;
        }
        write!(f, ": {}", self.code)
    }
}

impl std::error::Error for DriverError {}

one_line_debug!(DriverError, Unavailable);

/// Why a machine has no usable CUDA driver.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The driver library is not installed.
    #[error("no CUDA driver library (libcuda) was found")]
    NoLibrary,
    /// The library is installed but could not be initialised.
    #[error("the CUDA driver could not be initialised")]
    Init(#[source] DriverError),
    /// The driver works, and there is no device.
    #[error("the CUDA driver reports no device")]
    NoDevice,
    /// The library lacks a call that this crate needs.
    #[error("the CUDA driver library lacks {symbol}")]
    MissingSymbol {
        /// The first missing call.
        symbol: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_call_is_one_line_with_its_numbers() {
        let refused = DriverError::new("cuMemAlloc", ErrorCode::OUT_OF_MEMORY);
        let line = "cuMemAlloc of 8.0 GiB on GPU 0: CUDA_ERROR_OUT_OF_MEMORY (2)";
        let error = refused.of_bytes(8 << 30).on_device(0);
        assert_eq!([error.to_string(), format!("{error:?}")], [line, line]);
        assert_eq!(error, refused, "the numbers are for the reader");

        let config = LaunchConfig::linear(70_000, 2048);
        let refused = DriverError::new("cuLaunchKernel", ErrorCode::INVALID_VALUE);
        assert_eq!(
            refused.of_launch(&config).on_device(3).on_device(0).to_string(),
            "cuLaunchKernel of 70000x1x1 blocks of 2048 threads on GPU 3: CUDA_ERROR_INVALID_VALUE (1)"
        );
        assert_eq!(
            DriverError::new("cuMemMap", ErrorCode(987_654)).of_range(0x7000, 4096).to_string(),
            "cuMemMap of 4.0 KiB at 0x7000: CUDA error 987654"
        );
    }
}
