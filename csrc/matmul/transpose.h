// Rows in memory become lanes of vectors.
#pragma once

#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Swap lanes of `a` with vectors: low takes what lies in the even runs of STEP lanes of both, high the odd ones.
template <int STEP> inline void exchange(Floats& a, Floats& b) {
    Ints low, high;
    for (int l = 0; l < LANES; ++l) {
        low[l] = l & STEP ? LANES + l - STEP : l;
        high[l] = l & STEP ? LANES + l : l + STEP;
    }
    const Floats first = a, second = b;
#if defined(__clang__)
    for (int l = 0; l < LANES; ++l) {
        a[l] = l & STEP ? second[l - STEP] : first[l];
        b[l] = l & STEP ? second[l] : first[l + STEP];
    }
#else
    a = __builtin_shuffle(first, second, low);
    b = __builtin_shuffle(first, second, high);
#endif
}

// LANES vectors, transposed in place.
inline void transpose(Floats (&v)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & 1)) exchange<1>(v[i], v[i + 1]);
    for (int i = 0; i < LANES; ++i)
        if (!(i & 2)) exchange<2>(v[i], v[i + 2]);
    if constexpr (LANES > 4)
        for (int i = 0; i < LANES; ++i)
            if (!(i & 4)) exchange<4>(v[i], v[i + 4]);
    if constexpr (LANES > 8)
        for (int i = 0; i < LANES; ++i)
            if (!(i & 8)) exchange<8>(v[i], v[i + 8]);
}

// A vector of halves of which only `count`, up to LANES, are there; zeros behind them.
struct PartialHalves {
    uint16_t halves[LANES];

    PartialHalves(const uint16_t* from, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        const __m256i there = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from);
        __builtin_memcpy(halves, &there, sizeof there);
#elif defined(__AVX2__)
        const auto all = static_cast<int32_t>(count);
        const __m128i pairs = _mm_cmpgt_epi32(_mm_set1_epi32(all / 2), _mm_setr_epi32(0, 1, 2, 3));
        __m128i there = _mm_maskload_epi32(reinterpret_cast<const int32_t*>(from), pairs);
        if (all % 2 == 1) {
            const __m128i last =
                _mm_cmpeq_epi16(_mm_set1_epi16(static_cast<int16_t>(all - 1)), _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
            there = _mm_or_si128(there, _mm_and_si128(last, _mm_set1_epi16(load_as<int16_t>(from + all - 1))));
        }
        __builtin_memcpy(halves, &there, sizeof there);
#else
        __builtin_memset(halves, 0, sizeof halves);
        __builtin_memcpy(halves, from, static_cast<size_t>(count) * 2);
#endif
    }
};

// n columns of up to LANES rows of numbers of 16 bits, `stride` apart, a lane for each row, those that are missing 0.
template <Floats (*LOAD)(const uint16_t*)>
inline void decode_halves(const uint16_t* from, int64_t stride, int64_t rows, int64_t n, Floats* panel) {
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t left = least(LANES, n - j);
        Floats part[LANES] = {};
        for (int64_t l = 0; l < rows; ++l) part[l] = LOAD(PartialHalves(from + l * stride + j, left).halves);
        transpose(part);
        for (int64_t i = 0; i < left; ++i) panel[j + i] = part[i];
    }
}

} // namespace
} // namespace anybit::ANYBIT_ISA
