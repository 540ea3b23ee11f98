// What a kernel tells of an index that only the device could see to be out of range: how many there
// were, and the lowest place at which one stood. `report` is null where nobody asked.
//
//   report[0]  how many
//   report[1]  the complement of the lowest place; 0 while there is none
#pragma once
#include "kv.cuh"

static __device__ __forceinline__ void report_bad(u64* report, u64 place) {
    if (report == nullptr) return;
    atomicAdd(report, 1ull);
    atomicMax(report + 1, ~place);
}
