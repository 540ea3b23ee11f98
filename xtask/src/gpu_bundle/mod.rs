//! `cargo xtask gpu-bundle`: the GPU tests, the GPU benchmarks and `kv-replay` in one folder, for a
//! machine with a GPU but without build tools.

mod artifacts;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::cargo::{self, Package, workspace_root};
use artifacts::{Artifact, executables};

/// The bundle must be small enough to copy quickly.
const BYTES_MAX: u64 = 48 << 20;
/// The script that runs the packed programs and prints a table.
const SCRIPT: &str = include_str!("run.sh");
const PROGRAM: &str = "kv-replay";
/// The feature of tests that also use NVML if the machine has it. Building does not need NVML.
const NVML: &str = "nvml";

/// Builds, strips and packs into `gpu-bundle/`, which is recreated.
pub(crate) fn run() -> Result<()> {
    let wanted = Wanted::of(&cargo::packages()?);
    ensure!(!wanted.tests.is_empty(), "no crate has a test target named `gpu`");
    let mut built = Vec::new();
    for args in wanted.cargo_args() {
        built.extend(build(&args)?);
    }
    let bundle = workspace_root().join("gpu-bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle).context("cannot remove the last gpu-bundle")?;
    }
    let mut sizes = Vec::new();
    for (place, executable) in wanted.places(&built)? {
        sizes.push((pack(&executable, &bundle.join(&place))?, place));
    }
    // The peers' benchmark is packed only if it was built before. It is rebuilt if necessary.
    if crate::peers::built().is_some() {
        let place = "bin/peers".to_owned();
        sizes.push((pack(&crate::peers::build()?, &bundle.join(&place))?, place));
    }
    write_script(&bundle.join("run.sh"))?;
    println!("{}", report(&mut sizes)?);
    Ok(())
}

/// The packed targets, each with its crate's name.
#[derive(Debug, Default, PartialEq)]
struct Wanted {
    /// Crates with a test target named `gpu`.
    tests: Vec<String>,
    /// Those of them with a feature [`NVML`].
    with_nvml: Vec<String>,
    /// Benchmarks whose names end in `_gpu`: crate and benchmark.
    benches: Vec<(String, String)>,
}

impl Wanted {
    fn of(packages: &[Package]) -> Self {
        let mut wanted = Self::default();
        for package in packages {
            if package.targets_of("test").any(|name| name == "gpu") {
                wanted.tests.push(package.name.clone());
                if package.features.contains_key(NVML) {
                    wanted.with_nvml.push(package.name.clone());
                }
            }
            let benches = package.targets_of("bench").filter(|name| name.ends_with("_gpu"));
            wanted.benches.extend(benches.map(|name| (package.name.clone(), name.to_owned())));
        }
        wanted
    }

    /// One run of Cargo for each crate. A run for several crates would build each with the features
    /// of the others.
    fn cargo_args(&self) -> Vec<Vec<String>> {
        let line = |text: String| text.split_whitespace().map(str::to_owned).collect();
        let tests = self.tests.iter().map(|name| {
            let nvml = self.with_nvml.contains(name).then(|| format!("--features {NVML}"));
            let nvml = nvml.unwrap_or_default();
            format!("test --release --no-run --package {name} {nvml} --test gpu")
        });
        let benches = self
            .benches
            .iter()
            .map(|(name, bench)| format!("bench --no-run --package {name} --bench {bench}"));
        let program = format!("build --release --package {PROGRAM} --bin {PROGRAM}");
        tests.chain(benches).chain([program]).map(line).collect()
    }

    /// The path of each executable in the bundle.
    fn places(&self, built: &[Artifact]) -> Result<Vec<(String, PathBuf)>> {
        let find = |package: &str, kind: &str, target: &str| {
            let found = built.iter().find(|artifact| artifact.is(package, kind, target));
            let missing = || format!("Cargo built no {kind} `{target}` of {package}");
            found.map(|artifact| artifact.executable.clone()).with_context(missing)
        };
        let mut places = Vec::new();
        for package in &self.tests {
            places.push((format!("tests/{package}-gpu"), find(package, "test", "gpu")?));
        }
        for (package, bench) in &self.benches {
            let place = format!("benches/{bench}");
            ensure!(
                places.iter().all(|(other, _)| *other != place),
                "two crates have a benchmark `{bench}`"
            );
            places.push((place, find(package, "bench", bench)?));
        }
        places.push((format!("bin/{PROGRAM}"), find(PROGRAM, "bin", PROGRAM)?));
        Ok(places)
    }
}

