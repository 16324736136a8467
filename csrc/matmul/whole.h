// Inputs of 8 bits whose scales are whole multiples of one number (WholeInputs), and their sums, which are exact.
#pragma once

#include "common/simd.h"
#include "matmul/formats.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int32_t MOST_MULTIPLES = 255; // with codes of 8 bits numbers of 16

// NaN where one is.
inline float largest_scale(const float* scales, int64_t groups) {
    float largest = 0;
    for (int64_t g = 0; g < groups; ++g) {
        if (scales[g] != scales[g]) return scales[g];
        largest = scales[g] > largest ? scales[g] : largest;
    }
    return largest;
}

// The power of two that the largest scale of a token has 128 to 255 of, or fewer of the least there is. The same for a
// scale and for the multiple that it is rounded up to.
inline float unit_of(float largest) {
    const int32_t exponent = load_as<int32_t>(&largest) >> 23, bits = (exponent > 8 ? exponent - 7 : 1) << 23;
    return load_as<float>(&bits);
}

// The unit of a token's scales; NaN where one of them is.
inline float find_unit(const float* scales, int64_t groups) {
    const float largest = largest_scale(scales, groups);
    return largest < __builtin_inff() ? unit_of(largest) : __builtin_nanf("");
}

inline int32_t factor_of(float scale, float unit) {
    const float factor = scale / unit;
    return factor >= 0 && factor <= MOST_MULTIPLES ? static_cast<int32_t>(factor) : 0; // not NaN
}

// The sum of one group's codes.
inline int32_t sum_of(const int8_t* codes, int64_t count) {
    int32_t sum = 0;
    for (int64_t j = 0; j < count; ++j) sum += codes[j];
    return sum;
}

// The factors of a token's LANES groups of inputs from `first` on, 0 where there are none; returns the sum of factors
// times codes.
inline int64_t find_factors(const int8_t* codes, int64_t columns, const float* scales, float unit, int64_t first,
                            int32_t* factors) {
    constexpr int64_t SIZE = CodebookByRow::INPUT_GROUP;
    const int64_t groups = ceil_div(columns, SIZE);
    int64_t sum = 0;
    for (int64_t l = 0, g = first; l < LANES; ++l, ++g) {
        factors[l] = g < groups ? factor_of(scales[g], unit) : 0;
        if (g < groups) sum += int64_t(factors[l]) * sum_of(codes + g * SIZE, least(SIZE, columns - g * SIZE));
    }
    return sum;
}

// Sums of 64 bits of integers times factors.
class WholeSums {
public:
    static constexpr int64_t RUN = INT32_MAX; // blocks whose sums fit

    void add(Ints sums, Ints factors) {
#if defined(__AVX512F__)
        const auto a = reinterpret_cast<__m512i>(sums), b = reinterpret_cast<__m512i>(factors);
        const __m512i odd = _mm512_mul_epi32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
        even_ += reinterpret_cast<Longs>(_mm512_mul_epi32(a, b));
        odd_ += reinterpret_cast<Longs>(odd);
#elif defined(__AVX2__)
        const auto a = reinterpret_cast<__m256i>(sums), b = reinterpret_cast<__m256i>(factors);
        const __m256i odd = _mm256_mul_epi32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
        even_ += reinterpret_cast<Longs>(_mm256_mul_epi32(a, b));
        odd_ += reinterpret_cast<Longs>(odd);
#else
        for (int l = 0; l < LANES; l += 2) {
            even_[l / 2] += int64_t(sums[l]) * factors[l];
            odd_[l / 2] += int64_t(sums[l + 1]) * factors[l + 1];
        }
#endif
    }
    int64_t total() const {
        const Longs all = even_ + odd_;
        int64_t sum = 0;
        for (int l = 0; l < LANES / 2; ++l) sum += all[l];
        return sum;
    }
#if defined(__AVX2__) && !defined(__AVX512F__)
    // The sums of the lower half join those of one row, those of the upper half another's.
    void split(WholeSums& lower, WholeSums& upper) const {
        lower.even_ += half<0>(even_), lower.odd_ += half<0>(odd_);
        upper.even_ += half<1>(even_), upper.odd_ += half<1>(odd_);
    }
#endif
#if !defined(__AVX512F__)
    // Sums of 32 bits join, or are the first.
    void take(Ints sums, bool more) {
#if defined(__AVX2__)
        const auto all = reinterpret_cast<__m256i>(sums), one = _mm256_set1_epi64x(1);
        const auto even = reinterpret_cast<Longs>(_mm256_mul_epi32(all, one));
        const auto odd = reinterpret_cast<Longs>(_mm256_mul_epi32(_mm256_srli_epi64(all, 32), one));
#else
        const Longs even = {sums[0], sums[2]}, odd = {sums[1], sums[3]};
#endif
        even_ = more ? even_ + even : even;
        odd_ = more ? odd_ + odd : odd;
    }
#endif
#if defined(__AVX512F__)
    __m512i lanes() const { return reinterpret_cast<__m512i>(even_ + odd_); }
#elif defined(__AVX2__)
    __m256i lanes() const { return reinterpret_cast<__m256i>(even_ + odd_); }
#endif

private:
    typedef int64_t Longs __attribute__((vector_size(LANES * 4)));
#if defined(__AVX2__) && !defined(__AVX512F__)
    template <int UPPER> static Longs half(Longs v) {
        return reinterpret_cast<Longs>(
            _mm256_blend_epi32(_mm256_setzero_si256(), reinterpret_cast<__m256i>(v), UPPER ? 0xf0 : 0x0f));
    }
#endif
    Longs even_, odd_; // not set, as arrays of sums are large; WholeSums{} is 0
};

