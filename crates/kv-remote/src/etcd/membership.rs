//! A node's key in etcd, and the list of all.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_pool::guard;
use parking_lot::{Condvar, Mutex};

use super::EtcdError;
use super::client::{Client, Lease};
use crate::channel::NAME_MAX;
use crate::tier::MEMBERS_MAX;
use crate::{Member, NodeError};

/// The shortest lease: etcd counts whole seconds, and a renewal takes its time.
const LEASE_MIN: Duration = Duration::from_secs(2);

/// The longest call and the longest lease, beyond which a number is taken for no end: an hour, and a hundred years.
const CALL_LONGEST: Duration = Duration::from_secs(3600);
const LEASE_LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Whether it is a node's name. Keys with a slash behind the prefix are of another prefix, which begins in the same way.
fn is_name(name: &str) -> bool {
    (1..=NAME_MAX).contains(&name.len()) && !name.contains('/')
}

/// Takes the list of members; false if it is to be told again.
type Take = Box<dyn FnMut(&[Member]) -> bool + Send>;

/// Where etcd is, and how often it is asked.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EtcdOptions {
    /// URLs of etcd, such as `http://127.0.0.1:2379`. If one does not answer, the next is asked.
    pub endpoints: Vec<String>,
    /// The folder of the keys of all nodes, such as `/kv/prod/`. Nodes of one prefix are one cache. A slash at its end is added where there
    /// is none, so that `/kv/prod-eu/` is another cache than `/kv/prod`. Keys with a slash behind it are no members.
    pub prefix: String,
    /// A node that does not renew its key for so long, in whole seconds, has gone. At least 2 s.
    pub lease: Duration,
    /// How often the list is read: three times in a lease at least.
    pub every: Duration,
    /// How long a call may take.
    pub call_max: Duration,
}

impl EtcdOptions {
    /// Keys that go after 5 s, a list every 500 ms, and calls of 1 s at most.
    #[must_use]
    pub fn new(endpoints: Vec<String>, prefix: &str) -> Self {
        Self {
            endpoints,
            prefix: prefix.to_owned(),
            lease: Duration::from_secs(5),
            every: Duration::from_millis(500),
            call_max: Duration::from_secs(1),
        }
    }

    fn check(&self) -> Result<(), NodeError> {
        if self.endpoints.is_empty() {
            return Err(NodeError::NoEndpoint);
        }
        let is_endpoint = |endpoint: &&String| {
            endpoint.strip_prefix("http://").is_some_and(|rest| {
                !rest.is_empty() && !rest.contains(['/', '?', '#', '@']) && !rest.contains(' ')
            })
        };
        if let Some(endpoint) = self.endpoints.iter().find(|of| !is_endpoint(of)) {
            return Err(NodeError::Endpoint { endpoint: endpoint.clone() });
        }
        if self.prefix.is_empty() {
            return Err(NodeError::NoPrefix);
        }
        if self.lease < LEASE_MIN {
            let (ttl_ms, min_ms) = (self.lease.as_millis(), LEASE_MIN.as_millis());
            return Err(NodeError::EtcdLease { ttl_ms, min_ms });
        }
        Ok(())
    }
}

/// Counts of a membership.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct EtcdStats {
    /// Whether this node's key is there, as far as is known.
    pub is_listed: bool,
    /// Times that the key was written: once, and again when its lease or etcd's data was lost.
    pub written: u64,
    /// Renewals of its lease.
    pub renewed: u64,
    /// Lists that were read.
    pub lists: u64,
    /// Lists that were another one than before.
    pub changes: u64,
    /// Keys that are no members, of all lists together: another node's mistake, or another program's keys.
    pub foreign: u64,
    /// Calls that have failed.
    pub failed: u64,
    /// Why the last one has failed, or that the name is another node's.
    pub last_error: Option<EtcdError>,
}

/// Follows the members, and keeps this node's key, in a thread of its own.
///
/// While etcd does not answer, the list stays as it was: nodes that die meanwhile cost what a node that is down costs. Dropping it
/// tells the thread to end, and does not wait for it: the key goes as soon as etcd has been told, or with its lease.
pub struct Membership {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    members: Vec<Member>,
    stats: EtcdStats,
    ends: bool,
}

