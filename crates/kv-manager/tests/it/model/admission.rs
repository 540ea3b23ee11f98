//! Requests, and what becomes of them.

use super::engine::{Engine, Wish};
use super::hints::reuse;
use super::mirror::mask;
use super::run::{Run, blocks_of};
use super::truth::{Facts, Ideal};
use crate::prelude::*;

/// Salts from this one on are given by the request; those below are the tenants' own.
const EXPLICIT: u8 = 100;

/// What decides the KV of a prompt of `tokens` tokens beside its ids.
fn facts(random: &mut Random, block_tokens: u64, tokens: u64, tenants: usize) -> Facts {
    let tenant = random.index(tenants) as u8;
    let mut inputs = Vec::new();
    if random.chance(20) {
        inputs.push((random.below(tokens), random.below(2) as u8));
    }
    if random.chance(5) {
        inputs.push((tokens + random.below(4), 7));
    }
    Facts {
        block_tokens,
        adapter: if random.chance(15) { 1 } else { 0 },
        inputs,
        salt: if random.chance(15) { EXPLICIT + tenant } else { tenant },
        shared_tokens: if random.chance(40) { random.below(2 * tokens) } else { 0 },
        tenant,
        named: random.chance(15),
    }
}

/// A prompt whose KV its ids alone decide.
fn plain(block_tokens: u64) -> Facts {
    Facts {
        block_tokens,
        adapter: 0,
        inputs: Vec::new(),
        salt: 0,
        shared_tokens: 0,
        tenant: 0,
        named: false,
    }
}

/// Whether a tenant holds as much as it may.
fn is_bound(missing: &Missing) -> bool {
    matches!(missing.reason, ClaimError::Tenant(TenantError::HeldMax { .. }))
}

/// Whether requests behind one with this answer have none. A tenant's bound stops nobody else.
fn ends(answer: &Answer) -> bool {
    match answer {
        Answer::NoRoom(missing) => !is_bound(missing),
        answer => matches!(answer, Answer::NoRow),
    }
}

impl Engine {
    /// Makes up a request.
    pub fn wish(&mut self) -> Wish {
        let random = &mut self.random;
        let block_tokens = self.size.unit() as u64;
        let most = (self.size.block_tokens * self.size.width) as u64;
        let longest = if random.chance(3) { most + 2 } else { most * 2 / 3 };
        let tokens = random.from(1, longest.max(1));
        // Few different prompts, most of which begin alike; some go on from what runs now, and like that.
        let running = self.runs.get(random.index(self.runs.len() + 2)).map(|run| &run.ideal);
        let mut ids: Vec<u32> = match running {
            Some(ideal) => ideal.ids.clone(),
            None if self.history.is_empty() || random.chance(30) => (0..tokens as u32).collect(),
            None => self.history[random.index(self.history.len())].clone(),
        };
        ids.truncate(tokens as usize);
        if random.chance(30) {
            ids.truncate(random.from(0, ids.len() as u64) as usize);
        }
        let other = random.below(3) as u32 * 100;
        let from = ids.len() as u32;
        ids.extend((from..tokens as u32).map(|at| at + other));
        let facts = match running.filter(|_| random.chance(80)) {
            Some(ideal) => Facts { inputs: ideal.facts.inputs.clone(), ..*ideal.facts },
            // What left the host is asked for again, or the tiers below would see few loads.
            None if self.size.tiers > 0 && random.chance(75) => plain(block_tokens),
            None => facts(random, block_tokens, tokens, self.tenants.len()),
        };
        let mut request = if facts.named {
            Request::named(tokens, facts.names(&ids))
        } else {
            Request::new(ids.clone())
        };
        request.content = facts.content(facts.salt >= EXPLICIT);
        request.tenant = self.tenants[usize::from(facts.tenant)];
        request.waits = random.chance(if self.size.tiers > 0 { 80 } else { 60 });
        request.by_layers = random.chance(85);
        request.tokens_max = random.below(2 * most);
        request.reuse = reuse(random);
        if random.chance(15) {
            request.hit_max = if random.chance(50) { 0 } else { random.below(tokens + 1) };
        }
        Wish {
            request,
            ideal: Ideal { facts: Rc::new(facts), ids, kv: Vec::new(), later: Vec::new() },
        }
    }

