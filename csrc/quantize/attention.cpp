// Causal attention of many tokens in bfloat16, softmax(q k^T scale) v, on the processor's bf16 dot product
// (AVX512-BF16). Scores, exponentials and sums are float32; weights are rounded to bfloat16 when they multiply values.
// No more than 48 x 128 scores are there at a time, as in FlashAttention (arXiv:2205.14135).
//
// Both products are strips of 6 rows times 64 columns, whose sums stay in registers: queries times pairs of a head's
// numbers, and weights times pairs of keys.
#include "quantize/attention.h"
#include "common/thread_memory.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace anybit {
namespace {

constexpr int64_t QUERIES = ATTENTION_QUERIES, KEYS = ATTENTION_KEYS;
constexpr int64_t TOGETHER = 2 * KEYS; // keys whose scores are there at a time
constexpr int64_t STRIP = 6;           // rows, times 4 vectors: 24 sums in 32 registers
constexpr int64_t LANES = 16;

// Pair p of a row that begins anywhere.
inline __m512bh pair(const void* row, int64_t p) {
    int32_t both;
    std::memcpy(&both, static_cast<const char*>(row) + 4 * p, sizeof both);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

// sums[R, V vectors] += rows of pairs times a panel of pairs, [pairs, width].
template <int R, int V>
inline void strip(const void* const* rows, const uint32_t* panel, int64_t width, int64_t pairs, float* sums,
                  int64_t stride) {
    __m512 s[R][V];
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < V; ++v) s[i][v] = _mm512_loadu_ps(sums + i * stride + v * LANES);
    for (int64_t p = 0; p < pairs; ++p) {
        __m512bh right[V];
        for (int v = 0; v < V; ++v)
            right[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + p * width + v * LANES));
        for (int i = 0; i < R; ++i) {
            const __m512bh left = pair(rows[i], p);
            for (int v = 0; v < V; ++v) s[i][v] = _mm512_dpbf16_ps(s[i][v], left, right[v]);
        }
    }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < V; ++v) _mm512_storeu_ps(sums + i * stride + v * LANES, s[i][v]);
}

// The same for up to STRIP rows and any whole number of vectors.
template <int R>
inline void rows_by_panel(int64_t count, const void* const* rows, const uint32_t* panel, int64_t width, int64_t columns,
                          int64_t pairs, float* sums, int64_t stride) {
    if constexpr (R > 1)
        if (count < R) return rows_by_panel<R - 1>(count, rows, panel, width, columns, pairs, sums, stride);
    int64_t c = 0;
    for (; c + 4 * LANES <= columns; c += 4 * LANES) strip<R, 4>(rows, panel + c, width, pairs, sums + c, stride);
    for (; c < columns; c += LANES) strip<R, 1>(rows, panel + c, width, pairs, sums + c, stride);
}

// e^x of x <= 0, to about 1e-7: 2^n times a polynomial of the rest. NaN stays one.
inline __m512 exponential(__m512 x) {
    const __m512 least = _mm512_set1_ps(-160.0f); // 2^-160 is 0
    const __m512 y = _mm512_max_ps(least, _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
    const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(y, n);
    constexpr float CEPHES[] = {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f,
                                2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f};
    __m512 p = _mm512_set1_ps(1.535336188319500e-4f);
    for (const float c : CEPHES) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, n);
}

// One piece of queries: what is known of each when some of the keys have been looked at.
struct Piece {
    alignas(64) float scores[QUERIES * TOGETHER];
    alignas(64) uint32_t weights[QUERIES * TOGETHER / 2]; // pairs of bfloat16
    alignas(64) float out[QUERIES * MOST_HEAD_SIZE];
    float most[QUERIES], sum[QUERIES];

    // Weights of row i, of its first `seen` scores out of `columns`; what it has so far counts by its largest score.
    void weigh(int64_t i, int64_t seen, int64_t columns, float scale, int64_t size) {
        float* s = scores + i * TOGETHER;
        const __m512 factor = _mm512_set1_ps(scale), none = _mm512_set1_ps(-INFINITY);
        __m512 largest = none;
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = seen - c;
            const auto there = static_cast<__mmask16>(left >= LANES ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
            const __m512 x = _mm512_mask_mul_ps(none, there, _mm512_load_ps(s + c), factor);
            _mm512_store_ps(s + c, x);
            largest = _mm512_max_ps(largest, x);
        }
        const float now = _mm512_reduce_max_ps(largest), before = most[i], top = now > before ? now : before;
        const __m512 tops = _mm512_set1_ps(top);
        __m512 total = _mm512_setzero_ps();
        for (int64_t c = 0; c < columns; c += LANES) {
            const __m512 e = exponential(_mm512_sub_ps(_mm512_load_ps(s + c), tops));
            total = _mm512_add_ps(total, e);
            _mm256_store_si256(reinterpret_cast<__m256i*>(weights + (i * TOGETHER + c) / 2),
                               reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(e)));
        }
        const float keep = ::expf(before - top);
        sum[i] = sum[i] * keep + _mm512_reduce_add_ps(total);
        most[i] = top;
        if (keep == 1.0f) return;
        for (int64_t c = 0; c < size; c += LANES)
            _mm512_store_ps(out + i * size + c,
                            _mm512_mul_ps(_mm512_load_ps(out + i * size + c), _mm512_set1_ps(keep)));
    }
};

} // namespace

