// From codes to centroids of a byte, or to one byte of wider ones: the table of a row.
#pragma once

#include "matmul/codebook_planes.h"

namespace anybit::ANYBIT_ISA {
namespace {

// A row's centroids, ready to look up by the low B bits of a byte.
#if defined(__AVX512VBMI__)
template <int B> struct Table {
    __m512i part[B <= 6 ? 1 : 1 << (B - 6)];

    Table() = default; // not set, for arrays
    explicit Table(const uint8_t* entry, int = 0) {
        if constexpr (B == 1) part[0] = _mm512_set1_epi16(load_as<int16_t>(entry));
        else if constexpr (B == 2) part[0] = _mm512_set1_epi32(load_as<int32_t>(entry));
        else if constexpr (B == 3) part[0] = _mm512_set1_epi64(load_as<int64_t>(entry));
        else if constexpr (B == 4) part[0] = _mm512_broadcast_i32x4(load_as<__m128i>(entry));
        else if constexpr (B == 5) part[0] = _mm512_broadcast_i64x4(load_as<__m256i>(entry));
        else
            for (int i = 0; i < 1 << (B - 6); ++i) part[i] = load_as<__m512i>(entry + 64 * i);
    }

    Codes operator()(Codes code) const {
        const auto index = reinterpret_cast<__m512i>(code);
        if constexpr (B <= 6) return reinterpret_cast<Codes>(_mm512_permutexvar_epi8(index, part[0]));
        else {
            const __m512i low = _mm512_permutex2var_epi8(part[0], index, part[1]);
            if constexpr (B == 7) return reinterpret_cast<Codes>(low);
            else {
                const __m512i high = _mm512_permutex2var_epi8(part[2], index, part[3]);
                return reinterpret_cast<Codes>(_mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high));
            }
        }
    }
};
#elif defined(__AVX2__)
// Sixteen entries at a time; 0 where the highest bit of the index is set.
inline Codes shuffle(Codes table, Codes index) {
#if defined(__AVX512BW__)
    return reinterpret_cast<Codes>(
        _mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(index)));
#else
    return reinterpret_cast<Codes>(
        _mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(index)));
#endif
}

// Sixteen bytes in every lane of 16.
inline Codes repeat(__m128i bytes) {
#if defined(__AVX512F__)
    return reinterpret_cast<Codes>(_mm512_broadcast_i32x4(bytes));
#else
    return reinterpret_cast<Codes>(_mm256_broadcastsi128_si256(bytes));
#endif
}

// Sixteen entries of B bits, or all of them again and again.
template <int B> inline __m128i sixteen_of(const uint8_t* entry) {
    if constexpr (B == 1) return _mm_set1_epi16(load_as<int16_t>(entry));
    else if constexpr (B == 2) return _mm_set1_epi32(load_as<int32_t>(entry));
    else if constexpr (B == 3) return _mm_set1_epi64x(load_as<int64_t>(entry));
    else return load_as<__m128i>(entry);
}

#if !defined(__AVX512BW__)
// What is negative stays so.
inline Codes sixteen_down(Codes index) {
    return reinterpret_cast<Codes>(_mm256_subs_epi8(reinterpret_cast<__m256i>(index), _mm256_set1_epi8(16)));
}
#endif

