//! Reads traces in public formats, also compressed, and converts them to the format of `kv-replay run`.

mod compressed;
mod csv_rows;
mod formats;
mod weka;

use std::collections::HashMap;
use std::fs::File;
use std::io::BufRead;
use std::path::{Path, PathBuf};

use kv_replay::json_file::{WriteError, check_files, write_json};
use kv_replay::trace::{BLOCK_TOKENS_IN_TRACE, ReadOptions, Trace, TraceError, left_out};

/// What the files of traces do not say.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ConvertOptions {
    /// What holds for traces of every format.
    pub reading: ReadOptions,
    /// Sessions whose times are their own begin at random moments within so many milliseconds; 0 for all at once.
    pub sessions_within_ms: u64,
    /// Seed of these moments.
    pub seed: u64,
}

impl From<ReadOptions> for ConvertOptions {
    fn from(reading: ReadOptions) -> Self {
        Self { reading, ..Self::default() }
    }
}

/// Reads the trace in the file `path`, in any format. The file may be compressed with gzip or zstd. Its content tells format
/// and compression, not its name.
pub fn read(path: &Path, options: &ConvertOptions) -> Result<Trace, TraceError> {
    if path.is_dir() {
        return Err(TraceError::Folder { path: path.to_owned() });
    }
    let file =
        File::open(path).map_err(|source| TraceError::Open { path: path.to_owned(), source })?;
    let name = path.display().to_string();
    let reader = compressed::open(file);
    let reader =
        reader.map_err(|source| TraceError::Read { name: name.clone(), lines_read: 0, source })?;
    parse(reader, &name, options)
}

/// Reads a trace in any format from `reader`. Errors contain `name`.
pub fn parse(
    reader: impl BufRead,
    name: &str,
    options: &ConvertOptions,
) -> Result<Trace, TraceError> {
    formats::parse(reader, name, options)?.not_empty(name)
}

/// The reason why traces were not converted. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Two files have hash ids of different sizes.
    #[error("a hash id stands for {found} tokens in {}, and for {block_tokens} in {}", path.display(), first.display())]
    Mixed {
        /// The first file.
        first: PathBuf,
        /// Tokens of a hash id in the first file.
        block_tokens: u64,
        /// The file that differs.
        path: PathBuf,
        /// Tokens of a hash id in that file.
        found: u64,
    },
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Reads the traces of `paths` and joins them to one, in the order of arrival. Equal ids in different files are
/// different prompts. `tell` hears how many of them were read.
pub fn join(
    paths: &[PathBuf],
    options: &ConvertOptions,
    mut tell: impl FnMut(usize),
) -> Result<Trace, ConvertError> {
    let mut joined = Trace::new(Vec::new());
    let mut next_id = 0;
    for (index, path) in paths.iter().enumerate() {
        let seed = options.seed.wrapping_add(index as u64);
        let mut trace = read(path, &ConvertOptions { seed, ..*options })?;
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

/// The command `convert`: writes the traces of `paths` to `output` as one, what it has to `json`, and says so.
/// Without an output, the trace itself is the answer.
pub fn run(
    paths: &[PathBuf],
    options: &ConvertOptions,
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
    if *block_tokens != BLOCK_TOKENS_IN_TRACE {
        let output = output.display();
        told.push_str(&format!(
            "use it with: kv-replay run --trace {output} --trace-block-tokens {block_tokens}\n"
        ));
    }
    Ok(told)
}
