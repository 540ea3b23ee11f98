//! Memory, NUMA nodes and limits of this machine.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::Finding;
use kv_replay::report::bytes;

/// Locked memory that io_uring's registered buffers need in the usual set-up.
const LOCKED_BYTES: u64 = 64 << 20;

/// Open files that are plenty for worker processes, each with its pipes and devices.
const OPEN_FILES: u64 = 4096;

pub(super) fn findings(root: &Path) -> Vec<Finding> {
    let mut findings = memory(root);
    findings.extend(huge_pages(root));
    findings.push(nodes(root));
    findings.extend(limits());
    findings
}

/// The first line of a file; `None` if it cannot be read.
pub(super) fn first_line(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.trim().to_owned())
}

/// A number of `/proc/meminfo`, as it stands there.
fn meminfo(root: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    rest.split_whitespace().next()?.parse().ok()
}

fn memory(root: &Path) -> Vec<Finding> {
    const AREA: &str = "host memory";
    let kib = |name| meminfo(root, name).map(|kib| kib.saturating_mul(1024));
    let (Some(total), Some(free)) = (kib("MemTotal"), kib("MemAvailable")) else {
        let to_do = "give --host-blocks a size that is known to fit";
        return vec![Finding::note(AREA, "the system does not tell its memory", to_do)];
    };
    let mut findings = vec![Finding::fine(
        AREA,
        format!("{} of {} available for pinned memory and others", bytes(free), bytes(total)),
    )];
    let limit = first_line(&root.join("sys/fs/cgroup/memory.max"));
    if let Some(limit) =
        limit.and_then(|limit| limit.parse::<u64>().ok()).filter(|&limit| limit < total)
    {
        findings.push(Finding::note(
            AREA,
            format!("this container may use {}", bytes(limit)),
            "pinned memory counts towards it: keep --host-blocks below, or raise the container's limit",
        ));
    }
    findings
}

fn huge_pages(root: &Path) -> Vec<Finding> {
    const AREA: &str = "huge pages";
    let mut findings = Vec::new();
    let size = meminfo(root, "Hugepagesize").unwrap_or(0).saturating_mul(1024);
    match (meminfo(root, "HugePages_Free"), meminfo(root, "HugePages_Total")) {
        (Some(free), Some(total)) if total > 0 => findings.push(Finding::fine(
            AREA,
            format!("{free} of {total} reserved pages of {} are free", bytes(size)),
        )),
        _ => findings.push(Finding::fine(AREA, "none are reserved; host memory needs none")),
    }
    let path = root.join("sys/kernel/mm/transparent_hugepage/enabled");
    match first_line(&path) {
        Some(line) if line.contains("[never]") => findings.push(Finding::note(
            AREA,
            "transparent huge pages are off",
            "pinning host memory takes longer; as root: echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
        )),
        Some(line) => findings.push(Finding::fine(AREA, format!("transparent huge pages: {line}"))),
        None => {}
    }
    findings
}

fn nodes(root: &Path) -> Finding {
    const AREA: &str = "NUMA";
    let entries = fs::read_dir(root.join("sys/devices/system/node"));
    let is_node = |name: &str| {
        name.strip_prefix("node")
            .is_some_and(|rest| !rest.is_empty() && rest.parse::<u32>().is_ok())
    };
    let nodes = entries.map_or(0, |entries| {
        entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count()
    });
    match nodes {
        0 | 1 => Finding::fine(AREA, "one node: all memory is equally near"),
        _ => Finding::note(
            AREA,
            format!("{nodes} nodes"),
            "start each process at its GPU's node, for instance with numactl --cpunodebind=N --membind=N; a link across \
             nodes is slower",
        ),
    }
}

fn limits() -> Vec<Finding> {
    let shown =
        |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let locked = getrlimit(Resource::Memlock).current;
    let files = getrlimit(Resource::Nofile).current;
    let of_locked = locked.map_or("unlimited".to_owned(), bytes);
    let of_locked = format!("locked memory (ulimit -l): {of_locked}");
    let of_files = format!("open files (ulimit -n): {}", shown(files));
    vec![
        match locked.is_some_and(|limit| limit < LOCKED_BYTES) {
            true => Finding::note(
                "limits",
                of_locked,
                "io_uring may not register its buffers, and works without; ulimit -l unlimited, or LimitMEMLOCK=infinity \
                 for a service",
            ),
            false => Finding::fine("limits", of_locked),
        },
        match files.is_some_and(|limit| limit < OPEN_FILES) {
            true => Finding::note(
                "limits",
                of_files,
                format!("ulimit -n {OPEN_FILES}, for runs with many --workers"),
            ),
            false => Finding::fine("limits", of_files),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn notes(findings: &[Finding]) -> Vec<&str> {
        let notes = findings.iter().filter(|finding| finding.status != Status::Fine);
        notes.map(|finding| finding.found.as_str()).collect()
    }

    #[test]
    fn what_is_small_off_or_divided_is_noted() {
        let root = machine(&[
            (
                "proc/meminfo",
                "MemTotal:       1048576 kB\nMemAvailable:    524288 kB\nHugePages_Total:       0\n",
            ),
            ("sys/fs/cgroup/memory.max", "268435456\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
            ("sys/devices/system/node/node0/cpulist", "0-7\n"),
            ("sys/devices/system/node/node1/cpulist", "8-15\n"),
            ("sys/devices/system/node/possible", "0-1\n"),
        ]);
        let root = root.path();
        let all: Vec<_> = [memory(root), huge_pages(root), vec![nodes(root)]].concat();
        assert_eq!(
            notes(&all),
            ["this container may use 256 MiB", "transparent huge pages are off", "2 nodes"]
        );
        assert_eq!(all[0].found, "512 MiB of 1 GiB available for pinned memory and others");
        assert!(
            all.iter().all(|finding| finding.to_do.is_some() == (finding.status != Status::Fine))
        );
    }

    #[test]
    fn a_machine_that_says_nothing_is_noted_and_one_that_is_large_is_fine() {
        let root = machine(&[]);
        assert_eq!(notes(&memory(root.path())), ["the system does not tell its memory"]);
        let root = machine(&[
            (
                "proc/meminfo",
                "MemTotal: 8 kB\nMemAvailable: 4 kB\nHugePages_Total: 5\nHugePages_Free: 3\nHugepagesize: 2048 kB\n",
            ),
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ]);
        let root = root.path();
        let all: Vec<_> = [memory(root), huge_pages(root), vec![nodes(root)]].concat();
        assert_eq!(notes(&all), [""; 0]);
        assert_eq!(all[1].found, "3 of 5 reserved pages of 2 MiB are free");
    }
}
