// Format "group int" times bfloat16: exact codes, products and sums in float32.
#include "matmul/dot_bfloat16.h"
#include "matmul/group_int.h"

#ifdef __AVX512BF16__
namespace anybit::ANYBIT_ISA {
namespace {

constexpr int CHAINS = 4;      // sums under way at once, in the same order whatever the number of tokens
constexpr int MOST_TOKENS = 4; // in registers at once

// R blocks of rows times M tokens.
template <int BITS, int R, int M>
void multiply_blocks(const GroupInt& t, const PairInputs& in, int64_t first, float* y, int64_t y_stride,
                     int64_t block) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    constexpr float BIAS = BITS == 8 ? CODE_BIAS * 17 : CODE_BIAS; // 8 bits go in halves: code = low + 16 high
    const int64_t cells = cells_of(t), stride = t.groups * cells * COLUMNS, apart = t.groups * cells * SIZE;
    const uint8_t* cell = t.codes + block * apart;
    const uint16_t* x = in.x + first * stride;
    Floats total[R][M] = {};
    for (int64_t g = 0; g < t.groups; ++g) {
        Floats sum[R][CHAINS][M] = {};
        for (int64_t c = 0; c < cells; ++c, cell += SIZE, x += COLUMNS) {
            Codes code[R][COLUMNS / 4];
            for (int r = 0; r < R; ++r) cell_codes<BITS>(cell + r * apart, code[r]);
            for (int s = 0; s < COLUMNS / 4; ++s)
                for (int odd = 0; odd < 2; ++odd)
                    for (int k = 0; k < M; ++k) {
                        const Codes two = broadcast_pair(x + k * stride + 4 * s + 2 * odd);
                        for (int r = 0; r < R; ++r) {
                            const Codes pair = odd ? shifted<-8>(code[r][s]) : code[r][s];
                            Floats(&own)[CHAINS][M] = sum[r];
                            if constexpr (BITS == 8) {
                                own[odd][k] = dot_pairs(own[odd][k], biased<15>(pair), two);
                                own[odd + 2][k] = dot_pairs(own[odd + 2][k], biased<15>(shifted<-4>(pair)), two);
                            } else {
                                Floats& one = own[s % 2 * 2 + odd][k];
                                one = dot_pairs(one, biased<127>(pair), two);
                            }
                        }
                    }
        }
        for (int r = 0; r < R; ++r) {
            const Floats scale = load_scales(t, block + r, g);
            const Floats zero = to_float(load_zeros(t, block + r, g)) + BIAS;
            for (int k = 0; k < M; ++k) {
                const Floats low = sum[r][0][k] + sum[r][1][k], high = sum[r][2][k] + sum[r][3][k];
                const Floats all = BITS == 8 ? low + 16 * high : low + high;
                total[r][k] += scale * (all - zero * broadcast(in.sums[(first + k) * t.groups + g]));
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) add_lanes(t, block + r, total[r][k], y + (first + k) * y_stride);
}

template <int BITS>
void multiply(const GroupInt& t, const PairInputs& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    by_blocks<MOST_TOKENS, true>(in.tokens, begin, end, [&](auto r, auto m, int64_t block, int64_t k) {
        multiply_blocks<BITS, r.value, m.value>(t, in, k, y, y_stride, block);
    });
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
