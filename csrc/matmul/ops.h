// Products of stored tiles with a few vectors: compiled per way of multiplying bytes, chosen at run time. As in
// quantize/ops.h: raw pointers that the caller has checked, ranges of rows, no shared state.
#pragma once

#include "quantize/ops.h"

namespace anybit {

// One tile in format "group int": w[i, j] = scale[i, j / group_size] * (code[i, j] - zero[i, j / group_size]), its
// arrays in the order that `group_int_interleave` of one instruction set gives them (group_int.h).
struct GroupInt {
    const uint8_t* codes;
    const uint16_t* scales;  // fp16 bit patterns [blocks of rows, groups, lanes]
    const uint8_t* zeros;    // [blocks of rows, groups, lanes]; null: 2^(bits-1)
    const int32_t* out_rows; // [rows] ascending output rows; null: row i is output row i
    int bits;                // 1..8
    int64_t rows, columns, group_size, groups;
};

// The same tile as it is stored. Codes of 2, 4 and 8 bits are packed along a row, low bits first; other widths are
// bitplanes, most significant first, weight j at bit j % 8 of byte j / 8.
struct StoredGroupInt {
    const uint8_t* codes;   // [rows, row_bytes], planes: [bits, rows, row_bytes]
    const uint16_t* scales; // [rows, groups]
    const uint8_t* zeros;   // [rows, groups], a byte each, or null
    int64_t row_bytes;
};

// The 2-bit channels of a tile in format "two_four", all rows: w[i, j] = scale[i, g] (code[i, j] - zero[i, g]) with
// scale[i, g] = scales[i / SECOND_ROWS, g] (scale_code[i, g] + zeros[i / SECOND_ROWS, g]), g = j / group_size.
struct SecondOrder {
    const uint8_t* bytes; // codes, zero points and codes of scales in the kernels' order (two_four.cpp)
    const float* scales;  // [rows / SECOND_ROWS, groups], rounded up
    const uint8_t* zeros; // the same
    int64_t rows, columns, group_size, groups; // group_size 16 or 8
};
constexpr int64_t SECOND_ROWS = 16;

struct StoredSecondOrder {
    const uint8_t *codes, *zeros, *scale_codes; // a byte each: [rows, columns], [rows, groups], [rows, groups]
};

// One tile in format "codebook" by input channel: w[i, j] = table[j, code[j, i]], all output rows.
struct ChannelCodebook {
    const uint8_t* bytes;   // codes in the kernels' order (codebook_by_channel.cpp)
    const float* table;     // [channel_columns, channel_entries], what pads it finite; of more bits
    const uint16_t* halves; // the same as float16, and two bytes more
    const uint8_t* planes;  // the table as `channel_planes` makes it, or null
    int bits;               // 1..8
    int64_t rows, columns;  // the channels
};
constexpr int CHANNEL_FLOAT_BITS = 6; // tables of more entries fit no registers
constexpr int64_t channel_entries(int bits) { return bits <= 4 ? 16 : int64_t(1) << bits; }
constexpr int64_t CHANNEL_ROWS = 32; // blocks that restore and interleave split at: a word of a plane

// Activations of some tokens, in the kernels' order.
struct FloatInputs {
    const float* x;    // [tokens, group_int_columns] (or second_order_columns), padding 0
    const float* sums; // [tokens, groups]
    int64_t tokens;
};

// The same in bfloat16.
struct PairInputs {
    const uint16_t* x; // in the order of pairs (dot_bfloat16.h)
    const float* sums;
    int64_t tokens;
};

// Activations of some tokens as integers: x[t, j] = scales[t, j / group_size] * codes[t, j].
struct IntInputs {
    const int8_t* codes; // [tokens, group_int_columns] of a stride, padding 0; INTS_BEHIND more can be read
    const float* scales; // [tokens, groups]
    const int32_t* sums; // [tokens, groups], of the codes
    int64_t tokens, stride;
};
constexpr int64_t INTS_BEHIND = 64; // bytes

// How a row of activations is rounded: symmetric, a scale per group of columns.
struct ActivationGrid {
    int bits; // 2..8
    int64_t columns, group_size;
    const uint16_t*
        clip; // fp16 bit patterns [groups]: share of the largest magnitude that the grid reaches; or null for
    const uint16_t* fixed; // [groups], scales known beforehand
};

// One tile in format "codebook" by rows whose centroids are bytes: w[i, j] = scales[i] (table[i, code[i, j]] -
// BYTE_ZERO).
struct ByteCodebook {
    const uint32_t* planes[8]; // as in Codebook
    const uint8_t* table;      // [rows, 2^bits]
    bool mirrored;             // for floats: tables are of float16 numbers, entry e minus that of 2^bits - 1 - e
    bool halves; // for `lookup_gemm_bf16`: the table is of bfloat16 as `lookup_bf16_form` says, or else of plain floats
    const float* scales;  // [rows]
    const uint8_t* kinds; // tables of floats and bfloat16, as in Codebook
    const float* row_scales;
    const int32_t* out_rows; // as in Codebook
    int bits;                // 1..8
    int64_t rows, columns, words;
    const uint16_t* kept; // for `gemm` functions: fp16 bit patterns [rows, kept_columns] of further columns
    int64_t kept_columns;

