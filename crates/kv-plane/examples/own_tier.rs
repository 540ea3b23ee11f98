//! A tier of one's own under host memory: a file for each block.
//!
//! `cargo run -p kv-plane --example own_tier`

use std::collections::VecDeque;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::tier::{Background, BlockFault, BlockSink, BlockSource, LowerTier};
use kv_plane::{GroupId, KvCache, KvCacheOptions, LowerTiers, Request};
use kv_pool::BlockHash;

/// The files of one worker. Every record ends with a checksum, which is compared when it is loaded: a file that is torn or
/// swapped is a miss, and nothing here has to look.
#[derive(Debug)]
struct Files(PathBuf);

impl Files {
    fn file(&self, name: BlockHash, group: GroupId) -> PathBuf {
        self.0.join(format!("{:032x}-{}", name.to_u128(), group.0))
    }
}

impl LowerTier for Files {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        for block in blocks {
            let record = block.record();
            match record.map(|record| fs::write(self.file(block.name(), block.group()), record)) {
                Ok(Ok(())) => block.done(),
                _ => block.failed(BlockFault::Failed),
            }
        }
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        for mut block in blocks {
            match fs::read(self.file(block.name(), block.group())) {
                Ok(record) if block.write_at(0, &record).is_ok() => drop(block.done()),
                Ok(_) => block.failed(BlockFault::Foreign),
                Err(_) => block.failed(BlockFault::Missing),
            }
        }
    }

    fn forget(&mut self, blocks: &[(GroupId, BlockHash)]) {
        for &(group, name) in blocks {
            let _ = fs::remove_file(self.file(name, group));
        }
    }

    fn clear(&mut self) {
        let files = fs::read_dir(&self.0).into_iter().flatten().flatten();
        files.for_each(|file| drop(fs::remove_file(file.path())));
    }

    fn poll(&mut self, _dropped: &mut Vec<(GroupId, BlockHash)>) {}
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::temp_dir().join(format!("kv-plane-own-tier-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let mut tiers = LowerTiers::new(b"llama-3-8b, revision 4");
    let files = folder.clone();
    // Files take their time, so they have a thread of their own.
    tiers.push(move || match Background::new(Files(files.clone())) {
        Ok(tier) => Box::new(tier),
        // Without a thread, in the engine's.
        Err(_) => Box::new(Files(files.clone())),
    });
    // On a GPU: `CudaDriver::load()?`.
    let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let shape = KvShapeOptions { layers: 8, kv_count: 2, row_bytes: 128, block_tokens: 16 };
    // Device and host memory hold two prompts each. The first one comes back from its files.
    let mut options = KvCacheOptions { tiers, ..KvCacheOptions::new(KvShape::new(shape)?, 16) };
    options.groups[0].host_blocks = 16;
    let mut kv = KvCache::new(&[Stream::new(&device)?], options)?;
    for (prompt, hit) in [1, 2, 3, 4, 5, 6, 7, 8, 1].into_iter().zip([0, 0, 0, 0, 0, 0, 0, 0, 96]) {
        let ids = prompt * 1000..prompt * 1000 + 100;
        let mut queue = VecDeque::from([Request::new(ids.collect())]);
        let sequence = loop {
            let step = kv.begin_step()?;
            let Some((_, mut sequence)) = kv.admit(&mut queue, 1024)?.admitted.pop() else {
                // It waits for a load, or for the copies of evicted blocks. A real engine serves others meanwhile.
                kv.finish_step(step)?;
                std::thread::yield_now();
                continue;
            };
            kv.stage(&step, &mut [&mut sequence])?;
            kv.finish_step(step)?;
            break sequence;
        };
        assert_eq!(sequence.cached_tokens(), hit);
        drop(sequence);
        // Steps that have nothing else to copy store what is complete, ahead of need. Until a store is complete, it keeps
        // its blocks in host memory, which a load has to find room in.
        let unstored = |kv: &KvCache| {
            let stats = kv.manager().lower_stats();
            stats.names[0] < 6 || stats.open_tickets > 0
        };
        while unstored(&kv) {
            let step = kv.begin_step()?;
            kv.finish_step(step)?;
            std::thread::yield_now();
        }
    }
    assert_eq!(kv.manager().lower_stats().loaded_blocks[0], 6);
    kv.close()?;
    fs::remove_dir_all(folder)?;
    Ok(())
}
