// From codes to centroids that are floats or bfloat16.
//
// A vector of codes becomes four of floats or two of bfloat16: by permuting whole entries where a table fits one or two
// registers, byte by byte where it does not.
#pragma once

#include "matmul/codebook_tables.h"
#include "matmul/dot_bfloat16.h"

namespace anybit::ANYBIT_ISA {
namespace {

// How floats are looked up at a width: whole entries by a permutation where the table fits the registers, byte by byte
// where permutations of bytes reach that far, by gathering otherwise. Without vectors words are decoded instead.
enum class Floating { whole, bytes, gathered, none };
constexpr Floating floating(int bits) {
#if defined(__AVX512VBMI__)
    if (bits <= 5) return Floating::whole;
#elif defined(__AVX512F__)
    if (bits <= 7) return Floating::whole;
#elif defined(__AVX2__)
    if (bits <= 3) return Floating::whole;
    if (bits <= 6) return Floating::bytes;
#endif
#if defined(__AVX512VBMI__)
    return Floating::bytes;
#elif defined(__AVX2__)
    return Floating::gathered;
#else
    return bits > 0 ? Floating::none : Floating::whole;
#endif
}
// Mirrored tables of float16 numbers are looked up as half the entries of half the bytes.
constexpr bool looks_up_mirrored(int bits) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return bits >= 5 && bits <= 7;
#else
    return bits < 0;
#endif
}
// And bfloat16: whole up to this width, byte by byte above; not where floats are faster.
#ifdef __AVX512BW__
constexpr int MOST_WHOLE_HALVES = 6;
#else
constexpr int MOST_WHOLE_HALVES = 0;
#endif
constexpr bool looks_up_halves(int bits) {
#if defined(__AVX512BF16__)
    return bits > 0;
#elif defined(__AVX512F__)
    return bits >= 6;
#elif defined(__AVX2__)
    return bits >= 4 && bits <= 7;
#else
    return bits < 0;
#endif
}

template <int B> struct ByteFloats {
    Table<B> byte[4];

    ByteFloats(const uint8_t* table, int64_t row)
        : byte{Table<B>(at(table, row, 0)), Table<B>(at(table, row, 1)), Table<B>(at(table, row, 2)),
               Table<B>(at(table, row, 3))} {}
    static const uint8_t* at(const uint8_t* table, int64_t row, int64_t i) { return table + ((row * 4 + i) << B); }

    // Which byte of the codes lane l of vector v belongs to.
    static int64_t place(int64_t v, int64_t l) { return l / 4 * 16 + 4 * v + l % 4; }

    void operator()(Codes code, Floats (&values)[4]) const {
        Codes low[2], high[2], made[4];
        interleave<1>(byte[0](code), byte[1](code), low[0], high[0]);
        interleave<1>(byte[2](code), byte[3](code), low[1], high[1]);
        interleave<2>(low[0], low[1], made[0], made[1]);
        interleave<2>(high[0], high[1], made[2], made[3]);
        for (int j = 0; j < 4; ++j) values[j] = reinterpret_cast<Floats>(made[j]);
    }
};

#ifdef __AVX2__
// The codes of bytes 4 l + v in the low bits of lanes l.
template <int V> inline Codes fourth(Codes code) {
    if constexpr (V == 0) return code;
    else {
        typedef uint32_t Words __attribute__((vector_size(BYTES)));
        return reinterpret_cast<Codes>(reinterpret_cast<Words>(code) >> 8 * V);
    }
}

template <int B> struct WholeFloats {
#ifdef __AVX512F__
    __m512 part[B <= 4 ? 1 : 1 << (B - 4)];

    WholeFloats(const uint8_t* table, int64_t row) {
        const auto* entry = reinterpret_cast<const float*>(table) + (row << B);
        if constexpr (B == 1) part[0] = _mm512_castpd_ps(_mm512_set1_pd(load_as<double>(entry)));
        else if constexpr (B == 2) part[0] = _mm512_broadcast_f32x4(load_as<__m128>(entry));
        else if constexpr (B == 3) part[0] = _mm512_broadcast_f32x8(load_as<__m256>(entry));
        else
            for (int i = 0; i < 1 << (B - 4); ++i) part[i] = load_as<__m512>(entry + 16 * i);
    }

    Floats pair(__m512i index, int first) const {
        return reinterpret_cast<Floats>(_mm512_permutex2var_ps(part[first], index, part[first + 1]));
    }
    static __mmask16 bit(__m512i index, int n) { return _mm512_test_epi32_mask(index, _mm512_set1_epi32(1 << n)); }
    static Floats choose(__mmask16 by, Floats where_clear, Floats where_set) {
        return reinterpret_cast<Floats>(
            _mm512_mask_blend_ps(by, reinterpret_cast<__m512>(where_clear), reinterpret_cast<__m512>(where_set)));
    }

    Floats at(Codes lanes) const {
        const auto index = reinterpret_cast<__m512i>(lanes);
        if constexpr (B <= 4) return reinterpret_cast<Floats>(_mm512_permutexvar_ps(index, part[0]));
        else if constexpr (B == 5) return pair(index, 0);
        else { // two registers at a time, then the bits above choose
            const __mmask16 fifth = bit(index, 5);
            const Floats low = choose(fifth, pair(index, 0), pair(index, 2));
            if constexpr (B == 6) return low;
            else return choose(bit(index, 6), low, choose(fifth, pair(index, 4), pair(index, 6)));
        }
    }
#else
    __m256 part;

    WholeFloats(const uint8_t* table, int64_t row) {
        const auto* entry = reinterpret_cast<const float*>(table) + (row << B);
        if constexpr (B == 1) part = _mm256_castpd_ps(_mm256_set1_pd(load_as<double>(entry)));
        else if constexpr (B == 2) part = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(entry));
        else part = load_as<__m256>(entry);
    }

