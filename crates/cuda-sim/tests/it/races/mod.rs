//! Planted races. Each is found in the first run, whatever order the device takes, and its report
//! names the fix. Programs that are ordered, in each legal way, give no finding.

mod actors;
mod copies;
mod default_streams;
mod ends;
mod events;
mod harness;
mod history;
mod host;
mod kernels;
mod ordered;
mod ordered_by_host;
mod peers;
mod reports;
mod run;
mod unusual;
