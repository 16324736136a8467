// Format "codebook" by input channel: lanes are output rows, laid out as codes of format "group int" (group_int.h) with
// the channels as columns. A channel's table of few bits fits a few registers, its weights for all lanes are
// permutations of them; of more bits, they are gathered.
#pragma once

#include "matmul/formats.h"
#include "matmul/group_int.h"

namespace anybit::ANYBIT_ISA {
namespace {

inline int64_t cells_of(const CodebookByChannel& t) { return ceil_div(t.columns, cell_columns(t.bits)); }
inline int64_t block_bytes(const CodebookByChannel& t) { return cells_of(t) * cell_vectors(t.bits) * BYTES; }
inline int64_t columns_of(const CodebookByChannel& t) { return cells_of(t) * cell_columns(t.bits); }

#if defined(__AVX512F__)
constexpr int MOST_PERMUTED = 6; // bits
#elif defined(__AVX2__)
#define ANYBIT_LOOKS_UP_HALVES
constexpr int MOST_PERMUTED = 4; // four permutations and three choices take longer than gathering
#endif

#if defined(__AVX2__)
// A channel's table, ready to look up by the low bits of every lane: registers of it are permuted, one or two at a
// time, and the bits above choose among what they give.
template <int BITS> struct PermutedTable {
    static constexpr int PARTS = 1 << BITS <= LANES ? 1 : (1 << BITS) / LANES;
    Floats part[PARTS];

    explicit PermutedTable(const float* from) {
        for (int i = 0; i < PARTS; ++i) part[i] = load(from + i * LANES);
    }

    Floats operator()(Ints code) const {
#if defined(__AVX512F__)
        const auto index = reinterpret_cast<__m512i>(code);
        if constexpr (PARTS == 1) return _mm512_permutexvar_ps(index, part[0]);
        else {
            Floats found[PARTS / 2];
            for (int i = 0; i < PARTS / 2; ++i) found[i] = _mm512_permutex2var_ps(part[2 * i], index, part[2 * i + 1]);
            return chosen<5>(found, code);
        }
#else
        Floats found[PARTS];
        for (int i = 0; i < PARTS; ++i) found[i] = _mm256_permutevar8x32_ps(part[i], reinterpret_cast<__m256i>(code));
        return chosen<3>(found, code);
#endif
    }

private:
    // One of N, by the bits from BIT on.
    template <int BIT, int N> static Floats chosen(const Floats (&found)[N], Ints code) {
        if constexpr (N == 1) return found[0];
        else {
            Floats left[N / 2];
#if defined(__AVX512F__)
            const __mmask16 set = _mm512_test_epi32_mask(reinterpret_cast<__m512i>(code), _mm512_set1_epi32(1 << BIT));
            for (int i = 0; i < N / 2; ++i) left[i] = _mm512_mask_blend_ps(set, found[2 * i], found[2 * i + 1]);
#else
            const auto set = reinterpret_cast<Floats>(code << (31 - BIT)); // in the sign
            for (int i = 0; i < N / 2; ++i) left[i] = _mm256_blendv_ps(found[2 * i], found[2 * i + 1], set);
#endif
            return chosen<BIT + 1>(left, code);
        }
    }
};
#endif

// One whose entries are read one by one.
template <int BITS> struct ReadTable {
    const float* from;

    explicit ReadTable(const float* table) : from(table) {}

    Floats operator()(Ints code) const {
        const Ints index = code & ((1 << BITS) - 1);
#if defined(__AVX2__) && !defined(__AVX512F__)
        return _mm256_i32gather_ps(from, reinterpret_cast<__m256i>(index), 4);
#else
        Floats values;
        for (int l = 0; l < LANES; ++l) values[l] = from[index[l]];
        return values;
#endif
    }
};

// The same of float16; two more bytes behind it may be read.
template <int BITS> struct ReadHalves {
    const uint16_t* from;

    explicit ReadHalves(const uint16_t* table) : from(table) {}

    Floats operator()(Ints code) const {
        const Ints index = code & ((1 << BITS) - 1);
#if defined(__AVX512F__)
        const __m512i found = _mm512_i32gather_epi32(reinterpret_cast<__m512i>(index), from, 2);
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(found));
#elif defined(__AVX2__)
        const auto* words = reinterpret_cast<const int*>(from);
        const auto found = reinterpret_cast<Ints>(_mm256_i32gather_epi32(words, reinterpret_cast<__m256i>(index), 2));
        const auto low = reinterpret_cast<__m256i>(found & 0xffff);
        return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
        Floats values;
        for (int l = 0; l < LANES; ++l) values[l] = half_to_float(from[index[l]]);
        return values;
#endif
    }
};

template <int BITS> inline auto table_of(const CodebookByChannel& t, int64_t channel) {
    const int64_t at = channel * CodebookByChannel::entries(BITS);
#if defined(__AVX2__)
    if constexpr (BITS <= MOST_PERMUTED) return PermutedTable<BITS>(t.table + at);
    else
#endif
        if constexpr (BITS <= CodebookByChannel::FLOAT_BITS)
        return ReadTable<BITS>(t.table + at);
    else return ReadHalves<BITS>(t.halves + at);
}

} // namespace
} // namespace anybit::ANYBIT_ISA