    /// The tokens that the next request finds, as a mirror of the events knows it; more if steps are not complete.
    fn foresee_hit(&mut self) -> Option<u64> {
        self.compare_mirror();
        let Wish { request, ideal } = self.wishes.first()?;
        let facts = &ideal.facts;
        // A prefix ends where bounds of a tenant do not let it be held, and a salt is part of the names.
        let bound = self.tenants.len() > 1 || facts.salt != 0;
        if bound || !self.size.further.is_empty() || self.size.tiers > 0 {
            return None;
        }
        let most = request.hit_max.min(request.tokens().saturating_sub(1));
        let mask = mask(self.generation);
        let names = facts.names(&ideal.ids).into_iter().map(|name| name.to_u128() ^ mask);
        let names = names.take((most / facts.block_tokens) as usize).map(BlockHash::from_u128);
        let score = self.mirror.score(&names.collect::<Vec<_>>())?;
        Some(score as u64 * facts.block_tokens)
    }

    /// Sees to it that there are some requests.
    fn wish_some(&mut self) {
        while self.wishes.len() < self.random.from(1, 3) as usize {
            let wish = self.wish();
            self.wishes.push(wish);
        }
        if self.random.chance(5) {
            let at = self.random.index(self.wishes.len());
            self.wishes.remove(at);
        }
    }

    fn check_foreseen(&mut self, foreseen: Option<u64>, cached: u64) {
        let Some(foreseen) = foreseen else { return };
        let exact = self.completed() >= self.latest_staged();
        let right = cached == foreseen || cached > foreseen && !exact;
        assert!(right, "{cached} tokens were found, not {foreseen}; {exact}");
        self.saw_if(exact && foreseen > 0, "a lookup that a mirror foresees");
    }

    pub fn admit(&mut self) {
        self.wish_some();
        let most = self.size.block_tokens * self.size.width;
        let budget = self.random.from(0, 2 * most as u64);
        let rows = self.manager.free_rows();
        let foreseen = if self.random.chance(20) { self.foresee_hit() } else { None };
        let mut requests: Vec<_> = self.wishes.iter().map(|wish| wish.request.clone()).collect();
        let answers = self.manager.ask_all(&mut requests, budget);
        assert!(answers.len() <= requests.len());
        let mut left = budget;
        let (mut admitted, mut waiting, mut loads) = (Vec::new(), 0, false);
        let ended = answers.iter().position(ends);
        assert!(ended.is_none_or(|at| at + 1 == answers.len()), "an answer behind the last one");
        for (at, answer) in answers.into_iter().enumerate() {
            self.wishes[at].request = requests[at].clone();
            match answer {
                Answer::Admitted(sequence) => {
                    self.saw("an admission");
                    if at == 0 {
                        self.check_foreseen(foreseen, sequence.cached_tokens());
                    }
                    left -= u64::from(sequence.next());
                    admitted.push((at, sequence));
                }
                Answer::Waiting(Waiting::Prefix { tokens }) => {
                    self.check_waiting(at, tokens as usize);
                    waiting += 1;
                    self.saw("a request that waits");
                }
                Answer::Waiting(Waiting::Load { blocks, .. }) => {
                    let stats = self.manager.lower_stats();
                    assert!(blocks > 0 && stats.ticket_blocks >= blocks, "{blocks} of {stats:?}");
                    self.saw("a request that waits for a load");
                    loads = true;
                }
                Answer::NoRow => {
                    // One that waits for another of the same call has held a row until the end.
                    assert!(admitted.len() + waiting >= rows, "there was a row");
                    self.saw("no row");
                }
                Answer::NoRoom(missing) | Answer::Waiting(Waiting::Bound(missing)) => {
                    self.check_missing(&missing);
                }
                Answer::Refused(error) => self.check_refusal(at, &error),
            }
        }
        assert!(left <= budget);
        if rows < self.size.rows && !admitted.is_empty() {
            let watermark = self.manager.options().groups[0].watermark_blocks as usize;
            assert!(
                self.manager.pool(GroupId(0)).unwrap().claimable() >= watermark,
                "nothing is left to grow"
            );
        }
        for (at, sequence) in admitted.into_iter().rev() {
            let wish = self.wishes.remove(at);
            let hits = sequence.cached_tokens() as usize / self.size.block_tokens;
            self.enter(wish, sequence, hits);
        }
        self.wishes.retain(|wish| wish.request.tokens_max != u64::MAX);
        if loads && self.random.chance(80) {
            // Asked again as soon as the load has begun, and before it has ended.
            self.stage();
            self.finish();
            self.carry_out_all();
            self.begin();
            self.admit();
            self.stage();
        }
    }

