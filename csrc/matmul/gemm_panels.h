// A panel of decoded weights times many tokens: by vectors, and by AMX tiles (multiply_tiles).
#pragma once

#include "matmul/dot_bfloat16.h"
#include "matmul/ops.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t PANEL = 32 * LANES; // columns; a multiple of whatever a format decodes at a time

// Vectors of a panel of weights that meet inputs of type X, float or uint16_t (bfloat16, two columns to a vector), and
// what is held at a time: blocks of rows, and panels of each.
template <typename X> constexpr int64_t PANEL_VECTORS = PANEL * sizeof(X) / 4;
template <typename X> constexpr int64_t HELD = GEMM_BLOCKS;
template <typename X> constexpr int64_t HELD_PANELS = 1;
#ifdef __AMX_BF16__
template <> constexpr int64_t HELD<uint16_t> = 8;        // of fewer, reading inputs takes longer than multiplying
template <> constexpr int64_t HELD_PANELS<uint16_t> = 2; // one after the other, lest a short last one stand alone
#endif
template <typename X> constexpr int64_t HELD_VECTORS = HELD_PANELS<X> * PANEL_VECTORS<X>; // of a block
#if defined(__AVX512F__)
constexpr int TOGETHER = 12; // tokens in registers at once
#elif defined(__AVX2__)
constexpr int TOGETHER = 6;
#else
constexpr int TOGETHER = 4;
#endif

// R blocks of rows, whose panels lie HELD_VECTORS apart and whose sums BATCH, times M tokens: a vector of weights
// meets M inputs, an input R vectors.
template <int R, int M>
void multiply_panel(const Floats* panel, int64_t columns, const float* x, int64_t stride, Floats* total) {
    Floats sum[R][M];
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) sum[r][k] = total[r * BATCH + k];
    for (int64_t j = 0; j < columns; ++j)
        for (int k = 0; k < M; ++k) {
            const Floats one = broadcast(x[k * stride + j]);
            for (int r = 0; r < R; ++r) sum[r][k] += panel[r * HELD_VECTORS<float> + j] * one;
        }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) total[r * BATCH + k] = sum[r][k];
}

#ifdef __AVX512BF16__
template <int R, int M>
void multiply_panel(const Floats* panel, int64_t columns, const uint16_t* x, int64_t stride, Floats* total) {
    Floats sum[R][M];
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) sum[r][k] = total[r * BATCH + k];
    for (int64_t p = 0; p < columns / 2; ++p)
        for (int k = 0; k < M; ++k) {
            const Codes two = broadcast_pair(x + k * stride + 2 * p);
            for (int r = 0; r < R; ++r)
                sum[r][k] = dot_pairs(sum[r][k], load_as<Codes>(panel + r * HELD_VECTORS<uint16_t> + p), two);
        }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) total[r * BATCH + k] = sum[r][k];
}

#endif

// A panel of float32 in the form in which it meets inputs of a type.
inline void prepare_panel(Floats*, const Floats*, int64_t, const float*) {}
#ifdef __AVX512BF16__
inline void prepare_panel(Floats* panel, const Floats* decoded, int64_t columns, const uint16_t*) {
    uint16_t order[2 * LANES];
    for (int i = 0; i < 2 * LANES; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * LANES);
    const auto index = load_as<__m512i>(order);
    for (int64_t p = 0; p < columns / 2; ++p) {
        const auto low = reinterpret_cast<__m512>(decoded[2 * p]), high = reinterpret_cast<__m512>(decoded[2 * p + 1]);
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        panel[p] = reinterpret_cast<Floats>(_mm512_permutexvar_epi16(index, both));
    }
}
#endif

template <int R, typename X>
void multiply_tokens(const Floats* panel, int64_t columns, const X* x, int64_t stride, int64_t tokens, Floats* total) {
    int64_t k = 0;
    for (; k + TOGETHER <= tokens; k += TOGETHER)
        multiply_panel<R, TOGETHER>(panel, columns, x + k * stride, stride, total + k);
    for (; k + 4 <= tokens; k += 4) multiply_panel<R, 4>(panel, columns, x + k * stride, stride, total + k);
    for (; k < tokens; ++k) multiply_panel<R, 1>(panel, columns, x + k * stride, stride, total + k);
}

