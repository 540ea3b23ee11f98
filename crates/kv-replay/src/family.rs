//! Processes that end with the one that has started them, whatever ends it.
//!
//! A run with nodes or workers starts this program again. The system kills such a process when its parent dies, also while
//! it is stopped: a parent that is killed itself can tell nobody.

use std::io;
use std::process::Command;

use cuda_driver::guard;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Names the parent in the environment of its children.
const PARENT: &str = "KV_REPLAY_PARENT";

/// Has the process that `command` starts end with the calling thread. It must be this program.
pub fn bind(command: &mut Command) -> &mut Command {
    command.env(PARENT, std::process::id().to_string())
}

/// Binds this process to its parent, if a [bound](bind) command has started it. To be called before anything else.
pub fn join() -> io::Result<()> {
    let Some(parent) = std::env::var_os(PARENT) else { return Ok(()) };
    guard!("replay.ends-with-its-run", set_parent_process_death_signal(Some(Signal::KILL))?);
    // A parent that ended before this call was noticed by nobody.
    let now = getppid().map(Pid::as_raw_nonzero);
    match now.is_some_and(|now| parent.to_str() == Some(&now.to_string())) {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::NotFound, "the run that started it has ended")),
    }
}