    int64_t kind(int64_t row) const { return kinds == nullptr ? row : kinds[row]; }
    float row_scale(int64_t row) const { return row_scales == nullptr ? 1.0f : row_scales[row]; }
};
constexpr int32_t BYTE_ZERO = 128;

// Activations of some tokens as integers, a scale for every LOOKUP_GROUP of them; as `lookup_prepare` makes them.
struct LookupInputs {
    const int8_t* codes;
    const float* scales;
    const float* sums; // [tokens], of scale times code
    int64_t tokens;
};
constexpr int64_t LOOKUP_GROUP = 32;

// How centroids wider than bytes lie for the kernels: [rows, 2^bits] as they are, or [rows, sizeof, 2^bits] byte by
// byte, the lowest first; or so the lower half of a mirrored table as float16, [rows, 2, 2^(bits - 1)].
enum class TableForm { none, whole, bytes, mirrored };

// Activations of some tokens as floats, or as bit patterns of bfloat16; as `lookup_prepare_...` makes them.
template <typename T> struct LookupPlain {
    const T* x;
    int64_t tokens;
};

// One tile in format "float16": w[i, j] = values[i, j].
struct HalfRows {
    const uint16_t* values;  // bit patterns [rows, columns]
    const int32_t* out_rows; // as above
    int64_t rows, columns;
    bool bf16; // or fp16
};

// Weights beside the tiles, compressed by rows: those of row i are row_ptr[i] <= n < row_ptr[i + 1], each in the column
// that columns16, or columns32 where that is null, says.
struct SparseRows {
    const uint16_t* values; // fp16 bit patterns
    const uint16_t* columns16;
    const uint32_t* columns32;
    const int32_t* row_ptr; // [rows + 1]
    int64_t rows;
};

// Where a product of many tokens goes: sums float32 [tokens, stride], which it is added to, or which it is if they are
// `fresh`; or `rounded`, bfloat16 of the same stride, what would be those sums.
struct Outputs {
    float* sums; // may be null if both
    int64_t stride;
    bool fresh = false;
    uint16_t* rounded = nullptr;
    const int32_t* rows = nullptr; // which outputs a tile's rows are; null: all, in order
};

constexpr int64_t MAX_INT_GROUP = 65536; // columns of a group whose sum cannot leave int32
constexpr int64_t LOOKUP_ROWS = 8;       // rows that `lookup_matmul` works on together: split rows at its multiples
constexpr int64_t FEW_TOKENS = 16;       // in float32, up to which weights are decoded for a few of them at a time
constexpr int64_t BATCH = 512;           // tokens, up to which weights are decoded once for all
constexpr int64_t MANY_BLOCKS = 2;       // blocks of rows that one token, and many, meet together: the same

// Memory of this thread in whole cache lines, too much for the stack of a small one; the next call may give the same.
void* thread_memory(int64_t bytes, int which = 0);

struct Products {
    const char* isa;
    int64_t lanes;    // rows to a block of a tile in format "group int"
    int64_t few_bf16; // tokens in bfloat16 up to which kernels for few tokens take less time than `gemm` functions

