//! A library and a server that tests use where they can be had: NIXL, from its wheel, and etcd, from Debian's package. Both are pinned
//! by hash, unpacked into the target folder, and need no root. Where one cannot be had, its tests are ignored, and this says why.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};

use crate::cargo;
use crate::kernels::toolchain;

/// The package with the server, and the hash of its file.
const ETCD: (&str, &str) =
    ("etcd-server=3.4.23-4+b4", "3a9445d4560ad6de1c375756b2a17d97713df44cbd20a658c871fe108af7ef5d");

/// Obtains one of them, into a folder.
type Obtain = fn(&Path) -> Result<PathBuf>;

/// The variables that tell tests where each is.
const SERVICES: [(&str, Obtain); 2] = [("KV_NIXL_LIBRARY", toolchain::nixl), ("KV_ETCD", etcd)];

static PROVIDED: OnceLock<Vec<(&str, PathBuf)>> = OnceLock::new();

/// Has every Cargo that this program starts from now on know of them, but for variables that are set already. Prints what is
/// left out.
pub(crate) fn provide() {
    PROVIDED.get_or_init(|| {
        let folder = cargo::target_folder().join("toolchain");
        let unset = SERVICES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
        let found = unset.filter_map(|(name, obtain)| match obtain(&folder) {
            Ok(path) => Some((name, path)),
            Err(error) => {
                println!("left out: the tests that need {name}: {error:#}");
                None
            }
        });
        found.collect()
    });
}

/// What was provided.
pub(crate) fn variables() -> impl Iterator<Item = (&'static str, &'static Path)> {
    PROVIDED.get().into_iter().flatten().map(|(name, path)| (*name, path.as_path()))
}

/// The server's program, fetched first if it is missing.
fn etcd(folder: &Path) -> Result<PathBuf> {
    let (package, sha256) = ETCD;
    let content = folder.join("etcd-server");
    let program = content.join("usr/bin/etcd");
    if program.exists() {
        return Ok(program);
    }
    ensure!(cfg!(target_arch = "x86_64"), "the pinned package is for x86_64");
    let aside = folder.join(format!("etcd-server.{}.partial", std::process::id()));
    fs::create_dir_all(&aside).with_context(|| format!("cannot create {}", aside.display()))?;
    let unpacked = unpack(package, sha256, &aside);
    let placed = unpacked.and_then(|()| Ok(fs::rename(aside.join("content"), &content)?));
    fs::remove_dir_all(&aside).with_context(|| format!("cannot remove {}", aside.display()))?;
    // Another run of this task may have been faster.
    if !program.exists() {
        placed?;
        bail!("{package} has no etcd");
    }
    Ok(program)
}

fn unpack(package: &str, sha256: &str, folder: &Path) -> Result<()> {
    succeeds("apt-get", &["--quiet", "download", package], folder)?;
    let mut files = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let file = files.find(|path| path.extension().is_some_and(|end| end == "deb"));
    let file = file.with_context(|| format!("{package} was not fetched"))?;
    toolchain::verify(&file, sha256)?;
    let path = file.to_str().context("a path is no text")?;
    succeeds("dpkg", &["-x", path, "content"], folder)
}

fn succeeds(program: &str, arguments: &[&str], folder: &Path) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(())
}
