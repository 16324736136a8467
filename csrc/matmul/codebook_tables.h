// From bitplanes to codes, and from codes to the centroids that a row's table has for them.
//
// A vector of each plane holds the bits of 8 * BYTES weights: byte m, bit s belongs to weight 8 m + s. Shifting and
// merging turns the planes into eight vectors whose byte m has the code of weight 8 m + s in its low bits, and junk
// above them that the lookup does not see.
#pragma once

#include "matmul/dot_bfloat16.h"

namespace anybit::ANYBIT_ISA {
namespace {

typedef uint16_t Pairs __attribute__((vector_size(BYTES)));

constexpr int64_t PHASES = 8; // vectors of codes that a vector of each plane becomes

// Shifts within pairs of bytes: the bits that cross into the neighbour are junk or masked by whoever shifts.
template <int N> inline Codes left(Codes v) { return reinterpret_cast<Codes>(reinterpret_cast<Pairs>(v) << N); }
template <int N> inline Codes right(Codes v) { return reinterpret_cast<Codes>(reinterpret_cast<Pairs>(v) >> N); }

inline Codes merge(int mask, Codes where_set, Codes elsewhere) {
    return (where_set & fill(mask)) | (elsewhere & fill(~mask));
}

// The codes of a block in their low B bits, from its planes (the least significant first).
template <int B> inline void codes_of(const Codes (&plane)[B], Codes (&code)[PHASES]) {
    constexpr int P = (B + 1) / 2, Q = (B + 3) / 4;
    Codes even[P], odd[P]; // fields of 2 bits
    for (int i = 0; i < P; ++i) {
        const Codes low = plane[2 * i];
        if (2 * i + 1 < B) {
            const Codes high = plane[2 * i + 1];
            even[i] = merge(0x55, low, left<1>(high));
            odd[i] = merge(0x55, right<1>(low), high);
        } else even[i] = low, odd[i] = right<1>(low);
    }
    if constexpr (B <= 2) {
        code[0] = even[0], code[2] = right<2>(even[0]), code[4] = right<4>(even[0]), code[6] = right<6>(even[0]);
        code[1] = odd[0], code[3] = right<2>(odd[0]), code[5] = right<4>(odd[0]), code[7] = right<6>(odd[0]);
    } else {
        Codes field[4][Q]; // of 4 bits: phase s in the low half of the byte, phase s + 4 in the high one
        for (int i = 0; i < Q; ++i)
            for (int o = 0; o < 2; ++o) {
                const Codes low = (o == 0 ? even : odd)[2 * i];
                if (2 * i + 1 < P) {
                    const Codes high = (o == 0 ? even : odd)[2 * i + 1];
                    field[o][i] = merge(0x33, low, left<2>(high));
                    field[o + 2][i] = merge(0x33, right<2>(low), high);
                } else field[o][i] = low, field[o + 2][i] = right<2>(low);
            }
        for (int s = 0; s < 4; ++s) {
            const Codes low = field[s][0], high = field[s][Q - 1];
            code[s] = Q == 1 ? low : merge(0x0f, low, left<4>(high));
            code[s + 4] = Q == 1 ? right<4>(low) : merge(0x0f, right<4>(low), high);
        }
    }
}

// A row's centroids, ready to look up by the low B bits of a byte.
#if defined(__AVX512VBMI__)
template <int B> struct Table {
    __m512i part[B <= 6 ? 1 : 1 << (B - 6)];

    explicit Table(const uint8_t* entry) {
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

#if !defined(__AVX512BW__)
// What is negative stays so.
inline Codes sixteen_down(Codes index) {
    return reinterpret_cast<Codes>(_mm256_subs_epi8(reinterpret_cast<__m256i>(index), _mm256_set1_epi8(16)));
}
#endif

template <int B> struct Table {
    static constexpr int PARTS = B <= 4 ? 1 : 1 << (B - 4);
    Codes part[PARTS];

    explicit Table(const uint8_t* entry) {
        if constexpr (B == 1) part[0] = repeat(_mm_set1_epi16(load_as<int16_t>(entry)));
        else if constexpr (B == 2) part[0] = repeat(_mm_set1_epi32(load_as<int32_t>(entry)));
        else if constexpr (B == 3) part[0] = repeat(_mm_set1_epi64x(load_as<int64_t>(entry)));
        else
            for (int i = 0; i < PARTS; ++i) part[i] = repeat(sixteen(entry, i));
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
    static __m128i sixteen(const uint8_t* entry, int i) { return load_as<__m128i>(entry + 16 * i); }

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
        const auto own = load_as<__m128i>(entry + 16 * i);
        return i % RUN == 0 ? own : _mm_xor_si128(own, load_as<__m128i>(entry + 16 * (i - 1)));
    }
#endif
};
#else
template <int B> struct Table {
    const uint8_t* entry;

    explicit Table(const uint8_t* from) : entry(from) {}

    Codes operator()(Codes code) const {
        Codes found;
        for (int64_t l = 0; l < BYTES; ++l) found[l] = entry[code[l] & ((1 << B) - 1)];
        return found;
    }
};
#endif

// ---- wider centroids ------------------------------------------------------------------------------------------
//
// A vector of codes becomes four of floats or two of bfloat16: by permuting whole entries where a table fits one or two
// registers, byte by byte where it does not.

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
