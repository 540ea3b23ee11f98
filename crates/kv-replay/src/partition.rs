//! The drill of a network that parts: a node's connections, in both directions, go through this process, which stops passing
//! bytes on for a while.

use std::fs;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
struct Gate {
    is_shut: AtomicBool,
    /// The drill is over: every thread ends.
    has_ended: AtomicBool,
}

/// Passes the connections of one node on, but for while it is shut. As behind a network that has parted, neither side is told:
/// bytes do not come, and connections of that time are of no use behind it.
#[derive(Debug)]
pub(crate) struct Wall {
    gate: Arc<Gate>,
    threads: Vec<JoinHandle<()>>,
}

impl Wall {
    /// Listens at the first place of each route, and passes on to the second. As at a node without a wall, there is nothing at the
    /// first place before somebody listens at the second.
    pub(crate) fn new(routes: impl IntoIterator<Item = (PathBuf, PathBuf)>) -> io::Result<Self> {
        let mut wall = Self { gate: Arc::default(), threads: Vec::new() };
        for (from, to) in routes {
            let hidden = from.with_extension("wall");
            let listener = UnixListener::bind(&hidden)?;
            listener.set_nonblocking(true)?;
            let gate = Arc::clone(&wall.gate);
            let listens = thread::Builder::new().spawn(move || {
                while !to.exists() && !gate.has_ended.load(Ordering::Acquire) {
                    thread::park_timeout(LOOK);
                }
                // Without its name, the others find that the node is not there.
                drop(fs::rename(hidden, from));
                listen(&listener, &to, &gate);
            })?;
            wall.threads.push(listens);
        }
        Ok(wall)
    }

    pub(crate) fn shut(&self) {
        self.gate.is_shut.store(true, Ordering::Release);
    }

    pub(crate) fn open(&self) {
        self.gate.is_shut.store(false, Ordering::Release);
    }
}

impl Drop for Wall {
    fn drop(&mut self) {
        self.gate.has_ended.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn listen(listener: &UnixListener, to: &PathBuf, gate: &Arc<Gate>) {
    let mut pumps: Vec<JoinHandle<()>> = Vec::new();
    while !gate.has_ended.load(Ordering::Acquire) {
        match listener.accept() {
            // Without the node behind it, the connection ends.
            Ok((near, _)) => pumps.extend(pass(near, to, gate).unwrap_or_default()),
            Err(_) => thread::park_timeout(LOOK),
        }
        pumps.retain(|pump| !pump.is_finished());
    }
    for pump in pumps {
        drop(pump.join());
    }
}

/// Threads that pass a connection on, one for each direction.
fn pass(near: UnixStream, to: &PathBuf, gate: &Arc<Gate>) -> io::Result<Vec<JoinHandle<()>>> {
    // An accepted socket has the flags of a new one.
    let far = UnixStream::connect(to)?;
    let ways = [(near.try_clone()?, far.try_clone()?), (far, near)];
    let mut pumps = Vec::new();
    for (from, to) in ways {
        from.set_read_timeout(Some(LOOK))?;
        let gate = Arc::clone(gate);
        pumps.push(thread::Builder::new().spawn(move || {
            pump(&from, &to, &gate);
            // Of a connection that has ended one way, the other way is of no use.
            drop(from.shutdown(Shutdown::Both));
            drop(to.shutdown(Shutdown::Both));
        })?);
    }
    Ok(pumps)
}

fn pump(mut from: &UnixStream, mut to: &UnixStream, gate: &Gate) {
    let mut bytes = vec![0; 1 << 16];
    while !gate.has_ended.load(Ordering::Acquire) {
        if gate.is_shut.load(Ordering::Acquire) {
            while gate.is_shut.load(Ordering::Acquire) && !gate.has_ended.load(Ordering::Acquire) {
                thread::park_timeout(LOOK);
            }
            return;
        }
        match from.read(&mut bytes) {
            Ok(0) => return,
            // What has come while it was being shut is lost.
            Ok(_) if gate.is_shut.load(Ordering::Acquire) => {}
            Ok(read) => {
                if to.write_all(bytes.get(..read).unwrap_or_default()).is_err() {
                    return;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_seen_when_somebody_listens_behind_it() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let _behind = UnixListener::bind(place("there")).unwrap();
        let routes = [("early", "nowhere"), ("late", "there")];
        let _wall = Wall::new(routes.map(|(from, to)| (place(from), place(to)))).unwrap();
        while !place("late").exists() {
            thread::yield_now();
        }
        assert!(!place("early").exists());
    }

    #[test]
    fn bytes_pass_but_for_while_it_is_shut_and_connections_of_that_time_end() {
        let folder = tempfile::tempdir().unwrap();
        let (near, far) = (folder.path().join("near"), folder.path().join("far"));
        let behind = UnixListener::bind(&far).unwrap();
        let wall = Wall::new([(near.clone(), far)]).unwrap();
        while !near.exists() {
            thread::yield_now();
        }
        let connect = || {
            let here = UnixStream::connect(&near).unwrap();
            let (there, _) = behind.accept().unwrap();
            for stream in [&here, &there] {
                stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            }
            (here, there)
        };
        let (mut here, mut there) = connect();
        let mut byte = [0];
        here.write_all(b"a").unwrap();
        there.read_exact(&mut byte).unwrap();
        there.write_all(b"b").unwrap();
        here.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"b");
        wall.shut();
        here.write_all(b"c").unwrap();
        here.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let nothing = here.read(&mut byte).unwrap_err().kind();
        assert!(matches!(nothing, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{nothing}");
        wall.open();
        // The byte of that time has not come, and nothing more does.
        assert_eq!(there.read(&mut byte).unwrap(), 0);
        let (mut here, mut there) = connect();
        here.write_all(b"d").unwrap();
        there.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"d");
    }
}
