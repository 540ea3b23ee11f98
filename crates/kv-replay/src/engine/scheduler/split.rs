//! Prompts that are computed here for other nodes, and such that other nodes compute.

use kv_cache::{Answer, OpenStep, Tokens};

use super::Scheduler;
use crate::engine::RunError;
use crate::engine::cache::Cache;
use crate::engine::handover::Handover;
use crate::report::RunReport;

impl<C: Cache> Scheduler<'_, C> {
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
            prefill.finish(&mut self.cache, number, sequence)?;
        }
        Ok(())
    }

    /// Hears from other nodes, and goes on with the sequences whose blocks have come.
    pub(super) fn hear(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let filled = match &mut self.handover {
            Handover::None => return Ok(()),
            Handover::Prefill(prefill) => {
                prefill.hear();
                return Ok(());
            }
            Handover::Decode(decode) => {
                decode.hear();
                let completed = self.cache.manager().completed_step();
                decode.fill(&mut self.cache, completed)?
            }
        };
        for (number, sequence) in filled {
            self.begin(number, sequence, report)?;
        }
        Ok(())
    }

    /// Admits the requests whose prompts have come from other nodes, in order, as far as there is room.
    pub(super) fn adopt_waiting(
        &mut self,
        step: &OpenStep,
        report: &mut RunReport,
    ) -> Result<(), RunError> {
        let formats = self.cache.manager().formats();
        for number in self.waiting.clone() {
            let Handover::Decode(decode) = &mut self.handover else { return Ok(()) };
            let request = self.live.get_mut(&number).filter(|_| decode.is_ready(number));
            let Some(mut request) = request.and_then(|live| live.request.take()) else { continue };
            let tokens = request.tokens();
            let (answer, adoption) = self.cache.adopt(&mut request, tokens, &formats)?;
            if let (Some(live), false) =
                (self.live.get_mut(&number), matches!(answer, Answer::Admitted(_)))
            {
                live.request = Some(request);
            }
            match (answer, adoption) {
                (Answer::Admitted(sequence), Some(adoption)) => {
                    decode.adopt(number, sequence, adoption, step.number());
                }
                (Answer::Admitted(sequence), None) => {
                    decode.needs_nothing(number);
                    self.begin(number, sequence, report)?;
                }
                (Answer::NoRoom(missing), _) => {
                    self.refused = Some((number, missing.into()));
                    break;
                }
                (Answer::Refused(source), _) => {
                    return Err(RunError::Admit { request: number, source: source.into() });
                }
                _ => break,
            }
            self.note_arrival(number);
            report.admissions += 1;
            self.waiting.retain(|of| *of != number);
        }
        Ok(())
    }
}
