//! Prometheus' own `promtool` reads the text and finds nothing to say about names, types and help.
//!
//! Without one this trial is listed as ignored. `KV_PROMTOOL` names one that is not in the path; it must exist then.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use kv_disk::DiskStats;
use kv_manager::{LowerStats, ManagerStats};
use kv_plane::CacheStats;
use kv_plane::metrics::Exposition;
use kv_pool::stats::PoolStats;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let args = Arguments::from_args();
    let found = promtool();
    let absent = found.is_none();
    let trial =
        Trial::test("promtool_has_nothing_to_say", move || check(&found.unwrap_or_default()))
            .with_ignored_flag(absent);
    let why = "no promtool here; name one by KV_PROMTOOL";
    let trial = if absent { trial.with_kind(why) } else { trial };
    libtest_mimic::run(&args, vec![trial]).exit();
}

fn promtool() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("KV_PROMTOOL") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("promtool")).find(|path| path.is_file())
}

fn check(promtool: &PathBuf) -> Result<(), Failed> {
    let mut exposition = Exposition::new();
    exposition.label("model", "a \"name\" with \\ and\na line break")?;
    exposition.manager(&ManagerStats::default()).lower_tiers(&LowerStats::default());
    exposition.cache(&CacheStats::default());
    exposition.disk(&DiskStats { read_bytes: u64::MAX, ..Default::default() });
    exposition.label("cache", "second")?.pool(&PoolStats::default());
    let mut command = Command::new(promtool);
    let pipes = command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = pipes.stderr(Stdio::piped()).spawn()?;
    child.stdin.take().ok_or("no input")?.write_all(exposition.text().as_bytes())?;
    let output = child.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    match output.status.success() && said.is_empty() {
        true => Ok(()),
        false => Err(format!("{}: {}", output.status, String::from_utf8_lossy(&said)).into()),
    }
}