template <int B> struct Table {
    static constexpr int PARTS = B <= 4 ? 1 : 1 << (B - 4);
    Codes part[PARTS];

    Table() = default; // not set, for arrays
    // Entries are exclusive-or `turned`, which costs nothing later on; with AVX-512 or without vectors it is 0.
    explicit Table(const uint8_t* entry, [[maybe_unused]] int turned = 0) {
        for (int i = 0; i < PARTS; ++i) part[i] = repeat(sixteen(entry, i));
#if !defined(__AVX512BW__)
        turn(turned);
#endif
    }

#if defined(__AVX512BW__)
    // Every part is looked up; then the bits above choose among what they give.
    Codes operator()(Codes code) const {
        const Codes low = code & fill(15);
        Codes found[PARTS];
        for (int i = 0; i < PARTS; ++i) found[i] = shuffle(part[i], low);
        if constexpr (B > 4) choose<3>(found, code);
        return found[0];
    }

private:
    static __m128i sixteen(const uint8_t* entry, int i) { return sixteen_of<B>(entry + 16 * i); }

    static Codes blend(Codes where_clear, Codes where_set, __mmask64 by) {
        return reinterpret_cast<Codes>(
            _mm512_mask_blend_epi8(by, reinterpret_cast<__m512i>(where_clear), reinterpret_cast<__m512i>(where_set)));
    }

    // Halve the candidates by bit 7 - SHIFT of the codes, then by the bits above it.
    template <int SHIFT> static void choose(Codes (&found)[PARTS], Codes code) {
        constexpr int LEFT = PARTS >> (4 - SHIFT);
        const __mmask64 bit = _mm512_movepi8_mask(reinterpret_cast<__m512i>(left<SHIFT>(code)));
        for (int i = 0; i < LEFT; ++i) found[i] = blend(found[2 * i], found[2 * i + 1], bit);
        if constexpr (LEFT > 1) choose<SHIFT - 1>(found, code);
    }
#else
    // The lower half looks up in one table, the upper half in another.
    Table(const uint8_t* lower, const uint8_t* upper, int turned) {
        for (int i = 0; i < PARTS; ++i)
            part[i] = reinterpret_cast<Codes>(_mm256_set_m128i(sixteen(upper, i), sixteen(lower, i)));
        turn(turned);
    }

    // A choice takes two or three instructions here. So part i holds its entries exclusive-or those of the part before:
    // what the parts up to a code's own give cancels down to its entry, and those behind see a negative index. The
    // ninth part begins anew, for codes whose highest bit is turned over.
    Codes operator()(Codes code) const {
        Codes index = B == 8 ? code : code & fill(B <= 4 ? 15 : (1 << B) - 1);
        Codes found = shuffle(part[0], index);
        for (int i = 1; i < PARTS; ++i) {
            index = i == RUN ? code ^ fill(1 << 7) : sixteen_down(index);
            found ^= shuffle(part[i], index);
        }
        return found;
    }

private:
    static constexpr int RUN = 8;

    static __m128i sixteen(const uint8_t* entry, int i) {
        const __m128i own = sixteen_of<B>(entry + 16 * i);
        return i % RUN == 0 ? own : _mm_xor_si128(own, load_as<__m128i>(entry + 16 * (i - 1)));
    }

    void turn(int turned) {
        for (int i = 0; i < PARTS; i += RUN)
            part[i] ^= fill(turned); // those after it cancel it out and put it in again
    }
#endif
};
#else
template <int B> struct Table {
    const uint8_t* entry;

    explicit Table(const uint8_t* from, int = 0) : entry(from) {}

    Codes operator()(Codes code) const {
        Codes found;
        for (int64_t l = 0; l < BYTES; ++l) found[l] = entry[code[l] & ((1 << B) - 1)];
        return found;
    }
};
#endif

// Interleave units of UNIT bytes of a and b, within every 16 bytes: the first halves into `low`, the others into
// `high`.
template <int UNIT> inline void interleave(Codes a, Codes b, Codes& low, Codes& high) {
#if defined(__AVX512BW__)
    const auto x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
    low = reinterpret_cast<Codes>(UNIT == 1 ? _mm512_unpacklo_epi8(x, y) : _mm512_unpacklo_epi16(x, y));
    high = reinterpret_cast<Codes>(UNIT == 1 ? _mm512_unpackhi_epi8(x, y) : _mm512_unpackhi_epi16(x, y));
#elif defined(__AVX2__)
    const auto x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
    low = reinterpret_cast<Codes>(UNIT == 1 ? _mm256_unpacklo_epi8(x, y) : _mm256_unpacklo_epi16(x, y));
    high = reinterpret_cast<Codes>(UNIT == 1 ? _mm256_unpackhi_epi8(x, y) : _mm256_unpackhi_epi16(x, y));
#else
    for (int64_t i = 0; i < BYTES; ++i) {
        const int64_t from = i / (2 * UNIT) * UNIT + i % UNIT;
        const bool second = i / UNIT % 2 == 1;
        low[i] = second ? b[from] : a[from];
        high[i] = second ? b[from + BYTES / 2] : a[from + BYTES / 2];
    }
#endif
}

} // namespace
} // namespace anybit::ANYBIT_ISA
