//! The pattern and the gathered rows, value by value.

use kv_kernels::{
    GatherRows,
    verify::{FillPattern, token_word},
};

use super::machine::{Machine, chunk_row, shapes_and_layouts};

#[test]
fn every_word_of_the_pattern_is_its_token_s() {
    for (shape, _) in shapes_and_layouts(1).into_iter().step_by(3) {
        let machine = Machine::new();
        let keys = [3u64, u64::MAX, 0, 1 << 63, 99];
        let tokens = keys.len() as u64;
        let (chunk, token_keys) =
            (machine.memory(tokens * shape.token_bytes()), machine.upload(&keys));
        let fill = FillPattern { chunk: chunk.span(), token_keys: token_keys.span(), tokens };
        machine.kernels.fill_pattern(&machine.stream, &shape, fill).unwrap();
        let bytes = machine.read(chunk.span());
        for plane in 0..shape.planes() {
            for (token, &key) in (0..).zip(&keys) {
                let row = &bytes[chunk_row(&shape, tokens, plane, token)];
                for (word, bytes) in (0..).zip(row.chunks_exact(8)) {
                    let expected = token_word(key, plane * shape.row_words() + word);
                    assert_eq!(bytes, expected.to_le_bytes());
                }
            }
        }
        machine.assert_clean();
    }
}

#[test]
fn gathered_rows_are_the_table_s_and_gaps_stay() {
    let machine = Machine::new();
    let (table_rows, table_stride, width, out_stride) = (5u32, 9u64, 7u32, 8u64);
    let table: Vec<i32> = (0..table_rows as i32 * table_stride as i32).collect();
    let index = [4u32, 0, 5, u32::MAX, 4, 2];
    let out = machine.upload(&[-7i32; 48]);
    let (table_memory, index_memory) = (machine.upload(&table), machine.upload(&index));
    let gather = GatherRows {
        out: out.span(),
        out_stride,
        table: table_memory.span(),
        table_stride,
        row_index: index_memory.span(),
        rows: 6,
        width,
        table_rows,
    };
    machine.kernels.gather_rows(&machine.stream, gather).unwrap();
    let got: Vec<i32> = bytemuck::pod_collect_to_vec(&machine.read(out.span()));
    for (r, &source) in index.iter().enumerate() {
        for c in 0..out_stride as usize {
            let expected = if c >= width as usize {
                -7
            } else if source < table_rows {
                table[source as usize * table_stride as usize + c]
            } else {
                -1
            };
            assert_eq!(got[r * out_stride as usize + c], expected, "row {r} column {c}");
        }
    }
    machine.assert_clean();
}
