//! The drill: a trace, request by request, through instances that evict, are reset, and lose messages on the way.

use anyhow::Context;
use kv_replay::trace::Trace;

use crate::Options;
use crate::instance::{BLOCK_TOKENS, Instance, Sizes};
use crate::prompt::{Prompt, mixed};
use crate::router::{Route, Router};
use crate::wire::{Heard, Publisher, Subscriber};

/// Who chooses the instance of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    Router,
    RoundRobin,
}

/// One of the instances is reset after so many requests.
const RESET_AFTER: usize = 997;

/// Messages of which one is lost.
const LOST_ONE_IN: u64 = 16;

/// Requests of which one has all its messages lost.
const LOST_TURN_ONE_IN: u64 = 64;

/// What came of the drill.
#[derive(Debug, Default)]
pub struct Outcome {
    pub prompt_tokens: u64,
    /// Prompt tokens that were found on the device, and in tiers below it.
    pub near_tokens: u64,
    pub far_tokens: u64,
    /// Requests of each instance.
    pub shares: Vec<u64>,
    pub resets: u64,
    pub cut_short: u64,
    /// Each request whose score was not what its instance found.
    pub disagreements: Vec<String>,
    /// Scores that were above 0, and those of prompts with a salt or an adapter.
    pub scored: u64,
    pub scoped: u64,
    pub wire: WireCounts,
}

/// What happened on the wire.
#[derive(Clone, Copy, Debug, Default)]
pub struct WireCounts {
    pub messages: u64,
    pub bytes: u64,
    pub events: u64,
    pub refused: u64,
    pub lost: u64,
    pub gaps: u64,
    pub replayed: u64,
    /// Everything told anew: because a replay came too late, and because the router was started anew.
    pub told_anew: u64,
    pub restarts: u64,
    /// How often an instance told everything anew, because its publisher had lagged behind its cache.
    pub log_losses: u64,
}

/// An instance, and the way from it to the router.
struct Linked {
    instance: Instance,
    publisher: Publisher,
    subscriber: Subscriber,
    random: u64,
}

impl Linked {
    async fn new(rank: u32, sizes: Sizes, seed: u64) -> anyhow::Result<Self> {
        let instance = Instance::new(rank, sizes)?;
        let mut publisher = Publisher::new().await?;
        let subscriber = Subscriber::new(&publisher.endpoints).await?;
        publisher.subscribed().await?;
        let random = mixed(seed ^ mixed(rank.into()));
        Ok(Self { instance, publisher, subscriber, random })
    }

    fn one_in(&mut self, of: u64) -> bool {
        self.random = mixed(self.random);
        self.random.is_multiple_of(of)
    }

    /// Publishes what has happened, and loses some of it on the way.
    async fn publish(&mut self, counts: &mut WireCounts) -> anyhow::Result<()> {
        let all_lost = self.one_in(LOST_TURN_ONE_IN);
        for payload in std::mem::take(&mut self.instance.outbox) {
            let is_lost = all_lost || self.one_in(LOST_ONE_IN);
            counts.messages += 1;
            counts.bytes += payload.len() as u64;
            counts.lost += u64::from(is_lost);
            self.publisher.publish(payload, is_lost).await?;
        }
        // Whoever has missed the last message sees it by the number of this one.
        self.publisher.publish(self.instance.heartbeat(), false).await
    }

    /// Has the router hear everything that was published. What no replay brings is told anew.
    async fn bring(
        &mut self,
        of: usize,
        router: &mut Router,
        counts: &mut WireCounts,
    ) -> anyhow::Result<()> {
        loop {
            let last = self.publisher.last().context("nothing was published")?;
            let mut is_lost = false;
            for heard in self.subscriber.hear(last).await? {
                match heard {
                    // It would be added to what is not there.
                    Heard::Batch { .. } if is_lost => {}
                    Heard::Batch { number, payload } => router.take(of, number, &payload).await?,
                    Heard::Lost => is_lost = true,
                }
            }
            if !is_lost {
                return Ok(());
            }
            counts.told_anew += 1;
            self.instance.tell_all()?;
            self.publish(counts).await?;
        }
    }
}

