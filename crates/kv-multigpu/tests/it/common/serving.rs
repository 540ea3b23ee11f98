//! A process for each GPU: what leaves the others serving when a kernel of one faults, since the driver keeps a
//! fault to the process.

#![allow(clippy::print_stdout, reason = "the answers of a process")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use cuda_driver::Stream;
use kv_multigpu::{DeviceRegistry, DeviceState};

use super::kernel;
use super::pipeline::{Failure, Plan, run};

/// A process that serves one GPU, the only one that it sees. It does what it is told, line by line.
struct Server {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Server {
    fn start(mut command: Command, uuid: &str) -> Self {
        command.env("CUDA_VISIBLE_DEVICES", uuid);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Self { process, orders, answers: BufReader::new(answers) }
    }

    fn order(&mut self, what: &str) {
        writeln!(self.orders, "{what}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Lets it end, which it must do quietly, lost or not.
    fn end(self) {
        let Self { mut process, orders, .. } = self;
        drop(orders);
        let status = process.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

/// Whether the device still takes work.
fn is_sound(registry: &DeviceRegistry) -> Result<(), Failure> {
    Ok(Stream::new(&registry.device(0)?).and_then(|stream| stream.synchronize())?)
}

/// The part of such a process: it ends when nobody orders any more.
pub(crate) fn serve(registry: &DeviceRegistry, plan: Plan) {
    assert_eq!(registry.count(), 1);
    for order in std::io::stdin().lines() {
        let answer = match order.unwrap().as_str() {
            "serve" => match is_sound(registry).and_then(|()| run(registry, plan)) {
                Ok(seen) => format!("served {}", seen.compared),
                Err(error) => format!("refused: {error}"),
            },
            "fault" => {
                let device = registry.device(0).unwrap();
                let stream = Stream::new(&device).unwrap();
                kernel::write_nowhere(&kernel::load(&device), &stream).unwrap();
                stream.synchronize().unwrap_err();
                let lost = matches!(registry.entry(0).unwrap().state, DeviceState::Lost { .. });
                format!("lost {lost}")
            }
            order => format!("unknown: {order}"),
        };
        println!("{answer}");
    }
    assert!(registry.close_all().is_complete());
}

/// One of them faults while the others have passes under way; they go on, and a new process takes its place.
pub(crate) fn one_faults_and_the_others_go_on(
    registry: &DeviceRegistry,
    plan: Plan,
    command: impl Fn() -> Command,
) {
    let report = registry.report().unwrap();
    let uuids: Vec<_> = report.iter().map(|entry| entry.uuid.to_string()).collect();
    let mut servers: Vec<_> = uuids.iter().map(|uuid| Server::start(command(), uuid)).collect();
    let served = format!("served {}", plan.passes - plan.passes / 5);
    for server in &mut servers {
        server.order("serve");
        assert_eq!(server.answer(), served);
    }
    let (first, others) = servers.split_first_mut().unwrap();
    for _ in 0..3 {
        others.iter_mut().for_each(|server| server.order("serve"));
    }
    first.order("fault");
    first.order("serve");
    assert_eq!(first.answer(), "lost true");
    assert!(first.answer().starts_with("refused: "), "a lost device served, or its process ended");
    for _ in 0..3 {
        others.iter_mut().for_each(|server| assert_eq!(server.answer(), served));
    }
    // Beside it, and after it, as if nothing had been.
    let mut again = Server::start(command(), &uuids[0]);
    again.order("serve");
    assert_eq!(again.answer(), served);
    servers.push(again);
    for server in &mut servers[1..] {
        server.order("serve");
        assert_eq!(server.answer(), served);
    }
    servers.into_iter().for_each(Server::end);
    println!("{} processes; one faulted, and another took its place", uuids.len());
}
