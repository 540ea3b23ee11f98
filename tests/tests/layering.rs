//! The layers of the workspace: which crates may depend on which, dependencies that are forbidden,
//! and crates that may use `unsafe`.
//!
//! The tables below are the rules. A new dependency is a change of a table, visible in review, or a
//! failure here.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde::Deserialize;

/// The position of a crate.
struct Layer {
    name: &'static str,
    /// Our crates directly below. Everything below those is allowed too.
    below: &'static [&'static str],
    /// Other allowed external crates, besides `LIBRARIES`.
    others: &'static [&'static str],
    /// External crates that only its features bring, and what is below them: `never` is said of the rest.
    featured: &'static [&'static str],
    /// Crates that must not appear in its dependency tree, at any depth.
    never: &'static [&'static [&'static str]],
    /// Whether its sources may contain `unsafe`; `docs/UNSAFE.md` says why.
    may_be_unsafe: bool,
}

/// External crates that any of our crates may use.
const LIBRARIES: &[&str] = &["bytemuck", "parking_lot", "smallvec", "thiserror", "tracing"];

/// Our crates that the tests of any crate may use, although they are on the same layer: a device to
/// run on, kernels that read memory contents, and a manager whose plans tiers and nodes serve.
const TEST_DEVICES: &[&str] = &["cuda-sim", "kv-kernels", "kv-manager", "kv-testkit"];

/// Too heavy for a library, or a choice of the program: runtimes, command lines, formats, loggers.
const HEAVY: &[&str] = &[
    "anyhow",
    "async-std",
    "clap",
    "console",
    "env_logger",
    "eyre",
    "futures",
    "indicatif",
    "rand",
    "rayon",
    "serde",
    "serde_json",
    "smol",
    "tokio",
    "tracing-subscriber",
];

/// Of the heavy ones, those that no feature of a library brings either: formats it may.
const RUNTIMES: &[&str] =
    &["anyhow", "async-std", "clap", "eyre", "futures", "rand", "rayon", "smol", "tokio"];

/// Builds only for model checkers. No crate depends on them, so their dependencies are like those
/// of tests.
const CHECKED: &[&str] = &["cfg(loom)", "cfg(shuttle)"];

/// Crates that must not appear below a crate without CUDA.
const CUDA: &[&str] = &["cuda-driver", "cudarc", "libloading"];