/// Plays the trace.
pub async fn run(
    trace: &Trace,
    way: Way,
    sizes: Sizes,
    options: &Options,
) -> anyhow::Result<Outcome> {
    let mut linked = Vec::new();
    for rank in 0..options.instances {
        linked.push(Linked::new(rank as u32, sizes, options.seed).await?);
    }
    let mut router = Router::new(options.instances, sizes.device.into(), options.seed)?;
    let mut outcome = Outcome { shares: vec![0; options.instances], ..Outcome::default() };
    for number in 0..trace.requests.len() {
        if number % RESET_AFTER == RESET_AFTER - 1 {
            linked[(number / RESET_AFTER) % options.instances].instance.reset()?;
            outcome.resets += 1;
        }
        if way == Way::Router && number == trace.requests.len() / 2 {
            router.forget();
            outcome.wire.restarts += 1;
            linked.iter_mut().try_for_each(|one| one.instance.tell_all())?;
        }
        let prompt = Prompt::of(trace, number);
        outcome.prompt_tokens += prompt.ids.len() as u64;
        match way {
            Way::RoundRobin => {
                let of = number % options.instances;
                let served = linked[of].instance.serve(&prompt)?;
                linked[of].instance.outbox.clear();
                outcome.shares[of] += 1;
                outcome.count(served.cached_tokens, served.far_tokens);
            }
            Way::Router => routed(&prompt, &mut linked, &mut router, &mut outcome).await?,
        }
    }
    for one in linked {
        outcome.cut_short += one.instance.cut_short;
        outcome.wire.log_losses += one.instance.log_losses;
        outcome.wire.gaps += one.subscriber.gaps;
        outcome.wire.replayed += one.subscriber.replayed;
        one.instance.close()?;
    }
    [outcome.wire.events, outcome.wire.refused] = router.events();
    Ok(outcome)
}

/// A request on the way that the router chooses.
async fn routed(
    prompt: &Prompt,
    linked: &mut [Linked],
    router: &mut Router,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    for (of, one) in linked.iter_mut().enumerate() {
        if !one.instance.outbox.is_empty() {
            one.publish(&mut outcome.wire).await?;
            one.bring(of, router, &mut outcome.wire).await?;
        }
    }
    let route = router.route(prompt).await?;
    let of = route.instance;
    let served = linked[of].instance.serve(prompt)?;
    outcome.shares[of] += 1;
    outcome.count(served.cached_tokens, served.far_tokens);
    outcome.compare(prompt, route, served.cached_tokens, served.far_tokens);
    router.computed(prompt.number).await?;
    for ended in served.ended {
        router.ended(ended).await?;
    }
    Ok(())
}

impl Outcome {
    fn count(&mut self, cached_tokens: u64, far_tokens: u64) {
        self.near_tokens += cached_tokens - far_tokens;
        self.far_tokens += far_tokens;
    }

    /// Compares a score with what the instance found, in all and on the device.
    fn compare(&mut self, prompt: &Prompt, route: Route, cached_tokens: u64, far_tokens: u64) {
        let block = u64::from(BLOCK_TOKENS);
        // A model computes the last token of a prompt at least, so a cache leaves the block out that it is in.
        let most = (prompt.ids.len() as u64 - 1) / block;
        let blocks = (route.device_blocks + route.lower_blocks).min(most);
        let near = route.device_blocks.min(most);
        self.scored += u64::from(blocks > 0);
        let is_scoped = prompt.scope.salt.or(prompt.scope.adapter).is_some();
        self.scoped += u64::from(is_scoped && blocks > 0);
        let found = [cached_tokens / block, (cached_tokens - far_tokens) / block];
        if found != [blocks, near] {
            self.disagreements.push(format!(
                "request {} of {} tokens ({:?}) at instance {}: score {blocks}, {near} on the device; found {} and {}",
                prompt.number,
                prompt.ids.len(),
                prompt.scope,
                route.instance,
                found[0],
                found[1],
            ));
        }
    }
}
