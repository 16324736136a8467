// Format "group int" with quantized activations: integer dot products group by group, scales after (the two-step
// dequantization of MixLLM, arXiv:2412.14590, section 3.3).
//
// Codes are unsigned and activations signed, which is what the machine's instructions want; the zero point enters
// through the sum of the group's activations, so the sum of a group is exact before it meets a float.
#include "gemm.h"
#include "interleaved.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int CHAINS = 4;          // sums under way at once, over the tokens
constexpr float ROUND = 0x1.8p23f; // adding and subtracting it rounds to nearest even, below 2^22
#if defined(__AVX512F__)
constexpr int MOST_TOKENS = 8; // in registers at once
#else
constexpr int MOST_TOKENS = 4;
#endif

inline Bytes broadcast_four(const int8_t* x) { return reinterpret_cast<Bytes>(load_as<int32_t>(x) - Ints{}); }

// R blocks of rows times M tokens.
template <int BITS, int R, int M>
void multiply_blocks(const GroupInt& t, const IntInputs& in, int64_t first, float* y, int64_t y_stride, int64_t block) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    constexpr int OWN = R * M >= CHAINS ? 1 : CHAINS / (R * M);
    const int64_t cells = cells_of(t), stride = in.stride, apart = t.groups * cells * SIZE;
    const uint8_t* cell = t.codes + block * apart;
    const int8_t* x = in.codes + first * stride;
    Floats total[R][M] = {};
    for (int64_t g = 0; g < t.groups; ++g) {
        Ints sum[OWN][R][M] = {};
        for (int64_t c = 0; c < cells; ++c, cell += SIZE, x += COLUMNS) {
            Codes code[R][COLUMNS / 4];
            for (int r = 0; r < R; ++r) cell_codes<BITS>(cell + r * apart, code[r]);
            for (int s = 0; s < COLUMNS / 4; ++s)
                for (int k = 0; k < M; ++k) {
                    const Bytes four = broadcast_four(x + k * stride + 4 * s);
                    for (int r = 0; r < R; ++r) {
                        Ints& own = sum[s % OWN][r][k];
                        own = BITS == 8 ? dot(own, code[r][s], four) : dot_small(own, code[r][s], four);
                    }
                }
        }
        for (int r = 0; r < R; ++r) {
            const Floats scale = load_scales(t, block + r, g);
            const Ints zero = load_zeros(t, block + r, g);
            for (int k = 0; k < M; ++k) {
                const int64_t at = (first + k) * t.groups + g;
                Ints all = sum[0][r][k] - zero * in.sums[at];
                for (int i = 1; i < OWN; ++i) all += sum[i][r][k];
                total[r][k] += to_float(all) * (scale * broadcast(in.scales[at]));
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) add_lanes(t, block + r, total[r][k], y + (first + k) * y_stride);
}

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

// Many tokens: the same sums, and the same bits, as one by one.
template <int BITS>
void multiply_many(const GroupInt& t, const IntInputs& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES, STEP = PANEL_CODES * 4 / COLUMNS;
    const int64_t cells = cells_of(t);
    Codes panel[MANY_BLOCKS * PANEL_CODES];
    Ints sums[MANY_BLOCKS * TURN];
    Floats total[MANY_BLOCKS * TURN];
    for (int64_t block = begin; block < end; block += MANY_BLOCKS)
        for (int64_t first = 0; first < in.tokens; first += TURN) {
            const int64_t m = least(TURN, in.tokens - first), blocks = least(MANY_BLOCKS, end - block);
            for (Floats& sum : total) sum = Floats{};
            for (int64_t g = 0; g < t.groups; ++g) {
                for (int64_t r = 0; r < blocks; ++r)
                    for (int64_t k = 0; k < m; ++k) sums[r * TURN + k] = Ints{};
                for (int64_t c = 0; c < cells; c += STEP) {
                    const int64_t here = least(STEP, cells - c), n = here * COLUMNS / 4;
                    for (int64_t r = 0; r < blocks; ++r)
                        decode_codes<BITS>(t.codes + (((block + r) * t.groups + g) * cells + c) * SIZE, here,
                                           panel + r * PANEL_CODES);
                    const int8_t* x = in.codes + first * in.stride + (g * cells + c) * COLUMNS;
                    if (blocks == MANY_BLOCKS) multiply_tokens<BITS, MANY_BLOCKS>(panel, n, x, in.stride, m, sums);
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
            for (int64_t r = 0; r < blocks; ++r)
                for (int64_t k = 0; k < m; ++k)
                    add_lanes(t, block + r, total[r * TURN + k], y + (first + k) * y_stride);
        }
}

template <int BITS>
void multiply(const GroupInt& t, const IntInputs& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    if (in.tokens > MOST_TOKENS) return multiply_many<BITS>(t, in, y, y_stride, begin, end);
    // Eight bits lose by pairs here (docs/log.md).
    by_blocks<MOST_TOKENS, (BITS < 8)>(in.tokens, begin, end, [&](auto r, auto m, int64_t block, int64_t k) {
        multiply_blocks<BITS, r.value, m.value>(t, in, k, y, y_stride, block);
    });
}

} // namespace

void group_int_prepare_ints(const GroupInt& t, const int8_t* x, int8_t* out, int32_t* sums) {
    const int64_t width = cells_of(t) * cell_columns(t.bits);
    for (int64_t g = 0; g < t.groups; ++g, out += width) {
        const int64_t begin = g * t.group_size, count = least(t.columns - begin, t.group_size);
        __builtin_memcpy(out, x + begin, static_cast<size_t>(count));
        __builtin_memset(out + count, 0, static_cast<size_t>(width - count));
        int32_t sum = 0;
        for (int64_t j = 0; j < width; ++j) sum += out[j];
        sums[g] = sum;
    }
}

void group_int_int_matmul(const GroupInt& t, const IntInputs& in, float* y, int64_t y_stride, int64_t begin,
                          int64_t end) {
    ANYBIT_BY_WIDTH(multiply, t.bits, t, in, y, y_stride, begin, end);
}

void quantize_row(const float* x, const ActivationGrid& grid, int8_t* codes, float* scales) {
    const float top = static_cast<float>((1 << (grid.bits - 1)) - 1), low = -top - 1;
    const int64_t groups = ceil_div(grid.columns, grid.group_size);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * grid.group_size, end = least(grid.columns, begin + grid.group_size);
        int32_t largest = 0; // sizes of floats are in the order of their bits, NaN and Inf above all others
        for (int64_t j = begin; j < end; ++j) {
            const int32_t size = load_as<int32_t>(x + j) & INT32_MAX;
            largest = size > largest ? size : largest;
        }
        const auto most = load_as<float>(&largest);
        float scale = grid.fixed != nullptr ? half_to_float(grid.fixed[g]) : most * half_to_float(grid.clip[g]) / top;
        if (!(most < __builtin_inff())) scale = __builtin_nanf(""); // NaN and Inf have no code
        scales[g] = scale;
        const float divisor = scale == 0 ? 1 : scale;
        for (int64_t j = begin; j < end; ++j) {
            float q = x[j] / divisor;
            q = q > low ? q : low; // NaN too
            q = q < top ? q : top;
            codes[j] = static_cast<int8_t>(static_cast<int32_t>((q + ROUND) - ROUND));
        }
    }
}

} // namespace anybit::ANYBIT_ISA
