//! etcd's calls, by its JSON gateway: bytes are base64, and numbers of 64 bits are text.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kv_pool::guard;
use serde_json::{Value, json};

use super::EtcdError;

/// Bytes of the longest answer that is read.
const ANSWER_MAX: u64 = 4 << 20;
/// Characters of an answer that an error repeats.
const TEXT_MAX: usize = 200;

/// A key and its value.
pub(crate) type Entry = (Vec<u8>, Vec<u8>);

/// The number of a lease.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Lease(i64);

/// Asks one endpoint after the other, the one first that has answered last.
#[derive(Debug)]
pub(crate) struct Client {
    agent: ureq::Agent,
    endpoints: Vec<String>,
    answered: usize,
}

fn encode(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// A number, which the gateway writes as text.
fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

/// The first key behind all that begin with a prefix, whose last byte is a slash.
fn behind(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}

impl Client {
    pub(crate) fn new(endpoints: Vec<String>, call_max: Duration) -> Self {
        let config = ureq::Agent::config_builder();
        let config = config.timeout_global(Some(call_max)).http_status_as_error(false);
        // An endpoint that sends callers elsewhere would have another one believed.
        let config = config.max_redirects(guard!("remote.follows-no-redirect", 0, else 9));
        Self { agent: config.build().new_agent(), endpoints, answered: 0 }
    }

    fn call(&mut self, path: &str, body: &Value) -> Result<(String, Value), EtcdError> {
        let text = body.to_string();
        let mut failed =
            EtcdError::Unreached { endpoint: String::new(), reason: "none is named".to_owned() };
        for turn in 0..self.endpoints.len() {
            let at = (self.answered + turn) % self.endpoints.len();
            let Some(endpoint) = self.endpoints.get(at) else { continue };
            match self.ask(endpoint, path, &text) {
                Ok(answer) => {
                    let endpoint = endpoint.clone();
                    self.answered = at;
                    return Ok((endpoint, answer));
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn ask(&self, endpoint: &str, path: &str, body: &str) -> Result<Value, EtcdError> {
        let unreached = |error: ureq::Error| EtcdError::Unreached {
            endpoint: endpoint.to_owned(),
            reason: error.to_string(),
        };
        let request = self.agent.post(format!("{endpoint}{path}"));
        let request = request.header("Content-Type", "application/json");
        let mut response = request.send(body).map_err(unreached)?;
        let status = response.status().as_u16();
        let text = response.body_mut().with_config().limit(ANSWER_MAX).read_to_string();
        let text = text.map_err(unreached)?;
        if status != 200 {
            let text = text.trim().chars().take(TEXT_MAX).collect();
            return Err(EtcdError::Status { endpoint: endpoint.to_owned(), status, text });
        }
        let no_json = EtcdError::Answer { endpoint: endpoint.to_owned(), field: "JSON" };
        serde_json::from_str(&text).map_err(|_| no_json)
    }

    /// A lease of so many seconds.
    pub(crate) fn grant(&mut self, seconds: u64) -> Result<Lease, EtcdError> {
        let body = json!({ "TTL": seconds.to_string() });
        let (endpoint, answer) = self.call("/v3/lease/grant", &body)?;
        let id = answer.get("ID").and_then(number);
        id.map(Lease).ok_or(EtcdError::Answer { endpoint, field: "ID" })
    }

    /// Renews a lease; false if it has ended.
    pub(crate) fn renew(&mut self, lease: Lease) -> Result<bool, EtcdError> {
        let body = json!({ "ID": lease.0.to_string() });
        let (endpoint, answer) = self.call("/v3/lease/keepalive", &body)?;
        let result = answer.get("result").ok_or(EtcdError::Answer { endpoint, field: "result" })?;
        // A lease that has ended has no time left, and the gateway leaves zeros out.
        Ok(result.get("TTL").and_then(number).is_some_and(|left| left > 0))
    }

    /// Ends a lease, and its keys.
    pub(crate) fn revoke(&mut self, lease: Lease) -> Result<(), EtcdError> {
        let body = json!({ "ID": lease.0.to_string() });
        self.call("/v3/lease/revoke", &body).map(drop)
    }

    /// Writes a key that goes with a lease.
    pub(crate) fn put(&mut self, key: &str, value: &str, lease: Lease) -> Result<(), EtcdError> {
        let (key, value) = (encode(key.as_bytes()), encode(value.as_bytes()));
        let body = json!({ "key": key, "value": value, "lease": lease.0.to_string() });
        self.call("/v3/kv/put", &body).map(drop)
    }

    /// All keys that begin with a prefix, and their values.
    pub(crate) fn list(&mut self, prefix: &str) -> Result<Vec<Entry>, EtcdError> {
        let (key, end) = (encode(prefix.as_bytes()), encode(&behind(prefix)));
        let (endpoint, answer) =
            self.call("/v3/kv/range", &json!({ "key": key, "range_end": end }))?;
        // The gateway leaves an empty list out; an answer of another kind has no header either.
        let Some(entries) = answer.get("kvs") else {
            let empty = answer.get("header").map(|_| Vec::new());
            return empty.ok_or(EtcdError::Answer { endpoint, field: "header" });
        };
        let field = |entry: &Value, name: &str| match entry.get(name) {
            Some(text) => STANDARD.decode(text.as_str()?).ok(),
            None => Some(Vec::new()),
        };
        let wrong = EtcdError::Answer { endpoint, field: "kvs" };
        let entries = entries.as_array().ok_or(wrong.clone())?;
        let entries =
            entries.iter().map(|entry| Some((field(entry, "key")?, field(entry, "value")?)));
        entries.collect::<Option<_>>().ok_or(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_text_or_as_numbers() {
        assert_eq!(number(&json!("7587869")), Some(7_587_869));
        assert_eq!(number(&json!(-3)), Some(-3));
        for none in [json!("x"), json!(null), json!("9223372036854775808"), json!({})] {
            assert_eq!(number(&none), None);
        }
    }
}
