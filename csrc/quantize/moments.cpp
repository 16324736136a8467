// Second moments of bfloat16 activations, H += X^T X, on the processor's bf16 dot product (AVX512-BF16).
// Products of bf16 are exact in float32 and sums are kept there, so nothing is lost against a float32 GEMM of the
// same activations; the symmetric half is computed once.
#include "quantize/moments.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace anybit {
namespace {

constexpr int64_t P = MOMENT_PANEL; // columns of a panel
constexpr int64_t STRIP = 8;        // rows of H that registers hold: 8 x 48 sums in 24 of 32 vectors
constexpr int64_t CHUNK = 128;      // token pairs whose panel slice (24 KB) stays in the first-level cache

// sums[STRIP, P] += over `pairs` token pairs of panels a (columns at `row`...) and b.
inline void strip(const uint32_t* a, const uint32_t* b, int64_t row, int64_t pairs, float* sums) {
    __m512 s[STRIP][3];
    for (int64_t i = 0; i < STRIP; ++i)
        for (int64_t v = 0; v < 3; ++v) s[i][v] = _mm512_loadu_ps(sums + i * P + v * 16);
    for (int64_t t = 0; t < pairs; ++t) {
        __m512bh right[3];
        for (int64_t v = 0; v < 3; ++v) right[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + t * P + v * 16));
        for (int64_t i = 0; i < STRIP; ++i) {
            const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[t * P + row + i])));
            for (int64_t v = 0; v < 3; ++v) s[i][v] = _mm512_dpbf16_ps(s[i][v], left, right[v]);
        }
    }
    for (int64_t i = 0; i < STRIP; ++i)
        for (int64_t v = 0; v < 3; ++v) _mm512_storeu_ps(sums + i * P + v * 16, s[i][v]);
}

} // namespace

void pack_moments(const uint16_t* x, int64_t stride, int64_t tokens, int64_t columns, int64_t panel, uint32_t* out) {
    const int64_t first = panel * P, width = columns - first < P ? columns - first : P;
    for (int64_t t = 0; t < tokens; t += 2, out += P) {
        const uint16_t* low = x + t * stride + first;
        const uint16_t* high = t + 1 < tokens ? low + stride : nullptr;
        for (int64_t j = 0; j < P; ++j)
            out[j] = j < width ? low[j] | static_cast<uint32_t>(high ? high[j] : 0) << 16 : 0;
    }
}

void add_moments(const uint32_t* panels, int64_t pairs, int64_t columns, int64_t i, int64_t j, float* h) {
    float sums[P * P] = {};
    const uint32_t *a = panels + i * pairs * P, *b = panels + j * pairs * P;
    for (int64_t t = 0; t < pairs; t += CHUNK) {
        const int64_t n = pairs - t < CHUNK ? pairs - t : CHUNK;
        for (int64_t row = 0; row < P; row += STRIP) strip(a + t * P, b + t * P, row, n, sums + row * P);
    }
    const int64_t r0 = i * P, c0 = j * P;
    const int64_t rows = columns - r0 < P ? columns - r0 : P, cols = columns - c0 < P ? columns - c0 : P;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) {
            h[(r0 + r) * columns + c0 + c] += sums[r * P + c];
            if (i != j) h[(c0 + c) * columns + r0 + r] += sums[r * P + c];
        }
}

} // namespace anybit
#endif
