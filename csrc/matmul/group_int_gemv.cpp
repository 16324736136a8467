// Format "group int" times few tokens: gemv of float32, bfloat16 and 8-bit inputs, one loop for all of them.
#include "matmul/gemv.h"
#include "matmul/group_int.h"
#include "matmul/ops.h"

namespace anybit::ANYBIT_ISA {
namespace {

// y[k, out row] += sum_g scale (sum_j code x - zero sum_j x), R blocks of LANES rows and M tokens from `first` on.
template <typename By, int BITS, int R, int M>
void gemv_blocks(const GroupInt& t, const Inputs<typename By::Input>& in, int64_t first, float* y, int64_t y_stride,
                 int64_t block) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    const int64_t cells = cells_of(t), stride = in.stride, apart = t.groups * cells * SIZE;
    const uint8_t* cell = t.codes + block * apart;
    const auto* x = in.x + first * stride;
    Floats total[R][M] = {};
    for (int64_t g = 0; g < t.groups; ++g) {
        typename By::template Sums<BITS, R, M> sums;
        for (int64_t c = 0; c < cells; ++c, cell += SIZE, x += COLUMNS) {
            Codes code[R][COLUMNS / 4];
            for (int r = 0; r < R; ++r) cell_codes<BITS>(cell + r * apart, code[r]);
            for (int s = 0; s < COLUMNS / 4; ++s) {
                Codes four[R];
                for (int r = 0; r < R; ++r) four[r] = code[r][s];
                sums.add(four, s, x + 4 * s, stride);
            }
        }
        for (int r = 0; r < R; ++r) {
            const Floats scale = load_scales(t, block + r, g);
            const Ints zero = load_zeros(t, block + r, g);
            for (int k = 0; k < M; ++k) total[r][k] += sums.of_group(r, k, scale, zero, in, (first + k) * t.groups + g);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) add_lanes(t, block + r, total[r][k], y + (first + k) * y_stride);
}

template <typename By>
void gemv(const GroupInt& t, const Inputs<typename By::Input>& in, float* y, int64_t y_stride, int64_t begin,
          int64_t end) {
    by_width(t.bits, [&](auto bits) {
        by_blocks<By::TOKENS, By::pairs(bits.value)>(
            in.tokens, begin, end, [&](auto r, auto m, int64_t block, int64_t k) {
                gemv_blocks<By, bits.value, r.value, m.value>(t, in, k, y, y_stride, block);
            });
    });
}

// ---- inputs in the order of cells: each group padded to whole ones ------------------------------------------------

void prepare_f32(const GroupInt& t, const float* x, float* out, float* sums) {
    const int64_t width = cells_of(t) * cell_columns(t.bits);
    for (int64_t g = 0; g < t.groups; ++g, out += width) {
        const int64_t begin = g * t.group_size, count = least(t.columns - begin, t.group_size);
        for (int64_t j = 0; j < width; ++j) out[j] = j < count ? x[begin + j] : 0.0f;
        Floats sum{};
        for (int64_t j = 0; j < width; j += LANES) sum += load(out + j);
        sums[g] = reduce(sum);
    }
}

#ifdef __AVX512BF16__
void prepare_bf16(const GroupInt& t, const uint16_t* x, uint16_t* out, float* sums) {
    const int64_t width = cells_of(t) * cell_columns(t.bits);
    for (int64_t g = 0; g < t.groups; ++g, out += width) {
        const int64_t begin = g * t.group_size, count = least(t.columns - begin, t.group_size);
        sums[g] = order_pairs(x + begin, count, width, out);
    }
}
#endif

void prepare_int8(const GroupInt& t, const int8_t* x, const float*, const InputOps<GroupInt, int8_t>::Prepared& to) {
    const int64_t width = cells_of(t) * cell_columns(t.bits);
    int8_t* out = to.x;
    for (int64_t g = 0; g < t.groups; ++g, out += width) {
        const int64_t begin = g * t.group_size, count = least(t.columns - begin, t.group_size);
        __builtin_memcpy(out, x + begin, static_cast<size_t>(count));
        __builtin_memset(out + count, 0, static_cast<size_t>(width - count));
        int32_t sum = 0;
        for (int64_t j = 0; j < width; ++j) sum += out[j];
        to.sums[g] = sum;
    }
}

} // namespace

void add_group_int_gemv(MatmulOps& ops) {
    ops.gemv_tokens_int8 = ByBytes::TOKENS;
    ops.group_int.f32.prepare = prepare_f32;
    ops.group_int.f32.gemv = gemv<ByFloats>;
#ifdef __AVX512BF16__
    ops.group_int.bf16.prepare = prepare_bf16;
    ops.group_int.bf16.gemv = gemv<ByPairs>;
#endif
    ops.group_int.int8.prepare = prepare_int8;
    ops.group_int.int8.gemv = gemv<ByBytes>;
}

} // namespace anybit::ANYBIT_ISA
