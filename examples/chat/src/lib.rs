//! An engine for models of the Llama family, built on `kv-plane`. The README is a tour.

pub mod attention;
pub mod chat;
pub mod draft;
pub mod engine;
pub mod job;
pub mod measure;
pub mod model;
pub mod plain;
pub mod proof;
pub mod report;
pub mod sampling;
pub mod script;
pub mod setup;
pub mod text;
