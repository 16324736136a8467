// The few vector operations that the kernels are written in, on the compiler's vector types (GCC, Clang).
// Compiled for each instruction set, inside its namespace and with internal linkage: an inline function of
// the standard library in these files could be emitted with AVX-512 instructions and then be the copy that
// the linker keeps for everybody, so none is used.
#pragma once

#include <cstdint>
#include <stddef.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the stored formats are little-endian"
#endif

namespace anybit::ANYBIT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

template <typename T, typename S> inline T load_as(const S* source) {
    T value;
    __builtin_memcpy(&value, source, sizeof value);
    return value;
}

// Weights come from memory in long lines; hardware follows one only to the end of a page.
constexpr int64_t AHEAD = 2048; // bytes
inline void prefetch(const uint8_t* p) { __builtin_prefetch(p + AHEAD); }

inline Floats load(const float* p) { return load_as<Floats>(p); }
inline void store(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof v); }
inline Floats broadcast(float s) { return s - Floats{}; }
inline Floats to_float(Ints v) { return __builtin_convertvector(v, Floats); }

// LANES bytes, one to a lane. (GCC 12 takes a vector conversion by four apart, lane by lane.)
inline Ints load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128(), bytes = _mm_cvtsi32_si128(load_as<int32_t>(p));
    return reinterpret_cast<Ints>(_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zero), zero));
#else
    return Ints{p[0], p[1], p[2], p[3]};
#endif
}

// The sum of the lanes in one fixed order: the upper half is added to the lower one, until one is left.
inline float reduce(Floats v) {
#if defined(__SSE2__)
#if defined(__AVX512F__)
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX2__)
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
    const __m128 four = v;
#endif
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    float lane[LANES];
    __builtin_memcpy(lane, &v, sizeof v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
    return lane[0];
#endif
}

inline float half_to_float(uint16_t h) {
#ifdef __F16C__
    return _cvtsh_ss(h);
#else
    // Shift exponent and fraction into place and let one exact multiplication rebias, subnormals included.
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
    const float rebias = 0x1p112f;
    float value = load_as<float>(&magnitude) * rebias;
    uint32_t bits = load_as<uint32_t>(&value);
    if ((h & 0x7c00u) == 0x7c00u) bits = 0x7f800000u | (magnitude & 0x007fffffu); // Inf and NaN
    bits |= sign;
    return load_as<float>(&bits);
#endif
}

// The float16 that equals a float, where one does.
inline uint16_t to_half(float value) {
    const float scaled = value * 0x1p-112f; // the exponent is the same number in both
    const auto bits = load_as<uint32_t>(&scaled);
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | (bits >> 13 & 0x7fff));
}

inline bool is_half(float value) {
    const float half = half_to_float(to_half(value));
    return load_as<uint32_t>(&half) == load_as<uint32_t>(&value);
}

// LANES numbers of 16 bits as floats.
inline Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(load_as<__m128i>(from));
#else
    Floats values;
    for (int l = 0; l < LANES; ++l) values[l] = half_to_float(from[l]);
    return values;
#endif
}

// Rounded to nearest even.
inline uint16_t to_bf16(float value) {
    const uint32_t bits = load_as<uint32_t>(&value);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40); // a NaN stays one
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)
typedef __m256i Halves;
#else
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
#endif

inline Halves to_bf16(Floats values) {
    typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
    const auto bits = reinterpret_cast<Words>(values), odd = bits >> 16 & 1;
    const Words words = values == values ? (bits + 0x7fff + odd) >> 16 : bits >> 16 | 0x40;
#if defined(__AVX512F__)
    return _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(words));
#else
    return __builtin_convertvector(words, Halves);
#endif
}

// bfloat16 as floats.
inline void widen(const uint16_t* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
        __builtin_memcpy(to + i, &bits, 4);
    }
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

} // namespace
} // namespace anybit::ANYBIT_ISA