const LAYERS: &[Layer] = &[
    Layer {
        name: "kv-errors",
        below: &[],
        others: &[],
        featured: &[],
        never: &[HEAVY, CUDA],
        may_be_unsafe: false,
    },
    Layer {
        name: "cuda-driver",
        below: &["kv-errors"],
        others: &["cudarc", "libc", "libloading"],
        featured: &[],
        never: &[HEAVY],
        may_be_unsafe: true,
    },
    Layer {
        name: "cuda-sim",
        below: &["cuda-driver"],
        others: &[],
        featured: &[],
        never: &[HEAVY],
        may_be_unsafe: true,
    },
    Layer {
        name: "cuda-vmm",
        below: &["cuda-driver"],
        others: &[],
        featured: &[],
        never: &[HEAVY],
        may_be_unsafe: false,
    },
    Layer {
        name: "kv-pool",
        below: &["kv-errors"],
        others: &["siphasher", "xxhash-rust"],
        featured: &[],
        never: &[HEAVY, CUDA],
        may_be_unsafe: false,
    },
    Layer {
        name: "kv-stage",
        below: &["cuda-driver", "kv-pool"],
        others: &[],
        featured: &[],
        never: &[HEAVY],
        may_be_unsafe: true,
    },
    Layer {
        name: "kv-kernels",
        below: &["cuda-driver", "kv-pool"],
        others: &[],
        featured: &[],
        never: &[HEAVY],
        may_be_unsafe: true,
    },
    Layer {
        name: "kv-tier",
        below: &["kv-pool"],
        others: &["xxhash-rust"],
        featured: &[],
        never: &[HEAVY, CUDA],
        may_be_unsafe: false,
    },
    Layer {
        name: "kv-manager",
        below: &["kv-pool", "kv-tier"],
        others: &["xxhash-rust"],
        featured: &[],
        never: &[HEAVY, CUDA],
        may_be_unsafe: false,
    },
    Layer {
        name: "kv-disk",
        below: &["cuda-driver", "kv-tier"],
        others: &["chacha20poly1305", "io-uring", "libc", "rustix", "xxhash-rust"],
        featured: &[],
        never: &[HEAVY],
        may_be_unsafe: true,
    },
    Layer {
        name: "kv-remote",
        below: &["kv-tier"],
        others: &["blake3", "rustix", "tempfile", "xxhash-rust"],
        featured: &["base64", "serde_json", "ureq"],
        never: &[HEAVY, CUDA],
        may_be_unsafe: false,
    },
    Layer {
        name: "kv-nixl",
        below: &["cuda-driver", "kv-remote"],
        // NIXL is opened when the program runs.
        others: &["libloading"],
        featured: &[],
        never: &[HEAVY],
        may_be_unsafe: true,
    },
    Layer {
        name: "kv-multigpu",
        below: &["kv-kernels"],
        others: &["nvml-wrapper"],
        featured: &[],
        never: &[HEAVY],
        may_be_unsafe: true,
    },
    Layer {
        name: "kv-plane",
        below: &[
            "cuda-vmm",
            "kv-disk",
            "kv-kernels",
            "kv-manager",
            "kv-multigpu",
            "kv-nixl",
            "kv-pool",
            "kv-remote",
            "kv-stage",
            "kv-tier",
        ],
        others: &[],
        featured: &["prometheus", "xxhash-rust"],
        never: &[HEAVY],
        may_be_unsafe: false,
    },
    Layer {
        name: "kv-replay",
        below: &["cuda-sim", "kv-plane", "kv-disk", "kv-multigpu", "kv-nixl", "kv-remote"],
        others: &["clap", "indicatif", "rustix", "signal-hook", "serde", "serde_json"],
        featured: &[],
        never: &[&["anyhow", "async-std", "rand", "rayon", "tokio"]],
        may_be_unsafe: false,
    },
];

/// Members that are never published; only tests depend on them.
const OUTSIDE: &[&str] = &["kv-testkit", "kv-tests", "xtask"];

/// A member of the workspace.
#[derive(Clone, Default)]
struct Member {
    name: String,
    /// Its dependencies under `[dependencies]` and `[build-dependencies]`, optional or not.
    normal: Vec<String>,
    /// Those of them that only a feature brings.
    optional: Vec<String>,
    /// Its dependencies under `[dev-dependencies]`.
    dev: Vec<String>,
    /// Text of the root file of its library and of each program, with its path.
    roots: Vec<(String, String)>,
}

/// The workspace, with everything that Cargo resolved below it.
#[derive(Default)]
struct Graph {
    members: Vec<Member>,
    /// Normal and build dependencies of every crate, with all features, by name.
    edges: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    /// Everything below `name` in the dependency tree, without what `layers` say that only features bring.
    fn tree(&self, name: &str, layers: &[Layer]) -> BTreeSet<&str> {
        let mut seen = BTreeSet::new();
        let mut next = vec![name];
        while let Some(name) = next.pop() {
            let layer = layers.iter().find(|layer| layer.name == name);
            let is_featured =
                |below: &str| layer.is_some_and(|layer| layer.featured.contains(&below));
            for below in self.edges.get(name).into_iter().flatten() {
                if !is_featured(below) && seen.insert(below.as_str()) {
                    next.push(below);
                }
            }
        }
        seen
    }
}

/// Our crates that a crate may use: those below it, at any depth.
fn allowed_below<'a>(layers: &'a [Layer], layer: &'a Layer) -> BTreeSet<&'a str> {
    let mut allowed = BTreeSet::new();
    let mut next = vec![layer];
    while let Some(layer) = next.pop() {
        for name in layer.below {
            if allowed.insert(*name) {
                next.extend(layers.iter().find(|layer| layer.name == *name));
            }
        }
    }
    allowed
}

