// Integer matrix products on quantized activations: compiled per way of multiplying bytes, chosen at run time.
#pragma once

#include "kernels.h"

namespace anybit {

// Activations of some tokens as integers: x[t, j] = scales[t, j / group_size] * codes[t, j].
struct IntInputs {
    const float* scales; // [tokens, groups]
    const int32_t* sums; // [tokens, groups], of the codes
    int64_t tokens;
};

// How a row of activations is rounded: symmetric, a scale per group of columns.
struct ActivationGrid {
    int bits; // 2..8
    int64_t columns, group_size;
    const uint16_t* clip;  // fp16 bit patterns [groups]: share of the largest magnitude that the grid reaches; or null for
    const uint16_t* fixed; // [groups], scales known beforehand
};

// One tile in format "codebook" by rows whose centroids are bytes: w[i, j] = scales[i] (table[i, code[i, j]] - BYTE_ZERO).
struct ByteCodebook {
    const uint32_t* planes;   // [bits, rows, words], as in Codebook
    const uint8_t* table;     // [rows, 2^bits]
    const float* scales;      // [rows]
    const int32_t* out_rows;  // [rows] ascending output rows; null: row i is output row i
    int bits;                 // 1..8
    int64_t rows, columns, words;
};
constexpr int32_t BYTE_ZERO = 128;

// Activations of some tokens as integers, one scale for a whole row.
struct LookupInputs {
    const int8_t* codes;  // as `lookup_prepare` made them
    const float* scales;  // [tokens]
    const int32_t* sums;  // [tokens], of the codes
    int64_t tokens;
};

constexpr int64_t MAX_INT_GROUP = 65536; // columns of a group whose sum cannot leave int32

struct IntKernels {
    const char* isa;
    // Bytes that a token's codes take once `prepare` has put them in the kernel's order.
    int64_t (*columns)(const GroupInt&);
    void (*prepare)(const GroupInt&, const int8_t* x, int64_t tokens, int8_t* out);
    // y[t, out_rows[i]] += sum_g scale[i, g] x_scale[t, g] (sum_j (code[i, j] - zero[i, g]) x[t, j]) for the rows
    // begin <= i < end of a tile whose groups begin at whole bytes, of 4 or 8 bits and up to MAX_INT_GROUP columns.
    void (*matmul)(const GroupInt&, const IntInputs&, const int8_t* prepared, float* y, int64_t y_stride, int64_t begin,
                   int64_t end);
    // The same for codes that are looked up; up to MAX_INT_GROUP columns.
    int64_t (*lookup_columns)(const ByteCodebook&);
    void (*lookup_prepare)(const ByteCodebook&, const int8_t* x, int64_t tokens, int8_t* out);
    void (*lookup_matmul)(const ByteCodebook&, const LookupInputs&, float* y, int64_t y_stride, int64_t begin,
                          int64_t end);
    // Identical results in every instruction set.
    void (*quantize_row)(const float* x, const ActivationGrid&, int8_t* codes, float* scales);
};

// The kernels of a named way, or the best of this machine for null. Null if it has no such.
const IntKernels* int_kernels_for(const char* isa);

#define ANYBIT_DECLARE(ISA)                                                                                   \
    namespace ISA {                                                                                           \
    int64_t int_columns(const GroupInt&);                                                                     \
    void int_prepare(const GroupInt&, const int8_t*, int64_t, int8_t*);                                       \
    void int_matmul(const GroupInt&, const IntInputs&, const int8_t*, float*, int64_t, int64_t, int64_t);     \
    int64_t lookup_columns(const ByteCodebook&);                                                              \
    void lookup_prepare(const ByteCodebook&, const int8_t*, int64_t, int8_t*);                                \
    void lookup_matmul(const ByteCodebook&, const LookupInputs&, float*, int64_t, int64_t, int64_t);          \
    void quantize_row(const float*, const ActivationGrid&, int8_t*, float*);                                  \
    }
ANYBIT_DECLARE(portable)
#ifdef ANYBIT_X86
ANYBIT_DECLARE(avx2)
ANYBIT_DECLARE(avx_vnni)
ANYBIT_DECLARE(avx512_vnni)
ANYBIT_DECLARE(avx512_vbmi)
#endif
#undef ANYBIT_DECLARE

} // namespace anybit
