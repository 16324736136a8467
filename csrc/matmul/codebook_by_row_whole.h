// What products of codebooks by row with WholeInputs share: the order of inputs, tables and step of a row, its kept
// channels.
#pragma once

#include "matmul/codebook_by_row.h"
#include "matmul/kept_channels.h"
#include "matmul/unroll.h"
#include "matmul/whole.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Inputs from token k on.
inline WholeInputs tokens_from(const CodebookByRow& c, const WholeInputs& in, int64_t k) {
    return {in.x + k * PHASES * BYTES, in.tokens - k, in.block_stride,
            in.factors + k * LANES,    in.token + k,  in.kept + k * c.kept.channels};
}

// What one step of a row's centroids stands for.
inline double whole_step(const CodebookByRow& c, int64_t row) {
    return static_cast<double>(c.scales[c.kind(row)] * c.row_scale(row));
}

#if defined(__AVX512DQ__)
// Of eight rows, or of fewer.
inline __m512d whole_steps(const CodebookByRow& c, int64_t row, int64_t rows) {
    if (rows >= 8 && c.kinds != nullptr && c.row_scales != nullptr) {
        const __m256i kinds = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load_as<int64_t>(c.kinds + row)));
        return _mm512_cvtps_pd(
            _mm256_mul_ps(_mm256_i32gather_ps(c.scales, kinds, 4), load_as<__m256>(c.row_scales + row)));
    }
    double steps[8] = {};
    for (int64_t i = 0; i < least(8, rows); ++i) steps[i] = whole_step(c, row + i);
    return load_as<__m512d>(steps);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
// Of four rows, or of fewer.
inline __m256d whole_steps(const CodebookByRow& c, int64_t row, int64_t rows) {
    if (rows >= 4 && c.kinds != nullptr && c.row_scales != nullptr) {
        const __m128i kinds = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(load_as<int32_t>(c.kinds + row)));
        return _mm256_cvtps_pd(_mm_mul_ps(_mm_i32gather_ps(c.scales, kinds, 4), load_as<__m128>(c.row_scales + row)));
    }
    double steps[4] = {};
    for (int64_t i = 0; i < least(4, rows); ++i) steps[i] = whole_step(c, row + i);
    return load_as<__m256d>(steps);
}
#endif

// use(Number<BITS>, Number<EACH>) for a tile's codes and the bytes of its entries.
template <typename F> inline void by_entries(const CodebookByRow& c, F&& use) {
    by_width(c.bits, [&](auto bits) {
        if constexpr (bits.value > CodebookByRow::MOST_BYTE_BITS)
            if (c.two_bytes) return use(bits, Number<2>{});
        use(bits, Number<1>{});
    });
}

// How many steps an entry of so many bytes is too large by.
template <int EACH>
constexpr int64_t ENTRY_EXCESS = (EACH == 2 ? CodebookByRow::WORD + 1 : 1) * CodebookByRow::BYTE_ZERO;

#if defined(__AVX512F__)
// A row's centroids, of a byte or of two.
template <int B, int EACH> class RowLookup {
public:
    RowLookup(const CodebookByRow& c, int64_t row) {
        for (int e = 0; e < EACH; ++e) table_[e] = Table<B>(c.table + ((EACH * c.kind(row) + e) << B));
    }
    void operator()(Codes code, Codes (&found)[EACH]) const {
        for (int e = 0; e < EACH; ++e) found[e] = table_[e](code);
    }

private:
    Table<B> table_[EACH];
};
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// A row's centroids less BYTE_ZERO, of a byte or of two.
template <int B> struct CentredBytes {
    static constexpr bool FOLDS = false;

    CentredBytes(const CodebookByRow& c, int64_t row)
        : table_(c.table + (c.kind(row) << B), CodebookByRow::BYTE_ZERO) {}
    void operator()(Codes code, Codes (&found)[1]) const { found[0] = table_(code); }

private:
    Table<B> table_;
};

template <int B> struct CentredWords {
    static constexpr bool FOLDS = false;

    CentredWords(const CodebookByRow& c, int64_t row)
        : high_(c.table + (2 * c.kind(row) << B), CodebookByRow::BYTE_ZERO),
          low_(c.table + ((2 * c.kind(row) + 1) << B), CodebookByRow::BYTE_ZERO) {}
    void operator()(Codes code, Codes (&found)[2]) const { found[0] = high_(code), found[1] = low_(code); }

private:
    Table<B> high_, low_;
};

// The same by the lower half of mirrored tables, which takes half the instructions: codes are folded, and their highest
// bit says which sign an entry has.
template <int B> struct MirroredWords {
    static constexpr bool FOLDS = true;

    MirroredWords(const CodebookByRow& c, int64_t row)
        : high_(c.table + (2 * c.kind(row) << B), CodebookByRow::BYTE_ZERO),
          low_(c.table + ((2 * c.kind(row) + 1) << B), CodebookByRow::BYTE_ZERO) {}
    MirroredWords(const CodebookByRow& c, int64_t lower, int64_t upper)
        : high_(c.table + (2 * c.kind(lower) << B), c.table + (2 * c.kind(upper) << B), CodebookByRow::BYTE_ZERO),
          low_(c.table + ((2 * c.kind(lower) + 1) << B), c.table + ((2 * c.kind(upper) + 1) << B),
               CodebookByRow::BYTE_ZERO) {}
    void operator()(Codes code, Codes (&found)[2]) const {
        const auto sign = reinterpret_cast<__m256i>(left<8 - B>(code) | fill(1));
        found[0] = reinterpret_cast<Codes>(_mm256_sign_epi8(reinterpret_cast<__m256i>(high_(code)), sign));
        found[1] = reinterpret_cast<Codes>(_mm256_sign_epi8(reinterpret_cast<__m256i>(low_(code)), sign));
    }

private:
    Table<B - 1> high_, low_;
};
#endif

