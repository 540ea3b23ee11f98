//! A man in the middle: passes bytes on, keeps what a client has sent, and may change it.

use crate::prelude::*;
use std::net::Shutdown;

/// Bytes of a client's hello and proof. Frames come behind them.
pub(crate) const HANDSHAKE: usize = 38 + 32;

/// What is done with the bytes that a client sends behind its handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tamper {
    Nothing,
    /// One bit of the byte at this place is changed.
    Flip(usize),
    /// What comes first is sent twice.
    Twice,
    /// So many bytes are passed on, and then nothing more, without an end.
    Stall(usize),
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    /// All that clients have sent.
    pub(crate) sent: Arc<Mutex<Vec<u8>>>,
}

impl Proxy {
    /// Passes one connection on to `to`.
    pub(crate) fn to(to: SocketAddr, tamper: Tamper) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let sent: Arc<Mutex<Vec<u8>>> = Arc::default();
        let keeps = Arc::clone(&sent);
        std::thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let server = TcpStream::connect(to).unwrap();
            let (mut back_from, mut back_to) =
                (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || {
                drop(std::io::copy(&mut back_from, &mut back_to));
                drop(back_to.shutdown(Shutdown::Both));
            });
            forward(client, server, tamper, &keeps);
        });
        Self { address, sent }
    }
}

fn forward(mut client: TcpStream, mut server: TcpStream, tamper: Tamper, keeps: &Mutex<Vec<u8>>) {
    let mut buffer = vec![0; 1 << 16];
    let mut passed = 0;
    while let Ok(read @ 1..) = client.read(&mut buffer) {
        let mut bytes = buffer[..read].to_vec();
        let before = keeps.lock().unwrap().len();
        keeps.lock().unwrap().extend_from_slice(&bytes);
        match tamper {
            Tamper::Flip(at) if (before..before + read).contains(&(HANDSHAKE + at)) => {
                bytes[HANDSHAKE + at - before] ^= 4;
            }
            Tamper::Twice if before >= HANDSHAKE => bytes = bytes.repeat(2),
            Tamper::Stall(most) => bytes.truncate((HANDSHAKE + most).saturating_sub(passed)),
            _ => {}
        }
        passed += bytes.len();
        if server.write_all(&bytes).is_err() {
            break;
        }
    }
    drop(server.shutdown(Shutdown::Write));
}
