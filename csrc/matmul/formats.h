// Tiles of every stored format as the kernels read them, their inputs and their outputs. Raw pointers that the caller
// has checked.
#pragma once

#include <cstdint>

namespace anybit {

// ---- tiles --------------------------------------------------------------------------------------------------------

// One tile in format "group int": w[i, j] = scale[i, j / group_size] * (code[i, j] - zero[i, j / group_size]), its
// arrays in the order that one instruction set's `interleave` gives them (group_int.h).
struct GroupInt {
    const uint8_t* codes;
    const uint16_t* scales;  // fp16 bit patterns [blocks of rows, groups, lanes]
    const uint8_t* zeros;    // [blocks of rows, groups, lanes]; null: 2^(bits-1)
    const int32_t* out_rows; // [rows] output rows, in any order; null: row i is output row i
    int bits;                // 1..8
    int64_t rows, columns, group_size, groups;

    // The same tile as it is stored. Codes of 2, 4 and 8 bits are packed along a row, low bits first; other widths are
    // bitplanes, most significant first, weight j at bit j % 8 of byte j / 8.
    struct Stored {
        const uint8_t* codes;   // [rows, row_bytes], planes: [bits, rows, row_bytes]
        const uint16_t* scales; // [rows, groups]
        const uint8_t* zeros;   // [rows, groups], a byte each, or null
        int64_t row_bytes;
    };
    // Where `restore` puts them.
    struct Restored {
        uint8_t* codes; // zeros before
        uint16_t* scales;
        uint8_t* zeros;
        int64_t row_bytes;
    };
    // Where `interleave` puts what the tile then reads.
    struct Packed {
        uint8_t* codes;
        uint16_t* scales;
        uint8_t* zeros;
    };
};
constexpr int64_t MAX_INT_GROUP = 65536; // columns of a group whose sum cannot leave int32

// The 2-bit channels of a tile in format "two_four", all rows: w[i, j] = scale[i, g] (code[i, j] - zero[i, g]) with
// scale[i, g] = scales[i / SCALE_ROWS, g] (scale_code[i, g] + zeros[i / SCALE_ROWS, g]), g = j / group_size.
struct TwoFour {
    const uint8_t* bytes; // codes, zero points and codes of scales in the kernels' order (two_four.cpp)
    const float* scales;  // [rows / SCALE_ROWS, groups], rounded up
    const uint8_t* zeros; // the same
    int64_t rows, columns, group_size, groups; // group_size 16 or 8

    static constexpr int64_t SCALE_ROWS = 16;

    struct Stored {
        const uint8_t *codes, *zeros, *scale_codes; // a byte each: [rows, columns], [rows, groups], [rows, groups]
    };
    struct Restored {
        uint8_t *codes, *zeros, *scale_codes;
    };
    struct Packed {
        uint8_t* bytes;
    };
};

// One tile in format "codebook" by input channel: w[i, j] = table[j, code[j, i]], all output rows.
struct CodebookByChannel {
    const uint8_t* bytes;   // codes in the kernels' order (codebook_by_channel_pack.cpp)
    const float* table;     // [columns, entries(bits)], what pads it finite; of more than FLOAT_BITS
    const uint16_t* halves; // the same as float16, and two bytes more
    const uint8_t* planes;  // the table as `table_planes` makes it, or null
    int bits;               // 1..8
    int64_t rows, columns;  // the channels

    static constexpr int FLOAT_BITS = 6; // tables of more entries fit no registers
    static constexpr int64_t entries(int bits) { return bits <= 4 ? 16 : int64_t(1) << bits; }
    static constexpr int64_t WHOLE_ROWS = 32; // that restore and interleave split at: a word of a plane

    struct Stored {
        const uint32_t* planes; // [bits, channels, rows / 32 rounded up]
    };
    struct Restored {
        uint32_t* planes; // zeros before
    };
    struct Packed {
        uint8_t* bytes;
    };
};

// Channels of a nested tile that have no codes in planes: fp16, or codes of 8 bits, of which each stands for
// code * |code| * (row_scales[i] * scales[j]).
struct KeptChannels {
    const uint16_t* halves;   // fp16 bit patterns [rows, channels], or null for
    const int8_t* codes;      // [rows, channels]
    const int8_t* by_channel; // codes once more, [channels, rows] of a stride, with BEHIND more; null: not made
    int64_t stride;
    const float* scales;     // [channels], those stored / 16384, with BEHIND more that can be read
    const float* row_scales; // [rows]; where by_channel is made, with BEHIND more that can be read
    int64_t channels;

    static constexpr int64_t BEHIND = 16;

