//! What of the evicted blocks a run stores in host memory: the rule, its share of the link, and what a store costs.

use kv_kernels::link::{DirectionCosts, TransportProfile};
use kv_plane::HostStore;
use kv_pool::store::{StoreKind, StoreRules};

use super::RunError;
use crate::config::RunConfig;

/// The rule for host memory. A store costs what follows from the links of the devices, where they were measured and it is
/// known how fast the engine computes.
pub(super) fn host_store(
    config: &RunConfig,
    measured: &[TransportProfile],
) -> Result<HostStore, RunError> {
    if config.store == StoreKind::All {
        return Ok(HostStore::All);
    }
    let block = config.shape.block_bytes(config.block_tokens)?.max(1);
    // At least one, or nothing would ever be stored.
    let a_second = |rate: u64| u32::try_from(rate / block).unwrap_or(u32::MAX).max(1);
    let rules = StoreRules {
        blocks_per_second_max: config.store_rate.map(a_second),
        ..StoreRules::new(config.host_blocks)
    };
    // The devices carry their parts of a block side by side.
    let part = block as f64 / measured.len().max(1) as f64;
    let seconds = |direction: fn(&TransportProfile) -> &DirectionCosts| {
        let rates = measured.iter().map(|profile| direction(profile).copy_bytes_per_s);
        rates.min().filter(|&slowest| slowest > 0).map(|slowest| part / slowest as f64)
    };
    let (store_s, load_s) = (seconds(|profile| &profile.to_host), seconds(|of| &of.to_pages));
    let rate = config.compute_rate.filter(|&rate| rate > 0);
    let compute_s = rate.map(|rate| f64::from(config.block_tokens) / rate as f64);
    Ok(HostStore::Evidence(match (store_s, load_s, compute_s) {
        (Some(store_s), Some(load_s), Some(compute_s)) => rules.costs(store_s, load_s, compute_s),
        _ => rules,
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn rules(config: &RunConfig, measured: &[TransportProfile]) -> StoreRules {
        match host_store(config, measured).unwrap() {
            HostStore::Evidence(rules) => rules,
            HostStore::All => panic!("evidence was asked for"),
        }
    }

    #[test]
    fn the_share_of_the_link_is_in_whole_blocks() {
        let mut config = RunConfig::default();
        assert_eq!(rules(&config, &[]).blocks_per_second_max, None);
        let block = config.shape.block_bytes(config.block_tokens).unwrap();
        for (rate, blocks) in [(1, 1), (3 * block + block / 2, 3), (u64::MAX, u32::MAX)] {
            config.store_rate = Some(rate);
            assert_eq!(rules(&config, &[]).blocks_per_second_max, Some(blocks), "{rate}");
        }
        config.store = StoreKind::All;
        assert_eq!(host_store(&config, &[]).unwrap(), HostStore::All);
    }

    #[test]
    fn a_store_costs_what_the_slowest_link_and_the_engine_say() {
        let mut config = RunConfig { compute_rate: Some(1000), ..RunConfig::default() };
        let block = config.shape.block_bytes(config.block_tokens).unwrap();
        let profile = |to_host, to_pages| {
            let costs =
                |copy_bytes_per_s| DirectionCosts { copy_bytes_per_s, ..DirectionCosts::default() };
            TransportProfile {
                device: String::new(),
                link: String::new(),
                multiprocessors: 1,
                to_host: costs(to_host),
                to_pages: costs(to_pages),
                forced: None,
            }
        };
        let usual = StoreRules::new(config.host_blocks);
        assert_eq!(rules(&config, &[]), usual, "no link was measured");
        assert_eq!(rules(&config, &[profile(0, 0)]), usual);
        // Two devices, each with half of a block: it takes half a second to store, and a quarter to load.
        let measured = [profile(block, 2 * block), profile(9 * block, 9 * block)];
        let compute_s = f64::from(config.block_tokens) / 1000.0;
        assert_eq!(rules(&config, &measured), usual.costs(0.5, 0.25, compute_s));
        config.compute_rate = Some(0);
        assert_eq!(rules(&config, &measured), usual, "it is not known what computing takes");
    }
}
