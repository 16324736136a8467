// What the kernels that quantize have in every instruction set. Raw pointers only: whoever calls them has checked
// dtypes, shapes and bounds (module/bindings.cpp). Functions work on a range of rows and never on shared state, so the
// caller may split the rows over threads without changing a bit of the result.
#pragma once

#include "common/dispatch.h"

#include <cstdint>

namespace anybit {

// A float matrix anywhere in memory; strides in floats.
struct Matrix {
    const float* data;
    int64_t row_stride, column_stride;
};

// One block of columns of GPTQ. Matrices without strides are dense and row-major.
struct GptqBlock {
    float* weight;        // [rows, columns] of stride weight_stride; in: weights, out: the values quantized
    const float* hinv;    // [columns, columns] of stride hinv_stride, upper triangular
    Matrix scales, zeros; // [rows, columns]
    const float* maxq;    // [rows]
    uint8_t* codes;       // [rows, columns], out
    float* error;         // [rows, columns], out
    int64_t rows, columns, weight_stride, hinv_stride;
};

// Nested weighted k-means of each row: 2^seed_bits clusters, each cut in two until there are 2^bits.
struct Clustering {
    const float* weight;     // [rows, columns] of stride weight_stride, finite
    const float* importance; // the same of stride importance_stride (0: one row for all), >= 0; null: all alike
    uint8_t* codes;          // [rows, columns], out: at `bits`; those of a smaller width are their leading bits
    float* centroids;        // [rows, sum of 2^b for b in seed_bits..bits], out: ascending at every width
    int64_t rows, columns, weight_stride, importance_stride;
    int seed_bits, bits; // 1..8
};

// One block of columns of nested codes: one code per weight, good at all widths from 1 to `bits`, each of which has
// its own targets. Matrices without strides are dense and row-major.
struct NestedBlock {
    const float* targets;  // [widths, rows, columns] of strides width_stride and row_stride
    const float* inverse;  // [columns, columns] of stride inverse_stride, upper triangular
    const float* tables;   // [shapes, 2 + 4 + ... + 2^bits], ascending at every width
    const uint8_t* shapes; // [rows]
    const float* scales;   // [rows], not below 0
    const float* weights;  // [rows, widths], not below 0, one of every row above
    uint8_t* codes;        // [rows, columns], out: of `bits`; those of a smaller width are their leading bits
    float* errors;         // [widths, rows, columns], out
    int64_t rows, columns, width_stride, row_stride, inverse_stride;
    int bits; // widths, 1..8
};
constexpr int64_t NESTED_COLUMNS = 128; // of a block, at most

// A block of columns of nested codes to go over again. The loss of a row at a width is `E H E^T`, E its errors.
struct NestedDescent {
    const float* slopes;   // [widths, rows, columns]: E H of all columns, of the codes as they come
    const float* hessian;  // [columns, columns] of stride hessian_stride, symmetric, its diagonal above 0
    const float* weight;   // [rows, columns] of stride weight_stride
    const float* tables;   // [shapes, 2 + 4 + ... + 2^bits], ascending at every width
    const uint8_t* shapes; // [rows]
    const float* scales;   // [rows], not below 0
    const float* weights;  // [rows, widths], not below 0, one of every row above
    uint8_t* codes;        // [rows, columns], changed
    float* errors;         // [widths, rows, columns] of strides width_stride and row_stride, changed as the codes are
    float* losses;         // [rows, widths], to which it adds what changes; never something above 0, rounding apart,
                           // of a row's sum over the widths by weights
    int64_t rows, columns, width_stride, row_stride, hessian_stride, weight_stride;
    int bits; // widths, 1..8
};

// The shape and scale of every row: scale times the shape's entries come close to the row's weights.
struct NestedFit {
    const float* weight;     // [rows, columns] of stride weight_stride
    const float* importance; // [columns], not below 0
    const float* tables;     // [shapes, entries]
    uint8_t* chosen;         // [rows], out
    float* scales;           // [rows], out
    int64_t rows, columns, weight_stride;
    int shapes, entries;
};

constexpr int64_t GPTQ_ROWS = 16; // rows that `gptq` works on together: split rows at its multiples

// All that one instruction set has; made by `make_quantize_ops` (ops.cpp), found by `quantize_ops` (common/dispatch.h).
// Identical results in every instruction set.
struct QuantizeOps {
    Isa isa;
    // scratch: GPTQ_ROWS * columns floats.
    void (*gptq)(const GptqBlock&, float* scratch, int64_t begin, int64_t end);
    // scratch: kmeans_scratch(columns, seed_bits) bytes, aligned to 64.
    int64_t (*kmeans_scratch)(int64_t columns, int seed_bits);
    void (*kmeans)(const Clustering&, char* scratch, int64_t begin, int64_t end);
    void (*nested_codes)(const NestedBlock&, int64_t begin, int64_t end);
    void (*nested_descent)(const NestedDescent&, int64_t begin, int64_t end);
    // scratch: 2 * (columns + 16) floats.
    void (*nested_fit)(const NestedFit&, float* scratch, int64_t begin, int64_t end);
};

} // namespace anybit
