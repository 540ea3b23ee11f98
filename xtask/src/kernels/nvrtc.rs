//! NVRTC, NVIDIA's run-time compiler, loaded from the pinned wheel.
//!
//! This is the only unsafe code of xtask: eight C functions behind one safe method. Their contracts
//! are those of the NVRTC 12.0 documentation.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use anyhow::{Context, Result, ensure};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::toolchain::Toolchain;

/// A header that sources may include.
pub(super) struct Header {
    /// The name as in `#include "..."`.
    pub(super) name: String,
    pub(super) text: String,
}

/// One translation unit.
pub(super) struct Source<'a> {
    /// The name in messages and PTX. It is not a path, so that both are the same on every machine.
    pub(super) name: &'a str,
    pub(super) text: &'a str,
    pub(super) headers: &'a [Header],
}

/// `nvrtcProgram`, an opaque handle.
type Program = *mut c_void;
/// `nvrtcResult`; 0 is success.
type Status = c_int;

type CreateProgram = unsafe extern "C" fn(
    program: *mut Program,
    source: *const c_char,
    name: *const c_char,
    headers: c_int,
    texts: *const *const c_char,
    names: *const *const c_char,
) -> Status;
type DestroyProgram = unsafe extern "C" fn(program: *mut Program) -> Status;
type CompileProgram =
    unsafe extern "C" fn(program: Program, options: c_int, texts: *const *const c_char) -> Status;
type GetSize = unsafe extern "C" fn(program: Program, bytes: *mut usize) -> Status;
type GetText = unsafe extern "C" fn(program: Program, text: *mut c_char) -> Status;
type GetErrorString = unsafe extern "C" fn(status: Status) -> *const c_char;

/// The compiler.
///
/// # Invariants
/// The functions were looked up in `_nvrtc` under their documented names and have their documented
/// types. The libraries stay loaded as long as this value lives.
pub(super) struct Compiler {
    create: CreateProgram,
    destroy: DestroyProgram,
    compile: CompileProgram,
    ptx_size: GetSize,
    ptx: GetText,
    log_size: GetSize,
    log: GetText,
    error_string: GetErrorString,
    _nvrtc: Library,
    _builtins: Library,
}

/// Looks up a function. The NVRTC documentation declares it with the type of the destination field.
macro_rules! function {
    ($library:expr, $name:literal) => {
        // SAFETY: the library is NVRTC 12.0.140, checked by hash, and the destination field has the
        // type that the documentation gives for this name. The pointer is stored beside the
        // library, which therefore outlives it.
        unsafe { $library.get($name.to_bytes_with_nul()) }
            .map(|symbol| *symbol)
            .with_context(|| format!("the compiler has no {:?}", $name))?
    };
}

impl Compiler {
    /// Loads the compiler from its two libraries.
    pub(super) fn load(toolchain: &Toolchain) -> Result<Self> {
        // The compiler opens its builtins by bare name. That works once they are loaded.
        let builtins = library(&toolchain.builtins)?;
        let nvrtc = library(&toolchain.nvrtc)?;
        Ok(Self {
            create: function!(nvrtc, c"nvrtcCreateProgram"),
            destroy: function!(nvrtc, c"nvrtcDestroyProgram"),
            compile: function!(nvrtc, c"nvrtcCompileProgram"),
            ptx_size: function!(nvrtc, c"nvrtcGetPTXSize"),
            ptx: function!(nvrtc, c"nvrtcGetPTX"),
            log_size: function!(nvrtc, c"nvrtcGetProgramLogSize"),
            log: function!(nvrtc, c"nvrtcGetProgramLog"),
            error_string: function!(nvrtc, c"nvrtcGetErrorString"),
            _nvrtc: nvrtc,
            _builtins: builtins,
        })
    }

