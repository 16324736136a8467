// Format "group int" times many tokens of 8 bits: gemm by AMX tiles (multiply_byte_tiles), or by dot products of bytes.
// The sums, and the bits, are those of gemv.
#include "common/thread_memory.h"
#include "matmul/gemm_panels.h"
#include "matmul/group_int.h"
#include "matmul/outputs.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

#ifdef __AMX_INT8__
constexpr int64_t STEP = 64;      // columns of a tile: of inputs, of 16 tokens, or of codes, 16 vectors
constexpr int64_t STEPS = 4;      // of a panel: with inputs of 32 tokens and their sums, two blocks fit the first cache
constexpr int64_t PANEL_ROWS = 8; // blocks; of fewer, reading inputs takes longer than multiplying
constexpr int64_t PAIR_SUMS = 64; // vectors of sums of two blocks of rows and 32 tokens

// Columns of a panel: `steps` tiles from `first` on of each of `count` groups, several only where they are whole.
struct Part {
    int64_t group, count, first, steps;
};

// Both sides of AMX's products are signed here: of the zero points, what leaves codes signed bytes is subtracted from
// them, the rest enters through the sums of activations.
struct Panel {
    Codes codes[PANEL_ROWS][STEPS * 16];
    Floats scales[PANEL_ROWS][STEPS]; // by group
    Ints rest[PANEL_ROWS][STEPS];     // of zero points
    bool exact;                       // there is none
};

template <int BITS>
void decode_panel(const GroupInt& t, int64_t block, int64_t blocks, const Part& part, Panel& panel) {
    constexpr int64_t COLUMNS = cell_columns(BITS), VECTORS = COLUMNS / 4, SIZE = cell_vectors(BITS) * BYTES;
    const int64_t cells = cells_of(t), first = part.first * STEP / COLUMNS;
    const int64_t here = least(part.steps * STEP / COLUMNS, cells - first);
    const Ints most = 127 - Ints{};
    Ints rest{};
    for (int64_t r = 0; r < blocks; ++r)
        for (int64_t i = 0; i < part.count; ++i) {
            const int64_t g = part.group + i;
            const Ints zeros = load_zeros(t, block + r, g), near = BITS == 8 ? most + 1 : zeros < most ? zeros : most;
            const Codes less = BITS == 8 ? fill(128) : reinterpret_cast<Codes>(near * 0x01010101);
            const uint8_t* cell = t.codes + (((block + r) * t.groups + g) * cells + first) * SIZE;
            Codes* to = panel.codes[r] + i * part.steps * 16;
            for (int64_t c = 0; c < here; ++c, cell += SIZE, to += VECTORS) {
                Codes code[VECTORS];
                cell_codes<BITS>(cell, code);
                for (int64_t s = 0; s < VECTORS; ++s) to[s] = code[s] - less;
            }
            if (cells * COLUMNS > STEP) // up to there tiles are as narrow as a group
                for (int64_t s = here * VECTORS; s < part.steps * 16; ++s) *to++ = Codes{}; // meet another group
            panel.scales[r][i] = load_scales(t, block + r, g);
            panel.rest[r][i] = zeros - near;
            rest |= zeros - near;
        }
    panel.exact = _mm512_test_epi32_mask(reinterpret_cast<__m512i>(rest), reinterpret_cast<__m512i>(rest)) == 0;
}

// R blocks of rows times tokens, MORE of them than 16, `steps` times STEP columns. Sums [R, 32] begin ANEW or go on.
template <int R, bool MORE>
void multiply_byte_tiles(const Codes* codes, int64_t steps, const int8_t* x, int64_t stride, bool anew, Ints* sums) {
    if (anew) {
        _tile_zero(0);
        if (R == 2) _tile_zero(1);
        if (MORE) _tile_zero(2);
        if (R == 2 && MORE) _tile_zero(3);
    } else {
        _tile_loadd(0, sums, BYTES);
        if (R == 2) _tile_loadd(1, sums + 32, BYTES);
        if (MORE) _tile_loadd(2, sums + 16, BYTES);
        if (R == 2 && MORE) _tile_loadd(3, sums + 48, BYTES);
    }
    for (int64_t q = 0; q < steps; ++q) {
        _tile_loadd(4, x + STEP * q, stride);
        _tile_loadd(6, codes + 16 * q, BYTES);
        _tile_dpbssd(0, 4, 6);
        if (R == 2) _tile_loadd(7, codes + STEPS * 16 + 16 * q, BYTES);
        if (R == 2) _tile_dpbssd(1, 4, 7);
        if (MORE) _tile_loadd(5, x + 16 * stride + STEP * q, stride);
        if (MORE) _tile_dpbssd(2, 5, 6);
        if (R == 2 && MORE) _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums, BYTES);
    if (R == 2) _tile_stored(1, sums + 32, BYTES);
    if (MORE) _tile_stored(2, sums + 16, BYTES);
    if (R == 2 && MORE) _tile_stored(3, sums + 48, BYTES);
}

