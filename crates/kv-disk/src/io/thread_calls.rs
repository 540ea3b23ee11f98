//! The calls that read and write several parts of memory at once. They need `unsafe`. See `docs/UNSAFE.md`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::{Body, Buffer};

/// Reads the first `bytes` of a buffer, and then a body; how many bytes came.
pub(super) fn read(
    file: &File,
    (buffer, bytes): (&mut Buffer, usize),
    body: &mut Body,
    offset: u64,
) -> io::Result<usize> {
    let offset = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    let parts = body.parts(buffer, bytes);
    let count = parts.len().try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `check` has compared `bytes` with the buffer. The parts are laid out as `iovec`s are, and name memory that
    // `buffer` and `body` keep alive and that nothing else touches during the call, since both are borrowed alone.
    let read = unsafe { libc::preadv(file.as_raw_fd(), parts.as_ptr().cast(), count, offset) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// Writes them; how many bytes were written.
pub(super) fn write(
    file: &File,
    (buffer, bytes): (&mut Buffer, usize),
    body: &mut Body,
    offset: u64,
) -> io::Result<usize> {
    let offset = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    let parts = body.parts(buffer, bytes);
    let count = parts.len().try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: as in `read`. The call reads the memory alone.
    let written = unsafe { libc::pwritev(file.as_raw_fd(), parts.as_ptr().cast(), count, offset) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}
