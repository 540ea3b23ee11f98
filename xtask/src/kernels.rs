//! `cargo xtask kernels`: from the CUDA C++ sources to the committed PTX.
//!
//! Every `kernels/*.cu` becomes one `crates/kv-kernels/ptx/<topic>.compute_80.ptx`, and every fixture
//! of a crate's tests one next to itself. A source of `BY_WIDTH` becomes one for each width. The
//! compiler is pinned by hash, so the same sources give the same bytes on every machine, and
//! `--check` finds stale PTX. Each module is also assembled for the supported cards, because only
//! the assembler reports registers and spills.

mod nvrtc;
mod ptxas;
pub(crate) mod toolchain;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::cargo;
use nvrtc::{Compiler, Header, Source};
use ptxas::Assembler;
use toolchain::Toolchain;

/// The virtual architecture of all sources; drivers of newer cards accept it.
const ARCHITECTURE: &str = "compute_80";
/// Cards for which the PTX must assemble without spills.
const CARDS: [&str; 2] = ["sm_80", "sm_90"];
/// Options of the compiler beside the architecture. `__NV_TARGET_H` keeps out the compiler's own
/// `<nv/target>`, which would leave 38 unused globals in every module.
const OPTIONS: [&str; 3] = ["-std=c++17", "-default-device", "-D__NV_TARGET_H"];

/// Sources that are built once for each width of a thread's accesses, with `KV_WIDTH` defined. Each
/// width is a module of its own, so that a program loads only the widths that it uses.
const BY_WIDTH: [&str; 2] = ["kernels/transfer.cu", "kernels/walk.cu"];
const WIDTHS: [u32; 5] = [1, 2, 4, 8, 16];

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

/// A folder of sources and where their PTX is committed, from the workspace's folder.
struct Folder {
    sources: &'static str,
    ptx: &'static str,
}

/// The published kernels, kernels with planted bugs that the simulated device must find, kernels of
/// tests, a benchmark's kernel for comparison, and the attention of an example.
const FOLDERS: [Folder; 7] = [
    Folder { sources: "kernels", ptx: "crates/kv-kernels/ptx" },
    Folder { sources: "kernels/stage", ptx: "crates/kv-stage/ptx" },
    Folder { sources: "crates/cuda-sim/tests/fixtures", ptx: "crates/cuda-sim/tests/fixtures" },
    Folder { sources: "crates/cuda-vmm/tests/fixtures", ptx: "crates/cuda-vmm/tests/fixtures" },
    Folder { sources: "crates/kv-testkit/fixtures", ptx: "crates/kv-testkit/fixtures" },
    Folder {
        sources: "crates/kv-kernels/benches/transport_gpu",
        ptx: "crates/kv-kernels/benches/transport_gpu",
    },
    Folder { sources: "examples/chat/kernels", ptx: "examples/chat/ptx" },
];

/// Folders in which PTX is searched for, at any depth. PTX that `FOLDERS` do not build is an error.
const SEARCHED: [&str; 6] = ["crates", "kernels", "tests", "examples", "bench", "xtask"];

/// The PTX of one source.
struct Module {
    /// Where it is, or shall be, committed.
    path: PathBuf,
    /// Its whole text.
    ptx: String,
}

fn build_all() -> Result<Vec<Module>> {
    let toolchain = Toolchain::obtain(&cargo::target_folder().join("toolchain"))?;
    let compiler = Compiler::load(&toolchain)?;
    let assembler =
        Assembler { program: toolchain.ptxas, scratch: cargo::target_folder().join("kernels") };
    let mut modules = Vec::new();
    for folder in &FOLDERS {
        let headers = headers(folder)?;
        let before = modules.len();
        for source in files(&root().join(folder.sources), "cu")? {
            let name = shown(&source);
            for width in widths(&name) {
                let topic = topic(stem(&source)?, width);
                let module = compile(&compiler, folder, (&source, &topic, width), &headers)
                    .with_context(|| format!("{name} does not compile as {topic}"))?;
                assemble(&assembler, &topic, &module)
                    .with_context(|| format!("{name} does not assemble as it should"))?;
                modules.push(module);
            }
        }
        ensure!(modules.len() > before, "no kernel found: {} has no .cu file", folder.sources);
    }
    for named in BY_WIDTH {
        ensure!(root().join(named).exists(), "{named}, which shall have widths, is missing");
    }
    Ok(modules)
}

/// The widths that a source is built for; one module without a width for most.
fn widths(source: &str) -> Vec<Option<u32>> {
    if BY_WIDTH.contains(&source) { WIDTHS.map(Some).to_vec() } else { vec![None] }
}

