//! Where a node listens: a Unix socket or a TCP port, and streams to it with deadlines.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use kv_pool::guard;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::leases::PeerHost;
use crate::{NodeError, PeerError};

/// How long a folder is waited for in which another node takes away what was left there.
const FOLDER_MAX: Duration = Duration::from_secs(2);

/// Where a node listens. Written as `unix:PATH` or `tcp:HOST:PORT`, with a number for the host.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Address {
    /// A socket in the file system, of this host only. In a folder that several hosts share, such as by NFS, a node of one takes the
    /// socket of a living node of another one for one that was left, since it cannot connect to it, and takes its place: choose a folder
    /// of the host's own, such as below `/run`.
    Unix(PathBuf),
    /// A TCP port. To listen on port 0 is to listen on one that is free.
    Tcp(SocketAddr),
}

impl FromStr for Address {
    type Err = NodeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || NodeError::Address { found: text.to_owned() };
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", at)) => at.parse().map(Self::Tcp).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(at) => write!(f, "tcp:{at}"),
        }
    }
}

/// A connection of either kind.
#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// The end of a duration from now on; of one that is longer than a clock counts, the end of a year.
pub(crate) fn after(duration: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 86_400);
    Instant::now() + duration.min(YEAR)
}

/// The time that is left, and at least as much as a timeout needs.
fn left(deadline: Instant) -> Result<Duration, PeerError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(PeerError::Late) } else { Ok(left.max(Duration::from_micros(10))) }
}

impl Stream {
    pub(crate) fn connect(address: &Address, deadline: Instant) -> Result<Self, PeerError> {
        let io = PeerError::io("connecting");
        let left = left(deadline)?;
        let stream = match address {
            Address::Tcp(at) => TcpStream::connect_timeout(at, left).map(Self::Tcp),
            Address::Unix(path) => connect_unix(path).map(Self::Unix),
        };
        let stream = stream.map_err(io)?;
        stream.ready().map_err(PeerError::io("setting up a connection"))?;
        Ok(stream)
    }

    /// Makes a new connection blocking, and has it send at once.
    fn ready(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_nonblocking(false),
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)
            }
        }
    }

    pub(crate) fn write_all(
        &mut self,
        mut bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), PeerError> {
        while !bytes.is_empty() {
            let left = Some(left(deadline)?);
            let written = match self {
                Self::Unix(stream) => {
                    stream.set_write_timeout(left).and_then(|()| stream.write(bytes))
                }
                Self::Tcp(stream) => {
                    stream.set_write_timeout(left).and_then(|()| stream.write(bytes))
                }
            };
            match written {
                Ok(0) => return Err(PeerError::Closed),
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(PeerError::io("sending")(error)),
            }
        }
        Ok(())
    }

    /// Reads some bytes; late if none come by the deadline.
    pub(crate) fn read(&mut self, into: &mut [u8], deadline: Instant) -> Result<usize, PeerError> {
        loop {
            let left = Some(left(deadline)?);
            let read = match self {
                Self::Unix(stream) => {
                    stream.set_read_timeout(left).and_then(|()| stream.read(into))
                }
                Self::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(into)),
            };
            match read {
                Ok(0) if !into.is_empty() => return Err(PeerError::Closed),
                Ok(read) => return Ok(read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(PeerError::io("receiving")(error)),
            }
        }
    }

    pub(crate) fn read_exact(
        &mut self,
        mut into: &mut [u8],
        deadline: Instant,
    ) -> Result<(), PeerError> {
        while !into.is_empty() {
            let read = self.read(into, deadline)?;
            into = into.get_mut(read..).unwrap_or_default();
        }
        Ok(())
    }

    /// From where the connection comes.
    pub(crate) fn host(&self) -> io::Result<PeerHost> {
        match self {
            Self::Unix(_) => Ok(PeerHost::Local),
            Self::Tcp(stream) => Ok(PeerHost::of(stream.peer_addr()?.ip())),
        }
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
        }
    }

    /// Ends the connection for all who have it.
    pub(crate) fn shut(&self) {
        // One that has ended already is as it should be.
        drop(match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        });
    }
}

