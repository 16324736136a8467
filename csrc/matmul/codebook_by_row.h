// Format "codebook" by rows: the codes of a row are looked up in its table (codebook_tables.h, codebook_tables_wide.h).
// The stored planes are read as they lie.
#pragma once

#include "matmul/codebook_tables_wide.h"
#include "matmul/formats.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Blocks that a token's inputs fill: 32 * LANES codes each.
inline int64_t blocks_of(const CodebookByRow& c) { return ceil_div(4 * c.words, BYTES); }

// The size of parts, no more than `most`, that are as equal as can be.
inline int64_t equal_part(int64_t all, int64_t most) { return ceil_div(all, ceil_div(all, most)); }

// Bytes of a plane from `from` on, of which `left`, a multiple of 4, lie in the row; those behind are 0 and meet
// inputs of 0. `Present` is what says so, once for all planes.
#if defined(__AVX512F__)
typedef __mmask16 Present;
inline Present present(int64_t left) { return static_cast<Present>(left >= BYTES ? 0xffff : (1u << left / 4) - 1); }
inline Codes load_plane(const uint8_t* from, Present there) {
    return reinterpret_cast<Codes>(_mm512_maskz_loadu_epi32(there, from));
}
#else
typedef int64_t Present;
inline Present present(int64_t left) { return left; }
inline Codes load_plane(const uint8_t* from, Present left) {
    if (left >= BYTES) return load_as<Codes>(from);
#if defined(__AVX2__)
    const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(left / 4)),
                                             _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return reinterpret_cast<Codes>(_mm256_maskload_epi32(reinterpret_cast<const int32_t*>(from), there));
#else
    Codes bytes{};
    __builtin_memcpy(&bytes, from, static_cast<size_t>(left));
    return bytes;
#endif
}
#endif

inline const uint8_t* plane_bytes(const CodebookByRow& c, int p) {
    return reinterpret_cast<const uint8_t*>(c.planes[p]);
}

// A row's planes, the least significant first.
template <int B> struct RowPlanes {
    const uint8_t* from[B];

    RowPlanes() = default; // not set, for arrays
    RowPlanes(const CodebookByRow& c, int64_t row) {
        for (int p = 0; p < B; ++p) from[p] = plane_bytes(c, B - 1 - p) + row * 4 * c.words;
    }
    // Those of a block at `at` bytes.
    void load(int64_t at, Present there, Codes (&plane)[B]) const {
        for (int p = 0; p < B; ++p) plane[p] = load_plane(from[p] + at, there);
    }
    // Have the lines there come into the first cache, meanwhile, or with 2 into the second. Inlined, as GCC drops calls
    // of functions that do nothing else.
    template <int LOCALITY = 3> [[gnu::always_inline]] void fetch(int64_t at) const {
        for (int p = 0; p < B; ++p) __builtin_prefetch(from[p] + at, 0, LOCALITY);
    }
};

// What a row has beyond its whole blocks comes 64 weights at a time where it is little: a block of vectors that are
// nearly empty costs as much as a full one. Of those, tails, there are none where masks of bytes are no instruction.
constexpr int64_t TAIL_BYTES = 8; // of each plane: 64 weights
#if defined(__AVX512BW__)
constexpr int64_t MOST_TAILS = 3;
#else
constexpr int64_t MOST_TAILS = 0;
#endif
inline int64_t tails_of(const CodebookByRow& c) {
    const int64_t tails = ceil_div(4 * c.words % BYTES, TAIL_BYTES);
    return tails <= MOST_TAILS ? tails : 0;
}

// With AVX2 the last blocks of two rows are one, a row in each half of its vectors, where they fill no more than half.
// Inputs of such a block lie in both halves.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool HALVES = true;
inline bool ends_in_halves(const CodebookByRow& c) {
    const int64_t rest = 4 * c.words % BYTES;
    return 0 < rest && rest <= BYTES / 2;
}
// The planes of two rows' last `rest` bytes, from `at` on; what lies behind them is 0.
template <int B>
inline void load_halves_of(const RowPlanes<B>& lower, const RowPlanes<B>& upper, int64_t at, int64_t rest,
                           Codes (&plane)[B]) {
    const __m128i there = _mm_cmpgt_epi32(_mm_set1_epi32(static_cast<int32_t>(rest / 4)), _mm_setr_epi32(0, 1, 2, 3));
    for (int p = 0; p < B; ++p)
        plane[p] = reinterpret_cast<Codes>(
            _mm256_set_m128i(_mm_maskload_epi32(reinterpret_cast<const int32_t*>(upper.from[p] + at), there),
                             _mm_maskload_epi32(reinterpret_cast<const int32_t*>(lower.from[p] + at), there)));
}
#else
constexpr bool HALVES = false;
inline bool ends_in_halves(const CodebookByRow&) { return false; }
#endif

// Codes of the upper half of a mirrored table become those of the entries opposite, below their highest bit.
template <int B> inline void fold(Codes (&plane)[B]) {
    for (int p = 0; p < B - 1; ++p) plane[p] ^= plane[B - 1];
}

// The same where floats are looked up so.
template <int B> inline void fold_floats(const CodebookByRow& c, Codes (&plane)[B]) {
    if constexpr (looks_up_mirrored(B))
        if (c.mirrored) fold(plane);
}

// The codes of a tail of a row in their low B bits, in the weights' order: bits of the planes are masks of bytes.
template <int B> inline Codes tail_codes(const CodebookByRow& c, int64_t row, int64_t at) {
#if defined(__AVX512BW__)
    const int64_t bytes = 4 * c.words;
    uint64_t bits[B];
    for (int p = 0; p < B; ++p) {
        const uint8_t* from = plane_bytes(c, B - 1 - p) + row * bytes + at;
        bits[p] = bytes - at >= TAIL_BYTES ? load_as<uint64_t>(from) : load_as<uint32_t>(from);
    }
    __m512i codes = _mm512_maskz_set1_epi8(bits[0], 1);
    for (int p = 1; p < B; ++p)
        codes = _mm512_mask_add_epi8(codes, bits[p], codes, _mm512_set1_epi8(static_cast<char>(1 << p)));
    return reinterpret_cast<Codes>(codes);
#else
    (void)c, (void)row, (void)at;
    return Codes{};
#endif
}

} // namespace
} // namespace anybit::ANYBIT_ISA
