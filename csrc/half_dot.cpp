// Weights kept as float16: whole rows (format "float16"), and single ones beside the tiles (CSR).
#include "products.h"
#include "simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

// LANES halves of which only `count` are there.
inline Floats load_halves(const uint16_t* from, int64_t count) {
    uint16_t own[LANES] = {};
    __builtin_memcpy(own, from, static_cast<size_t>(count) * 2);
    return load_halves(own);
}

inline float dot_row(const uint16_t* w, const float* x, int64_t columns) {
    Floats sum[2] = {};
    int64_t j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        for (int i = 0; i < 2; ++i) sum[i] += load_halves(w + j + i * LANES) * load(x + j + i * LANES);
    for (; j < columns; j += LANES) {
        const int64_t left = least(LANES, columns - j);
        Floats own{};
        __builtin_memcpy(&own, x + j, static_cast<size_t>(left) * 4);
        sum[0] += load_halves(w + j, left) * own;
    }
    return reduce(sum[0] + sum[1]);
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
                const Floats value = count == LANES ? load_halves(t.values + i) : load_halves(t.values + i, count);
                for (int64_t l = 0; l < count; ++l) sum += value[l] * from[columns[i + l]];
            }
            y[k * y_stride + row] += sum;
        }
}

} // namespace

void half_matmul(const HalfRows& t, const float* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
                 int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        for (int64_t k = 0; k < tokens; ++k)
            y[k * y_stride + (t.out_rows == nullptr ? row : t.out_rows[row])] +=
                dot_row(t.values + row * t.columns, x + k * x_stride, t.columns);
}

void sparse_matmul(const SparseRows& t, const float* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
                   int64_t begin, int64_t end) {
    if (t.columns16 != nullptr) multiply_sparse(t, t.columns16, x, x_stride, tokens, y, y_stride, begin, end);
    else multiply_sparse(t, t.columns32, x, x_stride, tokens, y, y_stride, begin, end);
}

} // namespace anybit::ANYBIT_ISA