// All tokens and panels. Sums begin `anew` or go on.
template <typename X>
void multiply_panels(const Floats* panels, int64_t blocks, int64_t columns, const X* x, int64_t stride, int64_t tokens,
                     bool anew, Floats* total) {
    for (int64_t r = 0; anew && r < blocks; ++r)
        for (int64_t k = 0; k < tokens; ++k) total[r * BATCH + k] = Floats{};
    int64_t r = 0;
    for (; r + GEMM_BLOCKS <= blocks; r += GEMM_BLOCKS)
        multiply_tokens<GEMM_BLOCKS>(panels + r * HELD_VECTORS<X>, columns, x, stride, tokens, total + r * BATCH);
    for (; r < blocks; ++r)
        multiply_tokens<1>(panels + r * HELD_VECTORS<X>, columns, x, stride, tokens, total + r * BATCH);
}

#ifdef __AMX_BF16__
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles for up to 32 tokens: 0 to 3 are the sums of tokens 0 to 15 and 16 to 31 with each of two blocks of rows, 4 and
// 5 inputs of so many bytes, 6 and 7 weights.
inline void shape_tiles(int64_t tokens, int64_t bytes = BYTES) {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
        const int64_t rest = tokens > 16 ? tokens - 16 : 1;
        shapes.bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? bytes : BYTES);
        shapes.rows[i] = static_cast<uint8_t>(i >= 6                       ? bytes / 4
                                              : i == 2 || i == 3 || i == 5 ? rest
                                                                           : least(16, tokens));
    }
    // GCC 12 takes this for a read of 8 bytes and loads of tiles for none: what they read must be written by here.
    __asm__ volatile("" ::"r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

// R blocks of rows times tokens, MORE of them than 16, `steps` times 32 columns: 16 vectors of a panel are a tile.
template <int R, bool MORE>
void multiply_tiles(const Floats* panel, int64_t steps, const uint16_t* x, int64_t stride, bool anew, Floats* total) {
    if (anew) {
        _tile_zero(0);
        if (R == 2) _tile_zero(1);
        if (MORE) _tile_zero(2);
        if (R == 2 && MORE) _tile_zero(3);
    } else {
        _tile_loadd(0, total, BYTES);
        if (R == 2) _tile_loadd(1, total + BATCH, BYTES);
        if (MORE) _tile_loadd(2, total + 16, BYTES);
        if (R == 2 && MORE) _tile_loadd(3, total + BATCH + 16, BYTES);
    }
    for (int64_t q = 0; q < steps; ++q) {
        _tile_loadd(4, x + 32 * q, 2 * stride);
        _tile_loadd(6, panel + 16 * q, BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (R == 2) _tile_loadd(7, panel + HELD_VECTORS<uint16_t> + 16 * q, BYTES);
        if (R == 2) _tile_dpbf16ps(1, 4, 7);
        if (MORE) _tile_loadd(5, x + 16 * stride + 32 * q, 2 * stride);
        if (MORE) _tile_dpbf16ps(2, 5, 6);
        if (R == 2 && MORE) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, total, BYTES);
    if (R == 2) _tile_stored(1, total + BATCH, BYTES);
    if (MORE) _tile_stored(2, total + 16, BYTES);
    if (R == 2 && MORE) _tile_stored(3, total + BATCH + 16, BYTES);
}

// The inputs of 32 tokens and up to STEPS tiles stay in the first cache while all panels pass. Of the last tile's
// columns, panels and inputs hold those that are missing as 0.
inline void multiply_panels(const Floats* panels, int64_t blocks, int64_t columns, const uint16_t* x, int64_t stride,
                            int64_t tokens, bool anew, Floats* total) {
    constexpr int64_t STEPS = 10;
    const int64_t all = ceil_div(columns, 32);
    const int64_t steps = ceil_div(all, ceil_div(all, STEPS)); // alike: each reads and writes all sums
    for (int64_t k = 0; k < tokens; k += 32) {
        const bool more = tokens - k > 16;
        if (k == 0 || tokens - k < 32) shape_tiles(least(32, tokens - k));
        for (int64_t q = 0; q < all; q += steps)
            for (int64_t r = 0; r < blocks; r += 2) {
                const auto multiply = blocks - r == 1 ? (more ? multiply_tiles<1, true> : multiply_tiles<1, false>)
                                                      : (more ? multiply_tiles<2, true> : multiply_tiles<2, false>);
                multiply(panels + r * HELD_VECTORS<uint16_t> + 16 * q, least(steps, all - q), x + k * stride + 32 * q,
                         stride, anew && q == 0, total + r * BATCH + k);
            }
    }
    _tile_release();
}
#endif

} // namespace
} // namespace anybit::ANYBIT_ISA
