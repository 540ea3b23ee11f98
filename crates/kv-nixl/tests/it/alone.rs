//! A trial in a process of its own, since UCX reads its variables once.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs this program again, told by `command` which trial it is, with UCX over `ways`; `name` says which it is when it fails.
pub(crate) fn run_alone(
    command: &mut Command,
    name: &str,
    ways: &str,
    limit: Duration,
) -> Result<(), String> {
    let mut child = command
        .env("UCX_TLS", ways)
        // A node's output is what it answers.
        .env("UCX_LOG_FILE", "stderr")
        // In the wheel of 1.5.1, a library of this module crashes when its process ends.
        .env("UCX_MODULES", "^ib")
        .stdin(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let begun = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("{name} over {ways}: {status}")),
            Ok(None) if begun.elapsed() < limit => {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            Ok(None) => {
                drop(child.kill());
                drop(child.wait());
                return Err(format!("{name} over {ways}: not done in {} s", limit.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}
