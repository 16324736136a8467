// Sparse weights of 16 bits beside tiles, compressed by rows.
#include "matmul/ops.h"
#include "matmul/transpose.h"

namespace anybit::ANYBIT_ISA {
namespace {

template <typename I>
void gemv_sparse(const SparseRows& t, const I* columns, const Inputs<float>& in, float* y, int64_t y_stride,
                 int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        for (int64_t k = 0; k < in.tokens; ++k) {
            const float* from = in.x + k * in.stride;
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
void gemm_sparse(const SparseRows& t, const I* columns, const Inputs<float>& in, const Outputs& y, int64_t begin,
                 int64_t end) {
    const float* x = in.x;
    for (int64_t k = 0; k < in.tokens; k += LANES, x += in.stride * LANES)
        for (int64_t row = begin; row < end; row += LANES) {
            const int64_t rows = least(LANES, end - row), count = least(LANES, in.tokens - k);
            Floats sums[LANES] = {};
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t i = t.row_ptr[row + r]; i < t.row_ptr[row + r + 1]; ++i)
                    sums[r] += half_to_float(t.values[i]) * load(x + static_cast<int64_t>(columns[i]) * LANES);
            transpose(sums);
            for (int64_t l = 0; l < count; ++l) {
                float* to = y.sums + (k + l) * y.stride + row;
                if (rows == LANES) store(to, load(to) + sums[l]);
                else
                    for (int64_t r = 0; r < rows; ++r) to[r] += sums[l][r];
            }
        }
}

void gemv(const SparseRows& t, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    if (t.columns16 != nullptr) gemv_sparse(t, t.columns16, in, y, y_stride, begin, end);
    else gemv_sparse(t, t.columns32, in, y, y_stride, begin, end);
}

void gemm(const SparseRows& t, const Inputs<float>& in, const Outputs& y, int64_t begin, int64_t end) {
    if (t.columns16 != nullptr) gemm_sparse(t, t.columns16, in, y, begin, end);
    else gemm_sparse(t, t.columns32, in, y, begin, end);
}

} // namespace

void add_sparse(MatmulOps& ops) { ops.sparse.f32 = {nullptr, gemv, gemm}; }

} // namespace anybit::ANYBIT_ISA
