// Weights of 16 bits: whole rows (format "float16", and bfloat16 to compare with), and single ones beside tiles (CSR).
#include "matmul/gemm.h"

namespace anybit::ANYBIT_ISA {
namespace {

struct Fp16 {
    static Floats load(const uint16_t* from) { return load_halves(from); }
};

struct Bf16 {
    static Floats load(const uint16_t* from) {
#if defined(__AVX512F__)
        return reinterpret_cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(from)), 16));
#elif defined(__AVX2__)
        return reinterpret_cast<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(from)), 16));
#else
        Ints bits;
        for (int l = 0; l < LANES; ++l) bits[l] = static_cast<int32_t>(static_cast<uint32_t>(from[l]) << 16);
        return reinterpret_cast<Floats>(bits);
#endif
    }
};

#if defined(__AVX512F__)
constexpr int TOGETHER_ROWS = 4; // which meet the same inputs while those are in registers
#else
constexpr int TOGETHER_ROWS = 2;
#endif

// R rows, `columns` apart.
template <typename Half, int R>
inline void dot_rows(const uint16_t* w, const float* x, int64_t columns, float (&dots)[R]) {
    Floats sum[R][4] = {};
    int64_t j = 0;
    for (; j + 4 * LANES <= columns; j += 4 * LANES)
        for (int r = 0; r < R; ++r) {
            const uint16_t* from = w + r * columns + j;
            prefetch(reinterpret_cast<const uint8_t*>(from));
            prefetch(reinterpret_cast<const uint8_t*>(from + 2 * LANES));
            for (int i = 0; i < 4; ++i) sum[r][i] += Half::load(from + i * LANES) * load(x + j + i * LANES);
        }
    for (; j < columns; j += LANES) {
        const auto left = static_cast<size_t>(least(LANES, columns - j));
        Floats floats{};
        __builtin_memcpy(&floats, x + j, left * 4);
        for (int r = 0; r < R; ++r)
            sum[r][0] += Half::load(PartialHalves(w + r * columns + j, static_cast<int64_t>(left)).halves) * floats;
    }
    for (int r = 0; r < R; ++r) dots[r] = reduce((sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]));
}

template <typename Half, int R>
void multiply_rows(const HalfRows& t, const float* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
                   int64_t row) {
    for (int64_t k = 0; k < tokens; ++k) {
        float dots[R];
        dot_rows<Half>(t.values + row * t.columns, x + k * x_stride, t.columns, dots);
        for (int r = 0; r < R; ++r)
            y[k * y_stride + (t.out_rows == nullptr ? row + r : t.out_rows[row + r])] += dots[r];
    }
}

template <typename Half>
void multiply(const HalfRows& t, const float* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
              int64_t begin, int64_t end) {
    int64_t row = begin;
    for (; row + TOGETHER_ROWS <= end; row += TOGETHER_ROWS)
        multiply_rows<Half, TOGETHER_ROWS>(t, x, x_stride, tokens, y, y_stride, row);
    for (; row < end; ++row) multiply_rows<Half, 1>(t, x, x_stride, tokens, y, y_stride, row);
}

// The columns from `column` on of a block of rows, a lane for each row.
template <typename Half> int64_t decode_panel(const HalfRows& t, int64_t block, int64_t column, Floats* panel) {
    const int64_t n = least(PANEL, t.columns - column), first = block * LANES;
    decode_halves<Half::load>(t.values + first * t.columns + column, t.columns, least(LANES, t.rows - first), n, panel);
    return n;
}

// The same with an even number of columns, the last one of zeros where the tile's is odd.
template <typename Half> int64_t decode_even(const HalfRows& t, int64_t block, int64_t column, Floats* panel) {
    const int64_t n = decode_panel<Half>(t, block, column, panel);
    if (n % 2 != 0) panel[n] = Floats{};
    return n + n % 2;
}

