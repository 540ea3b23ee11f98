//! Compiling PTX, with the messages of the driver's compiler.

use std::ffi::c_void;

use cudarc::driver::sys::{CUjit_option, CUmodule};

use super::api::Api;
use crate::{DriverError, DriverResult, ErrorCode};

/// Bytes of each of the two logs; the driver cuts longer ones off.
const LOG_BYTES: usize = 16 << 10;

/// NULs after the text: as long as the longest mark that the driver may look for, even in a short
/// text.
const MARK_BYTES: usize = 64;

/// Loads `ptx` into the current context and appends the compiler's messages to `log`.
pub(super) fn load(api: &Api, ptx: &str, log: &mut String) -> DriverResult<CUmodule> {
    let image = match image(ptx) {
        Ok(image) => image,
        Err((code, message)) => {
            append(log, message.as_bytes());
            return Err(DriverError::new("cuModuleLoadDataEx", code));
        }
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
    // SAFETY: `module` is live; the image is text that ends with a NUL and has no binary's mark
    // (`image`), so that the driver takes it for PTX, reads it up to the NUL, and writes nothing;
    // there are `options.len()` options and as many values, of the kinds that each option asks
    // for; each log has the length that its size option says. All of them outlive the call, and
    // the driver keeps none of them.
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

/// The text for the driver: `ptx` with NULs after it.
///
/// The driver recognises binaries by their first bytes and then trusts the lengths in the binary.
/// So a binary in place of text is refused here. The marks of fat binaries and of compiler bitcode
/// are not UTF-8. An ELF file begins with 0x7F, which no PTX does.
fn image(ptx: &str) -> Result<Vec<u8>, (ErrorCode, &'static str)> {
    if ptx.starts_with('\x7f') {
        return Err((ErrorCode::INVALID_IMAGE, "the PTX text is a binary"));
    }
    if ptx.contains('\0') {
        return Err((ErrorCode::INVALID_IMAGE, "the PTX text has a NUL byte in it"));
    }
    let mut image = Vec::with_capacity(ptx.len() + MARK_BYTES);
    image.extend_from_slice(ptx.as_bytes());
    image.resize(ptx.len() + MARK_BYTES, 0);
    Ok(image)
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
    fn only_text_is_shown_to_the_driver() {
        let shown = image(".version 7.0").unwrap();
        assert_eq!(&shown[..12], b".version 7.0");
        assert_eq!(shown[12..], [0; MARK_BYTES]);
        assert_eq!(image("").unwrap(), [0; MARK_BYTES]);
        for (binary, word) in [("\x7fELF\x02\x01", "binary"), (".version\0 7.0", "NUL")] {
            let (code, message) = image(binary).unwrap_err();
            assert_eq!(code, ErrorCode::INVALID_IMAGE);
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn messages_are_appended_line_by_line() {
        let mut log = "before".to_owned();
        append(&mut log, b"one\ntwo\n\0rest of the buffer");
        append(&mut log, b"\0\0");
        append(&mut log, b"no end");
        assert_eq!(log, "before\none\ntwo\nno end\n");
    }
}