// total += the scaled sums of COUNT groups of a panel's block, one after the other, for each of up to 32 tokens; it
// begins `anew` or goes on.
template <bool EXACT, int COUNT>
void scale_sums(const Ints* sums, const Floats* scales, const Ints* rest, const float* x_scales, const int32_t* x_sums,
                int64_t groups, int64_t tokens, bool anew, Floats* total) {
    Floats scale[COUNT];
    for (int i = 0; i < COUNT; ++i) scale[i] = scales[i];
    for (int64_t k = 0; k < tokens; ++k, x_scales += groups, x_sums += groups) {
        Floats own{};
        if (!anew) own = total[k];
        for (int i = 0; i < COUNT; ++i) {
            Ints all = sums[i * PAIR_SUMS + k];
            if (!EXACT) all -= rest[i] * x_sums[i];
            own += to_float(all) * (scale[i] * broadcast(x_scales[i]));
        }
        total[k] = own;
    }
}

// Up to PANEL_ROWS blocks of rows times up to 32 tokens from k on, for which tiles are shaped. The sums of a group that
// does not fit a panel have places of their own.
inline void multiply_byte_panel(const GroupInt& t, const Inputs<int8_t>& in, const Panel& panel, int64_t blocks,
                                const Part& part, int64_t width, int64_t k, int64_t tokens, Ints* sums, Floats* total) {
    const int8_t* x = in.x + k * in.stride + part.group * width + part.first * STEP;
    const bool more = tokens > 16, whole = (part.first + part.steps) * STEP >= width;
    for (int64_t r = 0; r < blocks; r += 2) {
        const int64_t pair = least(2, blocks - r);
        const auto multiply = pair == 1 ? (more ? multiply_byte_tiles<1, true> : multiply_byte_tiles<1, false>)
                                        : (more ? multiply_byte_tiles<2, true> : multiply_byte_tiles<2, false>);
        Ints* own = width > STEPS * STEP ? sums + r * BATCH + 2 * (k % BATCH) : sums;
        for (int64_t i = 0; i < part.count; ++i)
            multiply(panel.codes[r] + i * part.steps * 16, part.steps, x + i * width, in.stride, part.first == 0,
                     own + i * PAIR_SUMS);
        for (int64_t b = 0; whole && b < pair; ++b)
            by_tokens<STEPS>(part.count, [&](auto count, int64_t i) {
                const auto scale = panel.exact ? scale_sums<true, count.value> : scale_sums<false, count.value>;
                const int64_t at = k * t.groups + part.group + i;
                scale(own + i * PAIR_SUMS + b * 32, panel.scales[r + b] + i, panel.rest[r + b] + i, in.scales + at,
                      in.sums + at, t.groups, tokens, part.group + i == 0, total + (r + b) * BATCH + k % BATCH);
            });
    }
}

template <int BITS>
void gemm_bits(const GroupInt& t, const Inputs<int8_t>& in, const Outputs& y, int64_t begin, int64_t end) {
    const int64_t width = cells_of(t) * cell_columns(BITS), steps = ceil_div(width, STEP);
    const int64_t together = steps < STEPS ? STEPS / steps : 1; // groups of a panel
    constexpr int64_t MEMORY = 2 * PANEL_ROWS * BATCH * BYTES + sizeof(Panel);
    static_assert(MEMORY <= GEMM_MEMORY);
    auto* total = static_cast<Floats*>(thread_memory(MEMORY));
    auto* sums = reinterpret_cast<Ints*>(total + PANEL_ROWS * BATCH);
    Panel& panel = *reinterpret_cast<Panel*>(sums + PANEL_ROWS * BATCH);
    for (int64_t block = begin; block < end; block += PANEL_ROWS)
        for (int64_t first = 0; first < in.tokens; first += BATCH) {
            const int64_t m = least(BATCH, in.tokens - first), blocks = least(PANEL_ROWS, end - block);
            for (int64_t g = 0; g < t.groups; g += together)
                for (int64_t s = 0; s < steps; s += STEPS) {
                    const Part part{g, least(together, t.groups - g), s, least(STEPS, steps - s)};
                    decode_panel<BITS>(t, block, blocks, part, panel);
                    for (int64_t k = 0; k < m; k += 32) {
                        const int64_t tokens = least(32, m - k);
                        if (k == 0 || tokens < 32) shape_tiles(tokens, least(width, STEP));
                        multiply_byte_panel(t, in, panel, blocks, part, width, first + k, tokens, sums, total);
                    }
                }
            Places places[PANEL_ROWS];
            for (int64_t r = 0; r < blocks; ++r) places[r] = find_places(y, block + r, t.rows);
            for (int64_t k = 0; k < m; ++k)
                for (int64_t r = 0; r < blocks; ++r) finish(y, first + k, places[r], total[r * BATCH + k]);
        }
    _tile_release();
}
#else
constexpr int64_t PANEL_CODES = 64;    // vectors, four columns each, that are decoded at a time
constexpr int64_t TURN = 4 * TOGETHER; // tokens whose sums of a group stay in the first cache

