// What attention over pages of 16 bits and over pages of codes have in common.
#pragma once

#include "engine/ops.h"

#include "engine/exponential.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int VECTORS = PAGE / LANES; // of a page's tokens

// Tokens of a page.
struct Span {
    int64_t begin, end;
};

inline float largest_of(Floats v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps(v);
#else
    float most = v[0];
    for (int l = 1; l < LANES; ++l) most = v[l] > most ? v[l] : most;
    return most;
#endif
}

} // namespace
} // namespace anybit::ANYBIT_ISA