// A block of a token's inputs as its vectors of codes meet them: byte m of vector s is input 8 m + s, or in a block of
// tails input 64 s + m; those that are missing are 0.
inline void order_inputs(const CodebookByRow& c, const int8_t* codes, int64_t b, Codes (&block)[PHASES]) {
    constexpr int64_t ALL = PHASES * BYTES;
    int8_t padded[ALL];
    const int8_t* from = codes + b * ALL;
    const int64_t there = least(ALL, c.columns - b * ALL);
    if (there < ALL) {
        for (int64_t j = 0; j < ALL; ++j) padded[j] = j < there ? from[j] : int8_t(0);
        from = padded;
    }
    if (b == blocks_of(c) - 1 && tails_of(c) > 0) {
        __builtin_memcpy(block, from, sizeof block);
        return;
    }
#if defined(__AVX512VBMI__)
    // Within each vector the phases of its 8 m together; then vectors of 8 by 8 such pieces are transposed.
    alignas(64) uint8_t order[64];
    for (int i = 0; i < 64; ++i) order[i] = static_cast<uint8_t>(i % 8 * 8 + i / 8);
    const __m512i by = load_as<__m512i>(order);
    __m512i v[8], w[8];
    for (int i = 0; i < 8; ++i) v[i] = _mm512_permutexvar_epi8(by, load_as<__m512i>(from + 64 * i));
    for (int i = 0; i < 8; i += 2) { // 2 by 2
        w[i] = _mm512_unpacklo_epi64(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_epi64(v[i], v[i + 1]);
    }
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for (int i = 0; i < 8; i += 4)
        for (int o = 0; o < 2; ++o) { // 4 by 4
            v[i + o] = _mm512_permutex2var_epi64(w[i + o], low, w[i + o + 2]);
            v[i + o + 2] = _mm512_permutex2var_epi64(w[i + o], high, w[i + o + 2]);
        }
    for (int i = 0; i < 4; ++i) { // 8 by 8
        block[i] = reinterpret_cast<Codes>(_mm512_shuffle_i64x2(v[i], v[i + 4], 0x44));
        block[i + 4] = reinterpret_cast<Codes>(_mm512_shuffle_i64x2(v[i], v[i + 4], 0xee));
    }
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Within each lane of 128 bits the two inputs of every phase together; then such pairs are transposed, 8 by 8.
    const __m256i by = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    __m256i v[8], w[8];
    for (int i = 0; i < 4; ++i) {
        const __m256i first = _mm256_shuffle_epi8(load_as<__m256i>(from + 32 * i), by);
        const __m256i second = _mm256_shuffle_epi8(load_as<__m256i>(from + 32 * (i + 4)), by);
        v[2 * i] = _mm256_permute2x128_si256(first, second, 0x20);
        v[2 * i + 1] = _mm256_permute2x128_si256(first, second, 0x31);
    }
    for (int i = 0; i < 4; ++i) { // phases 0 to 3 of two of them, 4 to 7
        w[i] = _mm256_unpacklo_epi16(v[2 * i], v[2 * i + 1]);
        w[i + 4] = _mm256_unpackhi_epi16(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) { // two phases of four
        v[2 * i] = _mm256_unpacklo_epi32(w[2 * i], w[2 * i + 1]);
        v[2 * i + 1] = _mm256_unpackhi_epi32(w[2 * i], w[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) { // a phase of all
        const int a = i / 2 * 4 + i % 2;
        block[2 * i] = reinterpret_cast<Codes>(_mm256_unpacklo_epi64(v[a], v[a + 2]));
        block[2 * i + 1] = reinterpret_cast<Codes>(_mm256_unpackhi_epi64(v[a], v[a + 2]));
    }
#else
    for (int64_t s = 0; s < PHASES; ++s)
        for (int64_t m = 0; m < BYTES; ++m) block[s][m] = static_cast<uint8_t>(from[PHASES * m + s]);
#endif
}

// The factors of the inputs that the lanes of a tail's sums meet: two groups of 32, of those of the last block.
inline Ints tail_factors(const int32_t* factors, int64_t t) {
#if defined(__AVX512BW__)
    const auto second = static_cast<__mmask16>(0xff00);
    return reinterpret_cast<Ints>(
        _mm512_mask_set1_epi32(_mm512_set1_epi32(factors[2 * t]), second, factors[2 * t + 1]));
#else
    (void)factors, (void)t;
    return Ints{};
#endif
}

// sums += up to LANES channels, one after another, times M tokens of that stride.
template <int M>
inline void add_channels(const Floats (&channel)[LANES], int64_t count, const float* x, int64_t stride,
                         Floats (&sums)[M]) {
    for (int64_t i = 0; i < count; ++i)
        for (int k = 0; k < M; ++k) sums[k] += channel[i] * broadcast(x[k * stride + i]);
}

// Kept channels of up to LANES rows from `row` on, a lane for each, times M tokens: one channel after another.
template <int M>
inline void sum_kept(const CodebookByRow& c, const float* x, int64_t row, int64_t rows, Floats (&sums)[M]) {
    const int64_t n = c.kept.channels;
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t here = least(LANES, n - j);
        Floats channel[LANES];
        load_channels(c.kept, row, rows, j, here, channel);
        add_channels<M>(channel, here, x + j, n, sums);
    }
}

} // namespace
} // namespace anybit::ANYBIT_ISA
