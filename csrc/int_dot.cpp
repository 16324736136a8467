// Format "group int" with quantized activations: integer dot products group by group, scales after (the two-step
// dequantization of MixLLM, arXiv:2412.14590, section 3.3).
//
// Compiled once per way of multiplying bytes: AVX-512 VNNI, AVX-VNNI, AVX2, and plain C++. Codes are unsigned and
// activations signed, which is what these instructions want; the zero point enters the integer sum through the sum of
// the group's activations, so the sum of a group is exact before it meets a float.
#include "byte_dot.h"
#include "group_int.h"
#include "int_dot.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t EXACT_GROUP = 512; // columns of a group none of whose partial sums leaves float's 24 bits
constexpr float ROUND = 0x1.8p23f; // adding and subtracting it rounds to nearest even, below 2^22

// Columns of one vector of code bytes.
int64_t block_columns(int bits) { return BYTES * 8 / bits; }

// Blocks of a group, the last one perhaps not full; a tile's groups begin at whole blocks of their own.
int64_t blocks_of(const GroupInt& t) { return ceil_div(least(t.group_size, t.columns), block_columns(t.bits)); }

// Codes of block b of group g; bytes beyond the row or the group meet activations of 0, but must not be read.
inline Codes load_codes(const GroupInt& t, int64_t row, int64_t g, int64_t b) {
    const int64_t at = g * t.group_size * t.bits / 8 + b * BYTES, left = t.row_bytes - at;
    const uint8_t* from = t.codes + row * t.row_bytes + at;
    if (left >= BYTES) return load_as<Codes>(from);
    Codes codes{};
    __builtin_memcpy(&codes, from, static_cast<size_t>(left));
    return codes;
}

template <int BITS, int R, int M>
void dot_rows(const GroupInt& t, const IntInputs& in, const int8_t* x, int64_t x_stride, int64_t first, float* y,
              int64_t y_stride, int64_t row) {
    const int64_t blocks = blocks_of(t), per_block = block_columns(BITS);
    const bool by_lane = least(t.group_size, t.columns) <= EXACT_GROUP;
    Floats total[R][M] = {};
    for (int64_t g = 0; g < t.groups; ++g) {
        Ints sums[R][M] = {};
        for (int i = 0; i < R; ++i)
            for (int k = 0; k < M; ++k) sums[i][k][0] = -zero_of(t, row + i, g) * in.sums[(first + k) * t.groups + g];
        const int64_t used = g + 1 == t.groups ? ceil_div(t.columns - g * t.group_size, per_block) : blocks;
        for (int64_t b = 0; b < used; ++b) {
            const int8_t* from = x + (g * blocks + b) * per_block;
            for (int i = 0; i < R; ++i) {
                const Codes bytes = load_codes(t, row + i, g, b);
                for (int k = 0; k < M; ++k) {
                    const int8_t* at = from + k * x_stride;
                    if (BITS == 8) sums[i][k] = dot(sums[i][k], bytes, at);
                    else {
                        sums[i][k] = dot_nibbles(sums[i][k], bytes & 15, at);
                        sums[i][k] = dot_nibbles(sums[i][k], bytes >> 4, at + BYTES);
                    }
                }
            }
        }
        for (int i = 0; i < R; ++i) {
            const float scale = scale_of(t, row + i, g);
            for (int k = 0; k < M; ++k) {
                const float both = scale * in.scales[(first + k) * t.groups + g];
                if (by_lane) total[i][k] += to_float(sums[i][k]) * both;
                else total[i][k][0] += static_cast<float>(sum_of(sums[i][k])) * both;
            }
        }
    }
    for (int i = 0; i < R; ++i) {
        for (int k = 0; k < M; ++k) y[(first + k) * y_stride + out_row(t, row + i)] += reduce(total[i][k]);
    }
}

template <int BITS, int R, int M>
void dot_range(const GroupInt& t, const IntInputs& in, const int8_t* x, int64_t x_stride, int64_t first, float* y,
               int64_t y_stride, int64_t begin, int64_t end) {
    int64_t row = begin;
    for (; row + R <= end; row += R) dot_rows<BITS, R, M>(t, in, x, x_stride, first, y, y_stride, row);
    for (; row < end; ++row) dot_rows<BITS, 1, M>(t, in, x, x_stride, first, y, y_stride, row);
}

template <int BITS>
void matmul(const GroupInt& t, const IntInputs& in, const int8_t* x, float* y, int64_t y_stride, int64_t begin,
            int64_t end) {
    const int64_t stride = t.groups * blocks_of(t) * block_columns(t.bits);
    for (int64_t row = begin; row < end; row += ROW_BLOCK) {
        const int64_t last = least(end, row + ROW_BLOCK);
        for (int64_t k = 0; k < in.tokens;) {
            const int64_t step = in.tokens - k >= 4 ? 4 : in.tokens - k >= 2 ? 2 : 1;
            const int8_t* from = x + k * stride;
            if (step == 4) dot_range<BITS, 2, 4>(t, in, from, stride, k, y, y_stride, row, last);
            if (step == 2) dot_range<BITS, 4, 2>(t, in, from, stride, k, y, y_stride, row, last);
            if (step == 1) dot_range<BITS, 4, 1>(t, in, from, stride, k, y, y_stride, row, last);
            k += step;
        }
    }
}

} // namespace

int64_t int_columns(const GroupInt& t) { return t.groups * blocks_of(t) * block_columns(t.bits); }

// Within a block of 4-bit codes, weights in the low halves of the bytes come first, then those in the high halves.
void int_prepare(const GroupInt& t, const int8_t* x, int64_t tokens, int8_t* out) {
    const int64_t per_block = block_columns(t.bits), width = blocks_of(t) * per_block, phases = 8 / t.bits;
    for (int64_t k = 0; k < tokens; ++k)
        for (int64_t g = 0; g < t.groups; ++g, out += width) {
            const int64_t begin = g * t.group_size, count = least(t.columns - begin, t.group_size);
            for (int64_t j = 0; j < width; ++j) {
                const int64_t within = j % per_block;
                const int64_t from = j - within + within % BYTES * phases + within / BYTES;
                out[j] = from < count ? x[k * t.columns + begin + from] : int8_t(0);
            }
        }
}

void int_matmul(const GroupInt& t, const IntInputs& in, const int8_t* prepared, float* y, int64_t y_stride,
                int64_t begin, int64_t end) {
    if (t.bits == 4) matmul<4>(t, in, prepared, y, y_stride, begin, end);
    else matmul<8>(t, in, prepared, y, y_stride, begin, end);
}

void quantize_row(const float* x, const ActivationGrid& grid, int8_t* codes, float* scales) {
    const float top = static_cast<float>((1 << (grid.bits - 1)) - 1), low = -top - 1;
    const int64_t groups = ceil_div(grid.columns, grid.group_size);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * grid.group_size, end = least(grid.columns, begin + grid.group_size);
        float most = 0, damaged = 0;
        for (int64_t j = begin; j < end; ++j) {
            const float size = __builtin_fabsf(x[j]);
            most = size > most ? size : most;
            damaged += size < __builtin_inff() ? 0.0f : 1.0f;
        }
        float scale = grid.fixed != nullptr ? half_to_float(grid.fixed[g]) : most * half_to_float(grid.clip[g]) / top;
        if (damaged != 0) scale = __builtin_nanf(""); // NaN and Inf have no code: their group becomes NaN
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
