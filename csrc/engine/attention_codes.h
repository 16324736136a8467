// Products of queries and weights with a page of codes, as integers. Queries, and weights with the values' scales, are
// rounded to two digits of 7 bits. That loses about a twentieth of what codes of 8 bits have lost, and far less beside
// codes of 4 bits. Each digit meets the codes in dot products of bytes; their sums are exact.
#pragma once

#include "common/dot_int8.h"
#include "engine/attention_centres.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Numbers of +-MOST as DIGIT * high + low: high in -DIGIT to DIGIT - 1, low in 0 to DIGIT - 1.
constexpr int DIGIT = 128;
constexpr float MOST = DIGIT * DIGIT - 1;
constexpr float TINY = 1e-30f; // numbers up to here count as 0: MOST / number stays a number

inline void store_bytes(int8_t* to, Ints values) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(values)));
#else
    for (int l = 0; l < LANES; ++l) to[l] = static_cast<int8_t>(values[l]);
#endif
}

inline void store_digits(int8_t* high, int8_t* low, Floats x, float inverse) {
    const Ints whole = __builtin_convertvector((x * inverse + 0x1.8p23f) - 0x1.8p23f, Ints);
    store_bytes(high, whole >> 7);
    store_bytes(low, whole & (DIGIT - 1));
}

inline Floats joined(Ints high, Ints low) { return fused(to_float(high), broadcast(DIGIT), to_float(low)); }

RoundedQuery round_query(const float* query, int64_t n, int8_t* digits) {
    Floats most{}, total{};
    for (int64_t i = 0; i < n; i += LANES) {
        const Floats v = load(query + i);
        most = greater(v < 0 ? -v : v, most);
        total += v;
    }
    RoundedQuery made{digits, 0, reduce(total)};
    const float largest = largest_of(most);
    const bool finite = made.total - made.total == 0; // a sum that overflows is none either
    if (!finite || largest < TINY) {
        for (int64_t i = 0; i < 2 * n; ++i) digits[i] = 0;
        made.scale = finite ? 0 : __builtin_nanf("");
        return made;
    }
    made.scale = largest / MOST;
    for (int64_t i = 0; i < n; i += LANES) store_digits(digits + i, digits + n + i, load(query + i), MOST / largest);
    return made;
}

// One page of a KV head.
template <int WIDTH> struct CodePage {
    static constexpr int BITS = WIDTH, PARTS = 8 / BITS; // codes of a byte

    const uint8_t *keys, *values;
    const uint16_t* scales;
    int64_t n, row; // numbers and bytes of a token
    int64_t behind; // bytes from here to the page that comes next

    CodePage(const KvFormat& format, const uint8_t* page, const uint8_t* next)
        : keys(page), values(page + format.key_bytes()), scales(format.scales(page)), n(padded(format.head_size)),
          row(format.row_bytes()), behind(next - page) {}

    // The codes of some bytes: of the first or the second half of the tokens' numbers.
    static Codes part_of(Codes bytes, int part) {
        if constexpr (BITS == 8) return bytes;
        else return part == 0 ? bytes & fill(15) : bytes >> 4;
    }
    static Ints add(Ints sums, Codes codes, const int8_t* digits) {
        if constexpr (BITS == 8) return dot(sums, codes, broadcast_four(digits));
        else return dot_small(sums, codes, broadcast_four(digits));
    }
    // The bytes at `from`; those of the page that comes next will be read soon, which lies too far away for the
    // processor to see.
    Codes read(const uint8_t* from) const {
        __builtin_prefetch(from + behind);
        return load_as<Codes>(from);
    }
    Floats key_scale(int v) const { return load_halves(scales + v * LANES); }
    Floats key_least(int v) const { return load_halves(scales + PAGE + v * LANES); }
    Floats value_scale(int v) const { return load_halves(scales + 2 * PAGE + v * LANES); }
    Floats value_least(int v) const { return load_halves(scales + 3 * PAGE + v * LANES); }
};

