// Many tokens at once: the weights of LANES rows are decoded a panel of columns at a time, once for all tokens. Every
// format has its `decode`.
#pragma once

#include "common/thread_memory.h"
#include "matmul/gemm_panels.h"
#include "matmul/outputs.h"

namespace anybit::ANYBIT_ISA {
namespace {

// y[k, row] += w x for the blocks of LANES rows begin <= b < end of a tile, x [tokens, width] of a stride (bfloat16:
// followed by zeros up to a multiple of 32) in the order in which `decode(tile, block, column, panel)` gives the
// columns from `column` on, whose number it returns: PANEL, or the even number that is left, the same for every block;
// PAIRED: two columns to a vector already. Each token is summed in one order, whatever their number.
template <bool PAIRED = false, typename T, typename X>
void gemm(const T& t, int64_t (*decode)(const T&, int64_t, int64_t, Floats*), int64_t width, const Inputs<X>& in,
          const Outputs& y, int64_t begin, int64_t end) {
    constexpr bool PLAIN = PAIRED || sizeof(X) == 4; // panels are used as they are decoded
    Floats decoded[PLAIN ? 1 : PANEL];
    constexpr int64_t MEMORY = HELD<X> * (BATCH + HELD_VECTORS<X>)*BYTES;
    static_assert(MEMORY <= GEMM_MEMORY);
    auto* total = static_cast<Floats*>(thread_memory(MEMORY));
    Floats* panels = total + HELD<X> * BATCH;
    for (int64_t block = begin; block < end; block += HELD<X>)
        for (int64_t first = 0; first < in.tokens; first += BATCH) {
            const int64_t m = least(BATCH, in.tokens - first), blocks = least(HELD<X>, end - block);
            for (int64_t column = 0, held = 0; column < width; column += held) {
                held = 0;
                for (int64_t p = 0; p < HELD_PANELS<X> && column + held < width; ++p) {
                    int64_t n = 0;
                    for (int64_t r = 0; r < blocks; ++r) {
                        Floats* panel = panels + r * HELD_VECTORS<X> + p * PANEL_VECTORS<X>;
                        n = decode(t, block + r, column + held, PLAIN ? panel : decoded);
                        if (!PLAIN) prepare_panel(panel, decoded, n, in.x);
                        if (sizeof(X) == 2)
                            for (int64_t i = n / 2; i % 16 != 0; ++i) panel[i] = Floats{};
                    }
                    held += n;
                }
                multiply_panels(panels, blocks, held, in.x + first * in.stride + column, in.stride, m, column == 0,
                                total);
            }
            Places places[HELD<X>];
            for (int64_t r = 0; r < blocks; ++r) places[r] = find_places(y, block + r, t.rows);
            for (int64_t k = 0; k < m; ++k)
                for (int64_t r = 0; r < blocks; ++r) finish(y, first + k, places[r], total[r * BATCH + k]);
        }
}

} // namespace
} // namespace anybit::ANYBIT_ISA