    /// Compiles a source to PTX. Warnings are errors.
    pub(super) fn compile(&self, source: &Source<'_>, options: &[&str]) -> Result<String> {
        let unit = Unit::create(self, source)?;
        let options = Strings::new(options.iter().copied())?;
        // SAFETY: `unit.program` is live (invariant of `Unit`), and `options` has the stated number
        // of pointers to NUL-terminated strings, which live until the end of this function.
        let status =
            unsafe { (self.compile)(unit.program, options.count()?, options.pointers.as_ptr()) };
        let log = unit.text(self.log_size, self.log).context("cannot read the compiler's log")?;
        if let Err(error) = self.check(status) {
            return Err(error.context(log));
        }
        ensure!(log.trim().is_empty(), "the compiler warns:\n{log}");
        unit.text(self.ptx_size, self.ptx).context("cannot read the PTX")
    }

    fn check(&self, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any status.
        let text = unsafe { (self.error_string)(status) };
        ensure!(!text.is_null(), "nvrtc status {status}");
        // SAFETY: the documentation promises a static NUL-terminated string, and it is not null.
        let text = unsafe { CStr::from_ptr(text) };
        anyhow::bail!("nvrtc status {status}: {}", text.to_string_lossy())
    }
}

/// A program of the compiler.
///
/// # Invariants
/// `program` was created by `compiler`, and only the drop destroys it.
struct Unit<'a> {
    compiler: &'a Compiler,
    program: Program,
}

impl<'a> Unit<'a> {
    fn create(compiler: &'a Compiler, source: &Source<'_>) -> Result<Self> {
        let text = CString::new(source.text).context("the source holds a NUL")?;
        let name = CString::new(source.name).context("the name holds a NUL")?;
        let texts = Strings::new(source.headers.iter().map(|header| header.text.as_str()))?;
        let names = Strings::new(source.headers.iter().map(|header| header.name.as_str()))?;
        let mut program = ptr::null_mut();
        // SAFETY: `program` is writable, the strings are NUL-terminated, and the two arrays have
        // the stated number of pointers to such strings. All live until the call returns, and the
        // compiler copies what it keeps.
        let status = unsafe {
            (compiler.create)(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                texts.count()?,
                texts.pointers.as_ptr(),
                names.pointers.as_ptr(),
            )
        };
        compiler.check(status)?;
        Ok(Self { compiler, program })
    }

    /// A text of the program: its log, or its PTX once it is compiled.
    fn text(&self, size: GetSize, get: GetText) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: the program is live (invariant), and `bytes` is writable.
        self.compiler.check(unsafe { size(self.program, &raw mut bytes) })?;
        // One byte more than requested, so that the text is terminated whatever was written.
        let mut text = vec![0_u8; bytes + 1];
        // SAFETY: the program is live (invariant), and the buffer has the size that the compiler
        // requested.
        self.compiler.check(unsafe { get(self.program, text.as_mut_ptr().cast()) })?;
        let text = CStr::from_bytes_until_nul(&text).context("the text has no end")?;
        Ok(text.to_str().context("the text is not UTF-8")?.to_owned())
    }
}

impl Drop for Unit<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live, and nothing uses it afterwards (invariant). A failure could
        // only leak it.
        let _status = unsafe { (self.compiler.destroy)(&raw mut self.program) };
    }
}

/// Strings in C's form.
///
/// # Invariants
/// `pointers` point into `_owned`, in order, and `_owned` does not change.
struct Strings {
    _owned: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    fn new<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self> {
        let owned: Vec<CString> =
            texts.map(CString::new).collect::<Result<_, _>>().context("a text holds a NUL")?;
        let pointers = owned.iter().map(|text| text.as_ptr()).collect();
        Ok(Self { _owned: owned, pointers })
    }

    fn count(&self) -> Result<c_int> {
        c_int::try_from(self.pointers.len()).context("too many texts")
    }
}

/// Loads a library with global symbols, so that others can link against it.
fn library(path: &Path) -> Result<Library> {
    // SAFETY: the file has the pinned hash (`Toolchain::obtain`). Its initialisers only set up the
    // compiler, and may run on any thread.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .with_context(|| format!("cannot load {}", path.display()))
}
