//! Files that may be compressed, told by their first bytes.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;

const GZIP: &[u8] = &[0x1F, 0x8B];
const ZSTD: &[u8] = &[0x28, 0xB5, 0x2F, 0xFD];

/// Reads `file` as text, out of gzip or zstd if it begins as they do.
///
/// A file of several gzip members is read to its end. Of several zstd frames the first is read.
pub(crate) fn open(file: File) -> io::Result<Box<dyn BufRead>> {
    let mut reader = BufReader::new(file);
    let start = reader.fill_buf()?;
    if start.starts_with(GZIP) {
        return Ok(Box::new(BufReader::new(MultiGzDecoder::new(reader))));
    }
    if start.starts_with(ZSTD) {
        let decoder = StreamingDecoder::new(reader)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        return Ok(Box::new(BufReader::new(decoder)));
    }
    Ok(Box::new(reader))
}