/// The violations of `layers` in `graph`, one sentence each.
fn violations(graph: &Graph, layers: &[Layer]) -> Vec<String> {
    let mut found = Vec::new();
    for member in &graph.members {
        match layers.iter().find(|layer| layer.name == member.name) {
            Some(layer) => found.extend(violations_of(graph, layers, member, layer)),
            None if OUTSIDE.contains(&member.name.as_str()) => {}
            None => found.push(format!("{} has no place in the layers", member.name)),
        }
    }
    found
}

fn violations_of(graph: &Graph, layers: &[Layer], member: &Member, layer: &Layer) -> Vec<String> {
    let name = &member.name;
    let below = allowed_below(layers, layer);
    let is_ours = |dependency: &str| graph.members.iter().any(|member| member.name == dependency);
    let mut found = Vec::new();
    for dependency in member.normal.iter().map(String::as_str) {
        let allowed = below.contains(dependency)
            || LIBRARIES.contains(&dependency)
            || layer.others.contains(&dependency);
        let is_optional = member.optional.iter().any(|of| of == dependency);
        let is_of_a_feature = is_optional && layer.featured.contains(&dependency);
        if !(allowed || is_of_a_feature) {
            found.push(format!("{name} must not depend on {dependency}"));
        }
    }
    for dependency in member.dev.iter().map(String::as_str) {
        let allowed = below.contains(dependency) || TEST_DEVICES.contains(&dependency);
        if is_ours(dependency) && !allowed {
            found.push(format!("tests of {name} must not depend on {dependency}"));
        }
    }
    for featured in layer.featured {
        let tree = graph.tree(featured, layers);
        for heavy in RUNTIMES.iter().filter(|heavy| tree.contains(*heavy)) {
            found.push(format!("{heavy} is in the tree of {featured}, a feature of {name}"));
        }
    }
    let tree = graph.tree(name, layers);
    for dependency in
        layer.never.concat().into_iter().filter(|dependency| tree.contains(dependency))
    {
        found.push(format!("{dependency} is in the tree of {name}"));
    }
    if !layer.may_be_unsafe {
        for (path, text) in &member.roots {
            if !text.lines().any(|line| line.trim() == "#![forbid(unsafe_code)]") {
                found.push(format!("{path} does not forbid unsafe code"));
            }
        }
    }
    found
}

/// The page with the drawing of the layers, and the line above it.
const PAGE: &str = "docs/ARCHITECTURE.md";
const MARK: &str = "<!-- the layers of tests/tests/layering.rs -->\n";

/// The drawing: a line for each crate, from the top, with the crates directly below it. A star means that
/// there is no CUDA below.
fn drawing(layers: &[Layer]) -> String {
    let mut text = String::from("```text\n");
    for layer in layers.iter().rev() {
        let star = if layer.never.contains(&CUDA) { " *" } else { "" };
        let name = format!("{}{star}", layer.name);
        let arrow = if layer.below.is_empty() { "" } else { "──> " };
        text.push_str(format!("{name:<14}{arrow}{}", layer.below.join(", ")).trim_end());
        text.push('\n');
    }
    text + "```\n"
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
    workspace_members: Vec<String>,
    workspace_root: String,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    dependencies: Vec<Dependency>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    target: Option<String>,
    optional: bool,
}

impl Dependency {
    /// Whether users of the crate never build it.
    fn is_for_tests(&self) -> bool {
        let checked = |target: &str| CHECKED.contains(&target);
        self.kind.as_deref() == Some("dev") || self.target.as_deref().is_some_and(checked)
    }
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    src_path: String,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Edge>,
}

#[derive(Deserialize)]
struct Edge {
    pkg: String,
    dep_kinds: Vec<EdgeKind>,
}

#[derive(Deserialize)]
struct EdgeKind {
    kind: Option<String>,
}

fn cargo(args: &[&str]) -> String {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output =
        Command::new(program).args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {} failed: {errors}", args.join(" "));
    String::from_utf8(output.stdout).unwrap()
}