/// The name of what is built of a source, without the architecture.
fn topic(stem: &str, width: Option<u32>) -> String {
    width.map_or_else(|| stem.to_owned(), |width| format!("{stem}_{width}"))
}

/// The compiler's options for a width.
fn options(width: Option<u32>) -> Vec<String> {
    let architecture = format!("--gpu-architecture={ARCHITECTURE}");
    let width = width.map(|width| format!("-DKV_WIDTH={width}"));
    let fixed = OPTIONS.map(str::to_owned);
    std::iter::once(architecture).chain(fixed).chain(width).collect()
}

/// Assembles a module for every card and prints what its entries cost there.
fn assemble(assembler: &Assembler, topic: &str, module: &Module) -> Result<()> {
    for card in CARDS {
        for entry in assembler.assemble(topic, card, &module.ptx).context(card)? {
            println!("{topic}.{ARCHITECTURE}: {entry} on {card}");
            ensure!(
                entry.spilled_bytes == 0,
                "{} spills {} bytes on {card}; it needs fewer live values",
                entry.name,
                entry.spilled_bytes
            );
        }
    }
    Ok(())
}

fn compile(
    compiler: &Compiler,
    folder: &Folder,
    (path, topic, width): (&Path, &str, Option<u32>),
    headers: &[Header],
) -> Result<Module> {
    let stem = stem(path)?;
    let text = read(path)?;
    let source = Source { name: &format!("{stem}.cu"), text: &text, headers };
    let options = options(width);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let compiled = compiler.compile(&source, &options)?;
    let ptx = format!(
        "// {}/{stem}.cu, built by `cargo xtask kernels`: edit the source, not this file.\n\
         // nvrtc {} {}\n{}\n",
        folder.sources,
        toolchain::NVRTC.version,
        options.join(" "),
        compiled.trim_end()
    );
    let file = format!("{topic}.{ARCHITECTURE}.ptx");
    Ok(Module { path: root().join(folder.ptx).join(file), ptx })
}

fn write(built: &[Module]) -> Result<()> {
    for folder in &FOLDERS {
        fs::create_dir_all(root().join(folder.ptx))
            .with_context(|| format!("cannot create {}", folder.ptx))?;
    }
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
    let is_built = |path: &PathBuf| built.iter().any(|module| module.path == *path);
    for orphan in all_ptx(&root())?.into_iter().filter(|path| !is_built(path)) {
        stale.push(format!("{} has no source that is built", shown(&orphan)));
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
    let mut orphans = Vec::new();
    for folder in FOLDERS.map(|folder| root().join(folder.ptx)) {
        if folder.exists() {
            let mut found = files(&folder, "ptx")?;
            found.retain(|path| built.iter().all(|module| module.path != *path));
            orphans.append(&mut found);
        }
    }
    Ok(orphans)
}

/// All PTX of a tree, wherever it lies, but for what was built into a target folder.
fn all_ptx(root: &Path) -> Result<Vec<PathBuf>> {
    let mut folders: Vec<PathBuf> = SEARCHED.iter().map(|folder| root.join(folder)).collect();
    folders.retain(|folder| folder.exists());
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        found.append(&mut files(&folder, "ptx")?);
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", shown(&folder)))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", shown(&folder)))?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) && entry.file_name() != "target" {
                folders.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Every header of a folder, which any source of it may include.
fn headers(folder: &Folder) -> Result<Vec<Header>> {
    let mut headers = Vec::new();
    for path in files(&root().join(folder.sources), "cuh")? {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs no compiler: whatever PTX is committed lies where this task builds it, beside its source.
    #[test]
    fn all_committed_ptx_has_a_source_that_is_built() {
        let sources = |folder: &Folder| files(&root().join(folder.sources), "cu").unwrap();
        let built: Vec<PathBuf> = FOLDERS
            .iter()
            .flat_map(|folder| sources(folder).into_iter().map(move |source| (folder, source)))
            .flat_map(|(folder, source)| {
                let stem = stem(&source).unwrap().to_owned();
                let file = move |width| format!("{}.{ARCHITECTURE}.ptx", topic(&stem, width));
                widths(&shown(&source))
                    .into_iter()
                    .map(move |width| root().join(folder.ptx).join(file(width)))
            })
            .collect();
        let committed = all_ptx(&root()).unwrap();
        assert!(committed.len() > 20, "{committed:?}");
        for path in &committed {
            assert!(built.contains(path), "{} is built from nothing", shown(path));
        }
        for path in &built {
            assert!(committed.contains(path), "{} is not committed", shown(path));
        }
    }
}
