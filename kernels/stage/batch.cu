// Makes the buffers of a step's batch, at addresses that stay, from the persistent block tables and one
// packet of the step's small inputs. `kv-stage` launches it (crates/kv-stage/src/batch/kernel.rs), or a
// captured graph holds it: every argument is the same for every launch.
//
// Reads  the packet; the entries of the tables that the batch's tokens need; of each row of the batch where
//        its last step began, and how many of that step's tokens stand.
// Writes the packet's changes to the tables; then the batch: block tables, slots, positions, lengths, query
//        starts, rows and arrays, with padding behind them.
// The caller has checked, of the packet: every offset and count lies inside it; rows and columns lie inside
// the tables; the rows of its jobs are distinct, the batch's first; a row's end is inside each table;
// sequences and tokens are at most `sequences_max` and `tokens_max`. There is at least one table.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The most threads of a block that this kernel is launched with.
#define THREADS_MAX 256
// The ids that a thread fetches before it writes the first of them.
#define FETCHED 4

// The block table of one group of layers, and its part of the batch.
struct Table {
    // [rows, width]
    int* ids;
    // [sequences_max, width]
    int* dense;
    // [tokens_max]
    i64* slots;
    // [sequences_max]: columns of each dense row from here on hold the null block. At first above any width.
    u32* live;
    // [sequences_max]: the state that each row begins with. 0 for a table of KV.
    int* state_in;
    u32 width;
    u32 block_tokens;
    int null_block;
    u32 unused;
};

struct __align__(16) Vector {
    u64 word[2];
};

// An array of the engine.
struct Array {
    Vector* out;
    u64 vectors;
};

// Where a row's tokens began in the last step that it was in.
struct __align__(16) RowState {
    u64 step;
    u32 start;
    // The entry with the state that it began with.
    u32 entry;
};

struct Header {
    u64 step;
    // Rows of the batch; jobs, which are these rows and then rows that are only changed; tokens.
    u32 sequences;
    u32 jobs;
    u32 tokens;
    // In words from the start of the packet.
    u32 jobs_at;
    u32 heads_at;
    u32 edits_at;
    u32 ids_at;
    u32 unused[7];
};

// In words from the start of the packet, and in vectors.
struct ArrayPart {
    u32 at;
    u32 vectors;
};

// A row and where its tokens begin: at least behind `resolved` tokens and at most behind `upper`. The last `drafts` of them
// may be rejected: a row of states has one behind the tokens before them, and one behind each. Where the two bounds are the
// same, `input` is the entry with the state that the row begins with. Otherwise its last step had `input` tokens before its
// drafts, and the entry is the number of those that stand beyond.
struct __align__(16) Job {
    u32 row;
    u32 resolved;
    u32 upper;
    u32 first_token;
    u32 drafts;
    u32 input;
    u32 unused[2];
};

// `count` ids from the entry `first` of a row on. `next` is the number of the row's next change in that
// table, counted from 1; 0 for none.
struct __align__(16) Edit {
    u32 first;
    u32 count;
    u32 ids_at;
    u32 next;
};