/// This workspace, as Cargo resolves it for this machine with packages that are already downloaded.
fn workspace() -> Graph {
    let version = cargo(&["--version", "--verbose"]);
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let metadata: Metadata = serde_json::from_str(&cargo(&[
        "metadata",
        "--format-version=1",
        "--locked",
        "--offline",
        "--all-features",
        "--filter-platform",
        host,
    ]))
    .unwrap();
    let names: BTreeMap<&str, &str> = metadata
        .packages
        .iter()
        .map(|package| (package.id.as_str(), package.name.as_str()))
        .collect();
    let mut graph = Graph::default();
    for node in &metadata.resolve.nodes {
        let below = node
            .deps
            .iter()
            .filter(|edge| edge.dep_kinds.iter().any(|of| of.kind.as_deref() != Some("dev")))
            .map(|edge| names[edge.pkg.as_str()].to_owned());
        graph.edges.entry(names[node.id.as_str()].to_owned()).or_default().extend(below);
    }
    for package in &metadata.packages {
        if metadata.workspace_members.contains(&package.id) {
            graph.members.push(member(package, &metadata.workspace_root));
        }
    }
    graph
}

fn member(package: &Package, workspace_root: &str) -> Member {
    let dependencies = |dev: bool| {
        package
            .dependencies
            .iter()
            .filter(|dependency| dependency.is_for_tests() == dev)
            .map(|dependency| dependency.name.clone())
            .collect()
    };
    let is_root = |target: &&Target| target.kind.iter().any(|kind| kind == "lib" || kind == "bin");
    let read = |target: &Target| {
        let path = target.src_path.strip_prefix(workspace_root).unwrap();
        (
            path.trim_start_matches('/').to_owned(),
            std::fs::read_to_string(&target.src_path).unwrap(),
        )
    };
    Member {
        name: package.name.clone(),
        normal: dependencies(false),
        optional: package
            .dependencies
            .iter()
            .filter(|dependency| dependency.optional)
            .map(|dependency| dependency.name.clone())
            .collect(),
        dev: dependencies(true),
        roots: package.targets.iter().filter(is_root).map(read).collect(),
    }
}

#[test]
fn a_protection_is_taken_out_alike_in_all_crates() {
    // No crate lies below both, so the macro stands twice.
    let (driver, pool) = (
        include_str!("../../crates/cuda-driver/src/guard.rs"),
        include_str!("../../crates/kv-pool/src/guard.rs"),
    );
    assert_eq!(driver, pool);
}

#[test]
fn the_page_draws_the_layers_of_the_table() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(PAGE);
    let page = std::fs::read_to_string(path).unwrap();
    let (_, drawn) = page.split_once(MARK).unwrap();
    let expected = drawing(LAYERS);
    assert!(drawn.starts_with(&expected), "{PAGE} should have this drawing:\n{expected}");
}

