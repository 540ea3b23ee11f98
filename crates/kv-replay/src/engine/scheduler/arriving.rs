//! Requests of the trace that arrive.

use std::time::Duration;

use kv_plane::manager::Reuse;

use super::Scheduler;
use crate::engine::cache::Compute;
use crate::engine::expected::ExpectedSums;
use crate::engine::handover::Handover;
use crate::engine::live::Live;

impl<C: Compute> Scheduler<'_, C> {
    /// Prepares requests of the trace, so that as many wait as there are rows.
    pub(super) fn look_ahead(&mut self, rows: usize) {
        while self.waiting.len() < rows {
            let Some(entry) = self.trace.requests.get(self.next) else { return };
            if let Some(arrivals) = &mut self.arrivals {
                if !arrivals.is_here(entry.timestamp_ms) {
                    return;
                }
                arrivals.arrive(self.next, entry.timestamp_ms);
            }
            let content = self.content.of(self.next, entry);
            let sums = ExpectedSums::new(&self.oracle);
            let then = self.hints.get(self.next).copied().flatten();
            let reuse = Reuse { shared_head: 0, then };
            let answer_tokens = match &mut self.handover {
                Handover::Prefill(_) => 0,
                Handover::Decode(decode) => {
                    decode.want(self.next, content.prompt_tokens());
                    entry.output_length
                }
                Handover::None => entry.output_length,
            };
            let mut request = Live::new(content, sums, answer_tokens, reuse);
            request.twins = self.life.fork.saturating_sub(1);
            self.live.insert(self.next, request);
            self.waiting.push_back(self.next);
            self.next += 1;
        }
    }

    /// Lets time pass until the next request arrives, if there is nothing else to do.
    pub(super) fn wait_for_arrival(&self) {
        let next = self.trace.requests.get(self.next);
        if let (true, Some(arrivals), Some(next)) = (self.live.is_empty(), &self.arrivals, next) {
            arrivals.wait_for(next.timestamp_ms);
        }
    }

    pub(super) fn note_arrival(&mut self, number: usize) {
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.admit(number);
        }
        let Some(entry) = self.trace.requests.get(number) else { return };
        let more_ms = entry.timestamp_ms.saturating_sub(self.arrived_ms);
        if self.real.is_none() {
            self.clock.advance(Duration::from_millis(more_ms));
        }
        self.arrived_ms += more_ms;
    }
}
