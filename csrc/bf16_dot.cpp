// Format "group int" times bfloat16: exact codes, products and sums in float32.
#include "bf16_dot.h"
#include "interleaved.h"

#ifdef __AVX512BF16__
namespace anybit::ANYBIT_ISA {
namespace {

constexpr int CHAINS = 4;      // sums under way at once, in the same order whatever the number of tokens
constexpr int MOST_TOKENS = 4; // in registers at once

template <int BITS, int M>
void multiply_block(const GroupInt& t, const PairInputs& in, int64_t first, float* y, int64_t y_stride, int64_t block) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    constexpr float BIAS = BITS == 8 ? CODE_BIAS * 17 : CODE_BIAS; // 8 bits go in halves: code = low + 16 high
    const int64_t cells = cells_of(t), stride = t.groups * cells * COLUMNS;
    const uint8_t* cell = t.codes + block * t.groups * cells * SIZE;
    const uint16_t* x = in.x + first * stride;
    Floats total[M] = {};
    for (int64_t g = 0; g < t.groups; ++g) {
        Floats sum[CHAINS][M] = {};
        for (int64_t c = 0; c < cells; ++c, cell += SIZE, x += COLUMNS) {
            Codes code[COLUMNS / 4];
            cell_codes<BITS>(cell, code);
            for (int s = 0; s < COLUMNS / 4; ++s)
                for (int odd = 0; odd < 2; ++odd) {
                    const Codes pair = odd ? shifted<-8>(code[s]) : code[s];
                    for (int k = 0; k < M; ++k) {
                        const Codes two = broadcast_pair(x + k * stride + 4 * s + 2 * odd);
                        if constexpr (BITS == 8) {
                            sum[odd][k] = dot_pairs(sum[odd][k], biased<15>(pair), two);
                            sum[odd + 2][k] = dot_pairs(sum[odd + 2][k], biased<15>(shifted<-4>(pair)), two);
                        } else {
                            Floats& own = sum[s % 2 * 2 + odd][k];
                            own = dot_pairs(own, biased<127>(pair), two);
                        }
                    }
                }
        }
        const Floats scale = load_halves(t.scales + (block * t.groups + g) * LANES);
        const Floats zero = to_float(load_zeros(t, block, g)) + BIAS;
        for (int k = 0; k < M; ++k) {
            const Floats low = sum[0][k] + sum[1][k], high = sum[2][k] + sum[3][k];
            const Floats all = BITS == 8 ? low + 16 * high : low + high;
            total[k] += scale * (all - zero * broadcast(in.sums[(first + k) * t.groups + g]));
        }
    }
    for (int k = 0; k < M; ++k) add_lanes(t, block, total[k], y + (first + k) * y_stride);
}

template <int BITS>
void multiply(const GroupInt& t, const PairInputs& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
        by_tokens<MOST_TOKENS>(in.tokens,
                               [&](auto m, int64_t k) { multiply_block<BITS, m.value>(t, in, k, y, y_stride, block); });
}

} // namespace

void group_int_prepare_bf16(const GroupInt& t, const uint16_t* x, uint16_t* out, float* sums) {
    const int64_t width = cells_of(t) * cell_columns(t.bits);
    for (int64_t g = 0; g < t.groups; ++g, out += width) {
        const int64_t begin = g * t.group_size, count = least(t.columns - begin, t.group_size);
        sums[g] = order_pairs(x + begin, count, width, out);
    }
}

void group_int_bf16_matmul(const GroupInt& t, const PairInputs& in, float* y, int64_t y_stride, int64_t begin,
                           int64_t end) {
    ANYBIT_BY_WIDTH(multiply, t.bits, t, in, y, y_stride, begin, end);
}

} // namespace anybit::ANYBIT_ISA
#endif