    Floats at(Codes lanes) const {
        return reinterpret_cast<Floats>(_mm256_permutevar8x32_ps(part, reinterpret_cast<__m256i>(lanes)));
    }
#endif

    static int64_t place(int64_t v, int64_t l) { return 4 * l + v; }

    void operator()(Codes code, Floats (&values)[4]) const {
        values[0] = at(code);
        values[1] = at(fourth<1>(code));
        values[2] = at(fourth<2>(code));
        values[3] = at(fourth<3>(code));
    }
};
template <int B> struct GatheredFloats {
    const float* entry;

    GatheredFloats(const uint8_t* table, int64_t row) : entry(reinterpret_cast<const float*>(table) + (row << B)) {}
    static int64_t place(int64_t v, int64_t l) { return 4 * l + v; }

    Floats at(Codes lanes) const {
        const Ints index = reinterpret_cast<Ints>(lanes) & ((1 << B) - 1);
#ifdef __AVX512F__
        return reinterpret_cast<Floats>(_mm512_i32gather_ps(reinterpret_cast<__m512i>(index), entry, 4));
#else
        return reinterpret_cast<Floats>(_mm256_i32gather_ps(entry, reinterpret_cast<__m256i>(index), 4));
#endif
    }

    void operator()(Codes code, Floats (&values)[4]) const {
        values[0] = at(code);
        values[1] = at(fourth<1>(code));
        values[2] = at(fourth<2>(code));
        values[3] = at(fourth<3>(code));
    }
};
#else
template <int B> using WholeFloats = ByteFloats<B>; // never used, as the next
template <int B> using GatheredFloats = ByteFloats<B>;
#endif

template <int B> struct ByteHalves {
    Table<B> low, high;

    ByteHalves(const uint8_t* table, int64_t row)
        : low(table + (row << (B + 1))), high(table + (row << (B + 1)) + (1 << B)) {}
    static int64_t place(int64_t v, int64_t i) { return i / 8 * 16 + 8 * v + i % 8; }

    void operator()(Codes code, Codes (&halves)[2]) const {
        interleave<1>(low(code), high(code), halves[0], halves[1]);
    }
};

// The lower half of a mirrored table as float16, by codes that are folded: the highest bit turns the sign.
template <int B> struct MirroredFloats {
    Table<B - 1> low, high;

    MirroredFloats(const uint8_t* table, int64_t row)
        : low(table + (row << B)), high(table + (row << B) + (1 << (B - 1))) {}
    static int64_t place(int64_t v, int64_t l) { return ByteHalves<B>::place(v / 2, v % 2 * 8 + l); }

    void operator()(Codes code, Floats (&values)[4]) const {
        Codes made[2];
        interleave<1>(low(code), high(code) ^ (left<8 - B>(code) & fill(1 << 7)), made[0], made[1]);
        uint16_t halves[4 * LANES];
        __builtin_memcpy(halves, made, sizeof halves);
        asm("" : "+m"(halves)); // in memory: converted as they are loaded, they need no shuffle
        for (int j = 0; j < 4; ++j) values[j] = load_halves(halves + j * LANES);
    }
};

#ifdef __AVX2__
#ifdef __AVX512BW__
template <int B> struct WholeHalves {
    __m512i part[B == 6 ? 2 : 1];

    WholeHalves(const uint8_t* table, int64_t row) {
        const uint8_t* entry = table + (row << (B + 1));
        if constexpr (B == 1) part[0] = _mm512_set1_epi32(load_as<int32_t>(entry));
        else if constexpr (B == 2) part[0] = _mm512_set1_epi64(load_as<int64_t>(entry));
        else if constexpr (B == 3) part[0] = _mm512_broadcast_i32x4(load_as<__m128i>(entry));
        else if constexpr (B == 4) part[0] = _mm512_broadcast_i64x4(load_as<__m256i>(entry));
        else
            for (int i = 0; i < 1 << (B - 5); ++i) part[i] = load_as<__m512i>(entry + 64 * i);
    }

    Codes at(Codes halves) const {
        const auto index = reinterpret_cast<__m512i>(halves);
        if constexpr (B <= 5) return reinterpret_cast<Codes>(_mm512_permutexvar_epi16(index, part[0]));
        else return reinterpret_cast<Codes>(_mm512_permutex2var_epi16(part[0], index, part[1]));
    }
    static int64_t place(int64_t v, int64_t i) { return 2 * i + v; }

    void operator()(Codes code, Codes (&halves)[2]) const {
        halves[0] = at(code);
        halves[1] = at(right<8>(code));
    }
};
#else
template <int B> using WholeHalves = ByteHalves<B>; // never used
#endif
#endif

template <bool FIRST, typename A, typename B> struct Choice {
    using type = A;
};
template <typename A, typename B> struct Choice<false, A, B> {
    using type = B;
};
template <int B>
using FloatTable =
    typename Choice<floating(B) == Floating::whole, WholeFloats<B>,
                    typename Choice<floating(B) == Floating::gathered, GatheredFloats<B>, ByteFloats<B>>::type>::type;
#ifdef __AVX2__
template <int B> using HalfTable = typename Choice<B <= MOST_WHOLE_HALVES, WholeHalves<B>, ByteHalves<B>>::type;
#endif

} // namespace
} // namespace anybit::ANYBIT_ISA