bool ready_to_attend() noexcept { return reserve_thread_memory(sizeof(Piece)); }

void pack_attention(const CausalAttention& a, int64_t head) {
    uint32_t* keys = a.key_pairs + head * a.key_words();
    for (int64_t t = 0; t < a.padded_tokens(); ++t) {
        uint32_t* to = keys + t / KEYS * KEYS * a.size / 2 + t % KEYS;
        const uint16_t* from = t < a.tokens ? a.keys.at(head, t) : nullptr;
        for (int64_t p = 0; p < a.size / 2; ++p)
            to[p * KEYS] = from ? from[2 * p] | static_cast<uint32_t>(from[2 * p + 1]) << 16 : 0;
    }
    uint32_t* values = a.value_pairs + head * a.value_words();
    for (int64_t t = 0; t < a.padded_tokens(); t += 2, values += a.padded_size()) {
        const uint16_t* low = t < a.tokens ? a.values.at(head, t) : nullptr;
        const uint16_t* high = t + 1 < a.tokens ? a.values.at(head, t + 1) : nullptr;
        for (int64_t j = 0; j < a.padded_size(); ++j) {
            const bool there = j < a.size;
            values[j] = (there && low ? low[j] : 0) | static_cast<uint32_t>(there && high ? high[j] : 0) << 16;
        }
    }
}

void attend(const CausalAttention& a, int64_t head, int64_t piece) {
    Piece& now = *static_cast<Piece*>(thread_memory(sizeof(Piece)));
    const int64_t first = piece * QUERIES, size = a.padded_size();
    const int64_t count = a.tokens - first < QUERIES ? a.tokens - first : QUERIES, of = head / a.shared;
    const uint32_t *keys = a.key_pairs + of * a.key_words(), *values = a.value_pairs + of * a.value_words();
    const void* rows[QUERIES];
    for (int64_t i = 0; i < count; ++i) {
        rows[i] = a.queries.at(head, first + i);
        now.most[i] = -INFINITY, now.sum[i] = 0;
        for (int64_t c = 0; c < size; ++c) now.out[i * size + c] = 0;
    }
    for (int64_t k = 0; k < first + count; k += TOGETHER) {
        const int64_t left = first + count - k, columns = left > KEYS ? TOGETHER : KEYS;
        for (int64_t c = 0; c < columns; c += KEYS)
            for (int64_t i = 0; i < count; i += STRIP) {
                float* scores = now.scores + i * TOGETHER + c;
                const int64_t strips = count - i < STRIP ? count - i : STRIP;
                for (int64_t r = 0; r < strips; ++r)
                    for (int64_t v = 0; v < KEYS; v += LANES)
                        _mm512_store_ps(scores + r * TOGETHER + v, _mm512_setzero_ps());
                rows_by_panel<STRIP>(strips, rows + i, keys + (k + c) * a.size / 2, KEYS, KEYS, a.size / 2, scores,
                                     TOGETHER);
            }
        for (int64_t i = 0; i < count; ++i) now.weigh(i, first + i + 1 - k, columns, a.scale, size);
        for (int64_t i = 0; i < count; i += STRIP) {
            const void* weights[STRIP];
            const int64_t strips = count - i < STRIP ? count - i : STRIP, last = first + i + strips - k;
            for (int64_t r = 0; r < strips; ++r) weights[r] = now.weights + (i + r) * TOGETHER / 2;
            const int64_t pairs = last <= 0 ? 0 : last < columns ? (last + 1) / 2 : columns / 2;
            rows_by_panel<STRIP>(strips, weights, values + k / 2 * size, size, size, pairs, now.out + i * size, size);
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        uint16_t* to = a.out + ((first + i) * a.heads + head) * a.size;
        const __m512 share = _mm512_set1_ps(1.0f / now.sum[i]);
        for (int64_t c = 0; c < a.size; c += LANES) {
            const int64_t left = a.size - c;
            const auto there = static_cast<__mmask16>(left >= LANES ? 0xffff : (1 << left) - 1);
            const auto halves = reinterpret_cast<__m256i>(
                _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_load_ps(now.out + i * size + c), share)));
            _mm256_mask_storeu_epi16(to + c, there, halves);
        }
        a.log_sums[head * a.tokens + first + i] = now.most[i] + ::logf(now.sum[i]);
    }
}

} // namespace anybit
#endif
