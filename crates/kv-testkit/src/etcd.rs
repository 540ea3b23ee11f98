//! An etcd of a trial's own, in a folder and at ports of its own.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Waits until something that others do has come true.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = std::time::Instant::now();
    while !is_so() {
        assert!(since.elapsed().as_secs() < 60, "not in 60 s: {what}");
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
}

/// A running etcd. It ends with this.
#[derive(Debug)]
pub struct Etcd {
    program: PathBuf,
    folder: tempfile::TempDir,
    ports: [u16; 2],
    endpoint: String,
    child: Option<Child>,
}

/// Ports that were free a moment ago.
fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

impl Etcd {
    /// Starts the program, and waits until it listens.
    pub fn start(program: &Path) -> Self {
        let ports = free_ports();
        let endpoint = format!("http://127.0.0.1:{}", ports[0]);
        let folder = tempfile::tempdir().unwrap();
        let program = program.to_owned();
        let mut etcd = Self { program, folder, ports, endpoint, child: None };
        etcd.start_again();
        etcd
    }

    /// Its URL.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Starts it again, at the same ports and with the data that it had.
    pub fn start_again(&mut self) {
        let peers = format!("http://127.0.0.1:{}", self.ports[1]);
        let child = Command::new(&self.program)
            .args(["--name", "one", "--data-dir"])
            .arg(self.data())
            .args(["--listen-client-urls", &self.endpoint])
            .args(["--advertise-client-urls", &self.endpoint])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("one={peers}"), "--unsafe-no-fsync"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.child = Some(child);
        until("etcd listens", || TcpStream::connect(("127.0.0.1", self.ports[0])).is_ok());
    }

    /// Kills it.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }

    /// Takes its data away.
    pub fn forget(&self) {
        std::fs::remove_dir_all(self.data()).unwrap();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
    }
}
