//! Which nodes of a cache are alive, by etcd: each node has a key under a lease, which it renews, and the
//! list of keys is what a [`RemoteTier`](crate::RemoteTier) takes as its members.
//!
//! ```no_run
//! use kv_remote::etcd::{EtcdOptions, Membership};
//! use kv_remote::{Key, Member, RemoteOptions, RemoteTier};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let key = Key::new(b"32 random bytes that all nodes have")?;
//! let tier = RemoteTier::new(RemoteOptions::new(Vec::new(), key))?;
//! let watch = tier.watch();
//! let own = Member { name: "host-a".to_owned(), address: "tcp:10.0.0.7:7001".parse()? };
//! let options = EtcdOptions::new(vec!["http://10.0.0.1:2379".to_owned()], "/kv/prod/");
//! // The tier has the members that there are, whoever joins, leaves or dies.
//! let take = move |members: &[Member]| watch.set_members(members).is_ok();
//! let membership = Membership::join(options, own, take)?;
//! // ... the tier is at work in a `kv-plane` ...
//! membership.leave();
//! # drop(tier);
//! # Ok(())
//! # }
//! ```
//!
//! | call | when |
//! | --- | --- |
//! | grant a lease, write the key | at the beginning, and when the lease or etcd's data was lost |
//! | renew the lease | every third of it |
//! | read all keys of the prefix | every `every`, and every third of a lease |
//! | revoke the lease | when the membership ends, and when its key has gone or is another node's |
//!
//! - etcd decides who is alive, and nothing else. Where blocks are kept follows from the list
//!   ([`replicas`](crate::replicas)), where they are from what nodes say. A node that is listed has proved
//!   nothing yet: connections need the key of the nodes.
//! - While etcd does not answer, the list stays as it was, and nodes go on. What is listed is dropped only
//!   when etcd says so.
//! - An etcd that has lost its data has no keys at first: nodes write theirs again within `every`, and until
//!   then they are not members to each other. Names have to be different: a node whose name another one
//!   writes later is not listed any more ([`EtcdError::Taken`]), until that one's key has gone.
//! - Keys under the prefix that are no members, such as those with a slash behind it, are counted
//!   ([`EtcdStats::foreign`]) and passed over. At most 64 are taken, in the order of their names.
//!
//! The calls go to etcd's JSON gateway, which is part of etcd since 3.3, by `ureq`, a small blocking client
//! of HTTP. The crate `etcd-client` needs an async runtime, and `protoc` to build. There is no TLS and no
//! password of etcd: use a network of your own.

mod client;
mod error;
mod membership;

pub use error::EtcdError;
pub use membership::{EtcdOptions, EtcdStats, Membership};