    // Bytes of the codes in the kernels' order, and of the scratch of the next two.
    int64_t (*group_int_bytes)(const GroupInt&);
    int64_t (*group_int_scratch)(const GroupInt&);
    // Into the kernels' order and back, for the blocks of rows begin <= b < end. Only the sizes of the tile are read by
    // the first; the second fills codes [rows, row_bytes] or [bits, rows, row_bytes], scales and zeros [rows, groups].
    void (*group_int_interleave)(const GroupInt&, const StoredGroupInt&, uint8_t* codes, uint16_t* scales,
                                 uint8_t* zeros, uint8_t* scratch, int64_t begin, int64_t end);
    void (*group_int_restore)(const GroupInt&, uint8_t* codes, int64_t row_bytes, uint16_t* scales, uint8_t* zeros,
                              uint8_t* scratch, int64_t begin, int64_t end);
    // A token's activations [columns] in the kernels' order [group_int_columns], and their sums by group.
    int64_t (*group_int_columns)(const GroupInt&);
    void (*group_int_prepare)(const GroupInt&, const float* x, float* out, float* sums);
    void (*group_int_prepare_ints)(const GroupInt&, const int8_t* x, int8_t* out, int32_t* sums);
    // y[t, out_rows[i]] += sum_j w[i, j] x[t, j] for the blocks of rows begin <= b < end.
    void (*group_int_matmul)(const GroupInt&, const FloatInputs&, float* y, int64_t y_stride, int64_t begin,
                             int64_t end);
    // y[t, out_rows[i]] += sum_g scale[i, g] x_scale[t, g] (sum_j (code[i, j] - zero[i, g]) x[t, j]), the inner sum
    // exact; groups of up to MAX_INT_GROUP columns.
    void (*group_int_int_matmul)(const GroupInt&, const IntInputs&, const Outputs& y, int64_t begin, int64_t end);
    // The first two with activations in bfloat16; these and all `bf16` below are null without AVX512-BF16, those of
    // `lookup` and few tokens without vectors.
    void (*group_int_prepare_bf16)(const GroupInt&, const uint16_t* x, uint16_t* out, float* sums);
    void (*group_int_bf16_matmul)(const GroupInt&, const PairInputs&, float* y, int64_t y_stride, int64_t begin,
                                  int64_t end);
    // The same for many tokens, which decode the weights only once; `gemm` functions take x [tokens, ..._columns] in
    // plain order with padding 0, here with each group padded to whole cells, as `group_int_prepare` does, and follow
    // the outputs' rows, not the tile's.
    void (*group_int_gemm)(const GroupInt&, const float* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                           int64_t begin, int64_t end);
    void (*group_int_gemm_bf16)(const GroupInt&, const uint16_t* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                                int64_t begin, int64_t end);
    // out [rows, columns] = w, exactly rounded, for blocks of rows; the bf16 form rounds that to nearest even.
    void (*group_int_dequantize_f32)(const GroupInt&, float* out, int64_t begin, int64_t end);
    void (*group_int_dequantize_bf16)(const GroupInt&, uint16_t* out, int64_t begin, int64_t end);
    void (*group_int_row)(const GroupInt&, int64_t row, float* out); // one row of them

    // The same four for the 2-bit channels of 2/4/16.
    int64_t (*second_order_bytes)(const SecondOrder&);
    void (*second_order_interleave)(const SecondOrder&, const StoredSecondOrder&, uint8_t* bytes, int64_t begin,
                                    int64_t end);
    void (*second_order_restore)(const SecondOrder&, uint8_t* codes, uint8_t* zeros, uint8_t* scale_codes,
                                 int64_t begin, int64_t end);
    int64_t (*second_order_columns)(const SecondOrder&);
    void (*second_order_prepare)(const SecondOrder&, const float* x, float* out, float* sums);
    void (*second_order_matmul)(const SecondOrder&, const FloatInputs&, float* y, int64_t y_stride, int64_t begin,
                                int64_t end);
    void (*second_order_prepare_bf16)(const SecondOrder&, const uint16_t* x, uint16_t* out, float* sums);
    void (*second_order_bf16_matmul)(const SecondOrder&, const PairInputs&, float* y, int64_t y_stride, int64_t begin,
                                     int64_t end);
    void (*second_order_gemm)(const SecondOrder&, const float* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                              int64_t begin, int64_t end);
    void (*second_order_gemm_bf16)(const SecondOrder&, const uint16_t* x, int64_t x_stride, int64_t tokens,
                                   const Outputs& y, int64_t begin, int64_t end);
    void (*second_order_dequantize)(const SecondOrder&, float* out, int64_t begin, int64_t end);

