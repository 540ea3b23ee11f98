//! Files that may be compressed, told by their first bytes.

use std::cell::Cell;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use xxhash_rust::xxh64::Xxh64;

const GZIP: &[u8] = &[0x1F, 0x8B];
const ZSTD: &[u8] = &[0x28, 0xB5, 0x2F, 0xFD];

/// The second to fourth byte of a zstd frame without content; the first is 0x50 to 0x5F.
const ZSTD_SKIPPED: &[u8] = &[0x2A, 0x4D, 0x18];

const EMPTY: &[u8] = &[0x28, 0xB5, 0x2F, 0xFD, 0x20, 0, 1, 0, 0];

/// Bytes of text that a file may have, however small it is compressed.
const TEXT_BYTES: u64 = 64 << 20;

/// Bytes of text for each byte of a compressed file, at most. Traces shrink by 5 to 50 times; a gzip file made to fill the
/// memory shrinks by 1,000.
const TEXT_TIMES_MAX: u64 = 256;

/// Reads `file` as text, out of gzip or zstd if it begins as they do.
///
/// A file of several gzip members or zstd frames is read to its end, and their checksums are compared. Text that is more
/// than [`TEXT_TIMES_MAX`] times as long as its file is an error at the byte where it passes [`TEXT_BYTES`]; of a pipe, what has come
/// so far is its length.
pub(super) fn open(file: File) -> io::Result<Box<dyn BufRead>> {
    let file_bytes = Rc::new(Cell::new(file.metadata()?.len()));
    let counted = Counted { file, come: 0, bytes: Rc::clone(&file_bytes) };
    let mut reader = BufReader::new(counted);
    let start = reader.fill_buf()?;
    if start.starts_with(GZIP) {
        let text = MultiGzDecoder::new(reader);
        return Ok(Box::new(BufReader::new(Limited { text, text_bytes: 0, file_bytes })));
    }
    if start.starts_with(ZSTD) || start.get(1..4) == Some(ZSTD_SKIPPED) {
        let text = Frames { reader, frame: None };
        return Ok(Box::new(BufReader::new(Limited { text, text_bytes: 0, file_bytes })));
    }
    Ok(Box::new(reader))
}

/// A file, and how many bytes it has: by its length, or as many as have come.
struct Counted {
    file: File,
    come: u64,
    bytes: Rc<Cell<u64>>,
}

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(into)?;
        self.come = self.come.saturating_add(read as u64);
        self.bytes.set(self.bytes.get().max(self.come));
        Ok(read)
    }
}

/// Text that is not much longer than its file.
struct Limited<R> {
    text: R,
    text_bytes: u64,
    file_bytes: Rc<Cell<u64>>,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.text.read(into)?;
        self.text_bytes = self.text_bytes.saturating_add(read as u64);
        let file_bytes = self.file_bytes.get();
        let most = TEXT_BYTES.max(file_bytes.saturating_mul(TEXT_TIMES_MAX));
        if self.text_bytes > most {
            let why = format!(
                "its text is more than {TEXT_TIMES_MAX} times as long as the file; unpack it if that is right"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(read)
    }
}

/// The text of zstd frames that follow each other.
struct Frames<R> {
    reader: R,
    /// The frame that is being read, with the sum of its text so far.
    frame: Option<(FrameDecoder, Xxh64)>,
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while !into.is_empty() {
            let Some((decoder, sum)) = &mut self.frame else {
                if self.reader.fill_buf()?.is_empty() {
                    break;
                }
                self.begin()?;
                continue;
            };
            while decoder.can_collect() < into.len() && !decoder.is_finished() {
                let missing = BlockDecodingStrategy::UptoBytes(into.len() - decoder.can_collect());
                decoder.decode_blocks(&mut self.reader, missing).map_err(|why| damaged(&why))?;
            }
            let read = decoder.read(into)?;
            sum.update(&into[..read]);
            if read > 0 {
                return Ok(read);
            }
            // A frame ends with the low half of its text's sum, if it says one.
            let said = decoder.get_checksum_from_data();
            if said.is_some_and(|said| said != sum.digest() as u32) {
                return Err(damaged(&"its checksum is that of another text"));
            }
            self.frame = None;
        }
        Ok(0)
    }
}

impl<R: BufRead> Frames<R> {
    /// Reads the heading of the next frame, or passes over a frame without text.
    fn begin(&mut self) -> io::Result<()> {
        let mut decoder = FrameDecoder::new();
        // The window, which a frame's heading says, is bounded by a decoder that has read a heading before.
        decoder.init(EMPTY).map_err(|why| damaged(&why))?;
        match decoder.init(&mut self.reader) {
            Ok(()) => self.frame = Some((decoder, Xxh64::new(0))),
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let skipped = (&mut self.reader).take(length.into());
                if io::copy(&mut { skipped }, &mut io::sink())? < length.into() {
                    return Err(damaged(&"its last frame is cut off"));
                }
            }
            Err(why) => return Err(damaged(&why)),
        }
        Ok(())
    }
}

fn damaged(why: &dyn Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the zstd file is damaged: {why}"))
}
