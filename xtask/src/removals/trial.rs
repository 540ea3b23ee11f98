//! The build whose protections can be taken out, and runs of its tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use super::list::Removal;
use crate::{cargo, services};

/// Interval between two checks of a running test.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The variable that names the protection to take out.
const VARIABLE: &str = "KV_REMOVE";

/// The result of a removal's tests.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// All tests failed.
    Noticed,
    /// These tests passed.
    Passed(Vec<String>),
    /// This test neither passed nor failed in time.
    Hangs(String),
    /// Why the tests could not be run.
    NotTried(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noticed => f.write_str("noticed"),
            Self::Passed(names) => write!(f, "still passes: {}", names.join(", ")),
            Self::Hangs(name) => write!(f, "hangs: {name}"),
            Self::NotTried(why) => write!(f, "not tried: {why}"),
        }
    }
}

/// Test programs, by crate and name.
pub(super) struct Programs {
    paths: BTreeMap<(String, String), PathBuf>,
    timeout: Duration,
    /// Whether a test, of a crate and program, passes with every protection in place.
    whole: Mutex<BTreeMap<(String, String, String), bool>>,
}

impl Programs {
    /// Builds the test programs of `removals`.
    pub(super) fn build(removals: &[Removal], timeout: Duration) -> anyhow::Result<Self> {
        let packages: BTreeSet<&str> = removals.iter().map(|one| one.package.as_str()).collect();
        let mut command = cargo::command();
        command
            .args(["test", "--no-run", "--all-features", "--lib", "--bins", "--tests"])
            .arg("--message-format=json-render-diagnostics")
            .args(packages.iter().flat_map(|name| ["--package", *name]))
            .env("CARGO_TARGET_DIR", cargo::target_folder().join("removals"))
            .env("CARGO_INCREMENTAL", "0")
            .env("RUSTFLAGS", "--cfg removals")
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        let output = command.output().context("cannot start Cargo")?;
        ensure!(output.status.success(), "the tests do not build with `--cfg removals`");
        let messages = String::from_utf8_lossy(&output.stdout);
        let paths = messages.lines().filter_map(program).collect();
        Ok(Self { paths, timeout, whole: Mutex::default() })
    }

    /// Runs the removal's tests with the protection, where they must pass, and without it.
    pub(super) fn take_out(&self, removal: &Removal) -> Outcome {
        let Removal { package, program, .. } = removal;
        let Some(path) = self.paths.get(&(package.clone(), program.clone())) else {
            return Outcome::NotTried(format!("{package} has no test program {program}"));
        };
        self.outcome(removal, path).unwrap_or_else(|error| Outcome::NotTried(format!("{error:#}")))
    }

    fn outcome(&self, removal: &Removal, path: &Path) -> anyhow::Result<Outcome> {
        let mut passed = Vec::new();
        for test in &removal.tests {
            if !self.passes_whole(removal, path, test)? {
                bail!("{test} does not pass with the protection in");
            }
            match self.run(path, &removal.package, test, Some(&removal.name))? {
                Some(status) if status.success() => passed.push(test.clone()),
                Some(_) => {}
                None => return Ok(Outcome::Hangs(test.clone())),
            }
        }
        Ok(if passed.is_empty() { Outcome::Noticed } else { Outcome::Passed(passed) })
    }

    /// Whether `test` passes with every protection in place. Runs it once for all removals.
    fn passes_whole(&self, removal: &Removal, path: &Path, test: &str) -> anyhow::Result<bool> {
        let Removal { package, program, .. } = removal;
        let key = (package.clone(), program.clone(), test.to_owned());
        let known = || self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&passes) = known().get(&key) {
            return Ok(passes);
        }
        ensure!(is_there(path, test)?, "{package}'s program {program} has no test {test}");
        let status = self.run(path, package, test, None)?;
        let passes = status.is_some_and(|status| status.success());
        known().insert(key, passes);
        Ok(passes)
    }

    /// Runs one test; returns `None` if it had to be killed.
    fn run(
        &self,
        path: &Path,
        package: &str,
        test: &str,
        removed: Option<&str>,
    ) -> anyhow::Result<Option<ExitStatus>> {
        let folder = cargo::workspace_root().join("crates").join(package);
        let mut command = Command::new(path);
        command
            .args(["--exact", test])
            .current_dir(&folder)
            .env("CARGO_MANIFEST_DIR", &folder)
            .env("CUDA_SIM_RACES", "abort")
            .envs(services::variables())
            .env_remove(VARIABLE)
            .envs(removed.map(|name| (VARIABLE, name)));
        ended(&mut command, self.timeout)
    }
}

/// Whether `--exact` finds a test of this name.
fn is_there(path: &Path, test: &str) -> anyhow::Result<bool> {
    let output = Command::new(path).args(["--list", "--exact", test]).output();
    let output = output.with_context(|| format!("cannot start {}", path.display()))?;
    let expected = format!("{test}: test");
    Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| line == expected))
}

/// How a program ended; `None` if it had to be killed.
fn ended(command: &mut Command, timeout: Duration) -> anyhow::Result<Option<ExitStatus>> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
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

/// Cargo's message about one built target.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    profile: Option<Profile>,
    manifest_path: Option<PathBuf>,
    target: Option<cargo::Target>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// The crate, name and path of a test program that `line` reports.
fn program(line: &str) -> Option<((String, String), PathBuf)> {
    let message: Message = serde_json::from_str(line).ok()?;
    message.profile.filter(|profile| profile.test)?;
    let folder = message.manifest_path?.parent()?.file_name()?.to_str()?.to_owned();
    let target = message.target?;
    let name = match target.kind.first().map(String::as_str) {
        Some("lib") => "lib".to_owned(),
        Some("bin") => "bin".to_owned(),
        _ => target.name,
    };
    Some(((folder, name), message.executable?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_of_tests_is_told_from_what_it_is_built_of() {
        let line = |test: bool, kind: &str, name: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","profile":{{"test":{test}}},"executable":"/a/b","manifest_path":"/w/crates/kv-pool/Cargo.toml","target":{{"name":"{name}","kind":["{kind}"]}}}}"#
            )
        };
        let found = |name: &str| Some((("kv-pool".to_owned(), name.to_owned()), "/a/b".into()));
        assert_eq!(program(&line(false, "bin", "kv-pool")), None);
        assert_eq!(program(&line(true, "test", "it")), found("it"));
        assert_eq!(program(&line(true, "lib", "kv_pool")), found("lib"));
        assert_eq!(program("not of Cargo"), None);
    }

    #[test]
    fn a_test_that_fails_is_told_from_one_that_passes_or_hangs() {
        let run = |program: &str, timeout| ended(&mut Command::new(program), timeout);
        let long = Duration::from_secs(60);
        assert!(run("/bin/true", long).unwrap().unwrap().success());
        assert!(!run("/bin/false", long).unwrap().unwrap().success());
        assert!(run("/bin/true", Duration::ZERO).unwrap().is_none());
        assert!(run("/no/such/program", long).is_err());
    }
}
