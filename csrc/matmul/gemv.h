// Few tokens at once: how four columns of codes, of all rows of R blocks, meet inputs of each type. `Sums` are those of
// M tokens over a group of columns. Each runs in one order whatever R and M are, so a batch equals its single tokens to
// the bit.
#pragma once

#include "matmul/dot_bfloat16.h"
#include "matmul/group_int.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int CHAINS = 4; // sums under way at once: a multiply-add takes as many cycles or more

// Float32: every machine.
struct ByFloats {
    using Input = float;
#if defined(__AVX512F__)
    static constexpr int TOKENS = 4; // in registers at once
#else
    static constexpr int TOKENS = 2;
#endif
    static constexpr bool pairs(int) { return true; } // of blocks of rows meet one token

    template <int BITS, int R, int M> struct Sums {
        Floats sum[R][CHAINS][M] = {};

        // Codes of four columns, and inputs from the first of them on; s: which four of a cell, or 0 if all are to meet
        // the same chains.
        inline void add(const Codes (&code)[R], int, const float* x, int64_t stride) {
            for (int b = 0; b < 4; ++b)
                for (int r = 0; r < R; ++r) {
                    const Ints four = reinterpret_cast<Ints>(code[r]);
                    const Floats w = to_float(b == 3 && BITS < 8 ? four >> 24 : four >> 8 * b & 255);
                    for (int k = 0; k < M; ++k) sum[r][b][k] += w * broadcast(x[k * stride + b]);
                }
        }
        // What the group adds to block r of token k.
        inline Floats of_group(int r, int k, Floats scale, Ints zero, const Inputs<float>& in, int64_t at) const {
            const Floats all = (sum[r][0][k] + sum[r][1][k]) + (sum[r][2][k] + sum[r][3][k]);
            return scale * (all - to_float(zero) * broadcast(in.sums[at]));
        }
    };
};

#ifdef __AVX512BF16__
// Bfloat16 in pairs: exact codes, products and sums in float32.
struct ByPairs {
    using Input = uint16_t; // in the order of `order_pairs`
    static constexpr int TOKENS = 4;
    static constexpr bool pairs(int) { return true; }

    template <int BITS, int R, int M> struct Sums {
        static constexpr float BIAS = BITS == 8 ? CODE_BIAS * 17 : CODE_BIAS; // 8 bits go in halves: low + 16 high
        Floats sum[R][CHAINS][M] = {};

        inline void add(const Codes (&code)[R], int s, const uint16_t* x, int64_t stride) {
            for (int odd = 0; odd < 2; ++odd)
                for (int k = 0; k < M; ++k) {
                    const Codes two = broadcast_pair(x + k * stride + 2 * odd);
                    for (int r = 0; r < R; ++r) {
                        const Codes pair = odd ? shifted<-8>(code[r]) : code[r];
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
        inline Floats of_group(int r, int k, Floats scale, Ints zero, const Inputs<uint16_t>& in, int64_t at) const {
            const Floats low = sum[r][0][k] + sum[r][1][k], high = sum[r][2][k] + sum[r][3][k];
            const Floats all = BITS == 8 ? low + 16 * high : low + high;
            return scale * (all - (to_float(zero) + BIAS) * broadcast(in.sums[at]));
        }
    };
};
#endif

// Bytes, whose sums are exact before they meet a float: the two-step dequantization of MixLLM (arXiv:2412.14590,
// section 3.3). Codes are unsigned and inputs signed, which is what the machine's instructions want; the zero point
// enters through the sum of the group's inputs.
struct ByBytes {
    using Input = int8_t;
#if defined(__AVX512F__)
    static constexpr int TOKENS = 8;
#else
    static constexpr int TOKENS = 4;
#endif
    static constexpr bool pairs(int bits) { return bits < 8; } // eight bits lose by pairs here (docs/log.md)

    template <int BITS, int R, int M> struct Sums {
        static constexpr int OWN = R * M >= CHAINS ? 1 : CHAINS / (R * M);
        Ints sum[OWN][R][M] = {};

        inline void add(const Codes (&code)[R], int s, const int8_t* x, int64_t stride) {
            for (int k = 0; k < M; ++k) {
                const Bytes four = broadcast_four(x + k * stride);
                for (int r = 0; r < R; ++r) {
                    Ints& own = sum[s % OWN][r][k];
                    own = BITS == 8 ? dot(own, code[r], four) : dot_small(own, code[r], four);
                }
            }
        }
        inline Floats of_group(int r, int k, Floats scale, Ints zero, const Inputs<int8_t>& in, int64_t at) const {
            Ints all = sum[0][r][k] - zero * in.sums[at];
            for (int i = 1; i < OWN; ++i) all += sum[i][r][k];
            return to_float(all) * (scale * broadcast(in.scales[at]));
        }
    };
};

} // namespace
} // namespace anybit::ANYBIT_ISA
