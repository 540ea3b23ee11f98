//! The schedule in words: what the host asked for, and what the device ran, in order.

use cuda_driver::guard;

use crate::SimDriver;

use crate::state::Machine;
use crate::streams::DefaultOrder;
use crate::work::{Operation, Work};

/// Calls whose effect on pending work is immediate: the device may advance before them too.
const IMMEDIATE: &[&str] = &[
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuCtxEnablePeerAccess",
    "cuCtxDisablePeerAccess",
];

impl SimDriver {
    /// A step of the host that the driver does not see, such as writing pinned memory.
    ///
    /// In an exploration, the device may advance before it, and `what` is a line of the schedule.
    /// Otherwise this does nothing.
    pub fn host_step(&self, what: &str) {
        let mut state = self.state();
        state.interleave();
        state.trace(|_| format!("host    {what}"));
    }
}

impl Machine {
    /// In an exploration, lets the device advance before a call that changes what pending work finds,
    /// or asks how far it is: since the call before, the host may have written pinned memory.
    pub(crate) fn before_call(&mut self, call: &'static str) {
        if !self.scheduler.is_exploring() {
            return;
        }
        if IMMEDIATE.contains(&call) {
            self.interleave();
            self.trace(|_| format!("host    {call}"));
        } else if guard!("sim.explore-queries", call.ends_with("Query"), else false) {
            self.interleave();
        }
    }

    /// Lets the device advance after a call: in an exploration if it enqueued, waited or asked, and at
    /// a pace that follows the host as far as that says.
    pub(crate) fn after_call(&mut self, call: &'static str) {
        if !self.scheduler.is_exploring() {
            return self.keep_pace();
        }
        let looked = call.ends_with("Query") || call.ends_with("Synchronize");
        if looked || self.scheduler.has_moved() {
            self.interleave();
        }
    }

    /// Lets the device run any number of operations before the host goes on.
    pub(crate) fn interleave(&mut self) {
        loop {
            let ready = self.streams.ready();
            let choices = self.scheduler.choices().filter(|_| !ready.is_empty());
            let Some(choices) = choices else { break };
            let Some(choice) = choices.host_or_stream(ready.len()) else { break };
            self.run_next(ready[choice]);
        }
        self.scheduler.interleaved();
    }

    /// Lets the device go on after the answer of a query: as the pace says, or in an exploration by one
    /// operation at least if nothing has run since the same answer was given before.
    pub(crate) fn queried(&mut self, call: &'static str, handle: u64, is_done: bool) {
        let Some(choices) = self.scheduler.choices() else { return self.go_on_after_query() };
        let answer = if is_done { "done" } else { "not done" };
        choices.trace(|| format!("host    {call} of {handle:#x}: {answer}"));
        if !is_done && choices.found_unready(handle) {
            self.step();
        }
    }

    pub(crate) fn trace_enqueued(&mut self, stream: u64) {
        self.trace(|state| {
            let last = state.streams.get(stream).and_then(|stream| stream.pending().back());
            let what = last.map(|operation| state.describe(stream, operation));
            format!("host    enqueues {}", what.unwrap_or_default())
        });
    }

    pub(crate) fn trace_run(&mut self, stream: u64, operation: &Operation) {
        self.trace(|state| format!("device  runs     {}", state.describe(stream, operation)));
    }

    /// Adds a line to the schedule, if one is kept.
    pub(crate) fn trace(&mut self, line: impl FnOnce(&Self) -> String) {
        if !self.scheduler.is_tracing() {
            return;
        }
        let line = line(self);
        if let Some(choices) = self.scheduler.choices() {
            choices.trace(|| line);
        }
    }

    fn describe(&self, handle: u64, operation: &Operation) -> String {
        let Operation { sequence, call, work, .. } = operation;
        let place = match self.streams.get(handle) {
            Some(stream) if stream.order() == DefaultOrder::Legacy => {
                format!("the default stream of device {}", stream.device())
            }
            _ => format!("stream {handle:#x}"),
        };
        let what = match work {
            Work::Copy { destination, source, bytes } => {
                format!(": {bytes} bytes from {:#x} to {:#x}", source.1, destination.1)
            }
            Work::CopyBatch(copies) => format!(": {} copies", copies.len()),
            Work::WriteStaged { destination, data } => {
                format!(": {} staged bytes to {destination:#x}", data.len())
            }
            Work::Fetch { source, bytes } => format!(": {bytes} bytes from {source:#x}"),
            Work::Fill { destination, bytes, value } => {
                format!(": {bytes} bytes of {value:#04x} to {destination:#x}")
            }
            Work::Launch(launch) => format!(": {}", launch.name()),
            Work::Compute(nanos) => format!(": {nanos} ns"),
            Work::Record(event) => format!(": event {event:#x}"),
            Work::Wait(point) => format!(": for #{} of stream {:#x}", point.sequence, point.stream),
        };
        format!("#{sequence} {call} in {place}{what}")
    }
}