// Launch: any grid, since blocks take jobs and threads take padding in strides; blockDim.x at most
//         THREADS_MAX. One block does all of a row: the row's changes come one after the other.
extern "C" __global__ void __launch_bounds__(THREADS_MAX, 4)
gather_batch(const u32* packet, const Table* tables, u32 table_count, const Array* arrays, u32 array_count,
             RowState* states, u32* accepted, int* rows, int* lengths, int* query_starts, i64* positions,
             u32 sequences_max, u32 tokens_max) {
    __shared__ u32 shared_start;
    __shared__ u32 shared_entry;
    const Header* header = (const Header*)packet;
    const u32 sequences = header->sequences;
    const u32 tokens = header->tokens;
    const Job* jobs = (const Job*)(packet + header->jobs_at);
    const u32* heads = packet + header->heads_at;
    const Edit* edits = (const Edit*)(packet + header->edits_at);
    const int* ids = (const int*)(packet + header->ids_at);
    const u32 job_count = header->jobs;
    const u32 all = job_count > sequences_max ? job_count : sequences_max;
    for (u32 job = blockIdx.x; job < all; job += gridDim.x) {
        u64 row = 0;
        RowState last = {0, 0, 0};
        u32 stand = 0;
        if (job < job_count) {
            row = jobs[job].row;
            // Early, because the row's changes are waited for.
            if (job < sequences && threadIdx.x == 0) {
                last = states[row];
                stand = accepted[row];
            }
            for (u32 t = 0; t < table_count; t++) {
                int* line = tables[t].ids + row * tables[t].width;
                for (u32 next = heads[t * job_count + job]; next != 0;) {
                    const Edit edit = edits[next - 1];
                    for (u32 i = threadIdx.x; i < edit.count; i += blockDim.x) {
                        line[edit.first + i] = ids[edit.ids_at + i];
                    }
                    // The row's next change may write the same entries, and the batch reads them.
                    __syncthreads();
                    next = edit.next;
                }
            }
        }
        u32 start = 0;
        u32 end = 0;
        u32 first_token = tokens;
        u32 drafts = 0;
        if (job < sequences) {
            const Job here = jobs[job];
            first_token = here.first_token;
            drafts = here.drafts;
            const u32 count = (job + 1 < sequences ? jobs[job + 1].first_token : tokens) - first_token;
            if (threadIdx.x == 0) {
                // A step that is gathered again begins where it began.
                const bool again = last.step == header->step;
                u64 begin = (u64)last.start + (again ? 0 : stand);
                // A wrong count must not lead outside the row's blocks.
                begin = begin < here.resolved ? here.resolved : begin;
                begin = begin > here.upper ? here.upper : begin;
                shared_start = (u32)begin;
                u32 entry = here.input;
                if (here.resolved != here.upper) {
                    const u32 sure = last.start + here.input;
                    entry = begin > sure ? (u32)begin - sure : 0;
                }
                if (again) entry = last.entry;
                shared_entry = entry;
                RowState now;
                now.step = header->step;
                now.start = (u32)begin;
                now.entry = entry;
                states[row] = now;
                if (!again) accepted[row] = count;
            }
            __syncthreads();
            start = shared_start;
            end = start + count;
        }
        if (job < sequences_max) {
            for (u32 t = 0; t < table_count; t++) {
                const Table table = tables[t];
                const int* line = table.ids + row * table.width;
                int* dense = table.dense + (u64)job * table.width;
                const bool is_state = table.state_in != 0;
                u32 columns = end / table.block_tokens + (end % table.block_tokens != 0);
                if (is_state) {
                    columns = end > 0 ? drafts + 1 : 0;
                    // A wrong count must not lead outside the row.
                    columns = columns > table.width ? table.width : columns;
                }
                const u32 live = table.live[job];
                const u32 filled = live < table.width ? live : table.width;
                const u32 written = columns > filled ? columns : filled;
                for (u32 first = threadIdx.x; first < written; first += FETCHED * blockDim.x) {
                    int fetched[FETCHED];
#pragma unroll
                    for (u32 k = 0; k < FETCHED; k++) {
                        const u32 i = first + k * blockDim.x;
                        fetched[k] = i < columns ? line[i] : -1;
                    }
#pragma unroll
                    for (u32 k = 0; k < FETCHED; k++) {
                        const u32 i = first + k * blockDim.x;
                        const int id = fetched[k] < 0 ? table.null_block : fetched[k];
                        if (i < written) dense[i] = id;
                    }
                }
                for (u32 i = threadIdx.x; i < end - start; i += blockDim.x) {
                    const u32 position = start + i;
                    i64 slot = -1;
                    if (is_state) {
                        // Tokens before the drafts leave one state, the last one's.
                        const u32 left = end - 1 - position;
                        if (left < columns) slot = line[columns - 1 - left];
                    } else {
                        const int id = line[position / table.block_tokens];
                        slot = (i64)id * table.block_tokens + position % table.block_tokens;
                    }
                    table.slots[first_token + i] = slot < 0 ? -1 : slot;
                    if (t == 0) positions[first_token + i] = position;
                }
                // All threads have read `live`, and `shared_start`.
                __syncthreads();
                if (threadIdx.x == 0) {
                    table.live[job] = columns;
                    if (is_state) {
                        u32 entry = shared_entry;
                        if (entry >= table.width) entry = table.width - 1;
                        const int id = start > 0 ? line[entry] : -1;
                        table.state_in[job] = id < 0 ? table.null_block : id;
                    }
                }
            }
            if (threadIdx.x == 0) {
                rows[job] = job < sequences ? (int)row : -1;
                lengths[job] = end;
                query_starts[job] = first_token;
            }
        }
    }
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 threads = (u64)gridDim.x * blockDim.x;
    if (thread == 0) query_starts[sequences_max] = tokens;
    for (u64 i = tokens + thread; i < tokens_max; i += threads) {
        positions[i] = 0;
        u32 t = 0;
#pragma unroll 1
        do tables[t].slots[i] = -1;
        while (++t < table_count);
    }
    const ArrayPart* parts = (const ArrayPart*)(header + 1);
    for (u32 a = 0; a < array_count; a++) {
        const ArrayPart part = parts[a];
        const Vector* from = (const Vector*)(packet + part.at);
        const Vector zero = {{0, 0}};
        for (u64 i = thread; i < arrays[a].vectors; i += threads) {
            arrays[a].out[i] = i < part.vectors ? from[i] : zero;
        }
    }
}
