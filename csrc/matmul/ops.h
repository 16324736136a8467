// What the kernels of one instruction set can do with the tiles of every format:
//   gemv: times one token or a few, whose weights go from the stored bytes into registers;
//   gemm: times many tokens, whose weights are decoded once for all, a panel of columns at a time;
//   dequantize; interleave and restore: into an order of the kernels' own, and back.
// Functions work on a range of rows and never on shared state, so the caller may split the rows over threads without
// changing a bit of the result. csrc/README.md says which file has which.
#pragma once

#include "common/dispatch.h"
#include "matmul/formats.h"

namespace anybit {

// Products of tiles T with inputs X: float, uint16_t (bfloat16) or int8_t; null where there are none.
template <typename T, typename X> struct InputOps {
    // A token's inputs [T::columns] in the order of `gemv`, [Ops::columns], and their sums by group, where the format
    // has zero points. Null: it reads them as they are, or (codebooks by channel) followed by zeros.
    void (*prepare)(const T&, const X* x, X* out, float* sums);
    // y[t, out_rows[i]] += sum_j w[i, j] x[t, j] for the blocks of rows begin <= b < end.
    void (*gemv)(const T&, const Inputs<X>&, float* y, int64_t y_stride, int64_t begin, int64_t end);
    // The same for many tokens: x [tokens, columns] in plain order with padding 0 (group int: each group padded to
    // whole cells). Sums go to the rows that the outputs name, not the tile.
    void (*gemm)(const T&, const Inputs<X>&, const Outputs& y, int64_t begin, int64_t end);
};

// The sum of a group is exact. Both products take prepared inputs.
template <typename T> struct InputOps<T, int8_t> {
    struct Prepared { // of one token, what Inputs<int8_t> of the format have
        int8_t* x;
        float* scales;
        int32_t* sums;
    };
    void (*prepare)(const T&, const int8_t* x, const float* scales, const Prepared&);
    void (*gemv)(const T&, const Inputs<int8_t>&, float* y, int64_t y_stride, int64_t begin, int64_t end);
    void (*gemm)(const T&, const Inputs<int8_t>&, const Outputs& y, int64_t begin, int64_t end);
};

// A format's kernels. Ranges are of blocks of MatmulOps::lanes rows, unless the format says otherwise.
template <typename T> struct Ops {
    int64_t (*columns)(const T&); // of inputs in the kernels' order
    InputOps<T, float> f32;
    InputOps<T, uint16_t> bf16; // null without AVX512-BF16, but for the gemv of codebooks by row
    InputOps<T, int8_t> int8;
    // out [rows, columns] = w, exactly rounded. Null for formats that codebook_by_word or PyTorch dequantizes.
    void (*dequantize)(const T&, float* out, int64_t begin, int64_t end);
};

// Of a format that has an order of the kernels' own.
template <typename T> struct PackedOps : Ops<T> {
    int64_t (*bytes)(const T&); // of the codes in the kernels' order
    // Into that order, which reads only the sizes of the tile, and back.
    void (*interleave)(const T&, const typename T::Stored&, const typename T::Packed&, uint8_t* scratch, int64_t begin,
                       int64_t end);
    void (*restore)(const T&, const typename T::Restored&, uint8_t* scratch, int64_t begin, int64_t end);
    int64_t (*scratch)(const T&); // bytes that these two want; null: none
};

struct GroupIntOps : PackedOps<GroupInt> {
    void (*dequantize_bf16)(const GroupInt&, uint16_t* out, int64_t begin, int64_t end); // rounded to nearest even
    void (*dequantize_row)(const GroupInt&, int64_t row, float* out);
};

struct CodebookByChannelOps : PackedOps<CodebookByChannel> {
    // The table as `planes`: bytes of float16 entries [columns, parts of 16 entries, lower and upper bytes, 16],
    // exclusive-or those of the part before; 0 bytes where kernels have no use for them or entries are no float16
    // numbers.
    int64_t (*table_planes_bytes)(const CodebookByChannel&);
    void (*table_planes)(const CodebookByChannel&, uint8_t* planes);
};

// Products of codebooks by row with inputs of 8 bits. They have the same bits, however many tokens there are.
struct WholeOps {
    // Puts codes and scales (InputGrid::multiples) of token k of so many where `gemv` reads them. x and factors: where
    // those of all tokens begin.
    void (*prepare)(const CodebookByRow&, const int8_t* codes, const float* scales, int64_t k, int64_t tokens,
                    int8_t* x, int32_t* factors, WholeInputs::Token&);
    // Sums go to the rows that the outputs name, not the tile.
    void (*gemv)(const CodebookByRow&, const WholeInputs&, const Outputs& y, int64_t begin, int64_t end);
    // The same for many tokens, up to BATCH, in ranges of blocks: from `least` tokens on it takes less time, and it
    // sums rows of up to `most_columns`. Null: there is none.
    int64_t least, most_columns;
    int64_t (*bytes)(const CodebookByRow&, int64_t tokens); // of all x
    int64_t beside;                                         // tokens whose inputs lie in the same cache lines
    void (*prepare_many)(const CodebookByRow&, const int8_t* codes, const float* scales, int64_t k, int8_t* x,
                         WholeInputs::Token&); // of token k
    void (*gemm)(const CodebookByRow&, const WholeInputs&, const Outputs& y, int64_t begin, int64_t end);
};

// gemv takes ranges of rows, gemm ranges of blocks and inputs of 32 * words columns, then the kept ones.
struct CodebookByRowOps : Ops<CodebookByRow> {
    WholeOps whole;
    // How tables lie; `none`: no gemv of that width.
    TableForm (*f32_form)(int bits, bool mirrored);
    TableForm (*bf16_form)(int bits);
};

// Scratch: 32 * words floats.
struct CodebookByWordOps {
    // y[t, out_rows[i]] += sum_j w[i, j] x[t, j] for the rows begin <= i < end; x [tokens, 32 * words], padding zeros.
    void (*gemv_by_row)(const CodebookByWord&, const Inputs<float>&, float* y, int64_t y_stride, float* scratch,
                        int64_t begin, int64_t end);
    // y[t, j] += sum_i w[i, j] x[t, i], x [tokens, rows], for the columns j in the words begin <= j / 32 < end.
    void (*gemv_by_channel)(const CodebookByWord&, const Inputs<float>&, float* y, int64_t y_stride, float* scratch,
                            int64_t begin, int64_t end);
    // The same of many tokens for the blocks of `lanes` columns begin <= b < end.
    void (*gemm_by_channel)(const CodebookByWord&, const Inputs<float>&, const Outputs& y, int64_t begin, int64_t end);
    void (*dequantize)(const CodebookByWord&, float* out, float* scratch, int64_t begin, int64_t end);
};

// All that one instruction set has; made by `make_matmul_ops` (ops.cpp), found by `matmul_ops` (common/dispatch.h).
struct MatmulOps {
    Isa isa;
    int64_t lanes; // rows to a block of a tile in format "group int"
    // Tokens up to which `gemv` takes less time than `gemm`.
    int64_t gemv_tokens_bf16, gemv_tokens_int8;

    GroupIntOps group_int;
    PackedOps<TwoFour> two_four;
    CodebookByChannelOps codebook_by_channel;
    CodebookByRowOps codebook_by_row;
    CodebookByWordOps codebook_by_word;
    Ops<Float16> float16;   // gemv takes ranges of rows, bf16.gemm inputs of an even number of columns
    Ops<SparseRows> sparse; // both take ranges of rows, gemm inputs [tokens / lanes rounded up, stride, lanes]

    // Identical results in every instruction set; the second rounds to nearest even.
    void (*quantize_inputs)(const float* x, const InputGrid&, int8_t* codes, float* scales);
    void (*to_bfloat16)(const float* x, int64_t n, uint16_t* bf16);

    // to[i] is from[order[i]], or that is added to it, i < n; they do not overlap.
    void (*put_in_order)(const float* from, const int32_t* order, int64_t n, bool set, float* to);
};

constexpr int64_t GEMV_TOKENS = 16; // in float32, up to which `gemv` takes less time
constexpr int64_t BATCH = 512;      // tokens, up to which `gemm` decodes weights once for all
constexpr int64_t GEMM_BLOCKS = 2;  // blocks of rows that one token, and many, meet together: split rows at multiples

} // namespace anybit
