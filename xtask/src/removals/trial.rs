//! Building and running the tests of one removal.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Deserialize;

use super::copy::Copy;
use super::list::Removal;
use crate::{cargo, services};

/// Interval between two checks of a running test.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The result of a removal's tests.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// All tests failed.
    Noticed,
    /// All tests passed.
    Unnoticed,
    /// Some tests passed: these.
    PartlyNoticed(Vec<String>),
    /// This test neither passed nor failed in time.
    Hangs(String),
    /// The tests could not be built or started.
    NotTried(String),
}

impl Outcome {
    pub(super) fn is_noticed(&self) -> bool {
        *self == Self::Noticed
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noticed => f.write_str("noticed"),
            Self::Unnoticed => f.write_str("every test passes"),
            Self::PartlyNoticed(names) => write!(f, "still passes: {}", names.join(", ")),
            Self::Hangs(name) => write!(f, "hangs: {name}"),
            Self::NotTried(why) => write!(f, "not tried: {why}"),
        }
    }
}

/// Builds and runs tests of the copy.
pub(super) struct Tests<'a> {
    copy: &'a Copy,
    timeout: Duration,
    /// Package, binary and name of the tests that passed with every protection in place.
    passed: HashSet<(String, String, String)>,
}

impl<'a> Tests<'a> {
    pub(super) fn new(copy: &'a Copy, timeout: Duration) -> Self {
        Self { copy, timeout, passed: HashSet::new() }
    }

    /// Runs the tests in the unchanged tree, except those known to pass.
    pub(super) fn with_protection(&mut self, removal: &Removal) -> Outcome {
        let key = |name: &String| (removal.package.clone(), removal.test.clone(), name.clone());
        if removal.names.iter().all(|name| self.passed.contains(&key(name))) {
            return Outcome::Unnoticed;
        }
        let outcome = self.run(removal);
        if outcome == Outcome::Unnoticed {
            self.passed.extend(removal.names.iter().map(key));
        }
        outcome
    }

    /// Builds the tests of `removal` from the present copy, and runs each in a separate process.
    pub(super) fn run(&self, removal: &Removal) -> Outcome {
        let binary = match self.build(removal) {
            Ok(binary) => binary,
            Err(error) => return Outcome::NotTried(format!("{error:#}")),
        };
        let folder = self.copy.root().join("crates").join(&removal.package);
        let mut passing = Vec::new();
        for name in &removal.names {
            match run_one(&binary, &folder, name, self.timeout) {
                Ok(Some(status)) if status.success() => passing.push(name.clone()),
                Ok(Some(_)) => {}
                Ok(None) => return Outcome::Hangs(name.clone()),
                Err(error) => return Outcome::NotTried(format!("{error:#}")),
            }
        }
        match passing.len() {
            0 => Outcome::Noticed,
            all if all == removal.names.len() => Outcome::Unnoticed,
            _ => Outcome::PartlyNoticed(passing),
        }
    }

    /// The program that contains the tests.
    fn build(&self, removal: &Removal) -> anyhow::Result<PathBuf> {
        let mut command = Command::new(cargo::program());
        command
            .args(["test", "--no-run", "--quiet", "--all-features", "--message-format=json"])
            .args(["--package", &removal.package])
            .current_dir(self.copy.root())
            .env("CARGO_TARGET_DIR", self.copy.target())
            .stdin(Stdio::null());
        match removal.test.as_str() {
            "lib" => command.arg("--lib"),
            "bin" => command.arg("--bins"),
            name => command.args(["--test", name]),
        };
        let output = command.output().context("cannot start Cargo")?;
        if !output.status.success() {
            bail!("does not build: {}", first_error(&output.stdout));
        }
        let messages = String::from_utf8_lossy(&output.stdout);
        let executable = messages.lines().filter_map(executable).next_back();
        executable.with_context(|| format!("Cargo built no tests named {}", removal.test))
    }
}

/// Cargo's message about one built target.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    profile: Option<Profile>,
    message: Option<Diagnostic>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

#[derive(Deserialize)]
struct Diagnostic {
    level: String,
    message: String,
}

fn executable(line: &str) -> Option<PathBuf> {
    let message: Message = serde_json::from_str(line).ok()?;
    message.profile.filter(|profile| profile.test)?;
    message.executable
}

fn first_error(stdout: &[u8]) -> String {
    let text = String::from_utf8_lossy(stdout);
    let diagnostics = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok()?.message)
        .find(|diagnostic| diagnostic.level == "error");
    diagnostics
        .map_or_else(|| "for a reason that Cargo did not report".to_owned(), |found| found.message)
}

/// Runs one test; returns `None` if it had to be killed. A missing test counts as passed, because
/// nothing failed.
fn run_one(
    binary: &Path,
    folder: &Path,
    name: &str,
    timeout: Duration,
) -> anyhow::Result<Option<ExitStatus>> {
    let mut child = Command::new(binary)
        .args(["--exact", name])
        .current_dir(folder)
        .env("CARGO_MANIFEST_DIR", folder)
        .envs(services::variables())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {}", binary.display()))?;
    let start = Instant::now();
    while start.elapsed() < timeout {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(LOOK_EVERY);
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_of_tests_is_told_from_what_it_is_built_of() {
        let built =
            r#"{"reason":"compiler-artifact","profile":{"test":false},"executable":"/a/b"}"#;
        let tests = r#"{"reason":"compiler-artifact","profile":{"test":true},"executable":"/a/c"}"#;
        assert_eq!(executable(built), None);
        assert_eq!(executable(tests), Some(PathBuf::from("/a/c")));
        assert_eq!(executable("not of Cargo"), None);
    }

    #[test]
    fn a_test_that_fails_is_told_from_one_that_passes_or_hangs() {
        let folder = Path::new(".");
        let run = |program: &str, name, timeout| run_one(Path::new(program), folder, name, timeout);
        let long = Duration::from_secs(60);
        assert!(run("/bin/true", "a", long).unwrap().unwrap().success());
        assert!(!run("/bin/false", "a", long).unwrap().unwrap().success());
        assert!(run("/bin/true", "a", Duration::ZERO).unwrap().is_none());
        assert!(run("/no/such/program", "a", long).is_err());
    }

    #[test]
    fn a_build_that_fails_says_why() {
        let line = br#"{"reason":"compiler-message","message":{"level":"error","message":"no such thing"}}"#;
        assert_eq!(first_error(line), "no such thing");
        assert_eq!(first_error(b""), "for a reason that Cargo did not report");
    }
}
