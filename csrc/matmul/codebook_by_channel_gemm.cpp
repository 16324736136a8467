// Format "codebook" by input channel times many tokens: gemm, for which panels of weights are looked up.
#include "matmul/codebook_by_channel.h"
#include "matmul/gemm.h"
#include "matmul/ops.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

template <int BITS> int64_t decode_cells(const CodebookByChannel& t, int64_t block, int64_t column, Floats* panel) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    const int64_t begin = column / COLUMNS, end = least(cells_of(t), begin + PANEL / COLUMNS);
    for (int64_t c = begin; c < end; ++c, panel += COLUMNS) {
        Codes code[COLUMNS / 4];
        cell_codes<BITS>(t.bytes + block * block_bytes(t) + c * SIZE, code);
        for (int s = 0; s < COLUMNS / 4; ++s)
            for (int b = 0; b < 4; ++b) {
                const auto table = table_of<BITS>(t, c * COLUMNS + 4 * s + b);
                panel[4 * s + b] = table(reinterpret_cast<Ints>(code[s]) >> 8 * b);
            }
    }
    return (end - begin) * COLUMNS;
}

int64_t decode_panel(const CodebookByChannel& t, int64_t block, int64_t column, Floats* panel) {
    return by_width(t.bits, [&](auto bits) { return decode_cells<bits.value>(t, block, column, panel); });
}

template <typename X>
void gemm(const CodebookByChannel& t, const Inputs<X>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(t, decode_panel, columns_of(t), in, y, begin, end);
}

} // namespace

void add_codebook_by_channel_gemm(MatmulOps& ops) {
    ops.codebook_by_channel.f32.gemm = gemm<float>;
#ifdef __AVX512BF16__
    ops.codebook_by_channel.bf16.gemm = gemm<uint16_t>;
#endif
}

} // namespace anybit::ANYBIT_ISA
