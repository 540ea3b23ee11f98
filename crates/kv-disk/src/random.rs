//! Random bytes of the system: what must not come twice rests on nothing that can be brought back, such as a file.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// So many random bytes, 256 at most.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // The system gives up to 256 bytes whole.
    let filled = getrandom(&mut bytes[..], GetRandomFlags::empty())?;
    if filled == N { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}
