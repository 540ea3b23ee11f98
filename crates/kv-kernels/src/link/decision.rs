//! What a link has decided for transfers of a kind, kept, because a plan takes longer than a launch.

use super::pieces::Pace;
use super::{HostDirection, HostLink, Load, Transport};

/// What a decision depends on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Question {
    pub(super) direction: HostDirection,
    pub(super) load: Load,
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

/// An engine has a handful of kinds of transfers: by direction and length.
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
        let Question { direction, load } = question;
        let transport = match self.profile.choose(direction, load) {
            Transport::TwoHop if load.ring_buffer_bytes == 0 => Transport::DirectKernel,
            transport => transport,
        };
        let pace = match self.profile.costs(direction).plan(direction, load) {
            Some((taper, _)) => Pace::Tapered(taper),
            // Forced where the profile knows of no engine, too.
            None => Pace::Even { most: load.ring_buffer_bytes },
        };
        let decision = Decision { transport, pace };
        self.decisions.keep(question, decision);
        decision
    }
}
