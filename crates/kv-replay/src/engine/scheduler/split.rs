//! Prompts that are computed here for other nodes, and such that other nodes compute.

use cuda_driver::guard;
use kv_plane::handover::{Adopted, Coming};
use kv_plane::{Answer, NoRoom, Tokens};

use super::{IDLE_ITERATIONS_MAX, LOOK, Scheduler};
use crate::engine::RunError;
use crate::engine::cache::Compute;
use crate::engine::handover::Handover;
use crate::engine::live::Live;
use crate::report::RunReport;

impl<C: Compute> Scheduler<'_, C> {
    /// Hands over the prompts that steps up to this one have completed.
    pub(super) fn finish_prompts(&mut self, completed: u64) -> Result<(), RunError> {
        let Handover::Prefill(prefill) = &mut self.handover else { return Ok(()) };
        for (&number, request) in &mut self.live {
            if request.over_in.is_none_or(|step| step > completed) {
                continue;
            }
            let Some(mut sequence) = request.sequence.take().filter(|_| !request.cancelled) else {
                prefill.cancel(number);
                continue;
            };
            // The id that came out of the last step is not known to the other side; here it ends the prompt.
            while let Some((at, ids)) = request.outcomes.pop_front() {
                let known = sequence.known();
                let full = (known / self.block_tokens) as usize;
                let names = &request.content.names(known + ids)[full..];
                let committed = Tokens::Named { count: ids, names };
                let committed = self.cache.commit(&mut sequence, at, committed);
                committed.map_err(|source| RunError::Commit { request: number, source })?;
            }
            prefill.finish(&mut self.cache.local()?.cache, number, sequence)?;
        }
        Ok(())
    }

    /// Hears from other nodes, and goes on with the sequences whose blocks have come.
    pub(super) fn hear(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let filled = match &mut self.handover {
            Handover::None => return Ok(()),
            Handover::Prefill(prefill) => {
                // A prompt that is still computed is computed to its end: others find its blocks.
                prefill.side.poll(&self.cache.local()?.cache);
                return Ok(());
            }
            Handover::Decode(decode) => decode.poll(&mut self.cache.local()?.cache)?,
        };
        for (number, sequence) in filled {
            self.begin(number, sequence, report)?;
        }
        Ok(())
    }

    /// Admits the requests whose prompts have come from other nodes, in order, as far as there is room.
    pub(super) fn adopt_whole(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        for number in self.waiting.clone() {
            let Handover::Decode(decode) = &self.handover else { return Ok(()) };
            if decode.coming(number) == Some(Coming::Whole) && !self.adopt(number, report)? {
                break;
            }
        }
        Ok(())
    }

    /// Admits requests whose prompts other nodes have begun to compute, in what room those leave that can go on: while one of
    /// these waits, none. At most one request for each of the other nodes is offered and has not come.
    pub(super) fn adopt_early(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        if guard!("replay.no-early-room-that-others-lack", self.some_could_go_on(), else false) {
            return Ok(());
        }
        for number in self.waiting.clone() {
            let Handover::Decode(decode) = &self.handover else { return Ok(()) };
            if decode.coming(number) == Some(Coming::Offered) && !self.adopt(number, report)? {
                break;
            }
        }
        Ok(())
    }

    /// Whether a request waits for room only.
    fn some_could_go_on(&self) -> bool {
        let Handover::Decode(decode) = &self.handover else { return !self.waiting.is_empty() };
        let could = |number: &usize| decode.lacks_room_only(*number);
        let wakes = |live: &Live| live.wakes <= self.iteration;
        self.waiting.iter().any(could)
            || self.asleep.iter().any(|number| self.live.get(number).is_some_and(wakes))
    }

    /// Admits a request whose blocks are filled; false if there is no room.
    fn adopt(&mut self, number: usize, report: &mut RunReport) -> Result<bool, RunError> {
        let Handover::Decode(decode) = &mut self.handover else { return Ok(true) };
        let Some(live) = self.live.get_mut(&number) else { return Ok(true) };
        let Some(mut request) = live.request.take() else { return Ok(true) };
        let cache = &mut self.cache.local()?.cache;
        let cached = match decode.side.adopt(cache, decode.id(number), &mut request)? {
            Adopted::Filling => None,
            Adopted::Cached(sequence) => Some(sequence),
            Adopted::Later | Adopted::Here => {
                live.request = Some(request);
                return Ok(true);
            }
            Adopted::Not(answer) => {
                live.request = Some(request);
                return match answer {
                    Answer::Refused(source) => {
                        Err(RunError::Admit { request: number, source: source.into() })
                    }
                    // Of one that has not come, nobody is told: it waits in any case.
                    Answer::NoRoom(missing) if decode.coming(number) == Some(Coming::Whole) => {
                        self.refused = Some((number, NoRoom::from(missing).into()));
                        Ok(false)
                    }
                    _ => Ok(false),
                };
            }
        };
        if live.uncounted {
            let lives = self.chance.lives(number, live.total - live.content.prompt_tokens());
            live.dies = lives.map(|iterations| self.iteration + 1 + iterations);
        }
        if let Some(sequence) = cached {
            self.begin(number, sequence, report)?;
        }
        self.refused = None;
        self.note_arrival(number);
        report.admissions += 1;
        self.waiting.retain(|of| *of != number);
        Ok(true)
    }

    /// Whether blocks that a request lacks are those of a sequence that is being filled: it gives them back if other nodes still
    /// compute its prompt, and soon runs otherwise.
    pub(super) fn gives_way(&mut self, report: &mut RunReport) -> Result<bool, RunError> {
        let Handover::Decode(decode) = &mut self.handover else { return Ok(false) };
        if !decode.side.fills() {
            return Ok(false);
        }
        if let Some((number, sequence)) = decode.give_way(&mut self.cache.local()?.cache)
            && let Some(live) = self.live.get_mut(&number)
        {
            live.sequence = Some(sequence);
            live.preempt();
            self.waiting.push_front(number);
            report.preemptions += 1;
        }
        Ok(true)
    }

    /// An iteration without work while other nodes compute prompts. If that is so again and again though a request waits for
    /// room, others give way to it.
    pub(super) fn wait_for_nodes(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        self.refused = None;
        self.idle_iterations = match self.some_could_go_on() {
            true => self.idle_iterations + 1,
            false => 0,
        };
        if self.idle_iterations >= IDLE_ITERATIONS_MAX / 2 {
            self.idle_iterations = 0;
            let _ = guard!("replay.idle-gives-way", self.gives_way(report)?, else false);
        }
        std::thread::park_timeout(LOOK);
        Ok(())
    }
}