template <typename I>
void multiply_sparse(const SparseRows& t, const I* columns, const float* x, int64_t x_stride, int64_t tokens, float* y,
                     int64_t y_stride, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        for (int64_t k = 0; k < tokens; ++k) {
            const float* from = x + k * x_stride;
            float sum = 0;
            for (int64_t i = t.row_ptr[row]; i < t.row_ptr[row + 1]; i += LANES) {
                const int64_t count = least(LANES, t.row_ptr[row + 1] - i);
                const Floats value =
                    count == LANES ? load_halves(t.values + i) : load_halves(PartialHalves(t.values + i, count).halves);
                for (int64_t l = 0; l < count; ++l) sum += value[l] * from[columns[i + l]];
            }
            y[k * y_stride + row] += sum;
        }
}

// x [blocks of LANES tokens, columns, LANES]: tokens are lanes. Those of a block meet all rows before the next, since
// one block's inputs fit the second cache.
template <typename I>
void multiply_sparse_many(const SparseRows& t, const I* columns, const float* x, int64_t width, int64_t tokens,
                          float* y, int64_t y_stride, int64_t begin, int64_t end) {
    for (int64_t k = 0; k < tokens; k += LANES, x += width * LANES)
        for (int64_t row = begin; row < end; row += LANES) {
            const int64_t rows = least(LANES, end - row), count = least(LANES, tokens - k);
            Floats sums[LANES] = {};
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t i = t.row_ptr[row + r]; i < t.row_ptr[row + r + 1]; ++i)
                    sums[r] += half_to_float(t.values[i]) * load(x + static_cast<int64_t>(columns[i]) * LANES);
            transpose(sums);
            for (int64_t l = 0; l < count; ++l) {
                float* to = y + (k + l) * y_stride + row;
                if (rows == LANES) store(to, load(to) + sums[l]);
                else
                    for (int64_t r = 0; r < rows; ++r) to[r] += sums[l][r];
            }
        }
}

} // namespace

void half_matmul(const HalfRows& t, const float* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
                 int64_t begin, int64_t end) {
    if (t.bf16) multiply<Bf16>(t, x, x_stride, tokens, y, y_stride, begin, end);
    else multiply<Fp16>(t, x, x_stride, tokens, y, y_stride, begin, end);
}

void half_gemm(const HalfRows& t, const float* x, int64_t x_stride, int64_t tokens, const Outputs& y, int64_t begin,
               int64_t end) {
    multiply_many(t, t.bf16 ? decode_panel<Bf16> : decode_panel<Fp16>, x, x_stride, t.columns, tokens, y, begin, end);
}

#ifdef __AVX512BF16__
void half_gemm_bf16(const HalfRows& t, const uint16_t* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                    int64_t begin, int64_t end) {
    multiply_many(t, t.bf16 ? decode_even<Bf16> : decode_even<Fp16>, x, x_stride, t.columns + t.columns % 2, tokens, y,
                  begin, end);
}
#endif

void narrow(const float* x, int64_t n, uint16_t* bf16) {
    for (int64_t i = 0; i < n; ++i) bf16[i] = to_bf16(x[i]);
}

void sparse_matmul(const SparseRows& t, const float* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
                   int64_t begin, int64_t end) {
    if (t.columns16 != nullptr) multiply_sparse(t, t.columns16, x, x_stride, tokens, y, y_stride, begin, end);
    else multiply_sparse(t, t.columns32, x, x_stride, tokens, y, y_stride, begin, end);
}

void sparse_gemm(const SparseRows& t, const float* x, int64_t width, int64_t tokens, float* y, int64_t y_stride,
                 int64_t begin, int64_t end) {
    if (t.columns16 != nullptr) multiply_sparse_many(t, t.columns16, x, width, tokens, y, y_stride, begin, end);
    else multiply_sparse_many(t, t.columns32, x, width, tokens, y, y_stride, begin, end);
}

} // namespace anybit::ANYBIT_ISA
