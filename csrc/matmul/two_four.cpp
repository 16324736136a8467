// The 2-bit channels of format "two_four": groups of 16 or 8 channels whose scales are themselves rounded, over 16 rows
// at a time. Laid out as 2-bit codes of format "group int" (group_int.h), a cell of 16 channels at a time; beside
// each group lies a byte for every row, its zero point in the low 2 bits and its scale's code above.
#include "matmul/gemm.h"
#include "matmul/gemv.h"
#include "matmul/group_int.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t CELL = 16;                            // channels
constexpr int64_t CODE_BYTES = cell_vectors(2) * BYTES; // of a cell
int64_t cells_of(const TwoFour& t) { return ceil_div(t.columns, CELL); }
int64_t cell_groups(const TwoFour& t) { return CELL / t.group_size; }
int64_t cell_bytes(const TwoFour& t) { return CODE_BYTES + cell_groups(t) * LANES; }

// Where part of the rows' grid for a group is.
int64_t grid_at(const TwoFour& t, int64_t block, int64_t g) {
    return block * LANES / TwoFour::SCALE_ROWS * t.groups + g;
}

// GROUP columns share a scale.
template <typename By, int GROUP, int M>
void gemv_block(const TwoFour& t, const Inputs<typename By::Input>& in, int64_t first, float* y, int64_t y_stride,
                int64_t block) {
    constexpr int STEPS = GROUP / 4, GROUPS = CELL / GROUP;
    const int64_t cells = cells_of(t), size = cell_bytes(t);
    const uint8_t* cell = t.bytes + block * cells * size;
    const auto* x = in.x + first * in.stride;
    Floats total[M] = {};
    for (int64_t c = 0; c < cells; ++c, cell += size) {
        Codes code[CELL / 4];
        cell_codes<2>(cell, code);
        for (int i = 0; i < GROUPS; ++i, x += GROUP) {
            const int64_t g = c * GROUPS + i;
            if (g >= t.groups) break;
            typename By::template Sums<2, 1, M> sums;
            for (int s = 0; s < STEPS; ++s) {
                const Codes four[1] = {code[i * STEPS + s]};
                sums.add(four, 0, x + 4 * s, in.stride);
            }
            const Ints grid = load_bytes(cell + CODE_BYTES + i * LANES);
            const int64_t at = grid_at(t, block, g);
            const Floats scale = t.scales[at] * (to_float(grid >> 2) + static_cast<float>(t.zeros[at]));
            for (int k = 0; k < M; ++k)
                total[k] += sums.of_group(0, k, scale, grid & 3, in, (first + k) * t.groups + g);
        }
    }
    const int64_t row = block * LANES, rows = least(LANES, t.rows - row);
    for (int k = 0; k < M; ++k)
        for (int64_t l = 0; l < rows; ++l) y[(first + k) * y_stride + row + l] += total[k][l];
}

template <typename By>
void gemv(const TwoFour& t, const Inputs<typename By::Input>& in, float* y, int64_t y_stride, int64_t begin,
          int64_t end) {
    by_blocks<By::TOKENS, false>(in.tokens, begin, end, [&](auto, auto m, int64_t block, int64_t first) {
        if (t.group_size == 16) gemv_block<By, 16, m.value>(t, in, first, y, y_stride, block);
        else gemv_block<By, 8, m.value>(t, in, first, y, y_stride, block);
    });
}

void decode_cell(const TwoFour& t, int64_t block, int64_t c, uint8_t (&out)[LANES][CELL]) {
    Codes code[CELL / 4];
    cell_codes<2>(t.bytes + (block * cells_of(t) + c) * cell_bytes(t), code);
    for (int64_t s = 0; s < CELL / 4; ++s)
        for (int64_t l = 0; l < LANES; ++l)
            __builtin_memcpy(out[l] + 4 * s, reinterpret_cast<const uint8_t*>(code + s) + 4 * l, 4);
}

int64_t decode_panel(const TwoFour& t, int64_t block, int64_t column, Floats* panel) {
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

int64_t bytes(const TwoFour& t) { return ceil_div(t.rows, LANES) * cells_of(t) * cell_bytes(t); }

int64_t columns(const TwoFour& t) { return cells_of(t) * CELL; }

void interleave(const TwoFour& t, const TwoFour::Stored& from, const TwoFour::Packed& to, uint8_t*, int64_t begin,
                int64_t end) {
    const int64_t cells = cells_of(t), per_cell = cell_groups(t);
    for (int64_t block = begin; block < end; ++block)
        for (int64_t c = 0; c < cells; ++c) {
            uint8_t* cell = to.bytes + (block * cells + c) * cell_bytes(t);
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

void restore(const TwoFour& t, const TwoFour::Restored& to, uint8_t*, int64_t begin, int64_t end) {
    const int64_t cells = cells_of(t), per_cell = cell_groups(t);
    for (int64_t block = begin; block < end; ++block)
        for (int64_t c = 0; c < cells; ++c) {
            const uint8_t* cell = t.bytes + (block * cells + c) * cell_bytes(t);
            uint8_t own[LANES][CELL];
            decode_cell(t, block, c, own);
            for (int64_t l = 0; l < least(LANES, t.rows - block * LANES); ++l) {
                const int64_t row = block * LANES + l, count = least(CELL, t.columns - c * CELL);
                __builtin_memcpy(to.codes + row * t.columns + c * CELL, own[l], static_cast<size_t>(count));
                for (int64_t i = 0; i < per_cell && c * per_cell + i < t.groups; ++i) {
                    const uint8_t grid = cell[CODE_BYTES + i * LANES + l];
                    to.zeros[row * t.groups + c * per_cell + i] = grid & 3;
                    to.scale_codes[row * t.groups + c * per_cell + i] = grid >> 2;
                }
            }
        }
}

void prepare_f32(const TwoFour& t, const float* x, float* out, float* sums) {
    for (int64_t j = 0; j < columns(t); ++j) out[j] = j < t.columns ? x[j] : 0.0f;
    for (int64_t g = 0; g < t.groups; ++g) {
        sums[g] = 0;
        for (int64_t j = g * t.group_size; j < least(t.columns, (g + 1) * t.group_size); ++j) sums[g] += x[j];
    }
}

#ifdef __AVX512BF16__
void prepare_bf16(const TwoFour& t, const uint16_t* x, uint16_t* out, float* sums) {
    order_pairs(x, t.columns, columns(t), out);
    for (int64_t g = 0; g < t.groups; ++g) {
        sums[g] = 0;
        for (int64_t j = g * t.group_size; j < least(t.columns, (g + 1) * t.group_size); ++j)
            sums[g] += bf16_to_float(x[j]);
    }
}
#endif

template <typename X>
void gemm(const TwoFour& t, const Inputs<X>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(t, decode_panel, columns(t), in, y, begin, end);
}

void dequantize(const TwoFour& t, float* out, int64_t begin, int64_t end) {
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

} // namespace

void add_two_four(MatmulOps& ops) {
    PackedOps<TwoFour>& own = ops.two_four;
    own.columns = columns;
    own.f32 = {prepare_f32, gemv<ByFloats>, gemm<float>};
#ifdef __AVX512BF16__
    own.bf16 = {prepare_bf16, gemv<ByPairs>, gemm<uint16_t>};
#endif
    own.dequantize = dequantize;
    own.bytes = bytes;
    own.interleave = interleave;
    own.restore = restore;
}

} // namespace anybit::ANYBIT_ISA