// scores [COUNT, PAGE] = keys and centres times queries.
template <int COUNT, int BITS>
inline void multiply_keys(const CodePage<BITS>& page, const CentreScores<COUNT>& centres, int64_t p,
                          const Query* queries, float* scores) {
    constexpr int SOME = 2; // vectors of tokens whose sums are in registers
    for (int first = 0; first < VECTORS; first += SOME) {
        Ints high[COUNT][SOME] = {}, low[COUNT][SOME] = {};
        for (int64_t i = 0; i < page.row; i += 4)
            for (int v = 0; v < SOME; ++v) {
                const Codes bytes = page.read(page.keys + KvFormat::key_place(i, (first + v) * LANES));
                for (int part = 0; part < page.PARTS; ++part) {
                    const Codes codes = page.part_of(bytes, part);
                    for (int k = 0; k < COUNT; ++k) {
                        const int8_t* digits = queries[k].codes.digits + part * page.row + i;
                        high[k][v] = page.add(high[k][v], codes, digits);
                        low[k][v] = page.add(low[k][v], codes, digits + page.n);
                    }
                }
            }
        for (int k = 0; k < COUNT; ++k)
            for (int v = 0; v < SOME; ++v) {
                const RoundedQuery& query = queries[k].codes;
                const Floats sum = joined(high[k][v], low[k][v]) * query.scale;
                const Floats minima =
                    fused(page.key_least(first + v), broadcast(query.total), centres.at(p, k, first + v));
                store(scores + k * PAGE + (first + v) * LANES, fused(sum, page.key_scale(first + v), minima));
            }
    }
}

// Weights of a page's values: those times the values' scales are scale * (128 high + low).
struct RoundedWeights {
    float factor = 1; // of what was summed before
    float least = 0;  // sum of weights times the values' minima
    float scale = 0;
    int8_t high[PAGE] = {}, low[PAGE] = {};

    template <int BITS> void set(const CodePage<BITS>& page, const Floats (&p)[VECTORS]) {
        Floats scaled[VECTORS], minima{}, most{}, sum{};
        for (int v = 0; v < VECTORS; ++v) { // what was never written may be NaN
            scaled[v] = p[v] > 0.0f ? p[v] * page.value_scale(v) : Floats{};
            minima += p[v] > 0.0f ? p[v] * page.value_least(v) : Floats{};
            most = greater(scaled[v], most);
            sum += scaled[v];
        }
        least = reduce(minima);
        const float largest = largest_of(most), all = reduce(sum);
        if (!(all - all == 0)) scale = __builtin_nanf("");
        if (!(all - all == 0) || largest < TINY) return;
        scale = largest / MOST;
        for (int v = 0; v < VECTORS; ++v) store_digits(high + v * LANES, low + v * LANES, scaled[v], MOST / largest);
    }
};

// out = out * factor + values times weights, for UNITS vectors of a token's bytes from `v` on.
template <int COUNT, int UNITS, int BITS>
inline void add_some_values(const CodePage<BITS>& page, const Query* queries, const RoundedWeights* weights,
                            Span tokens, int64_t v) {
    constexpr int PARTS = CodePage<BITS>::PARTS;
    Ints high[COUNT][UNITS][PARTS] = {}, low[COUNT][UNITS][PARTS] = {};
    for (int64_t t = tokens.begin / 4 * 4; t < tokens.end; t += 4)
        for (int u = 0; u < UNITS; ++u) {
            const Codes bytes = page.read(page.values + t * page.row + (v + u) * BYTES);
            for (int part = 0; part < PARTS; ++part) {
                const Codes codes = page.part_of(bytes, part);
                for (int k = 0; k < COUNT; ++k) {
                    high[k][u][part] = page.add(high[k][u][part], codes, weights[k].high + t);
                    low[k][u][part] = page.add(low[k][u][part], codes, weights[k].low + t);
                }
            }
        }
    for (int k = 0; k < COUNT; ++k)
        for (int u = 0; u < UNITS; ++u)
            for (int part = 0; part < PARTS; ++part) {
                float* out = queries[k].out + part * page.row + (v + u) * LANES;
                const Floats before = fused(load(out), broadcast(weights[k].factor), broadcast(weights[k].least));
                store(out, fused(joined(high[k][u][part], low[k][u][part]), broadcast(weights[k].scale), before));
            }
}

template <int COUNT, int BITS>
inline void add_values(const CodePage<BITS>& page, const Query* queries, const RoundedWeights* weights, Span tokens) {
#if defined(__AVX512F__)
    constexpr int SUMS = 16; // in registers
#else
    constexpr int SUMS = 8;
#endif
    constexpr int FIT = SUMS / (2 * COUNT * CodePage<BITS>::PARTS), UNITS = FIT < 1 ? 1 : FIT > 4 ? 4 : FIT;
    const int64_t vectors = page.row / LANES;
    int64_t v = 0;
    for (; v + UNITS <= vectors; v += UNITS) add_some_values<COUNT, UNITS>(page, queries, weights, tokens, v);
    for (; v < vectors; ++v) add_some_values<COUNT, 1>(page, queries, weights, tokens, v);
}

} // namespace
} // namespace anybit::ANYBIT_ISA