/// Connects without waiting: to a process that accepts nothing, a blocking call would wait for ever.
fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// Listens at a path. A socket that a process has left there that is no more is taken away; one at which somebody listens is not, nor is
/// what is no socket.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    // It gets its name when it listens: who sees the name can connect, and who is refused there sees one that was left.
    let mut made = tempfile::Builder::new();
    let made = made.prefix(".").make_in(folder, |path| UnixListener::bind(path))?;
    let taken = match made.persist_noclobber(path) {
        Ok(listener) => return Ok(listener),
        Err(taken) if taken.error.kind() == io::ErrorKind::AlreadyExists => taken.file,
        Err(other) => return Err(other.error),
    };
    // Of two nodes that find such a socket, one would take away the other's new one.
    let held = File::open(folder)?;
    hold(&held)?;
    if !is_left(path) {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    fs::remove_file(path)?;
    taken.persist_noclobber(path).map_err(|taken| match taken.error.kind() {
        // By a node that had nothing to take away.
        io::ErrorKind::AlreadyExists => io::ErrorKind::AddrInUse.into(),
        _ => taken.error,
    })
}

/// Locks a folder against other nodes that take away what was left there, until the lock is dropped.
fn hold(folder: &File) -> io::Result<()> {
    let since = Instant::now();
    loop {
        match folder.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if since.elapsed() < FOLDER_MAX => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::WouldBlock.into()),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// Whether a path is a socket at which nobody listens.
fn is_left(path: &Path) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|seen| seen.file_type().is_socket());
    let is_refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket
        && guard!("remote.leaves-live-sockets", connect_unix(path).is_err_and(is_refused), else true)
}

/// What tells a file from another one that came to its place.
fn number_of(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|seen| (seen.dev(), seen.ino()))
}

/// A socket that listens. Dropping it removes a Unix socket's file, if it is still its own.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Socket,
    address: Address,
    /// The number of a Unix socket's file.
    file: Option<(u64, u64)>,
}

#[derive(Debug)]
enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    pub(crate) fn bind(address: &Address) -> io::Result<Self> {
        let (socket, address, file) = match address {
            Address::Unix(path) => {
                let listener = bind_unix(path)?;
                (Socket::Unix(listener), address.clone(), number_of(path).ok())
            }
            Address::Tcp(at) => {
                let listener = TcpListener::bind(at)?;
                let at = listener.local_addr()?;
                (Socket::Tcp(listener), Address::Tcp(at), None)
            }
        };
        match &socket {
            Socket::Unix(listener) => listener.set_nonblocking(true)?,
            Socket::Tcp(listener) => listener.set_nonblocking(true)?,
        }
        Ok(Self { socket, address, file })
    }

    /// Where it listens, with the port that was free.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// A connection; none if none waits.
    pub(crate) fn accept(&self) -> io::Result<Option<Stream>> {
        let accepted = match &self.socket {
            Socket::Unix(listener) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
            Socket::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
        };
        match accepted {
            Ok(stream) => stream.ready().map(|()| Some(stream)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Unix(listener) => listener.as_fd(),
            Socket::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Address::Unix(path) = &self.address
            && self.file.is_some()
            && guard!("remote.removes-its-own-socket", number_of(path).ok() == self.file, else true)
        {
            // Its folder may be gone already.
            drop(fs::remove_file(path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_they_are_read() {
        for text in ["unix:/run/kv/a.sock", "tcp:127.0.0.1:0", "tcp:[::1]:7000"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "unix:", "tcp:", "tcp:localhost:1", "tcp:1.2.3.4", "/run/a.sock", "udp:1"]
        {
            assert_eq!(text.parse::<Address>(), Err(NodeError::Address { found: text.to_owned() }));
        }
    }
}
