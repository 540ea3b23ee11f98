//! Compiling PTX, with what the driver's compiler has to say.

use std::ffi::{CString, c_void};

use cudarc::driver::sys::{CUjit_option, CUmodule};

use super::api::Api;
use crate::{DriverError, DriverResult, ErrorCode};

/// Bytes of each of the two logs; the driver cuts longer ones off.
const LOG_BYTES: usize = 16 << 10;

/// Loads `ptx` into the current context and appends the compiler's messages to `log`.
pub(super) fn load(api: &Api, ptx: &str, log: &mut String) -> DriverResult<CUmodule> {
    let Ok(image) = CString::new(ptx) else {
        append(log, b"the PTX text has a NUL byte in it");
        return Err(DriverError::new("cuModuleLoadDataEx", ErrorCode::INVALID_PTX));
    };
    let mut info = vec![0u8; LOG_BYTES];
    let mut errors = vec![0u8; LOG_BYTES];
    let mut options = [
        CUjit_option::CU_JIT_INFO_LOG_BUFFER,
        CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    // An option's value is a pointer or, for the sizes, a number in a pointer's place.
    let mut values: [*mut c_void; 4] = [
        info.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(LOG_BYTES),
        errors.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(LOG_BYTES),
    ];
    let mut module: CUmodule = std::ptr::null_mut();
    // SAFETY: `module` is live; the image is text that ends with a NUL, which the driver takes for
    // PTX and only reads; there are `options.len()` options and as many values, of the kinds that
    // each option asks for; each log has the length that its size option says. All of them
    // outlive the call, and the driver keeps none of them.
    let loaded = unsafe {
        api.cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    append(log, &errors);
    append(log, &info);
    loaded.map(|()| module)
}

/// Appends the text before the first NUL as lines of its own, if there is any.
fn append(log: &mut String, message: &[u8]) {
    let text = message.split(|&byte| byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    let text = text.trim_end();
    if text.is_empty() {
        return;
    }
    if !log.is_empty() && !log.ends_with('\n') {
        log.push('\n');
    }
    log.push_str(text);
    log.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_appended_line_by_line() {
        let mut log = "before".to_owned();
        append(&mut log, b"one\ntwo\n\0rest of the buffer");
        append(&mut log, b"\0\0");
        append(&mut log, b"no end");
        assert_eq!(log, "before\none\ntwo\nno end\n");
    }
}
