//! NIXL's library, found and opened when the program runs, and its functions.
//!
//! The functions, numbers and rules of ownership are those of NIXL's C interface, `libnixl_capi.so`, as of 1.5 (header
//! `wrapper.h` of the crate nixl-sys 1.5.2). Handles are opaque pointers; a status of 0 is success, and 1 is "in progress".

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{NixlError, Status};

/// Names the library's file.
const VARIABLE: &str = "KV_NIXL_LIBRARY";

/// What is looked for along the search path of the dynamic linker, unless a path is given.
const NAME: &str = "libnixl_capi.so";

/// A handle of the library.
pub(crate) type Handle = *mut c_void;

/// What an agent is configured with; `nixl_capi_agent_config_s`.
#[repr(C)]
pub(crate) struct AgentConfig {
    pub(crate) enable_prog_thread: bool,
    pub(crate) enable_listen_thread: bool,
    pub(crate) listen_port: c_int,
    pub(crate) thread_sync: c_uint,
    pub(crate) num_workers: c_uint,
    pub(crate) pthr_delay_us: u64,
    pub(crate) lthr_delay_us: u64,
    pub(crate) capture_telemetry: bool,
}

macro_rules! functions {
    ($($field:ident: $symbol:literal($($argument:ty),*);)*) => {
        /// The functions that this crate calls.
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// Finds all of them.
            fn of(library: &libloading::Library, path: &Path) -> Result<Self, NixlError> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is that of the function in NIXL's C interface; see the head of this file. The
                        // library is not closed any more.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol)
                        };
                        *found.map_err(|error| NixlError::Library {
                            path: path.to_owned(),
                            reason: error.to_string(),
                        })?
                    },)*
                })
            }
        }
    };
}

functions! {
    create_agent: "nixl_capi_create_configured_agent"(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent: "nixl_capi_destroy_agent"(Handle);
    create_params: "nixl_capi_create_params"(*mut Handle);
    destroy_params: "nixl_capi_destroy_params"(Handle);
    params_add: "nixl_capi_params_add"(Handle, *const c_char, *const c_char);
    create_backend: "nixl_capi_create_backend"(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend: "nixl_capi_destroy_backend"(Handle);
    get_local_md: "nixl_capi_get_local_md"(Handle, *mut *mut c_void, *mut usize);
    load_remote_md: "nixl_capi_load_remote_md"(Handle, *const c_void, usize, *mut *mut c_char);
    create_reg_dlist: "nixl_capi_create_reg_dlist"(c_uint, *mut Handle);
    destroy_reg_dlist: "nixl_capi_destroy_reg_dlist"(Handle);
    reg_dlist_add_desc: "nixl_capi_reg_dlist_add_desc"(Handle, usize, usize, u64, *const c_void, usize);
    register_mem: "nixl_capi_register_mem"(Handle, Handle, Handle);
    create_xfer_dlist: "nixl_capi_create_xfer_dlist"(c_uint, *mut Handle);
    destroy_xfer_dlist: "nixl_capi_destroy_xfer_dlist"(Handle);
    xfer_dlist_add_desc: "nixl_capi_xfer_dlist_add_desc"(Handle, usize, usize, u64);
    create_xfer_req: "nixl_capi_create_xfer_req"(
        Handle, c_uint, Handle, Handle, *const c_char, *mut Handle, Handle
    );
    post_xfer_req: "nixl_capi_post_xfer_req"(Handle, Handle, Handle);
    get_xfer_status: "nixl_capi_get_xfer_status"(Handle, Handle);
    release_xfer_req: "nixl_capi_release_xfer_req"(Handle, Handle);
    destroy_xfer_req: "nixl_capi_destroy_xfer_req"(Handle);
}

/// NIXL's library. Clones are the same one.
#[derive(Clone)]
pub struct Library {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    functions: Functions,
    /// Never closed: NIXL and UCX have threads and handlers of the process's end, which must not lose their code.
    _library: ManuallyDrop<libloading::Library>,
}

impl Library {
    /// Opens the file that the variable `KV_NIXL_LIBRARY` names; without it, `libnixl_capi.so` where the dynamic linker finds it, as
    /// in a folder of `LD_LIBRARY_PATH`.
    ///
    /// # Errors
    /// [`NixlError::Library`] if it is not there, or not of a version that has all functions.
    pub fn open() -> Result<Self, NixlError> {
        match std::env::var_os(VARIABLE) {
            Some(path) => Self::open_at(path.as_ref()),
            None => Self::open_at(Path::new(NAME)),
        }
    }

    /// Opens the library of a path, such as `.nixl_cu12.mesonpy.libs/libnixl_capi.so` of the unpacked wheel `nixl-cu12`. It
    /// finds its own libraries and plugins from there.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub fn open_at(path: &Path) -> Result<Self, NixlError> {
        let fails = |error: libloading::Error| {
            let mut reason = error.to_string();
            if let Some(source) = std::error::Error::source(&error) {
                reason = source.to_string();
            }
            NixlError::Library { path: path.to_owned(), reason }
        };
        // SAFETY: initialisers of the library run. It is NVIDIA's, and the caller names it, or the system does.
        let library = unsafe { libloading::Library::new(path) }.map_err(fails)?;
        let functions = Functions::of(&library, path)?;
        let inner =
            Inner { path: path.to_owned(), functions, _library: ManuallyDrop::new(library) };
        Ok(Self { inner: Arc::new(inner) })
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.inner.functions
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("path", &self.inner.path).finish_non_exhaustive()
    }
}

/// An error for every status but success.
pub(crate) fn check(operation: &'static str, status: c_int) -> Result<(), NixlError> {
    match status {
        0 => Ok(()),
        _ => Err(NixlError::Call { operation, status: Status::of(status) }),
    }
}

/// Takes a block of memory that the library has allocated for its caller, with so many bytes.
///
/// # Safety
/// `memory` is null, or was allocated by `malloc`, has as many initialised bytes, and is nobody else's.
pub(crate) unsafe fn take_bytes(memory: *mut c_void, bytes: usize) -> Vec<u8> {
    if memory.is_null() {
        return Vec::new();
    }
    // SAFETY: by the caller's promise.
    let taken = unsafe { std::slice::from_raw_parts(memory.cast::<u8>(), bytes) }.to_vec();
    // SAFETY: as above. Nothing borrows it any more.
    unsafe { free(memory) };
    taken
}

/// The same for a string.
///
/// # Safety
/// `text` is null, or a string that ends with a zero byte, was allocated by `malloc`, and is nobody else's.
pub(crate) unsafe fn take_string(text: *mut c_char) -> Option<CString> {
    if text.is_null() {
        return None;
    }
    // SAFETY: by the caller's promise.
    let taken = unsafe { CStr::from_ptr(text) }.to_owned();
    // SAFETY: as above. Nothing borrows it any more.
    unsafe { free(text.cast()) };
    Some(taken)
}

unsafe extern "C" {
    fn free(memory: *mut c_void);
}