    // And for codebooks by channel; restore ORs into planes [bits, channels, rows / 32 rounded up] of zeros, and ranges
    // of blocks begin at whole words of them. x [tokens, channel_columns], padding 0. out [rows, channels].
    int64_t (*channel_bytes)(const ChannelCodebook&);
    int64_t (*channel_columns)(const ChannelCodebook&);
    // The bytes of float16 entries [channel_columns, parts of 16 entries, lower and upper bytes, 16], exclusive-or
    // those of the part before; 0 bytes where kernels have no use for them or entries are no float16 numbers.
    int64_t (*channel_planes_bytes)(const ChannelCodebook&);
    void (*channel_planes)(const ChannelCodebook&, uint8_t* planes);
    void (*channel_interleave)(const ChannelCodebook&, const uint32_t* planes, uint8_t* bytes, int64_t begin,
                               int64_t end);
    void (*channel_restore)(const ChannelCodebook&, uint32_t* planes, int64_t begin, int64_t end);
    void (*channel_matmul)(const ChannelCodebook&, const float* x, int64_t tokens, float* y, int64_t y_stride,
                           int64_t begin, int64_t end);
    void (*channel_gemm)(const ChannelCodebook&, const float* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                         int64_t begin, int64_t end);
    void (*channel_gemm_bf16)(const ChannelCodebook&, const uint16_t* x, int64_t x_stride, int64_t tokens,
                              const Outputs& y, int64_t begin, int64_t end);
    void (*channel_dequantize)(const ChannelCodebook&, float* out, int64_t begin, int64_t end);

    // Blocks that a token's activations fill: 32 * lanes codes and `lanes` scales each.
    int64_t (*lookup_blocks)(const ByteCodebook&);
    // A token's activations [columns] and their scales [columns / LOOKUP_GROUP, rounded up] in the kernels' order.
    void (*lookup_prepare)(const ByteCodebook&, const int8_t* x, const float* scales, int8_t* codes, float* lane_scales,
                           float* sum);
    // y[t, out_rows[i]] += sum_j w[i, j] x[t, j] for the rows begin <= i < end; the sum of a group is exact.
    void (*lookup_matmul)(const ByteCodebook&, const LookupInputs&, float* y, int64_t y_stride, int64_t begin,
                          int64_t end);

    // The same exactly, where it takes the width: the table as `lookup_float_form` says. A token's activations fill
    // lookup_blocks * 32 * lanes floats.
    TableForm (*lookup_float_form)(int bits, bool mirrored);
    void (*lookup_prepare_floats)(const ByteCodebook&, const float* x, float* out);
    void (*lookup_float_matmul)(const ByteCodebook&, const LookupPlain<float>&, float* y, int64_t y_stride,
                                int64_t begin, int64_t end);

    // The same with activations and centroids in bfloat16; at any width with AVX512-BF16.
    TableForm (*lookup_bf16_form)(int bits);
    void (*lookup_prepare_bf16)(const ByteCodebook&, const uint16_t* x, uint16_t* out);
    void (*lookup_bf16_matmul)(const ByteCodebook&, const LookupPlain<uint16_t>&, float* y, int64_t y_stride,
                               int64_t begin, int64_t end);
    void (*lookup_gemm)(const ByteCodebook&, const float* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                        int64_t begin, int64_t end);
    void (*lookup_gemm_bf16)(const ByteCodebook&, const uint16_t* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                             int64_t begin, int64_t end);

