//! Planted races. Each is found in the first run, whatever order the device takes, and its report
//! names the fix. Programs that are ordered, in each legal way, give no finding.

mod actors;
mod ends;
mod events;
mod harness;
mod history;
mod ordered;
mod pairs;
mod reports;
mod run;
mod unusual;