impl Membership {
    /// Lists this node under its name, and tells `take` of all members, this one among them, whenever the list has changed. If
    /// `take` answers false, it is told again the next time. It is called by the thread of the membership, which a panic of it ends.
    ///
    /// # Errors
    /// [`NodeError`]. An etcd that does not answer is none: it is asked until it does.
    pub fn join(
        options: EtcdOptions,
        own: Member,
        take: impl FnMut(&[Member]) -> bool + Send + 'static,
    ) -> Result<Self, NodeError> {
        Self::start(options, Some(own), Box::new(take))
    }

    /// Follows the members without being one.
    ///
    /// # Errors
    /// As of [`join`](Self::join).
    pub fn follow(
        options: EtcdOptions,
        take: impl FnMut(&[Member]) -> bool + Send + 'static,
    ) -> Result<Self, NodeError> {
        Self::start(options, None, Box::new(take))
    }

    fn start(mut options: EtcdOptions, own: Option<Member>, take: Take) -> Result<Self, NodeError> {
        options.check()?;
        if !options.prefix.ends_with('/') {
            guard!("remote.ends-prefixes", options.prefix.push('/'));
        }
        if let Some(own) = own.as_ref().filter(|own| !is_name(&own.name)) {
            return Err(NodeError::MemberName { name: own.name.clone(), max: NAME_MAX });
        }
        let shared = Arc::<Shared>::default();
        let client = Client::new(options.endpoints.clone(), options.call_max.min(CALL_LONGEST));
        let (lease, is_taken, held) = (None, false, Arc::clone(&shared));
        let keeper = Keeper { options, own, take, client, lease, is_taken, shared: held };
        let thread = std::thread::Builder::new().name("kv-remote etcd".to_owned());
        let thread = thread.spawn(move || keeper.run());
        let thread = thread.map_err(|error| NodeError::Thread { reason: error.to_string() })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The members, as they were told last.
    #[must_use]
    pub fn members(&self) -> Vec<Member> {
        self.shared.state.lock().members.clone()
    }

    /// Counts of what was done.
    #[must_use]
    pub fn stats(&self) -> EtcdStats {
        self.shared.state.lock().stats.clone()
    }

    /// Takes this node's key away, and waits until that was tried: for as long as the calls that are left take, each
    /// [`call_max`](EtcdOptions::call_max) at most for each endpoint. Not to be called by what takes the list.
    pub fn leave(mut self) {
        self.end();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }

    fn end(&self) {
        self.shared.state.lock().ends = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Membership").field("state", &*self.shared.state.lock()).finish()
    }
}

/// What the thread has.
struct Keeper {
    options: EtcdOptions,
    own: Option<Member>,
    take: Take,
    client: Client,
    /// The lease of this node's key, and when it was renewed.
    lease: Option<(Lease, Instant)>,
    /// Another node has the name, which came later. Two that both wrote it again would do so for ever.
    is_taken: bool,
    shared: Arc<Shared>,
}

impl Keeper {
    fn run(mut self) {
        let mut told = None;
        loop {
            let begun = Instant::now();
            let kept = self.keep();
            self.note(kept);
            match self.list() {
                Ok(members) => self.tell(members, &mut told),
                Err(error) => self.note(Err(error)),
            }
            // None is longer than anybody waits.
            let every = self.options.every.clamp(Duration::from_millis(1), self.options.lease / 3);
            let next = begun.checked_add(every);
            let mut state = self.shared.state.lock();
            while !state.ends && next.is_none_or(|next| Instant::now() < next) {
                match next {
                    Some(next) => drop(self.shared.changed.wait_until(&mut state, next)),
                    None => self.shared.changed.wait(&mut state),
                }
            }
            if state.ends {
                break;
            }
        }
        if let Some((lease, _)) = self.lease.take() {
            let revoked = self.client.revoke(lease);
            self.note(revoked);
            self.shared.state.lock().stats.is_listed = false;
        }
    }

