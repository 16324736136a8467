// The 2-bit channels of format "two_four": groups of 16 or 8 channels whose scales are themselves rounded, over 16 rows
// at a time. Laid out as 2-bit codes of format "group int" (group_int.h), a cell of 16 channels at a time; beside
// each group lies a byte for every row, its zero point in the low 2 bits and its scale's code above.
#include "matmul/gemm.h"
#include "matmul/group_int.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t CELL = 16;                            // channels
constexpr int64_t CODE_BYTES = cell_vectors(2) * BYTES; // of a cell
constexpr int CHAINS = 4;
#if defined(__AVX512F__)
constexpr int MOST_TOKENS = 4; // in registers at once
#else
constexpr int MOST_TOKENS = 2;
#endif

int64_t cells_of(const SecondOrder& t) { return ceil_div(t.columns, CELL); }
int64_t cell_groups(const SecondOrder& t) { return CELL / t.group_size; }
int64_t cell_bytes(const SecondOrder& t) { return CODE_BYTES + cell_groups(t) * LANES; }

// Where part of the rows' grid for a group is.
int64_t grid_at(const SecondOrder& t, int64_t block, int64_t g) { return block * LANES / SECOND_ROWS * t.groups + g; }

// What multiplies four codes of every row with activations of M tokens, and how the sums of a group begin and end.
struct ByFloats {
    using Input = float;
    static constexpr float BIAS = 0; // that codes carry

    template <int M> static void add(Floats (&sum)[CHAINS][M], Codes code, const float* x, int64_t stride) {
        const Ints four = reinterpret_cast<Ints>(code);
        for (int b = 0; b < 4; ++b) {
            const Floats w = to_float(b == 3 ? four >> 24 : four >> 8 * b & 255);
            for (int k = 0; k < M; ++k) sum[b][k] += w * broadcast(x[k * stride + b]);
        }
    }
};

#ifdef __AVX512BF16__
struct ByPairs {
    using Input = uint16_t;
    static constexpr float BIAS = CODE_BIAS;

    template <int M> static void add(Floats (&sum)[CHAINS][M], Codes code, const uint16_t* x, int64_t stride) {
        for (int odd = 0; odd < 2; ++odd) {
            const Codes pair = biased<3>(odd ? shifted<-8>(code) : code);
            for (int k = 0; k < M; ++k) {
                sum[odd][k] = dot_pairs(sum[odd][k], pair, broadcast_pair(x + k * stride + 2 * odd));
            }
        }
    }
};
#endif

template <typename By, int M>
void multiply_block(const SecondOrder& t, const typename By::Input* x, const float* sums, float* y, int64_t y_stride,
                    int64_t block) {
    const int64_t cells = cells_of(t), per_cell = cell_groups(t), stride = cells * CELL;
    const uint8_t* cell = t.bytes + block * cells * cell_bytes(t);
    Floats total[M] = {};
    for (int64_t c = 0; c < cells; ++c, cell += cell_bytes(t)) {
        Codes code[CELL / 4];
        cell_codes<2>(cell, code);
        Floats sum[CHAINS][M] = {};
        for (int64_t s = 0; s < CELL / 4; ++s) {
            By::add(sum, code[s], x + c * CELL + 4 * s, stride);
            const int64_t g = c * per_cell + (s * 4 + 3) / t.group_size;
            if ((s + 1) * 4 % t.group_size != 0 || g >= t.groups) continue;
            const Ints grid = load_bytes(cell + CODE_BYTES + (g - c * per_cell) * LANES);
            const int64_t at = grid_at(t, block, g);
            const Floats scale = t.scales[at] * (to_float(grid >> 2) + static_cast<float>(t.zeros[at]));
            const Floats zero = to_float(grid & 3) + By::BIAS;
            for (int k = 0; k < M; ++k) {
                const Floats all = (sum[0][k] + sum[1][k]) + (sum[2][k] + sum[3][k]);
                total[k] += scale * (all - zero * broadcast(sums[k * t.groups + g]));
                for (auto& chain : sum) chain[k] = Floats{};
            }
        }
    }
    const int64_t first = block * LANES, rows = least(LANES, t.rows - first);
    for (int k = 0; k < M; ++k)
        for (int64_t l = 0; l < rows; ++l) y[k * y_stride + first + l] += total[k][l];
}

