//! What a link has decided for transfers of a kind, kept, because a plan takes longer than a launch.

use super::pieces::Pace;
use super::{HostDirection, HostLink, Load, Transport};

/// What a decision depends on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Question {
    pub(super) direction: HostDirection,
    pub(super) load: Load,
    /// Whether others follow without a gap.
    pub(super) is_one_of_many: bool,
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
    /// The cheapest transport that can carry a load, and how.
    pub(super) fn decide(&mut self, question: Question) -> Decision {
        if let Some(decision) = self.decisions.of(&question) {
            return decision;
        }
        let Question { direction, load, is_one_of_many } = question;
        let chosen = if is_one_of_many {
            self.profile.choose_of_many(direction, load)
        } else {
            self.profile.choose(direction, load)
        };
        let transport = match chosen {
            Transport::TwoHop if load.slot_bytes == 0 => Transport::DirectKernel,
            transport => transport,
        };
        let even = Pace::Even { most: load.slot_bytes };
        let pace = match self.profile.costs(direction).plan(direction, load) {
            Some((taper, _)) if !is_one_of_many => Pace::Tapered(taper),
            // Forced where the profile knows of no engine, too.
            _ => even,
        };
        let decision = Decision { transport, pace };
        self.decisions.keep(question, decision);
        decision
    }
}