    // y[t, out_rows[i]] += sum_j w[i, j] x[t, j] for the rows begin <= i < end.
    void (*half_matmul)(const HalfRows&, const float* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
                        int64_t begin, int64_t end);
    // The same of many tokens for the blocks of `lanes` rows begin <= b < end; in bfloat16 x has an even number of
    // columns.
    void (*half_gemm)(const HalfRows&, const float* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                      int64_t begin, int64_t end);
    void (*half_gemm_bf16)(const HalfRows&, const uint16_t* x, int64_t x_stride, int64_t tokens, const Outputs& y,
                           int64_t begin, int64_t end);
    void (*sparse_matmul)(const SparseRows&, const float* x, int64_t x_stride, int64_t tokens, float* y,
                          int64_t y_stride, int64_t begin, int64_t end);

    // The same for many tokens: x [tokens / lanes rounded up, width, lanes].
    void (*sparse_gemm)(const SparseRows&, const float* x, int64_t width, int64_t tokens, float* y, int64_t y_stride,
                        int64_t begin, int64_t end);

    // Identical results in every instruction set; the second rounds to nearest even.
    void (*quantize_row)(const float* x, const ActivationGrid&, int8_t* codes, float* scales);
    void (*narrow)(const float* x, int64_t n, uint16_t* bf16);
};

constexpr const char* PRODUCT_ISAS[] = {"portable",    "avx2",        "avx_vnni",    "avx512",
                                        "avx512_vnni", "avx512_vbmi", "avx512_bf16", "amx_bf16"};

// The products of a named instruction set, or the best of this machine for null. Null if it has no such.
const Products* products_for(const char* isa);

#define ANYBIT_DECLARE(ISA)                                                                                          \
    namespace ISA {                                                                                                  \
    extern const Products products;                                                                                  \
    int64_t group_int_bytes(const GroupInt&);                                                                        \
    int64_t group_int_scratch(const GroupInt&);                                                                      \
    void group_int_interleave(const GroupInt&, const StoredGroupInt&, uint8_t*, uint16_t*, uint8_t*, uint8_t*,       \
                              int64_t, int64_t);                                                                     \
    void group_int_restore(const GroupInt&, uint8_t*, int64_t, uint16_t*, uint8_t*, uint8_t*, int64_t, int64_t);     \
    int64_t group_int_columns(const GroupInt&);                                                                      \
    void group_int_prepare(const GroupInt&, const float*, float*, float*);                                           \
    void group_int_prepare_ints(const GroupInt&, const int8_t*, int8_t*, int32_t*);                                  \
    void group_int_matmul(const GroupInt&, const FloatInputs&, float*, int64_t, int64_t, int64_t);                   \
    void group_int_prepare_bf16(const GroupInt&, const uint16_t*, uint16_t*, float*);                                \
    void group_int_bf16_matmul(const GroupInt&, const PairInputs&, float*, int64_t, int64_t, int64_t);               \
    void group_int_gemm(const GroupInt&, const float*, int64_t, int64_t, const Outputs&, int64_t, int64_t);          \
    void group_int_gemm_bf16(const GroupInt&, const uint16_t*, int64_t, int64_t, const Outputs&, int64_t, int64_t);  \
    void group_int_int_matmul(const GroupInt&, const IntInputs&, const Outputs&, int64_t, int64_t);                  \
    void group_int_dequantize_f32(const GroupInt&, float*, int64_t, int64_t);                                        \
    void group_int_dequantize_bf16(const GroupInt&, uint16_t*, int64_t, int64_t);                                    \
    void group_int_row(const GroupInt&, int64_t, float*);                                                            \
    int64_t second_order_bytes(const SecondOrder&);                                                                  \
    void second_order_interleave(const SecondOrder&, const StoredSecondOrder&, uint8_t*, int64_t, int64_t);          \
    void second_order_restore(const SecondOrder&, uint8_t*, uint8_t*, uint8_t*, int64_t, int64_t);                   \
    int64_t second_order_columns(const SecondOrder&);                                                                \
    void second_order_prepare(const SecondOrder&, const float*, float*, float*);                                     \
    void second_order_matmul(const SecondOrder&, const FloatInputs&, float*, int64_t, int64_t, int64_t);             \
    void second_order_prepare_bf16(const SecondOrder&, const uint16_t*, uint16_t*, float*);                          \
    void second_order_bf16_matmul(const SecondOrder&, const PairInputs&, float*, int64_t, int64_t, int64_t);         \
    void second_order_gemm(const SecondOrder&, const float*, int64_t, int64_t, const Outputs&, int64_t, int64_t);    \
    void second_order_gemm_bf16(const SecondOrder&, const uint16_t*, int64_t, int64_t, const Outputs&, int64_t,      \
                                int64_t);                                                                            \
    void second_order_dequantize(const SecondOrder&, float*, int64_t, int64_t);                                      \
    int64_t channel_bytes(const ChannelCodebook&);                                                                   \
    int64_t channel_columns(const ChannelCodebook&);                                                                 \
    int64_t channel_planes_bytes(const ChannelCodebook&);                                                            \
    void channel_planes(const ChannelCodebook&, uint8_t*);                                                           \
    void channel_interleave(const ChannelCodebook&, const uint32_t*, uint8_t*, int64_t, int64_t);                    \
    void channel_restore(const ChannelCodebook&, uint32_t*, int64_t, int64_t);                                       \
    void channel_matmul(const ChannelCodebook&, const float*, int64_t, float*, int64_t, int64_t, int64_t);           \
    void channel_gemm(const ChannelCodebook&, const float*, int64_t, int64_t, const Outputs&, int64_t, int64_t);     \
    void channel_gemm_bf16(const ChannelCodebook&, const uint16_t*, int64_t, int64_t, const Outputs&, int64_t,       \
                           int64_t);                                                                                 \
    void channel_dequantize(const ChannelCodebook&, float*, int64_t, int64_t);                                       \
    int64_t lookup_blocks(const ByteCodebook&);                                                                      \
    void lookup_prepare(const ByteCodebook&, const int8_t*, const float*, int8_t*, float*, float*);                  \
    void lookup_matmul(const ByteCodebook&, const LookupInputs&, float*, int64_t, int64_t, int64_t);                 \
    TableForm lookup_float_form(int, bool);                                                                          \
    TableForm lookup_bf16_form(int);                                                                                 \
    void lookup_prepare_floats(const ByteCodebook&, const float*, float*);                                           \
    void lookup_float_matmul(const ByteCodebook&, const LookupPlain<float>&, float*, int64_t, int64_t, int64_t);     \
    void lookup_prepare_bf16(const ByteCodebook&, const uint16_t*, uint16_t*);                                       \
    void lookup_bf16_matmul(const ByteCodebook&, const LookupPlain<uint16_t>&, float*, int64_t, int64_t, int64_t);   \
    void lookup_gemm(const ByteCodebook&, const float*, int64_t, int64_t, const Outputs&, int64_t, int64_t);         \
    void lookup_gemm_bf16(const ByteCodebook&, const uint16_t*, int64_t, int64_t, const Outputs&, int64_t, int64_t); \
    void half_matmul(const HalfRows&, const float*, int64_t, int64_t, float*, int64_t, int64_t, int64_t);            \
    void half_gemm(const HalfRows&, const float*, int64_t, int64_t, const Outputs&, int64_t, int64_t);               \
    void half_gemm_bf16(const HalfRows&, const uint16_t*, int64_t, int64_t, const Outputs&, int64_t, int64_t);       \
    void sparse_matmul(const SparseRows&, const float*, int64_t, int64_t, float*, int64_t, int64_t, int64_t);        \
    void sparse_gemm(const SparseRows&, const float*, int64_t, int64_t, float*, int64_t, int64_t, int64_t);          \
    void quantize_row(const float*, const ActivationGrid&, int8_t*, float*);                                         \
    void narrow(const float*, int64_t, uint16_t*);                                                                   \
    }
ANYBIT_DECLARE(portable)
#ifdef ANYBIT_X86
ANYBIT_DECLARE(avx2)
ANYBIT_DECLARE(avx_vnni)
ANYBIT_DECLARE(avx512)
ANYBIT_DECLARE(avx512_vnni)
ANYBIT_DECLARE(avx512_vbmi)
ANYBIT_DECLARE(avx512_bf16)
ANYBIT_DECLARE(amx_bf16)
#endif
#undef ANYBIT_DECLARE

} // namespace anybit