// How many blocks of products of two bytes, 32 to a lane, have sums times factors that fit into 32 bits. In place of
// one block there may be up to three times 4 products (a row's tails). Where a lane is a row
// (codebook_by_row_lanes.cpp), it is so many groups of 32 inputs.
constexpr int64_t SHORT_RUN = 8;
static_assert(SHORT_RUN * 32 * 255 * 128 * MOST_MULTIPLES <= INT32_MAX);

#if defined(__AVX512F__)
// Sums of 64 bits, one for each pair of neighbouring lanes of 32.
class LongSums {
public:
    // Sums of 32 bits join, or are the first.
    void take(Ints sums, bool more) {
        const auto all = reinterpret_cast<__m512i>(sums);
        const __m512i even = _mm512_mul_epi32(all, _mm512_set1_epi64(1)), odd = _mm512_srai_epi64(all, 32);
        const __m512i both = _mm512_add_epi64(even, odd);
        lanes_ = more ? _mm512_add_epi64(lanes_, both) : both;
    }
    __m512i lanes() const { return lanes_; }

private:
    __m512i lanes_;
};
#else
// WholeSums in 32 bits, in a third of the instructions.
class ShortSums {
public:
    static constexpr int64_t RUN = SHORT_RUN;

    void add(Ints sums, Ints factors) { sums_ += sums * factors; }
    void settle(WholeSums& total, bool more) const { total.take(sums_, more); }
#if defined(__AVX2__)
    void split(WholeSums& lower, WholeSums& upper) const {
        WholeSums all;
        all.take(sums_, false);
        all.split(lower, upper);
    }
#endif

private:
    Ints sums_;
};
#endif

// What an exact sum stands for; the same roundings everywhere. Units are powers of two.
inline float whole_value(int64_t sum, double step, float unit) {
    return static_cast<float>(static_cast<double>(sum) * step) * unit;
}

#if defined(__AVX512DQ__)
// The same of eight.
inline __m256 whole_values(__m512i sums, __m512d steps, __m256 units) {
    return _mm256_mul_ps(_mm512_cvtpd_ps(_mm512_mul_pd(_mm512_cvtepi64_pd(sums), steps)), units);
}

// The total of each of eight.
inline __m512i totals_of(const __m512i (&v)[8]) {
    __m512i two[4], four[2];
    for (int i = 0; i < 4; ++i)
        two[i] = _mm512_add_epi64(_mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]),
                                  _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; ++i) // lanes of 128 bits 0 and 2 of both, and 1 and 3
        four[i] = _mm512_add_epi64(_mm512_shuffle_i64x2(two[2 * i], two[2 * i + 1], 0x88),
                                   _mm512_shuffle_i64x2(two[2 * i], two[2 * i + 1], 0xdd));
    return _mm512_add_epi64(_mm512_shuffle_i64x2(four[0], four[1], 0x88), _mm512_shuffle_i64x2(four[0], four[1], 0xdd));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
// As float64, rounded once: AVX2 has no such instruction. Halves of 32 bits become mantissas of 2^52 and 2^84.
inline __m256d to_doubles(__m256i v) {
    const __m256i low_exponent = _mm256_set1_epi64x(0x4330000000000000),
                  high_exponent = _mm256_set1_epi64x(0x4530000080000000); // and half of 2^64, as v has a sign
    const __m256d exponents = _mm256_castsi256_pd(_mm256_set1_epi64x(0x4530000080100000));
    const __m256i low = _mm256_blend_epi32(low_exponent, v, 0x55);
    const __m256i high = _mm256_xor_si256(_mm256_srli_epi64(v, 32), high_exponent);
    return _mm256_add_pd(_mm256_sub_pd(_mm256_castsi256_pd(high), exponents), _mm256_castsi256_pd(low));
}

// `whole_value` of four.
inline __m128 whole_values(__m256i sums, __m256d steps, __m128 units) {
    return _mm_mul_ps(_mm256_cvtpd_ps(_mm256_mul_pd(to_doubles(sums), steps)), units);
}

// The total of each of four.
inline __m256i totals_of(const __m256i (&v)[4]) {
    __m256i two[2];
    for (int i = 0; i < 2; ++i)
        two[i] = _mm256_add_epi64(_mm256_unpacklo_epi64(v[2 * i], v[2 * i + 1]),
                                  _mm256_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
    return _mm256_add_epi64(_mm256_permute2x128_si256(two[0], two[1], 0x20),
                            _mm256_permute2x128_si256(two[0], two[1], 0x31));
}
#endif

} // namespace
} // namespace anybit::ANYBIT_ISA
