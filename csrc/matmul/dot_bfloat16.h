// Dot products of pairs of bfloat16, summed in float32: by AVX512-BF16, or as products of floats on other vectors.
//
// A code below 128 becomes a bfloat16 by filling in the bits above it: 0x4300 is 128, whose last place is 1, so
// 0x4300 | code is 128 + code exactly. The 128 leaves again with the zero point, through the sum of the inputs.
#pragma once

#include "common/dot_int8.h"

namespace anybit::ANYBIT_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512BF16__)
// sums[i] += the dot product of two pairs.
inline Floats dot_pairs(Floats sums, Codes a, Codes b) {
    typedef uint32_t Words __attribute__((vector_size(BYTES)));
    const auto x = reinterpret_cast<Words>(a), y = reinterpret_cast<Words>(b);
    sums += reinterpret_cast<Floats>(x << 16) * reinterpret_cast<Floats>(y << 16);
    return sums + reinterpret_cast<Floats>(x & 0xffff0000u) * reinterpret_cast<Floats>(y & 0xffff0000u);
}
#endif

#ifdef __AVX512BF16__
constexpr float CODE_BIAS = 128;

// 128 + code in bytes 0 and 2 of every lane, the bits in MASK.
template <int MASK> inline Codes biased(Codes codes) {
    const __m512i mask = _mm512_set1_epi32(MASK * 0x10001), bias = _mm512_set1_epi32(0x43004300);
    return reinterpret_cast<Codes>(_mm512_ternarylogic_epi32(reinterpret_cast<__m512i>(codes), mask, bias, 0xea));
}

// sums[i] += the dot product of two pairs.
inline Floats dot_pairs(Floats sums, Codes a, Codes b) {
    return reinterpret_cast<Floats>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}

inline Codes broadcast_pair(const uint16_t* x) { return reinterpret_cast<Codes>(load_as<int32_t>(x) - Ints{}); }

inline float bf16_to_float(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    return load_as<float>(&bits);
}

// `count` inputs, and zeros up to `width` (a multiple of 4), in the order in which pairs of codes come out of four
// bytes: 0 and 2, then 1 and 3. Returns their sum.
inline float order_pairs(const uint16_t* x, int64_t count, int64_t width, uint16_t* out) {
    float sum[4] = {};
    for (int64_t j = 0; j < width; j += 4)
        for (int64_t k = 0; k < 4; ++k) {
            const uint16_t half = j + k < count ? x[j + k] : uint16_t(0);
            sum[k] += bf16_to_float(half);
            out[j + k % 2 * 2 + k / 2] = half;
        }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
#endif

} // namespace
} // namespace anybit::ANYBIT_ISA
