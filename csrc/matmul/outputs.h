// Where sums of a block of rows go: added to float32, or rounded to bfloat16, beside each other or row by row.
#pragma once

#include "common/simd.h"
#include "matmul/formats.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Where the rows of a block are among the outputs.
struct Places {
    const int32_t* rows; // null: beside each other, from `first` on
    int64_t first, count;
#ifdef __AVX512BW__
    bool near; // among 2 LANES outputs, of which `held` are they, in the order of `lanes`
    __mmask32 held;
    __m512i lanes;
#endif
};

inline Places find_places(const Outputs& y, int64_t block, int64_t rows) {
    const int64_t begin = block * LANES;
    Places p{};
    p.rows = y.rows == nullptr ? nullptr : y.rows + begin;
    p.first = p.rows == nullptr ? begin : p.rows[0];
    p.count = least(LANES, rows - begin);
#ifdef __AVX512BW__
    uint16_t lanes[2 * LANES] = {};
    p.near = p.rows != nullptr;
    for (int64_t l = 0; p.near && l < p.count; ++l) {
        const int64_t at = p.rows[l] - p.first;
        p.near = at >= 0 && at < 2 * LANES;
        if (!p.near) break;
        lanes[at] = static_cast<uint16_t>(l);
        p.held |= __mmask32(1) << at;
    }
    p.lanes = load_as<__m512i>(lanes);
#endif
    return p;
}

// A block's sums of token k go where outputs say.
inline void finish(const Outputs& y, int64_t k, const Places& p, Floats sum) {
    const int64_t token = k * y.stride, at = token + p.first;
    if (p.rows == nullptr && p.count == LANES) {
        if (!y.fresh) sum += load(y.sums + at);
        if (y.rounded == nullptr) return store(y.sums + at, sum);
        const Halves halves = to_bf16(sum);
        __builtin_memcpy(y.rounded + at, &halves, sizeof halves);
        return;
    }
#ifdef __AVX512BW__
    if (p.near && y.fresh && y.rounded != nullptr) {
        const __m512i halves = _mm512_castsi256_si512(to_bf16(sum));
        return _mm512_mask_storeu_epi16(y.rounded + at, p.held, _mm512_permutexvar_epi16(p.lanes, halves));
    }
#endif
    for (int64_t l = 0; l < p.count; ++l) {
        const int64_t to = p.rows == nullptr ? at + l : token + p.rows[l];
        const float own = y.fresh ? sum[l] : y.sums[to] + sum[l];
        if (y.rounded == nullptr) y.sums[to] = own;
        else y.rounded[to] = to_bf16(own);
    }
}

} // namespace
} // namespace anybit::ANYBIT_ISA
