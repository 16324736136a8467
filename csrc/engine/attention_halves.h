// Products of queries and weights with a page of 16 bits.
#pragma once

#include "engine/attention_centres.h"

namespace anybit::ANYBIT_ISA {
namespace {

// One page of a KV head.
struct HalfPage {
    const uint16_t *keys, *values;
    int64_t head_size, n;
    int64_t behind; // numbers from here to the page that comes next

    HalfPage(const KvFormat& format, const uint8_t* page, const uint8_t* next)
        : keys(reinterpret_cast<const uint16_t*>(page)),
          values(reinterpret_cast<const uint16_t*>(page + format.key_bytes())), head_size(format.head_size),
          n(padded(format.head_size)), behind((next - page) / 2) {}

    // Vector v of the tokens' numbers i. What is read is asked for in the page that comes next, too: pages lie too far
    // apart for the processor to see.
    Floats key(int64_t i, int v) const { return load_halves(keys + i * PAGE + v * LANES); }
    void expect_keys(int64_t i) const { __builtin_prefetch(keys + behind + i * PAGE); }
    // Vector v of the numbers of a token.
    Floats value(int64_t token, int64_t v) const { return load_halves(values + token * n + v * LANES); }
    void expect_values(int64_t token, int64_t v) const {
        const uint16_t* at = values + behind + token * n + v * LANES;
        for (int i = 0; i < VALUE_VECTORS * LANES; i += LINE) __builtin_prefetch(at + i);
    }

    static constexpr int VALUE_VECTORS = 4; // of a head's values whose sums are in registers

private:
    static constexpr int LINE = 32; // numbers of a line of the caches
};

#if defined(__AVX512F__)
constexpr int WAYS = 2; // sums of one score, which do not wait for each other
#else
constexpr int WAYS = 1;
#endif

// scores [COUNT, PAGE] = keys and centres times queries.
template <int COUNT, typename Centres>
inline void multiply_keys(const HalfPage& page, const Centres& centres, int64_t p, const Query* queries,
                          float* scores) {
    Floats sums[WAYS][COUNT][VECTORS] = {};
    const auto add = [&](int64_t i, Floats(&to)[COUNT][VECTORS]) {
        Floats keys[VECTORS];
        for (int v = 0; v < VECTORS; ++v) keys[v] = page.key(i, v);
        page.expect_keys(i);
        for (int k = 0; k < COUNT; ++k)
            for (int v = 0; v < VECTORS; ++v) to[k][v] = fused(broadcast(queries[k].plain[i]), keys[v], to[k][v]);
    };
    int64_t i = 0;
    for (; i + WAYS <= page.head_size; i += WAYS)
        for (int w = 0; w < WAYS; ++w) add(i + w, sums[w]);
    for (; i < page.head_size; ++i) add(i, sums[0]);
    for (int k = 0; k < COUNT; ++k)
        for (int v = 0; v < VECTORS; ++v) {
            Floats sum = sums[0][k][v] + centres.at(p, k, v);
            for (int w = 1; w < WAYS; ++w) sum += sums[w][k][v];
            store(scores + k * PAGE + v * LANES, sum);
        }
}

// Weights of a page's values.
struct FloatWeights {
    float factor = 1; // of what was summed before
    float p[PAGE] = {};

    void set(const HalfPage&, const Floats (&from)[VECTORS]) {
        for (int v = 0; v < VECTORS; ++v) store(p + v * LANES, from[v]);
    }
};

// out = out * factor + values times weights, for WIDTH vectors of a head from `v` on.
template <int COUNT, int WIDTH>
inline void add_some_values(const HalfPage& page, const Query* queries, const FloatWeights* weights, Span tokens,
                            int64_t v) {
    Floats sums[COUNT][WIDTH];
    for (int k = 0; k < COUNT; ++k)
        for (int i = 0; i < WIDTH; ++i) sums[k][i] = load(queries[k].out + (v + i) * LANES) * weights[k].factor;
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
        Floats values[WIDTH];
        for (int i = 0; i < WIDTH; ++i) values[i] = page.value(t, v + i);
        page.expect_values(t, v);
        for (int k = 0; k < COUNT; ++k) {
            const Floats p = broadcast(weights[k].p[t]);
            for (int i = 0; i < WIDTH; ++i) sums[k][i] = fused(p, values[i], sums[k][i]);
        }
    }
    for (int k = 0; k < COUNT; ++k)
        for (int i = 0; i < WIDTH; ++i) store(queries[k].out + (v + i) * LANES, sums[k][i]);
}

template <int COUNT>
inline void add_values(const HalfPage& page, const Query* queries, const FloatWeights* weights, Span tokens) {
    const int64_t vectors = page.n / LANES;
    int64_t v = 0;
    for (; v + HalfPage::VALUE_VECTORS <= vectors; v += HalfPage::VALUE_VECTORS)
        add_some_values<COUNT, HalfPage::VALUE_VECTORS>(page, queries, weights, tokens, v);
    for (; v < vectors; ++v) add_some_values<COUNT, 1>(page, queries, weights, tokens, v);
}

} // namespace
} // namespace anybit::ANYBIT_ISA