    fn check_missing(&mut self, missing: &Missing) {
        if let ClaimError::Exhausted { requested, claimable, .. } = missing.reason {
            assert!(requested > claimable, "{missing:?}");
        }
        self.saw_if(is_bound(missing), "a request of a tenant at its bound");
        self.saw("no room for a request");
    }

    /// Checks that another sequence, or an earlier request of the call, computes what a request waits for.
    fn check_waiting(&self, at: usize, tokens: usize) {
        let end = tokens + self.size.unit();
        let wanted = &self.wishes[at].ideal.ids[..end];
        let running = self.runs.iter().map(|run| &run.ideal.ids);
        let mut all = running.chain(self.wishes[..at].iter().map(|wish| &wish.ideal.ids));
        assert!(all.any(|ids| ids.starts_with(wanted)), "nobody computes {wanted:?}");
    }

    fn check_refusal(&mut self, at: usize, error: &AdmitError) {
        let blocks = self.wishes[at].ideal.ids.len().div_ceil(self.size.block_tokens);
        let further = !self.size.further.is_empty();
        match error {
            AdmitError::TooLong { .. } => assert!(further || blocks > self.size.width),
            AdmitError::NeverFitsShared { granules, capacity } => {
                assert!(granules > capacity && self.size.shared.is_some());
            }
            AdmitError::NeverFits { .. } => assert!(further || blocks > self.size.device),
            AdmitError::NeverFitsTenant { blocks, most, .. } => {
                assert!(blocks > most && self.wishes[at].request.tenant != TenantId::NOBODY);
                self.saw("a request beyond its tenant's bound");
            }
            other => panic!("{other:?}"),
        }
        // Nobody asks again.
        self.wishes[at].request.tokens_max = u64::MAX;
    }

    /// A request has been admitted, with `hits` blocks of the first group that were there.
    pub fn enter(&mut self, wish: Wish, sequence: Sequence, hits: usize) {
        let Wish { mut ideal, request } = wish;
        // It may compute again what was forgotten.
        self.forgotten.clear();
        let cached = sequence.cached_tokens();
        let length = ideal.ids.len() as u64;
        assert!(cached < length && cached <= request.hit_max, "{cached} of {length}");
        assert_eq!(sequence.resolved(), cached);
        assert_eq!(sequence.prompt_tokens(), length);
        ideal.fill(cached, self.generation);
        let blocks = blocks_of(&sequence);
        assert_eq!(blocks.len(), ideal.ids.len().div_ceil(self.size.block_tokens));
        self.check_claimed(&blocks[hits..]);
        self.saw_if(cached > 0, "a hit");
        let further = cached > 0 && !self.size.further.is_empty();
        self.saw_if(further, "a hit in several groups");
        self.saw_if(further && self.size.has_state(), "a hit at a checkpoint");
        self.saw_if(sequence.onboarded_blocks() > 0, "a hit in host memory");
        let run = Run {
            key: self.next_key,
            sequence,
            known: ideal.ids.clone(),
            ideal,
            tainted: false,
            outputs: VecDeque::new(),
            stale: Vec::new(),
            steps: Vec::new(),
            must_redo: false,
            lost: false,
            arriving: false,
            blocks,
            commits: Vec::new(),
            drafted: Vec::new(),
            late_drafted: Vec::new(),
            hit_max: request.hit_max,
        };
        self.next_key += 1;
        self.runs.push(run);
    }
}
