//! An etcd of a trial's own, in a folder and at ports of its own.
#![allow(dead_code, reason = "each test uses a part")]

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = std::time::Instant::now();
    while !is_so() {
        assert!(since.elapsed().as_secs() < 60, "not in 60 s: {what}");
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
}

pub(crate) struct Etcd {
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
    pub(crate) fn start(program: &Path) -> Self {
        let ports = free_ports();
        let endpoint = format!("http://127.0.0.1:{}", ports[0]);
        let folder = tempfile::tempdir().unwrap();
        let program = program.to_owned();
        let mut etcd = Self { program, folder, ports, endpoint, child: None };
        etcd.start_again();
        etcd
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    pub(crate) fn start_again(&mut self) {
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

    pub(crate) fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }

    /// Takes its data away.
    pub(crate) fn forget(&self) {
        std::fs::remove_dir_all(self.data()).unwrap();
    }

    /// Writes a key, as another program would.
    pub(crate) fn put(&self, key: &str, value: &str) {
        use base64::Engine as _;
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let body = serde_json::json!({ "key": encode(key), "value": encode(value) });
        let answer = ureq::post(format!("{}/v3/kv/put", self.endpoint)).send(body.to_string());
        assert_eq!(answer.unwrap().status(), 200);
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
    }
}
