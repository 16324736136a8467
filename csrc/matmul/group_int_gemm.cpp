// Format "group int" times many tokens of float32 or bfloat16: gemm, for which panels of weights are decoded.
#include "matmul/gemm.h"
#include "matmul/group_int.h"
#include "matmul/ops.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Weights of the cells from `column` on.
template <int BITS> int64_t decode_cells(const GroupInt& t, int64_t block, int64_t column, Floats* panel) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    const int64_t cells = cells_of(t), begin = column / COLUMNS;
    const int64_t end = least(t.groups * cells, begin + PANEL / COLUMNS);
    for (int64_t c = begin; c < end; ++c, panel += COLUMNS) {
        const int64_t g = block * t.groups + c / cells;
        const Floats scale = load_halves(t.scales + g * LANES);
        const Ints zero = load_zeros(t, block, c / cells);
        Codes code[COLUMNS / 4];
        cell_codes<BITS>(t.codes + (block * t.groups * cells + c) * SIZE, code);
        for (int s = 0; s < COLUMNS / 4; ++s)
            for (int b = 0; b < 4; ++b)
                panel[4 * s + b] = to_float((reinterpret_cast<Ints>(code[s]) >> 8 * b & 255) - zero) * scale;
    }
    return (end - begin) * COLUMNS;
}

int64_t decode_panel(const GroupInt& t, int64_t block, int64_t column, Floats* panel) {
    return by_width(t.bits, [&](auto bits) { return decode_cells<bits.value>(t, block, column, panel); });
}

template <typename X>
void gemm(const GroupInt& t, const Inputs<X>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(t, decode_panel, t.groups * cells_of(t) * cell_columns(t.bits), in, y, begin, end);
}

} // namespace

void add_group_int_gemm(MatmulOps& ops) {
    ops.group_int.f32.gemm = gemm<float>;
#ifdef __AVX512BF16__
    ops.group_int.bf16.gemm = gemm<uint16_t>;
#endif
}

} // namespace anybit::ANYBIT_ISA
