//! Libraries and kernel modules that move KV between machines and disks.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::Finding;

const AREA: &str = "libraries";

/// Where NIXL is installed, beside the folders of the dynamic linker.
const NIXL_FOLDERS: [&str; 5] = [
    "usr/local/nixl/lib/x86_64-linux-gnu",
    "opt/nvidia/nvda_nixl/lib/x86_64-linux-gnu",
    "usr/local/nixl/lib64",
    "opt/nvidia/nvda_nixl/lib64",
    "usr/local/lib",
];

/// The folders of `LD_LIBRARY_PATH`.
pub(super) fn folders() -> Vec<PathBuf> {
    let path: OsString = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::split_paths(&path).filter(|folder| !folder.as_os_str().is_empty()).collect()
}

pub(super) fn findings(root: &Path, folders: &[PathBuf]) -> Vec<Finding> {
    let usual = NIXL_FOLDERS.iter().map(|folder| root.join(folder));
    let folders: Vec<_> = folders.iter().cloned().chain(usual).collect();
    let modules = fs::read_to_string(root.join("proc/modules")).unwrap_or_default();
    let has = |name: &str| modules.lines().any(|line| line.split(' ').next() == Some(name));
    vec![
        match folders.iter().map(|folder| folder.join("libnixl.so")).find(|path| path.exists()) {
            Some(path) => Finding::fine(AREA, format!("NIXL: {}", path.display())),
            None => Finding::note(
                AREA,
                "NIXL was not found",
                "only transfers between machines need it: pip install nixl, or build it and name its folder in \
                 LD_LIBRARY_PATH",
            ),
        },
        match has("nvidia_peermem") {
            true => Finding::fine(AREA, "GPUDirect RDMA: nvidia_peermem is loaded"),
            false => Finding::note(
                AREA,
                "GPUDirect RDMA: nvidia_peermem is not loaded",
                "only network cards that access GPU memory need it; as root: modprobe nvidia-peermem",
            ),
        },
        match has("nvidia_fs") {
            true => Finding::fine(AREA, "GPUDirect Storage: nvidia_fs is loaded"),
            false => Finding::note(
                AREA,
                "GPUDirect Storage: nvidia_fs is not loaded",
                "files go through host memory, which --disk does in any case",
            ),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn what_is_there_is_found() {
        let root = tempfile::tempdir().unwrap();
        let status = |folders: &[PathBuf]| -> Vec<Status> {
            findings(root.path(), folders).iter().map(|finding| finding.status).collect()
        };
        assert_eq!(status(&[]), [Status::Note; 3]);
        fs::create_dir_all(root.path().join("proc")).unwrap();
        fs::write(
            root.path().join("proc/modules"),
            "nvidia_fs 1 0 - Live 0x0\nnvidia_peermem 2 0\n",
        )
        .unwrap();
        fs::write(root.path().join("libnixl.so"), "").unwrap();
        assert_eq!(status(&[root.path().to_owned()]), [Status::Fine; 3]);
    }
}