    KeptChannels from(int64_t row) const {
        KeptChannels own = *this;
        if (halves != nullptr) own.halves += row * channels;
        if (codes != nullptr) own.codes += row * channels;
        if (by_channel != nullptr) own.by_channel += row;
        if (row_scales != nullptr) own.row_scales += row;
        return own;
    }
};

// One tile in format "codebook" by rows, or the rows of one width of a tile in format "nested": w[i, j] =
// table[i, code[i, j]]; or scales[i] (table[i, code[i, j]] - BYTE_ZERO), centroids that are bytes.
struct CodebookByRow {
    const uint32_t* planes[8]; // as in CodebookByWord
    const uint8_t* table;      // [rows, 2^bits], laid out as TableForm says
    bool mirrored;             // entry e is minus that of 2^bits - 1 - e. For floats: float16 numbers. For int8: less
                               // BYTE_ZERO; each byte of two
    bool halves;               // for `bf16.gemm`: the table is of bfloat16 as `bf16_form` says, or else of plain floats
    bool two_bytes;            // for int8: an entry is WORD a + b, first all of a, then all of b; else it is a byte
    const float* scales;       // for int8: [tables], of a step
    const uint8_t* kinds;      // as in CodebookByWord
    const float* row_scales;
    const int32_t* out_rows; // as in CodebookByWord
    int bits;                // 1..8
    int64_t rows, columns, words;
    KeptChannels kept; // further columns

    static constexpr int32_t BYTE_ZERO = 128;
    static constexpr int32_t MOST_BYTE = 127; // the largest byte less BYTE_ZERO, of either sign
    static constexpr int32_t WORD = 2 * MOST_BYTE + 1;
    static constexpr int MOST_BYTE_BITS = 6;   // of codes whose entries a byte has room for, if all rows share tables
    static constexpr int64_t INPUT_GROUP = 32; // inputs of 8 bits that share a scale
    static constexpr int64_t TOGETHER = 16;    // rows that `gemv` works on together: split rows at its multiples

    int64_t kind(int64_t row) const { return kinds == nullptr ? row : kinds[row]; }
    float row_scale(int64_t row) const { return row_scales == nullptr ? 1.0f : row_scales[row]; }
};

// How centroids wider than bytes lie for the kernels: [rows, 2^bits] as they are, or [rows, sizeof, 2^bits] byte by
// byte, the lowest first; or so the lower half of a mirrored table as float16, [rows, 2, 2^(bits - 1)].
enum class TableForm { none, whole, bytes, mirrored };

// One tile in format "codebook" as it is stored, decoded word by word: w[i, j] = table[i, code[i, j]], codes as
// bitplanes, most significant first, weight j of a row at bit j % 32 of word j / 32. A row is an output row, or (by
// channel) an input channel.
struct CodebookByWord {
    const uint32_t* planes[8];             // `bits` of them, [rows, words] each
    const uint16_t* table16;               // fp16 bit patterns [rows, entries], or null for
    const float* table32;                  // [rows, entries]
    const uint8_t* kinds;                  // [rows] which table a row has, which then is times
    const float* row_scales;               // [rows]; both null: row i has table i as it is
    const int32_t* out_rows;               // [rows] output rows, all different; null: row i is output row i
    int bits;                              // 1..8
    int64_t rows, columns, words, entries; // entries <= 2^bits; a code beyond stands for 0
};

// One tile in format "float16": w[i, j] = values[i, j].
struct Float16 {
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

// ---- inputs and outputs -------------------------------------------------------------------------------------------

// Inputs of some tokens: float, or uint16_t (bfloat16).
template <typename X> struct Inputs {
    const X* x; // [tokens, columns] of a stride, in the order that the format's kernels want
    int64_t tokens, stride;
    const float* sums;           // [tokens, groups], of the inputs; for formats that have zero points
    const float* kept = nullptr; // [tokens, kept channels]; for codebooks by row
};

// Inputs of 8 bits: x[t, j] = scales[t, j / group_size] * codes[t, j].
template <> struct Inputs<int8_t> {
    const int8_t* x; // codes [tokens, columns] of a stride, padding 0; INTS_BEHIND more can be read
    int64_t tokens, stride;
    const float* scales; // [tokens, groups]
    const int32_t* sums; // [tokens, groups], of the codes
};
constexpr int64_t INTS_BEHIND = 64; // bytes

// Inputs of 8 bits for codebooks by row: x[t, j] = unit[t] * factor[t, j / INPUT_GROUP] * code[t, j]. Factors and codes
// are whole numbers, so sums of products with centroids that are bytes are exact, in any order.
struct WholeInputs {
    struct Token {
        float unit;
        int64_t sum; // of factor times code
    };

    const int8_t* x; // in the order of `gemv` [blocks, tokens, columns of a block], or in that of `gemm`
    int64_t tokens;
    int64_t block_stride;   // for `gemv`: inputs from a block to the next, which has other tokens' too
    const int32_t* factors; // for `gemv`: [blocks, tokens, columns of a block / INPUT_GROUP]
    const Token* token;     // [tokens]
    const float* kept;      // [tokens, kept channels]
};

// How a row of inputs is rounded: symmetric, a scale per group of columns.
struct InputGrid {
    int bits; // 2..8
    int64_t columns, group_size;
    const uint16_t* clip;  // fp16 bit patterns [groups]: share of the largest that the grid reaches; or null for
    const uint16_t* fixed; // [groups], scales known beforehand
    // Scales are rounded up to whole multiples of a power of two, for WholeInputs: the largest is 128 to 255 of it.
    bool multiples = false;
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

} // namespace anybit
