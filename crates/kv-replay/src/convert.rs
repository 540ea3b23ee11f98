//! Converts traces in public formats to the format of this project.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::json_file::{WriteError, check_files, write_json};
use crate::trace::{ReadOptions, Trace, TraceError, left_out};

/// The reason why traces were not converted. Nothing was written.
#[derive(thiserror::Error)]
pub enum ConvertError {
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("a hash id stands for {found} tokens in {}, and for {block_tokens} in {}", path.display(), first.display())]
    Mixed { first: PathBuf, block_tokens: u64, path: PathBuf, found: u64 },
    #[error(transparent)]
    Write(#[from] WriteError),
}

cuda_driver::messages::one_line_debug!(ConvertError);

/// Reads the traces of `paths` and joins them to one, in the order of arrival. Equal ids in different files are
/// different prompts. `tell` hears how many of them were read.
pub fn join(
    paths: &[PathBuf],
    options: &ReadOptions,
    mut tell: impl FnMut(usize),
) -> Result<Trace, ConvertError> {
    let mut joined = Trace::new(Vec::new());
    let mut next_id = 0;
    for (index, path) in paths.iter().enumerate() {
        let seed = options.seed.wrapping_add(index as u64);
        let mut trace = Trace::read_with(path, &ReadOptions { seed, ..*options })?;
        if let [_] = paths {
            return Ok(trace);
        }
        if index == 0 {
            joined.block_tokens = trace.block_tokens;
        }
        if trace.block_tokens != joined.block_tokens {
            let (first, path) = (paths[0].clone(), path.clone());
            let (block_tokens, found) = (joined.block_tokens, trace.block_tokens);
            return Err(ConvertError::Mixed { first, block_tokens, path, found });
        }
        let mut ids = HashMap::new();
        for id in trace.requests.iter_mut().flat_map(|request| &mut request.hash_ids) {
            *id = *ids.entry(*id).or_insert_with(|| {
                next_id += 1;
                next_id - 1
            });
        }
        joined.skipped += trace.skipped;
        joined.requests.append(&mut trace.requests);
        tell(index + 1);
    }
    joined.requests.sort_by_key(|request| request.timestamp_ms);
    Ok(joined)
}

/// The command `kv-replay convert`: writes the traces of `paths` to `output` as one, what it has to `json`, and says so.
/// Without an output, the trace itself is the answer.
pub fn run(
    paths: &[PathBuf],
    options: &ReadOptions,
    (output, json): (Option<&Path>, Option<&Path>),
    tell: impl FnMut(usize),
) -> Result<String, ConvertError> {
    check_files(paths.iter().map(PathBuf::as_path), output.into_iter().chain(json))?;
    let trace = join(paths, options, tell)?;
    output.map_or(Ok(()), |output| trace.write(output))?;
    json.map_or(Ok(()), |json| write_json(json, &trace.counts()))?;
    let Some(output) = output else { return Ok(trace.to_jsonl()) };
    let Trace { block_tokens, requests, .. } = &trace;
    let last_ms = requests.last().map_or(0, |request| request.timestamp_ms);
    let mut told = format!(
        "{} requests within {:.1} s, {} block lookups of {block_tokens} tokens\n",
        requests.len(),
        last_ms as f64 / 1e3,
        trace.block_lookups(),
    );
    if trace.skipped > 0 {
        told.push_str(&format!("{}\n", left_out(trace.skipped)));
    }
    if *block_tokens != crate::trace::BLOCK_TOKENS_IN_TRACE {
        let output = output.display();
        told.push_str(&format!(
            "use it with: kv-replay run --trace {output} --trace-block-tokens {block_tokens}\n"
        ));
    }
    Ok(told)
}
