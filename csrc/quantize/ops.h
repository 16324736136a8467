// What the kernels of every instruction set look like; those that multiply with most stored tiles are in matmul/ops.h.
// Raw pointers only: whoever calls them has checked dtypes, shapes and bounds (bindings.cpp). Functions work on a range
// of rows and never on shared state, so the caller may split the rows over threads without changing a bit of the
// result.
#pragma once

#include <cstdint>

namespace anybit {

// One tile in format "codebook": w[i, j] = table[i, code[i, j]], codes as bitplanes, most significant first, weight
// j of a row at bit j % 32 of word j / 32. A row is an output row, or (by channel) an input channel.
struct Codebook {
    const uint32_t* planes[8];             // `bits` of them, [rows, words] each
    const uint16_t* table16;               // fp16 bit patterns [rows, entries], or null for
    const float* table32;                  // [rows, entries]
    const uint8_t* kinds;                  // [rows] which table a row has, which then is times
    const float* row_scales;               // [rows]; both null: row i has table i as it is
    const int32_t* out_rows;               // [rows] output rows, all different; null: row i is output row i
    int bits;                              // 1..8
    int64_t rows, columns, words, entries; // entries <= 2^bits; a code beyond stands for 0
};

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

// One block of columns of nested codes: one code per weight, good at all widths from `low` to `high`, each of which has
// its own targets. Matrices without strides are dense and row-major.
struct NestedBlock {
    const float* targets;  // [widths, rows, columns] of strides width_stride and row_stride
    const float* inverse;  // [columns, columns] of stride inverse_stride, upper triangular
    const float* tables;   // [shapes, sum of 2^b for b in low..high], ascending at every width
    const uint8_t* shapes; // [rows]
    const float* scales;   // [rows], not below 0
    const float* weights;  // [rows, widths], not below 0, one of every row above
    uint8_t* codes;        // [rows, columns], out: at `high`; those of a smaller width are their leading bits
    float* errors;         // [widths, rows, columns], out
    int64_t rows, columns, width_stride, row_stride, inverse_stride;
    int low, high; // 1..8
};
constexpr int64_t NESTED_COLUMNS = 128; // of a block, at most

// A block of columns of nested codes to go over again. The loss of a row at a width is `E H E^T`, E its errors.
struct NestedDescent {
    const float* slopes;   // [widths, rows, columns]: E H of all columns, of the codes as they come
    const float* hessian;  // [columns, columns] of stride hessian_stride, symmetric, its diagonal above 0
    const float* weight;   // [rows, columns] of stride weight_stride
    const float* tables;   // [shapes, sum of 2^b for b in low..high], ascending at every width
    const uint8_t* shapes; // [rows]
    const float* scales;   // [rows], not below 0
    const float* weights;  // [rows, widths], not below 0, one of every row above
    uint8_t* codes;        // [rows, columns] of stride code_stride, changed
    float* errors;         // [widths, rows, columns] of strides width_stride and row_stride, changed as the codes are
    float* losses;         // [rows, widths], to which it adds what changes; never something above 0, rounding apart,
                           // of a row's sum over the widths by weights
    int64_t rows, columns, width_stride, row_stride, hessian_stride, weight_stride, code_stride;
    int low, high; // 1..8
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

struct Kernels {
    const char* isa;
    // scratch: GPTQ_ROWS * columns floats. Identical results in every instruction set.
    void (*gptq)(const GptqBlock&, float* scratch, int64_t begin, int64_t end);
    // y[t, out_rows[i]] += sum_j w[i, j] x[t, j] for the rows begin <= i < end; x [tokens, 32 * words], its padding
    // zeros. Scratch of this and the next: 32 * words floats.
    void (*codebook_rows)(const Codebook&, const float* x, int64_t tokens, float* y, int64_t y_stride, float* scratch,
                          int64_t begin, int64_t end);
    // y[t, j] += sum_i w[i, j] x[t, i], x [tokens, rows], for the columns j in the words begin <= j / 32 < end.
    void (*codebook_channels)(const Codebook&, const float* x, int64_t tokens, float* y, int64_t y_stride,
                              float* scratch, int64_t begin, int64_t end);
    // The same of many tokens for the blocks of `lanes` columns begin <= b < end.
    void (*codebook_channels_many)(const Codebook&, const float* x, int64_t x_stride, int64_t tokens, float* y,
                                   int64_t y_stride, int64_t begin, int64_t end);
    void (*codebook_decode)(const Codebook&, float* out, float* scratch, int64_t begin, int64_t end);
    // scratch: kmeans_scratch(columns, seed_bits) bytes, aligned to 64. Identical results in every instruction set.
    int64_t (*kmeans_scratch)(int64_t columns, int seed_bits);
    void (*kmeans)(const Clustering&, char* scratch, int64_t begin, int64_t end);
    // Identical results in every instruction set. Scratch of `nested_fit`: 2 * (columns + 16) floats.
    void (*nested_codes)(const NestedBlock&, int64_t begin, int64_t end);
    void (*nested_descent)(const NestedDescent&, int64_t begin, int64_t end);
    void (*nested_fit)(const NestedFit&, float* scratch, int64_t begin, int64_t end);
};

// The kernels of a named instruction set, or the best of this machine for null. Null if it has no such.
const Kernels* kernels_for(const char* isa);

struct Features {
    bool avx2, fma, f16c, avx512f, avx512bw, avx512vl, avx512dq, avx512_vnni, avx512_bf16, avx512_vbmi, avx_vnni,
        amx_bf16, amx_int8;
};
Features cpu_features();

#define ANYBIT_DECLARE(ISA)                                                                                          \
    namespace ISA {                                                                                                  \
    void gptq(const GptqBlock&, float*, int64_t, int64_t);                                                           \
    void codebook_rows(const Codebook&, const float*, int64_t, float*, int64_t, float*, int64_t, int64_t);           \
    void codebook_channels(const Codebook&, const float*, int64_t, float*, int64_t, float*, int64_t, int64_t);       \
    void codebook_channels_many(const Codebook&, const float*, int64_t, int64_t, float*, int64_t, int64_t, int64_t); \
    void codebook_decode(const Codebook&, float*, float*, int64_t, int64_t);                                         \
    int64_t kmeans_scratch(int64_t, int);                                                                            \
    void kmeans(const Clustering&, char*, int64_t, int64_t);                                                         \
    void nested_codes(const NestedBlock&, int64_t, int64_t);                                                         \
    void nested_descent(const NestedDescent&, int64_t, int64_t);                                                     \
    void nested_fit(const NestedFit&, float*, int64_t, int64_t);                                                     \
    }
ANYBIT_DECLARE(portable)
#ifdef ANYBIT_X86
ANYBIT_DECLARE(avx2)
ANYBIT_DECLARE(avx512)
#endif
#undef ANYBIT_DECLARE

} // namespace anybit