#[test]
fn the_workspace_keeps_to_its_layers() {
    let graph = workspace();
    // Checks that the graph was read. Otherwise the next assertion would hold trivially.
    let driver = graph.members.iter().find(|member| member.name == "cuda-driver").unwrap();
    assert!(driver.normal.iter().any(|name| name == "cudarc"));
    assert_eq!(driver.roots.len(), 1);
    assert!(
        graph.tree("kv-replay", LAYERS).contains("cudarc"),
        "the tree is not followed to its leaves"
    );
    assert!(graph.tree("kv-replay", LAYERS).contains("serde_json"), "external crates are missing");
    let found = violations(&graph, LAYERS);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_layers_have_no_cycle() {
    for layer in LAYERS {
        assert!(
            !allowed_below(LAYERS, layer).contains(layer.name),
            "{} is below itself",
            layer.name
        );
        for name in layer.below {
            assert!(LAYERS.iter().any(|other| other.name == *name), "{name} is no layer");
        }
    }
}

/// The violations in a graph that keeps the rules until `edit` breaks one.
fn made_up(edit: impl FnOnce(&mut Graph)) -> Vec<String> {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let member = |name: &str, normal: &[&str], dev: &[&str]| Member {
        name: name.to_owned(),
        normal: names(normal),
        dev: names(dev),
        optional: Vec::new(),
        roots: vec![(format!("{name}/lib.rs"), "//! A.\n#![forbid(unsafe_code)]\n".to_owned())],
    };
    let members = vec![
        member("cuda-driver", &["cudarc", "thiserror"], &["cuda-sim"]),
        member("cuda-sim", &["cuda-driver"], &[]),
        member("cuda-vmm", &["cuda-driver", "smallvec"], &["cuda-sim", "libtest-mimic"]),
        member("kv-pool", &["smallvec"], &[]),
        member("kv-remote", &["kv-tier"], &[]),
        member("kv-plane", &["cuda-driver", "cuda-vmm", "kv-pool"], &["cuda-sim"]),
        member("xtask", &["anyhow", "clap"], &[]),
    ];
    let mut graph = Graph { members, ..Graph::default() };
    graph.edges.insert("kv-pool".to_owned(), BTreeSet::from(["smallvec".to_owned()]));
    graph.edges.insert("cuda-driver".to_owned(), BTreeSet::from(["cudarc".to_owned()]));
    edit(&mut graph);
    violations(&graph, LAYERS)
}

#[test]
fn a_graph_that_keeps_the_rules_passes() {
    assert_eq!(made_up(|_| ()), [""; 0]);
}

#[test]
fn every_broken_rule_is_named() {
    let of = |graph: &mut Graph, name: &str| {
        graph.members.iter().position(|member| member.name == name).unwrap()
    };
    let upward = made_up(|graph| {
        let vmm = of(graph, "cuda-vmm");
        graph.members[vmm].normal.push("kv-plane".to_owned());
    });
    assert_eq!(upward, ["cuda-vmm must not depend on kv-plane"]);
    let sim_in_a_library = made_up(|graph| {
        let cache = of(graph, "kv-plane");
        graph.members[cache].normal.push("cuda-sim".to_owned());
    });
    assert_eq!(sim_in_a_library, ["kv-plane must not depend on cuda-sim"]);
    let heavy = made_up(|graph| {
        let vmm = of(graph, "cuda-vmm");
        graph.members[vmm].normal.push("tokio".to_owned());
    });
    assert_eq!(heavy, ["cuda-vmm must not depend on tokio"]);
    let sideways_in_tests = made_up(|graph| {
        let vmm = of(graph, "cuda-vmm");
        graph.members[vmm].dev.push("kv-pool".to_owned());
    });
    assert_eq!(sideways_in_tests, ["tests of cuda-vmm must not depend on kv-pool"]);
    let not_optional = made_up(|graph| {
        let remote = of(graph, "kv-remote");
        graph.members[remote].normal.push("serde_json".to_owned());
    });
    assert_eq!(not_optional, ["kv-remote must not depend on serde_json"]);
    let brings_a_runtime = made_up(|graph| {
        let remote = of(graph, "kv-remote");
        graph.members[remote].normal.push("ureq".to_owned());
        graph.members[remote].optional.push("ureq".to_owned());
        graph.edges.insert("kv-remote".to_owned(), BTreeSet::from(["ureq".to_owned()]));
        graph.edges.insert("ureq".to_owned(), BTreeSet::from(["tokio".to_owned()]));
    });
    assert_eq!(brings_a_runtime, ["tokio is in the tree of ureq, a feature of kv-remote"]);
    let deep = made_up(|graph| {
        graph.edges.insert("smallvec".to_owned(), BTreeSet::from(["cudarc".to_owned()]));
    });
    assert_eq!(deep, ["cudarc is in the tree of kv-pool"]);
    let allows_unsafe = made_up(|graph| {
        let pool = of(graph, "kv-pool");
        graph.members[pool].roots[0].1 = "//! No #![forbid(unsafe_code)] here.\n".to_owned();
    });
    assert_eq!(allows_unsafe, ["kv-pool/lib.rs does not forbid unsafe code"]);
    let unknown = made_up(|graph| {
        graph.members.push(Member { name: "kv-new".to_owned(), ..Member::default() });
    });
    assert_eq!(unknown, ["kv-new has no place in the layers"]);
}
