//! How a manager's process and a worker process reach each other.

use std::fmt;
use std::io::{self, Read, Write};
#[cfg(unix)]
use std::net::Shutdown;
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};

#[cfg(unix)]
use cuda_driver::guard;

/// A connection between a manager's process and a worker process: a byte stream each way, which nothing else is written to. On
/// the manager's side it knows how the process at the other end is ended.
pub struct Connection {
    pub(super) input: Box<dyn Read + Send>,
    pub(super) output: Box<dyn Write + Send>,
    pub(super) end: End,
    pub(super) cut: Cut,
}

/// How the process at the other end is ended.
pub(super) enum End {
    Child(Child),
    Call(Box<dyn FnOnce() -> io::Result<()> + Send>),
    /// Nobody can.
    Unknown,
}

impl Connection {
    /// A connection of these two streams.
    #[must_use]
    pub fn new(input: impl Read + Send + 'static, output: impl Write + Send + 'static) -> Self {
        let (input, output) = (Box::new(input), Box::new(output));
        Self { input, output, end: End::Unknown, cut: Cut::default() }
    }

    /// The other end of [`spawn`](Self::spawn), in a worker: its standard input and output. Nothing else may be printed there.
    #[must_use]
    pub fn inherited() -> Self {
        Self::new(io::stdin(), io::stdout())
    }

    /// Starts a process and connects to its standard input and output. A worker that is given up is killed, and its end waited
    /// for: the command is the worker itself, and no shell that would leave it behind. What the process writes to its standard
    /// error goes where this process's goes.
    ///
    /// # Errors
    /// Those of [`Command::spawn`].
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        match (child.stdout.take(), child.stdin.take()) {
            (Some(input), Some(output)) => {
                Ok(Self { end: End::Child(child), ..Self::new(input, output) })
            }
            _ => Err(io::Error::other("a process was started without its pipes")),
        }
    }

    /// A connected socket, which is shut down when nobody here needs it any more.
    ///
    /// # Errors
    /// Those of [`UnixStream::try_clone`].
    #[cfg(unix)]
    pub fn socket(stream: UnixStream) -> io::Result<Self> {
        let (input, output) = (stream.try_clone()?, stream.try_clone()?);
        Ok(Self { cut: Cut(Some(stream)), ..Self::new(input, output) })
    }

    /// Says how the process at the other end is ended, on the manager's side: `end` ends it, and returns when it **writes to no
    /// memory any more**, on any device. It is called on a thread of its own, at most once, when the worker is given up, or its cache
    /// dropped; without success within the time limit, the blocks of the worker stay locked and the cache fails.
    #[must_use]
    pub fn ended_by(self, end: impl FnOnce() -> io::Result<()> + Send + 'static) -> Self {
        Self { end: End::Call(Box::new(end)), ..self }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("end", &self.end).finish_non_exhaustive()
    }
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Child(child) => write!(f, "process {}", child.id()),
            Self::Call(_) => f.write_str("a call"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

impl End {
    pub(super) fn pid(&self) -> Option<u32> {
        match self {
            Self::Child(child) => Some(child.id()),
            _ => None,
        }
    }

    /// Ends the process without waiting, if that can be done.
    pub(super) fn kill(&mut self) {
        if let Self::Child(child) = self {
            // One that has ended already cannot be killed.
            let _ = child.kill();
        }
    }

    /// Ends the process and waits until it has ended.
    pub(super) fn wait(self) -> io::Result<Option<ExitStatus>> {
        match self {
            Self::Child(mut child) => child.wait().map(Some),
            Self::Call(end) => end().map(|()| None),
            Self::Unknown => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// A socket that both of its ends are done with when this is dropped, though threads still read it and write to it.
#[derive(Debug, Default)]
pub(super) struct Cut(#[cfg(unix)] Option<UnixStream>);

impl Drop for Cut {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Some(stream) = &self.0 {
            guard!("replay.stuck-peers-are-cut", drop(stream.shutdown(Shutdown::Both)));
        }
    }
}
