//! Virtual reservations, physical pages and mappings for KV memory on CUDA devices, transactional and ordered after use.
