//! What a link has decided for transfers of a kind, kept, because a plan takes longer than a launch.

use super::host_order::HostOrder;
use super::pieces::Pace;
use super::{HostDirection, HostLink, Load, Transport};

/// What a decision depends on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Question {
    pub(super) direction: HostDirection,
    pub(super) load: Load,
    /// Whether others may follow without a gap.
    pub(super) is_one_of_many: bool,
    /// Whether the pipeline is empty before it; to the host only.
    pub(super) is_first: bool,
}

/// How a transfer goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Decision {
    pub(super) transport: Transport,
    /// Of two hops.
    pub(super) pace: Pace,
}

/// The last decisions.
#[derive(Debug, Default)]
pub(super) struct Decisions {
    made: [Option<(Question, Decision)>; KEPT],
    next: usize,
}

/// Slots of bytes from which on a sequence is long.
const LONG_SLOTS: u64 = 4;

/// An engine has a handful of kinds of transfers: by direction, length and whether they are layered.
const KEPT: usize = 8;

impl Decisions {
    fn of(&self, question: &Question) -> Option<Decision> {
        let mut made = self.made.iter().flatten();
        made.find(|(asked, _)| asked == question).map(|&(_, decision)| decision)
    }

    fn keep(&mut self, question: Question, decision: Decision) {
        self.made[self.next] = Some((question, decision));
        self.next = (self.next + 1) % KEPT;
    }
}

impl HostLink {
    pub(super) fn question(
        &self,
        direction: HostDirection,
        load: Load,
        order: HostOrder<'_>,
    ) -> Question {
        let is_one_of_many = matches!(order, HostOrder::Started(_));
        // From the host, what drains last is not known now.
        let matters = is_one_of_many && direction == HostDirection::ToHost;
        let is_first = matters && {
            let last = self.last_to_host.as_ref();
            last.is_none_or(|last| matches!(last.is_at_rest(), Ok(true)))
        };
        Question { direction, load, is_one_of_many, is_first }
    }

    /// The cheapest transport that can carry a load, and how.
    pub(super) fn decide(&mut self, question: Question) -> Decision {
        if let Some(decision) = self.decisions.of(&question) {
            return decision;
        }
        let Question { direction, load, is_one_of_many, is_first } = question;
        let chosen = if is_one_of_many {
            self.profile.choose_of_many(direction, load)
        } else {
            self.profile.choose(direction, load)
        };
        let transport = match chosen {
            Transport::TwoHop if load.ring_buffer_bytes == 0 => Transport::DirectKernel,
            transport => transport,
        };
        let even = Pace::Even { most: load.ring_buffer_bytes };
        // Short pieces are worth their set-up where the pipeline fills, where it surely drains, and where
        // they are few of many. Whether others follow is not known.
        let fills = direction == HostDirection::ToHost && is_first;
        let is_long = load.bytes / LONG_SLOTS >= load.ring_buffer_bytes;
        let is_tapered = !is_one_of_many || fills || is_long;
        let pace = match self.profile.costs(direction).plan(direction, load) {
            Some((taper, _)) if is_tapered => Pace::Tapered(taper),
            // Forced where the profile knows of no engine, too.
            _ => even,
        };
        let decision = Decision { transport, pace };
        self.decisions.keep(question, decision);
        decision
    }
}