    fn note(&self, outcome: Result<(), EtcdError>) {
        if let Err(error) = outcome {
            tracing::debug!(%error, "etcd");
            let mut state = self.shared.state.lock();
            state.stats.failed += 1;
            state.stats.last_error = Some(error);
        }
    }

    /// Has this node's key be there: renews its lease, or writes it under a new one.
    fn keep(&mut self) -> Result<(), EtcdError> {
        let Some(own) = self.own.clone().filter(|_| !self.is_taken) else { return Ok(()) };
        let now = Instant::now();
        if let Some((lease, renewed)) = self.lease {
            if now.duration_since(renewed) < self.options.lease / 3 {
                return Ok(());
            }
            if self.client.renew(lease)? {
                self.lease = Some((lease, now));
                self.shared.state.lock().stats.renewed += 1;
                return Ok(());
            }
            self.lease = None;
            self.shared.state.lock().stats.is_listed = false;
        }
        let seconds = self.options.lease.min(LEASE_LONGEST).as_secs();
        let lease = self.client.grant(seconds)?;
        let key = format!("{}{}", self.options.prefix, own.name);
        if let Err(error) = self.client.put(&key, &own.address.to_string(), lease) {
            // Nothing is under it, so that it may go by itself.
            drop(self.client.revoke(lease));
            return Err(error);
        }
        self.lease = Some((lease, now));
        let mut state = self.shared.state.lock();
        (state.stats.is_listed, state.stats.written) = (true, state.stats.written + 1);
        Ok(())
    }

    /// Gives back the lease of a key that is there no more, so that etcd does not keep it for its whole time.
    fn lose(&mut self) {
        if let Some((lease, _)) = self.lease.take() {
            self.shared.state.lock().stats.is_listed = false;
            let revoked =
                guard!("remote.returns-lost-leases", self.client.revoke(lease), else Ok(()));
            self.note(revoked);
        }
    }

    /// The members that etcd has, by name.
    fn list(&mut self) -> Result<Vec<Member>, EtcdError> {
        let entries = self.client.list(&self.options.prefix)?;
        let (mut members, mut foreign) = (BTreeMap::new(), 0);
        let mut found = None;
        for (key, value) in entries {
            let member = || {
                let key = String::from_utf8(key).ok()?;
                let name = key.strip_prefix(&self.options.prefix)?.to_owned();
                let address = String::from_utf8(value).ok()?.parse().ok()?;
                is_name(&name).then_some(Member { name, address })
            };
            let member = member();
            // Also where its name is behind those that are taken.
            let is_own = |own: &Member| member.as_ref().is_some_and(|of| of.name == own.name);
            if self.own.as_ref().is_some_and(is_own) {
                found.clone_from(&member);
            }
            match member {
                Some(member) if members.len() < MEMBERS_MAX => {
                    drop(members.insert(member.name.clone(), member));
                }
                _ => foreign += 1,
            }
        }
        let mut state = self.shared.state.lock();
        state.stats.lists += 1;
        state.stats.foreign += foreign;
        drop(state);
        self.look(found);
        Ok(members.into_values().collect())
    }

    /// Takes in who has this node's name in a list: the node itself, another one, or nobody.
    fn look(&mut self, found: Option<Member>) {
        if found == self.own {
            self.is_taken = false;
            return;
        }
        // Of one whose key etcd has lost, it is written again, under another lease.
        self.lose();
        guard!("remote.leaves-a-taken-name", self.is_taken = found.is_some());
        if let Some(Member { name, address }) = found {
            let taken = EtcdError::Taken { name, address: address.to_string() };
            self.shared.state.lock().stats.last_error = Some(taken);
        }
    }

    /// Tells of a list that is another one than was taken last.
    fn tell(&mut self, members: Vec<Member>, told: &mut Option<Vec<Member>>) {
        if told.as_ref() == Some(&members) {
            return;
        }
        let mut state = self.shared.state.lock();
        if state.members != members {
            state.stats.changes += 1;
            state.members.clone_from(&members);
        }
        drop(state);
        *told = (self.take)(&members).then_some(members);
    }
}
