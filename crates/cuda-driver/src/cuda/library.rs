//! The driver library in this process, which our calls and cudarc's must share.
//!
//! The program chooses whether cudarc loads the library at its first use or is linked to it. In
//! both cases it is found here by name, because a process has one library of each name.

use std::sync::OnceLock;

use libloading::Library;

/// Names in the order in which cudarc tries them, without those of other libraries' versions.
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
#[cfg(windows)]
const NAMES: [&str; 1] = ["nvcuda.dll"];

/// The library, loaded until the process ends; none if it is not installed.
pub(super) fn find() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Some(library);
    }
    let found = loaded().or_else(|| NAMES.into_iter().find_map(load))?;
    Some(LIBRARY.get_or_init(|| found))
}

fn load(name: &str) -> Option<Library> {
    // SAFETY: loading a library runs its initialisers. Those of NVIDIA's driver may run at any time and
    // in any thread; nothing else is installed under its names.
    unsafe { Library::new(name) }.ok()
}

/// The library that this process has loaded already, by whatever name.
#[cfg(target_os = "linux")]
fn loaded() -> Option<Library> {
    use libloading::os::unix;
    let flags = unix::RTLD_NOW | libc::RTLD_NOLOAD;
    // SAFETY: nothing is loaded, so no initialiser runs.
    unsafe { unix::Library::open(Some("libcuda.so.1"), flags) }.ok().map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn loaded() -> Option<Library> {
    None
}
