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

kv_pool::one_line_debug!(EtcdError);
