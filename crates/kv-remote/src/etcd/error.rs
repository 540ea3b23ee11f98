//! What goes wrong with etcd.

/// Why a call to etcd has no answer that can be used.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EtcdError {
    /// No endpoint was reached, or none answered in time.
    #[error("{endpoint} did not answer: {reason}")]
    Unreached {
        /// The last endpoint that was tried.
        endpoint: String,
        /// The reason.
        reason: String,
    },
    /// The answer is another status than 200.
    #[error("{endpoint} answers with status {status}: {text}")]
    Status {
        /// The endpoint.
        endpoint: String,
        /// The status.
        status: u16,
        /// The beginning of what it says.
        text: String,
    },
    /// The answer is not what etcd's gateway says.
    #[error("the answer of {endpoint} has no {field}")]
    Answer {
        /// The endpoint.
        endpoint: String,
        /// What is missing or wrong.
        field: &'static str,
    },
    /// Another node has this node's name. This one is not listed until the other's key has gone.
    #[error(
        "the name {name:?} is another node's, at {address}: nodes of a prefix need different names"
    )]
    Taken {
        /// The name.
        name: String,
        /// The other node's address.
        address: String,
    },
}

/// Options with which no membership is kept.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// No endpoint is named.
    #[error("no endpoint of etcd is named")]
    NoEndpoint,
    /// An endpoint is no URL of this kind.
    #[error("{endpoint:?} is no endpoint; expected http://HOST:PORT")]
    Endpoint {
        /// The endpoint.
        endpoint: String,
    },
    /// The prefix is empty, so that keys of others would be taken for members.
    #[error("the prefix of the keys is empty")]
    NoPrefix,
    /// The node's name is empty, too long, or has a slash, so that no list would take it for a member.
    #[error("{name:?} is no name of a node; it has 1 to {max} bytes, and no slash")]
    Name {
        /// The name.
        name: String,
        /// Bytes of the longest name.
        max: usize,
    },
    /// The lease is too short for its renewals.
    #[error("a lease of {ttl_ms} ms is shorter than {min_ms} ms")]
    Lease {
        /// Milliseconds of the lease.
        ttl_ms: u128,
        /// Milliseconds of the shortest.
        min_ms: u128,
    },
    /// The system has no thread.
    #[error("the system has no thread: {reason}")]
    Thread {
        /// The system's reason.
        reason: String,
    },
}

kv_pool::one_line_debug!(EtcdError, OptionsError);
