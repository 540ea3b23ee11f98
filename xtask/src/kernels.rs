//! `cargo xtask kernels`: from the CUDA C++ sources to the committed PTX.
//!
//! Every `kernels/*.cu` becomes one `crates/kv-kernels/ptx/<topic>.compute_80.ptx`. The compiler is
//! pinned by hash, so the same sources give the same bytes on every machine, and `--check` can tell
//! committed PTX from stale PTX. What was built is also assembled for the cards we serve, because
//! only the assembler knows registers and spills.

mod nvrtc;
mod ptxas;
mod toolchain;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use nvrtc::{Compiler, Header, Source};
use ptxas::Assembler;
use toolchain::Toolchain;

/// The virtual architecture of the committed PTX, which every card since runs through its driver.
const ARCHITECTURE: &str = "compute_80";
/// The cards for which the PTX must assemble without spills.
const CARDS: [&str; 2] = ["sm_80", "sm_90"];
/// What the compiler is told. `__NV_TARGET_H` keeps the compiler's own `<nv/target>` out, which
/// would leave 38 unused globals in every module.
const OPTIONS: [&str; 4] =
    ["--gpu-architecture=compute_80", "-std=c++17", "-default-device", "-D__NV_TARGET_H"];

/// Options of `cargo xtask kernels`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare with the committed PTX instead of writing it.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Builds the PTX of every kernel and writes it, or compares it with what is committed.
pub(crate) fn run(args: &Args) -> Result<()> {
    let built = build_all()?;
    if args.check { compare(&built) } else { write(&built) }
}

/// The PTX of one source.
struct Module {
    /// Where it is, or shall be, committed.
    path: PathBuf,
    /// Its whole text.
    ptx: String,
}

fn build_all() -> Result<Vec<Module>> {
    let toolchain = Toolchain::obtain(&root().join("target/toolchain"))?;
    let compiler = Compiler::load(&toolchain.nvrtc_dir)?;
    let assembler = Assembler { program: toolchain.ptxas, scratch: root().join("target/kernels") };
    let headers = headers()?;
    let mut modules = Vec::new();
    for source in files(&root().join("kernels"), "cu")? {
        let topic = stem(&source)?;
        let module = compile(&compiler, &source, &headers)
            .with_context(|| format!("kernels/{topic}.cu does not compile"))?;
        for card in CARDS {
            let entries = assembler
                .assemble(topic, card, &module.ptx)
                .with_context(|| format!("kernels/{topic}.cu does not assemble for {card}"))?;
            for entry in entries {
                println!("{topic}: {entry} on {card}");
                ensure!(
                    entry.spilled_bytes == 0,
                    "kernels/{topic}.cu: {} spills {} bytes on {card}; it needs fewer live values",
                    entry.name,
                    entry.spilled_bytes
                );
            }
        }
        modules.push(module);
    }
    ensure!(!modules.is_empty(), "no kernel found: kernels/ has no .cu file");
    Ok(modules)
}

fn compile(compiler: &Compiler, path: &Path, headers: &[Header]) -> Result<Module> {
    let topic = stem(path)?;
    let text = read(path)?;
    let source = Source { name: &format!("{topic}.cu"), text: &text, headers };
    let compiled = compiler.compile(&source, &OPTIONS)?;
    let ptx = format!(
        "// kernels/{topic}.cu, built by `cargo xtask kernels`: edit the source, not this file.\n\
         // nvrtc {} {}\n{}\n",
        toolchain::NVRTC.version,
        OPTIONS.join(" "),
        compiled.trim_end()
    );
    Ok(Module { path: ptx_dir().join(format!("{topic}.{ARCHITECTURE}.ptx")), ptx })
}

fn write(built: &[Module]) -> Result<()> {
    fs::create_dir_all(ptx_dir())
        .with_context(|| format!("cannot create {}", shown(&ptx_dir())))?;
    for module in built {
        if fs::read_to_string(&module.path).is_ok_and(|committed| committed == module.ptx) {
            println!("{}: unchanged", shown(&module.path));
            continue;
        }
        fs::write(&module.path, &module.ptx)
            .with_context(|| format!("cannot write {}", shown(&module.path)))?;
        println!("{}: written, {} bytes", shown(&module.path), module.ptx.len());
    }
    for orphan in orphans(built)? {
        fs::remove_file(&orphan).with_context(|| format!("cannot remove {}", shown(&orphan)))?;
        println!("{}: removed, it has no source", shown(&orphan));
    }
    Ok(())
}

fn compare(built: &[Module]) -> Result<()> {
    let mut stale = Vec::new();
    for module in built {
        match fs::read(&module.path) {
            Ok(committed) if committed == module.ptx.as_bytes() => {}
            Ok(_) => stale.push(format!("{} differs from its source", shown(&module.path))),
            Err(error) => stale.push(format!("{}: {error}", shown(&module.path))),
        }
    }
    for orphan in orphans(built)? {
        stale.push(format!("{} has no source", shown(&orphan)));
    }
    if !stale.is_empty() {
        bail!(
            "the committed PTX is stale; run `cargo xtask kernels` and commit what it writes:\n  {}",
            stale.join("\n  ")
        );
    }
    println!("{} PTX files are what their sources give", built.len());
    Ok(())
}

/// Committed PTX that no source gives.
fn orphans(built: &[Module]) -> Result<Vec<PathBuf>> {
    if !ptx_dir().exists() {
        return Ok(Vec::new());
    }
    let mut found = files(&ptx_dir(), "ptx")?;
    found.retain(|path| built.iter().all(|module| module.path != *path));
    Ok(found)
}

/// Every header of the folder, which any source may include.
fn headers() -> Result<Vec<Header>> {
    let mut headers = Vec::new();
    for path in files(&root().join("kernels"), "cuh")? {
        headers.push(Header { name: format!("{}.cuh", stem(&path)?), text: read(&path)? });
    }
    Ok(headers)
}

/// The files of a folder with an extension, in the order of their names.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", shown(folder)))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot list {}", shown(folder)))?.path();
        if path.extension().is_some_and(|found| found == extension) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", shown(path)))
}

fn stem(path: &Path) -> Result<&str> {
    path.file_stem()
        .and_then(|stem| stem.to_str())
        .with_context(|| format!("{} has no plain name", path.display()))
}

fn ptx_dir() -> PathBuf {
    root().join("crates/kv-kernels/ptx")
}

/// The workspace's folder.
fn root() -> PathBuf {
    // The manifest's folder is `xtask`, one below the workspace.
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

/// A path as a person in the workspace's folder would write it.
fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