template <typename By>
void multiply(const SecondOrder& t, const typename By::Input* x, const float* sums, int64_t tokens, float* y,
              int64_t y_stride, int64_t begin, int64_t end) {
    const int64_t stride = cells_of(t) * CELL;
    for (int64_t block = begin; block < end; ++block)
        by_tokens<MOST_TOKENS>(tokens, [&](auto m, int64_t k) {
            multiply_block<By, m.value>(t, x + k * stride, sums + k * t.groups, y + k * y_stride, y_stride, block);
        });
}

void decode_cell(const SecondOrder& t, int64_t block, int64_t c, uint8_t (&out)[LANES][CELL]) {
    Codes code[CELL / 4];
    cell_codes<2>(t.bytes + (block * cells_of(t) + c) * cell_bytes(t), code);
    for (int64_t s = 0; s < CELL / 4; ++s)
        for (int64_t l = 0; l < LANES; ++l)
            __builtin_memcpy(out[l] + 4 * s, reinterpret_cast<const uint8_t*>(code + s) + 4 * l, 4);
}

int64_t decode_panel(const SecondOrder& t, int64_t block, int64_t column, Floats* panel) {
    const int64_t cells = cells_of(t), per_cell = cell_groups(t), begin = column / CELL;
    const int64_t end = least(cells, begin + PANEL / CELL);
    for (int64_t c = begin; c < end; ++c, panel += CELL) {
        const uint8_t* cell = t.bytes + (block * cells + c) * cell_bytes(t);
        Codes code[CELL / 4];
        cell_codes<2>(cell, code);
        for (int64_t i = 0; i < per_cell; ++i) {
            const int64_t at = grid_at(t, block, least(c * per_cell + i, t.groups - 1)); // padding meets inputs of 0
            const Ints grid = load_bytes(cell + CODE_BYTES + i * LANES), zero = grid & 3;
            const Floats scale = t.scales[at] * (to_float(grid >> 2) + static_cast<float>(t.zeros[at]));
            for (int64_t j = i * t.group_size; j < (i + 1) * t.group_size; ++j)
                panel[j] = to_float((reinterpret_cast<Ints>(code[j / 4]) >> 8 * (j % 4) & 255) - zero) * scale;
        }
    }
    return (end - begin) * CELL;
}

} // namespace

int64_t second_order_bytes(const SecondOrder& t) { return ceil_div(t.rows, LANES) * cells_of(t) * cell_bytes(t); }

int64_t second_order_columns(const SecondOrder& t) { return cells_of(t) * CELL; }

void second_order_interleave(const SecondOrder& t, const StoredSecondOrder& from, uint8_t* bytes, int64_t begin,
                             int64_t end) {
    const int64_t cells = cells_of(t), per_cell = cell_groups(t);
    for (int64_t block = begin; block < end; ++block)
        for (int64_t c = 0; c < cells; ++c) {
            uint8_t* cell = bytes + (block * cells + c) * cell_bytes(t);
            const int64_t count = least(CELL, t.columns - c * CELL);
            for (int64_t l = 0; l < LANES; ++l) {
                const int64_t row = block * LANES + l;
                uint8_t own[CELL] = {};
                if (row < t.rows)
                    __builtin_memcpy(own, from.codes + row * t.columns + c * CELL, static_cast<size_t>(count));
                put_cell<2>(own, cell + 4 * l);
                for (int64_t i = 0; i < per_cell; ++i) {
                    const int64_t g = c * per_cell + i, at = row * t.groups + g;
                    const int grid = row < t.rows && g < t.groups ? from.zeros[at] | from.scale_codes[at] << 2 : 0;
                    cell[CODE_BYTES + i * LANES + l] = static_cast<uint8_t>(grid);
                }
            }
        }
}

