// Dot products of unsigned bytes with signed ones, on whole vectors: VNNI, AVX-512, AVX2, SSE2 or plain C++.
#pragma once

#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t BYTES = 4 * LANES;

typedef uint8_t Codes __attribute__((vector_size(BYTES)));
typedef int8_t Bytes __attribute__((vector_size(BYTES)));

inline Codes fill(int byte) { return static_cast<uint8_t>(byte) - Codes{}; }

inline Bytes broadcast_four(const int8_t* x) { return reinterpret_cast<Bytes>(load_as<int32_t>(x) - Ints{}); }

// sums[i] += the dot product of four codes with four inputs.
inline Ints dot(Ints sums, Codes codes, Bytes x) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(codes),
                                                      reinterpret_cast<__m512i>(x)));
#elif defined(__AVXVNNI__)
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(sums), reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(x)));
#elif defined(__AVX512BW__)
    // Pairs of products are summed in 16 bits, which 8-bit codes overflow: their halves do not.
    const __m512i ones = _mm512_set1_epi16(1), low = _mm512_set1_epi8(15), from = reinterpret_cast<__m512i>(x);
    const __m512i all = reinterpret_cast<__m512i>(codes);
    const __m512i first = _mm512_maddubs_epi16(_mm512_and_si512(all, low), from);
    const __m512i second = _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(all, 4), low), from);
    const __m512i high = _mm512_slli_epi32(_mm512_madd_epi16(second, ones), 4);
    return sums + reinterpret_cast<Ints>(_mm512_add_epi32(_mm512_madd_epi16(first, ones), high));
#elif defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15), from = reinterpret_cast<__m256i>(x);
    const __m256i all = reinterpret_cast<__m256i>(codes);
    const __m256i first = _mm256_maddubs_epi16(_mm256_and_si256(all, low), from);
    const __m256i second = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(all, 4), low), from);
    const __m256i high = _mm256_slli_epi32(_mm256_madd_epi16(second, ones), 4);
    return sums + reinterpret_cast<Ints>(_mm256_add_epi32(_mm256_madd_epi16(first, ones), high));
#elif defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128(), from = reinterpret_cast<__m128i>(x),
                  all = reinterpret_cast<__m128i>(codes);
    const __m128i low = _mm_srai_epi16(_mm_unpacklo_epi8(from, from), 8);
    const __m128i high = _mm_srai_epi16(_mm_unpackhi_epi8(from, from), 8);
    const __m128 first = _mm_castsi128_ps(_mm_madd_epi16(_mm_unpacklo_epi8(all, zero), low)); // sums of two
    const __m128 second = _mm_castsi128_ps(_mm_madd_epi16(_mm_unpackhi_epi8(all, zero), high));
    const __m128i even = _mm_castps_si128(_mm_shuffle_ps(first, second, 0x88));
    const __m128i odd = _mm_castps_si128(_mm_shuffle_ps(first, second, 0xdd));
    return sums + reinterpret_cast<Ints>(_mm_add_epi32(even, odd));
#else
    for (int64_t i = 0; i < LANES; ++i)
        for (int64_t k = 0; k < 4; ++k) sums[i] += codes[4 * i + k] * x[4 * i + k];
    return sums;
#endif
}

// The same for codes below 128.
inline Ints dot_small(Ints sums, Codes codes, Bytes x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
    return dot(sums, codes, x);
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(x));
    return sums + reinterpret_cast<Ints>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
    const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(x));
    return sums + reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

} // namespace
} // namespace anybit::ANYBIT_ISA
