// The inner loop of GPTQ (Frantar et al. 2022, algorithm 1) for one block of columns on a known grid.
//
// Sixteen rows stand side by side in the lanes of a vector (the block is transposed into scratch), so the
// serial chain divide, round, propagate of a column is paid once for sixteen rows. Plain IEEE operations in
// one order and no contraction (the build passes -ffp-contract=off): every instruction set gives the same bits.
#include "quantize/ops.h"
#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int N = GPTQ_ROWS;

// To nearest, ties to even, for |x| < 2^22; beyond, some number that is as large, which the clamp catches.
inline float round_even(float x) {
    constexpr float shift = 0x1.8p23f;
    return (x + shift) - shift;
}

inline float at(const Matrix& m, int64_t row, int64_t column) {
    return m.data[row * m.row_stride + column * m.column_stride];
}

struct Column { // the grid of one column, lane by lane
    float scale[N], zero[N], maxq[N], q[N], error[N];
};

void read_grid(const GptqBlock& b, int64_t row, int lanes, int64_t j, Column& c) {
    for (int l = 0; l < N; ++l) {
        const int64_t r = row + (l < lanes ? l : 0); // idle lanes repeat the first row
        c.scale[l] = at(b.scales, r, j);
        c.zero[l] = at(b.zeros, r, j);
        c.maxq[l] = b.maxq[r];
    }
}

// Quantize the lanes of one column: codes in c.q, (w - dequantized) / pivot in c.error. NaN becomes code 0.
void quantize_column(const float* w, float pivot, Column& c) {
    for (int l = 0; l < N; ++l) {
        const bool grid = c.scale[l] != 0.0f; // an all-zero group has none: its weights get the zero point
        const float ratio = w[l] / (grid ? c.scale[l] : 1.0f);
        float q = round_even(grid ? ratio : 0.0f) + c.zero[l];
        q = q > 0.0f ? q : 0.0f;
        q = q < c.maxq[l] ? q : c.maxq[l];
        c.q[l] = q;
        c.error[l] = (w[l] - c.scale[l] * (q - c.zero[l])) / pivot;
    }
}

void write_column(const GptqBlock& b, int64_t row, int lanes, int64_t j, const Column& c) {
    for (int l = 0; l < lanes; ++l) {
        b.codes[(row + l) * b.columns + j] = static_cast<uint8_t>(c.q[l]);
        b.error[(row + l) * b.columns + j] = c.error[l];
    }
}

// w[:, j] -= error * hinv[j] for the columns begin <= j < end.
void propagate(float* w, const float* error, const float* hinv, int64_t begin, int64_t end) {
    Floats e[N / LANES];
    for (int v = 0; v < N / LANES; ++v) e[v] = load(error + v * LANES);
    for (int64_t j = begin; j < end; ++j) {
        const Floats h = broadcast(hinv[j]);
        for (int v = 0; v < N / LANES; ++v) {
            float* p = w + j * N + v * LANES;
            store(p, load(p) - e[v] * h);
        }
    }
}

void gptq(const GptqBlock& b, float* w, int64_t begin, int64_t end) {
    Column c;
    for (int64_t row = begin; row < end; row += N) {
        const int lanes = static_cast<int>(least(N, end - row));
        for (int l = 0; l < N; ++l)
            for (int64_t j = 0; j < b.columns; ++j)
                w[j * N + l] = b.weight[(row + (l < lanes ? l : 0)) * b.weight_stride + j];
        for (int64_t j = 0; j < b.columns; ++j) {
            const float* hinv = b.hinv + j * b.hinv_stride;
            read_grid(b, row, lanes, j, c);
            quantize_column(w + j * N, hinv[j], c);
            write_column(b, row, lanes, j, c);
            propagate(w, c.error, hinv, j + 1, b.columns);
        }
        for (int l = 0; l < lanes; ++l)
            for (int64_t j = 0; j < b.columns; ++j) b.weight[(row + l) * b.weight_stride + j] = w[j * N + l];
    }
}

} // namespace

void add_gptq(QuantizeOps& ops) { ops.gptq = gptq; }

} // namespace anybit::ANYBIT_ISA