void second_order_restore(const SecondOrder& t, uint8_t* codes, uint8_t* zeros, uint8_t* scale_codes, int64_t begin,
                          int64_t end) {
    const int64_t cells = cells_of(t), per_cell = cell_groups(t);
    for (int64_t block = begin; block < end; ++block)
        for (int64_t c = 0; c < cells; ++c) {
            const uint8_t* cell = t.bytes + (block * cells + c) * cell_bytes(t);
            uint8_t own[LANES][CELL];
            decode_cell(t, block, c, own);
            for (int64_t l = 0; l < least(LANES, t.rows - block * LANES); ++l) {
                const int64_t row = block * LANES + l, count = least(CELL, t.columns - c * CELL);
                __builtin_memcpy(codes + row * t.columns + c * CELL, own[l], static_cast<size_t>(count));
                for (int64_t i = 0; i < per_cell && c * per_cell + i < t.groups; ++i) {
                    const uint8_t grid = cell[CODE_BYTES + i * LANES + l];
                    zeros[row * t.groups + c * per_cell + i] = grid & 3;
                    scale_codes[row * t.groups + c * per_cell + i] = grid >> 2;
                }
            }
        }
}

void second_order_prepare(const SecondOrder& t, const float* x, float* out, float* sums) {
    for (int64_t j = 0; j < second_order_columns(t); ++j) out[j] = j < t.columns ? x[j] : 0.0f;
    for (int64_t g = 0; g < t.groups; ++g) {
        sums[g] = 0;
        for (int64_t j = g * t.group_size; j < least(t.columns, (g + 1) * t.group_size); ++j) sums[g] += x[j];
    }
}

void second_order_matmul(const SecondOrder& t, const FloatInputs& in, float* y, int64_t y_stride, int64_t begin,
                         int64_t end) {
    multiply<ByFloats>(t, in.x, in.sums, in.tokens, y, y_stride, begin, end);
}

#ifdef __AVX512BF16__
void second_order_prepare_bf16(const SecondOrder& t, const uint16_t* x, uint16_t* out, float* sums) {
    order_pairs(x, t.columns, second_order_columns(t), out);
    for (int64_t g = 0; g < t.groups; ++g) {
        sums[g] = 0;
        for (int64_t j = g * t.group_size; j < least(t.columns, (g + 1) * t.group_size); ++j)
            sums[g] += bf16_to_float(x[j]);
    }
}

void second_order_bf16_matmul(const SecondOrder& t, const PairInputs& in, float* y, int64_t y_stride, int64_t begin,
                              int64_t end) {
    multiply<ByPairs>(t, in.x, in.sums, in.tokens, y, y_stride, begin, end);
}
#endif

void second_order_gemm(const SecondOrder& t, const float* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                       int64_t begin, int64_t end) {
    multiply_many(t, decode_panel, x, x_stride, second_order_columns(t), tokens, y, begin, end);
}

#ifdef __AVX512BF16__
void second_order_gemm_bf16(const SecondOrder& t, const uint16_t* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                            int64_t begin, int64_t end) {
    multiply_many(t, decode_panel, x, x_stride, second_order_columns(t), tokens, y, begin, end);
}
#endif

void second_order_dequantize(const SecondOrder& t, float* out, int64_t begin, int64_t end) {
    const int64_t cells = cells_of(t), per_cell = cell_groups(t);
    for (int64_t block = begin; block < end; ++block)
        for (int64_t c = 0; c < cells; ++c) {
            const uint8_t* grids = t.bytes + (block * cells + c) * cell_bytes(t) + CODE_BYTES;
            uint8_t own[LANES][CELL];
            decode_cell(t, block, c, own);
            for (int64_t l = 0; l < least(LANES, t.rows - block * LANES); ++l)
                for (int64_t j = 0; j < least(CELL, t.columns - c * CELL); ++j) {
                    const int64_t i = j / t.group_size, at = grid_at(t, block, c * per_cell + i);
                    const int grid = grids[i * LANES + l];
                    const float scale = t.scales[at] * static_cast<float>((grid >> 2) + t.zeros[at]);
                    out[(block * LANES + l) * t.columns + c * CELL + j] =
                        static_cast<float>(own[l][j] - (grid & 3)) * scale;
                }
        }
}

} // namespace anybit::ANYBIT_ISA