// R blocks of rows, whose panels lie PANEL_CODES apart, times M tokens, with n vectors of codes of one group.
template <int BITS, int R, int M>
void multiply_codes(const Codes* panel, int64_t n, const int8_t* x, int64_t stride, Ints* sums) {
    Ints own[R][M];
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) own[r][k] = sums[r * TURN + k];
    for (int64_t s = 0; s < n; ++s)
        for (int k = 0; k < M; ++k) {
            const Bytes four = broadcast_four(x + k * stride + 4 * s);
            for (int r = 0; r < R; ++r) {
                const Codes code = panel[r * PANEL_CODES + s];
                own[r][k] = BITS == 8 ? dot(own[r][k], code, four) : dot_small(own[r][k], code, four);
            }
        }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) sums[r * TURN + k] = own[r][k];
}

template <int BITS, int R>
void multiply_tokens(const Codes* panel, int64_t n, const int8_t* x, int64_t stride, int64_t tokens, Ints* sums) {
    int64_t k = 0;
    for (; k + TOGETHER <= tokens; k += TOGETHER)
        multiply_codes<BITS, R, TOGETHER>(panel, n, x + k * stride, stride, sums + k);
    for (; k + 4 <= tokens; k += 4) multiply_codes<BITS, R, 4>(panel, n, x + k * stride, stride, sums + k);
    for (; k < tokens; ++k) multiply_codes<BITS, R, 1>(panel, n, x + k * stride, stride, sums + k);
}

// The codes of n cells.
template <int BITS> void decode_codes(const uint8_t* cell, int64_t n, Codes* panel) {
    constexpr int64_t VECTORS = cell_columns(BITS) / 4;
    for (int64_t i = 0; i < n; ++i) {
        Codes code[VECTORS];
        cell_codes<BITS>(cell + i * cell_vectors(BITS) * BYTES, code);
        for (int64_t s = 0; s < VECTORS; ++s) panel[i * VECTORS + s] = code[s];
    }
}

template <int BITS>
void gemm_bits(const GroupInt& t, const Inputs<int8_t>& in, const Outputs& y, int64_t begin, int64_t end) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES, STEP = PANEL_CODES * 4 / COLUMNS;
    const int64_t cells = cells_of(t);
    Codes panel[GEMM_BLOCKS * PANEL_CODES];
    Ints sums[GEMM_BLOCKS * TURN];
    Floats total[GEMM_BLOCKS * TURN];
    for (int64_t block = begin; block < end; block += GEMM_BLOCKS)
        for (int64_t first = 0; first < in.tokens; first += TURN) {
            const int64_t m = least(TURN, in.tokens - first), blocks = least(GEMM_BLOCKS, end - block);
            for (Floats& sum : total) sum = Floats{};
            for (int64_t g = 0; g < t.groups; ++g) {
                for (int64_t r = 0; r < blocks; ++r)
                    for (int64_t k = 0; k < m; ++k) sums[r * TURN + k] = Ints{};
                for (int64_t c = 0; c < cells; c += STEP) {
                    const int64_t here = least(STEP, cells - c), n = here * COLUMNS / 4;
                    for (int64_t r = 0; r < blocks; ++r)
                        decode_codes<BITS>(t.codes + (((block + r) * t.groups + g) * cells + c) * SIZE, here,
                                           panel + r * PANEL_CODES);
                    const int8_t* x = in.x + first * in.stride + (g * cells + c) * COLUMNS;
                    if (blocks == GEMM_BLOCKS) multiply_tokens<BITS, GEMM_BLOCKS>(panel, n, x, in.stride, m, sums);
                    else multiply_tokens<BITS, 1>(panel, n, x, in.stride, m, sums);
                }
                for (int64_t r = 0; r < blocks; ++r) {
                    const Floats scale = load_scales(t, block + r, g);
                    const Ints zero = load_zeros(t, block + r, g);
                    for (int64_t k = 0; k < m; ++k) {
                        const int64_t at = (first + k) * t.groups + g;
                        const Ints all = sums[r * TURN + k] - zero * in.sums[at];
                        total[r * TURN + k] += to_float(all) * (scale * broadcast(in.scales[at]));
                    }
                }
            }
            for (int64_t r = 0; r < blocks; ++r) {
                const Places places = find_places(y, block + r, t.rows);
                for (int64_t k = 0; k < m; ++k) finish(y, first + k, places, total[r * TURN + k]);
            }
        }
}
#endif

void gemm_int8(const GroupInt& t, const Inputs<int8_t>& in, const Outputs& y, int64_t begin, int64_t end) {
    by_width(t.bits, [&](auto bits) { gemm_bits<bits.value>(t, in, y, begin, end); });
}

} // namespace

void add_group_int_gemm_int8(MatmulOps& ops) { ops.group_int.int8.gemm = gemm_int8; }

} // namespace anybit::ANYBIT_ISA
