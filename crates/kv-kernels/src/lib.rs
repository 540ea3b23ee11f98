//! Checked launches of KV-cache transfer kernels, with committed PTX and a CPU reference for each.
