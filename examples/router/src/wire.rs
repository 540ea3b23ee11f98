//! The way from a cache to the router: vLLM's framing over ZeroMQ, with numbers, a buffer of what was sent last, and
//! a socket that sends it again.
//!
//! | socket | frames |
//! | --- | --- |
//! | PUB to SUB | topic, number (8 bytes, the highest first), payload |
//! | the router's request for a replay | empty, first number |
//! | the answer, for each message | empty, number, payload; at last -1 and an empty payload |

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail, ensure};
use dynamo_kv_router::recovery::{CursorObservation, CursorState};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::task::JoinHandle;
use zeromq::{
    DealerSocket, RouterSocket, Socket, SocketRecv, SocketSend, SubSocket, XPubSocket, ZmqMessage,
};

const TOPIC: &str = "kv-events";

/// The number of the message that ends a replay.
const END: u64 = u64::MAX;

/// Messages that a publisher keeps for replays. vLLM's default is 10,000; here the end of the buffer is to be met.
const KEPT: usize = 16;

type Kept = Arc<Mutex<VecDeque<(u64, Vec<u8>)>>>;

fn message(frames: impl IntoIterator<Item = Vec<u8>>) -> Option<ZmqMessage> {
    let mut frames = frames.into_iter();
    let mut message = ZmqMessage::from(frames.next()?);
    frames.for_each(|frame| message.push_back(frame.into()));
    Some(message)
}

fn number(frame: &[u8]) -> anyhow::Result<u64> {
    let bytes = frame.try_into().context("a number has 8 bytes")?;
    Ok(u64::from_be_bytes(bytes))
}

/// An instance's end.
pub struct Publisher {
    /// An XPUB socket is a PUB socket that says who has subscribed, so nobody has to wait for that by the clock.
    socket: XPubSocket,
    kept: Kept,
    next: u64,
    /// Where others connect: messages, and replays.
    pub endpoints: [String; 2],
    replays: JoinHandle<()>,
}

impl Publisher {
    pub async fn new() -> anyhow::Result<Self> {
        let (mut socket, mut router) = (XPubSocket::new(), RouterSocket::new());
        let endpoints = [
            socket.bind("tcp://127.0.0.1:0").await?.to_string(),
            router.bind("tcp://127.0.0.1:0").await?.to_string(),
        ];
        let kept = Kept::default();
        let from = Arc::clone(&kept);
        let replays =
            tokio::spawn(async move { while replay(&mut router, &from).await.is_ok() {} });
        Ok(Self { socket, kept, next: 0, endpoints, replays })
    }

    /// Waits until somebody has subscribed.
    pub async fn subscribed(&mut self) -> anyhow::Result<()> {
        let frames = self.socket.recv().await?.into_vec();
        ensure!(frames.first().is_some_and(|frame| frame.first() == Some(&1)), "no subscription");
        Ok(())
    }

    /// Sends a message, or loses it on the way: then it has its number, and is kept, all the same.
    pub async fn publish(&mut self, payload: Vec<u8>, is_lost: bool) -> anyhow::Result<()> {
        {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push_back((self.next, payload.clone()));
            if kept.len() > KEPT {
                kept.pop_front();
            }
        }
        let number = self.next.to_be_bytes().to_vec();
        self.next += 1;
        if !is_lost && let Some(message) = message([TOPIC.into(), number, payload]) {
            self.socket.send(message).await?;
        }
        Ok(())
    }

    /// The number of the last message.
    pub fn last(&self) -> Option<u64> {
        self.next.checked_sub(1)
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.replays.abort();
    }
}

/// Answers one request for a replay.
async fn replay(router: &mut RouterSocket, kept: &Kept) -> anyhow::Result<()> {
    let frames = router.recv().await?.into_vec();
    let [client, empty, first] = &frames[..] else { bail!("{} frames", frames.len()) };
    let (first, client) = (number(first)?, client.to_vec());
    let kept: Vec<_> = {
        let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().filter(|(number, _)| *number >= first).cloned().collect()
    };
    for (number, payload) in kept.into_iter().chain([(END, Vec::new())]) {
        let frames = [client.clone(), empty.to_vec(), number.to_be_bytes().to_vec(), payload];
        router.send(message(frames).context("four frames")?).await?;
    }
    Ok(())
}

/// What a subscriber was given, in order.
#[derive(Debug)]
pub enum Heard {
    Batch {
        number: u64,
        payload: Vec<u8>,
    },
    /// Messages are lost that no replay has brought. What was heard before may be wrong.
    Lost,
}

/// The router's end, for one instance.
pub struct Subscriber {
    messages: UnboundedReceiver<(u64, Vec<u8>)>,
    replays: DealerSocket,
    cursor: CursorState,
    reader: JoinHandle<()>,
    /// Gaps that were found, and messages that replays have brought.
    pub gaps: u64,
    pub replayed: u64,
}

impl Subscriber {
    pub async fn new([messages, replays]: &[String; 2]) -> anyhow::Result<Self> {
        let mut socket = SubSocket::new();
        socket.connect(messages).await?;
        socket.subscribe(TOPIC).await?;
        let (send, messages) = mpsc::unbounded_channel();
        let reader = tokio::spawn(async move {
            while let Ok(message) = socket.recv().await {
                let frames = message.into_vec();
                let [_, at, payload] = &frames[..] else { continue };
                let Ok(at) = number(at) else { continue };
                if send.send((at, payload.to_vec())).is_err() {
                    return;
                }
            }
        });
        let mut dealer = DealerSocket::new();
        dealer.connect(replays).await?;
        let cursor = CursorState::Initial;
        Ok(Self { messages, replays: dealer, cursor, reader, gaps: 0, replayed: 0 })
    }

    /// Everything up to message `last`, with what was lost on the way if it is to be had.
    pub async fn hear(&mut self, last: u64) -> anyhow::Result<Vec<Heard>> {
        let mut heard = Vec::new();
        while self.cursor.last_applied_id().is_none_or(|at| at < last) {
            let (number, payload) = self.messages.recv().await.context("the wire is closed")?;
            match self.cursor.observe(number) {
                CursorObservation::Initial { got: first } if first > 0 => {
                    self.mend(0, first, &mut heard).await?;
                }
                CursorObservation::Gap { expected, got } => {
                    self.mend(expected, got, &mut heard).await?;
                }
                _ => {}
            }
            // A replay may have brought it.
            if !matches!(self.cursor.observe(number), CursorObservation::Stale { .. }) {
                self.cursor = self.cursor.advance_to(number);
                heard.push(Heard::Batch { number, payload });
            }
        }
        Ok(heard)
    }

    /// Asks for what was sent from number `first` on, of which at least those below `end` are missing.
    async fn mend(&mut self, first: u64, end: u64, heard: &mut Vec<Heard>) -> anyhow::Result<()> {
        self.gaps += 1;
        let request = message([Vec::new(), first.to_be_bytes().to_vec()]).context("two frames")?;
        self.replays.send(request).await?;
        let mut next = first;
        loop {
            let frames = self.replays.recv().await?.into_vec();
            let [_, at, payload] = &frames[..] else { bail!("{} frames", frames.len()) };
            let at = number(at)?;
            if at == END {
                break;
            }
            if at != next {
                heard.push(Heard::Lost);
            }
            next = at + 1;
            self.replayed += 1;
            self.cursor = self.cursor.advance_to(at);
            heard.push(Heard::Batch { number: at, payload: payload.to_vec() });
        }
        if next < end {
            heard.push(Heard::Lost);
        }
        Ok(())
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.reader.abort();
    }
}