/// Builds one target. All are built in the release profile, as users do: without debug assertions.
fn build(args: &[String]) -> Result<Vec<Artifact>> {
    println!("cargo {}", args.join(" "));
    let output = cargo::command()
        .args(args)
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start Cargo")?;
    if !output.status.success() {
        bail!("cargo {} failed", args.join(" "));
    }
    executables(&String::from_utf8_lossy(&output.stdout))
}

/// Copies an executable, strips the copy and compresses it; returns its size in bytes.
fn pack(executable: &Path, place: &Path) -> Result<u64> {
    let folder = place.parent().context("a place in the bundle has a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::copy(executable, place).with_context(|| format!("cannot copy to {}", place.display()))?;
    // If `strip` or `gzip` is missing, the copy is larger but works. The limit on the size still applies.
    if let Ok(status) = Command::new("strip").arg(place).status() {
        ensure!(status.success(), "`strip {}` failed", place.display());
    }
    compress(place)
}

/// Compresses a file, which the script unpacks; returns its size in bytes.
fn compress(place: &Path) -> Result<u64> {
    let compressed = Command::new("gzip").args(["--no-name", "--force"]).arg(place).status();
    let Ok(status) = compressed else { return Ok(fs::metadata(place)?.len()) };
    ensure!(status.success(), "`gzip {}` failed", place.display());
    let mut packed = place.as_os_str().to_owned();
    packed.push(".gz");
    Ok(fs::metadata(packed)?.len())
}

fn write_script(place: &Path) -> Result<()> {
    fs::write(place, SCRIPT).with_context(|| format!("cannot write {}", place.display()))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(place, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// The sizes, largest first. Fails with the same lines if their sum is too large.
fn report(sizes: &mut [(u64, String)]) -> Result<String> {
    sizes.sort_by(|a, b| b.cmp(a));
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut lines: Vec<String> =
        sizes.iter().map(|(bytes, place)| format!("{:7.2} MiB  {place}", mib(*bytes))).collect();
    let total = sizes.iter().map(|(bytes, _)| bytes).sum();
    lines.push(format!("{:7.2} MiB  in all, of {:.0} MiB allowed", mib(total), mib(BYTES_MAX)));
    let lines = lines.join("\n");
    ensure!(total <= BYTES_MAX, "gpu-bundle is too large:\n{lines}");
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cargo::Target;

    fn package(name: &str, targets: &[(&str, &str)]) -> Package {
        let targets = targets
            .iter()
            .map(|&(kind, name)| Target { name: name.to_owned(), kind: vec![kind.to_owned()] })
            .collect();
        Package {
            name: name.to_owned(),
            targets,
            publish: None,
            features: BTreeMap::new(),
            dependencies: Vec::new(),
        }
    }

    fn artifact(package: &str, kind: &str, target: &str) -> Artifact {
        Artifact {
            package: package.to_owned(),
            kinds: vec![kind.to_owned()],
            target: target.to_owned(),
            executable: PathBuf::from(format!("target/{target}")),
        }
    }

    fn bench(package: &str) -> Artifact {
        artifact(package, "bench", "copy_gpu")
    }

    fn wanted() -> Wanted {
        Wanted::of(&[
            package("kv-a", &[("lib", "kv_a"), ("test", "gpu"), ("bench", "copy_gpu")]),
            package("kv-b", &[("test", "gpu_less"), ("bench", "copy")]),
        ])
    }

    #[test]
    fn gpu_targets_are_found_by_name() {
        let benches = vec![("kv-a".to_owned(), "copy_gpu".to_owned())];
        let tests = vec!["kv-a".to_owned()];
        assert_eq!(wanted(), Wanted { tests, with_nvml: Vec::new(), benches });
    }

    #[test]
    fn tests_that_know_nvml_are_built_with_it() {
        let mut packages = ["kv-a", "kv-b"].map(|name| package(name, &[("test", "gpu")]));
        packages[1].features.insert("nvml".to_owned(), Vec::new());
        let args = Wanted::of(&packages).cargo_args();
        let lines: Vec<_> = args.iter().map(|args| args.join(" ")).collect();
        let tests: Vec<_> = lines.iter().filter(|line| line.starts_with("test")).collect();
        assert_eq!(
            tests,
            [
                "test --release --no-run --package kv-a --test gpu",
                "test --release --no-run --package kv-b --features nvml --test gpu",
            ]
        );
    }

    #[test]
    fn each_executable_has_its_place_and_none_may_be_missing() {
        let mut built = vec![
            artifact("kv-a", "test", "gpu"),
            bench("kv-a"),
            artifact("kv-replay", "bin", "kv-replay"),
        ];
        let places: Vec<String> =
            wanted().places(&built).unwrap().into_iter().map(|(place, _)| place).collect();
        assert_eq!(places, ["tests/kv-a-gpu", "benches/copy_gpu", "bin/kv-replay"]);
        built.remove(1);
        let error = wanted().places(&built).unwrap_err().to_string();
        assert_eq!(error, "Cargo built no bench `copy_gpu` of kv-a");
    }

    #[test]
    fn two_benches_of_one_name_are_refused() {
        let copy = [("bench", "copy_gpu")];
        let wanted = Wanted::of(&[package("kv-a", &copy), package("kv-b", &copy)]);
        let error = wanted.places(&[bench("kv-a"), bench("kv-b")]).unwrap_err().to_string();
        assert_eq!(error, "two crates have a benchmark `copy_gpu`");
    }

    #[test]
    fn too_large_a_bundle_is_refused_with_its_sizes() {
        let mut sizes = vec![(1 << 20, "bin/a".to_owned()), (47 << 20, "bin/b".to_owned())];
        let fits = "  47.00 MiB  bin/b\n   1.00 MiB  bin/a\n  48.00 MiB  in all, of 48 MiB allowed";
        assert_eq!(report(&mut sizes).unwrap(), fits);
        sizes.push((1, "bin/c".to_owned()));
        let error = report(&mut sizes).unwrap_err().to_string();
        assert!(error.starts_with("gpu-bundle is too large:\n  47.00 MiB  bin/b\n"), "{error}");
    }

    /// Creates a bundle of shell scripts and runs it; returns the table and whether the run
    /// succeeded.
    fn run_script(programs: &[(&str, &str)]) -> (String, bool) {
        let folder = tempfile::tempdir().unwrap();
        for (place, body) in programs {
            let place = folder.path().join(place);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            write_script(&place).unwrap();
            fs::write(&place, format!("#!/bin/sh\n{body}\n")).unwrap();
        }
        let script = folder.path().join("run.sh");
        write_script(&script).unwrap();
        let out = folder.path().join("results");
        let output = Command::new("bash").arg(&script).env("OUT", &out).output().unwrap();
        let table = fs::read_to_string(out.join("results.txt")).unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).ends_with(&table));
        (table, output.status.success())
    }

    #[test]
    fn the_script_requires_a_gpu_and_runs_benches_after_tests() {
        let (table, success) = run_script(&[
            ("tests/a-gpu", "test \"$KV_REQUIRE_GPU\" = 1 && echo 'test result: ok. 1 passed'"),
            ("benches/b_gpu", "test \"$1\" = --bench"),
        ]);
        let names: Vec<&str> =
            table.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(names, ["name", "tests/a-gpu", "benches/b_gpu"]);
        assert!(success && !table.contains("FAILED"), "{table}");
    }

    #[test]
    fn the_script_unpacks_what_was_compressed() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("tests/a-gpu");
        fs::create_dir_all(folder.path().join("tests")).unwrap();
        write_script(&place).unwrap();
        fs::write(&place, "#!/bin/sh\necho 'test result: ok. 1 passed'\n").unwrap();
        assert!(compress(&place).unwrap() > 0 && !place.exists());
        let script = folder.path().join("run.sh");
        write_script(&script).unwrap();
        for _ in 0..2 {
            let mut run = Command::new("bash");
            let run = run.arg(&script).env("OUT", folder.path().join("out"));
            assert!(run.status().unwrap().success());
        }
        assert!(place.exists());
    }

    #[test]
    fn the_script_remembers_a_failure_and_runs_the_other_tests_but_no_bench() {
        let (table, success) = run_script(&[
            ("tests/a-gpu", "exit 3"),
            ("tests/b-gpu", "echo 'test result: ok. 2 passed; 0 failed'"),
            ("benches/b_gpu", "exit 0"),
        ]);
        let results: Vec<(&str, &str)> = table
            .lines()
            .filter_map(|line| Some((line.split_whitespace().next()?, line.get(41..53)?.trim())))
            .collect();
        assert_eq!(
            results,
            [("name", "result"), ("tests/a-gpu", "FAILED (3)"), ("tests/b-gpu", "ok")]
        );
        assert!(!success);
    }

    #[test]
    fn the_script_fails_for_a_test_that_ran_nothing() {
        for says in ["", "echo 'test result: ok. 0 passed; 0 failed; 9 ignored'"] {
            let (table, success) = run_script(&[("tests/a-gpu", says)]);
            assert!(!success && table.contains("RAN NOTHING"), "{table}");
        }
    }
}
