// What a decoder computes beside its matrices, in every instruction set: norms, rotary embeddings, activations and
// attention over a quantized KV-cache. Raw pointers only: whoever calls them has checked shapes and bounds.
//
// Every number of an output depends on its own token's inputs alone and is summed in one fixed order, so its bits do
// not depend on the other tokens of a step, on threads, or on how a prompt is cut into chunks.
#pragma once

#include "common/dispatch.h"

#include <cstdint>

namespace anybit {

enum class Activation { silu, gelu, gelu_tanh, relu };

constexpr int64_t PAGE = 32;     // tokens of a page of the KV-cache
constexpr int64_t SPLIT = 256;   // tokens of the KV axis that one thread attends to: sums have one order
constexpr int64_t PART = 16;     // numbers before the values of a part of attention: largest, sum, and nothing
constexpr int64_t HEAD_PAD = 32; // a head is padded with zeros to a multiple of so many numbers

constexpr int64_t padded(int64_t head_size) { return (head_size + HEAD_PAD - 1) / HEAD_PAD * HEAD_PAD; }

// How one KV head's keys and values of a page lie. With 16 bits: float16 keys [head_size, PAGE], so that tokens are
// lanes, then values [PAGE, padded]. With 8 and 4 bits: codes in fours, as dot products of bytes read them. Keys are
// [row / 4, PAGE, 4], four numbers of a token; values are [PAGE / 4, row, 4], a number of four tokens. Behind them
// stand four float16 arrays [PAGE]: scale and minimum of the keys, scale and minimum of the values, of each token. Of 4
// bits one byte holds numbers i (low) and i + row (high) of a token.
struct KvFormat {
    int bits = 16;
    int64_t head_size = 0;

    int64_t row_bytes() const { return padded(head_size) * bits / 8; } // of a token's codes
    int64_t key_bytes() const { return bits == 16 ? head_size * 2 * PAGE : row_bytes() * PAGE; }
    int64_t value_bytes() const { return row_bytes() * PAGE; }
    int64_t scale_bytes() const { return bits == 16 ? 0 : 4 * PAGE * 2; }
    int64_t page_bytes() const { return key_bytes() + value_bytes() + scale_bytes(); }

    // Where byte i of a token's codes lies.
    static int64_t key_place(int64_t i, int64_t token) { return (i / 4 * PAGE + token) * 4 + i % 4; }
    int64_t value_place(int64_t i, int64_t token) const { return (token / 4 * row_bytes() + i) * 4 + token % 4; }

    uint16_t* scales(uint8_t* page) const { return reinterpret_cast<uint16_t*>(page + key_bytes() + value_bytes()); }
    const uint16_t* scales(const uint8_t* page) const {
        return reinterpret_cast<const uint16_t*>(page + key_bytes() + value_bytes());
    }
};

// What is subtracted from keys before they are rounded: a key at position t, as it was before its rotary embedding, is
// thought of as a constant, the centre, and a rest. Only the rest is rounded: key - R(t) centre, with R the rotation by
// the angles of a position. R(t) is that of the page's first position, then that of the place within the page: whoever
// writes and whoever reads use the same tables, so that what was taken away is what is put back.
struct Centres {
    const float* first = nullptr;   // [head_size]: of the page of position 0; null: none
    const float* others = nullptr;  // [head_size]: of all other pages; null: none
    const float* starts = nullptr;  // [pages, 2, half]: cosines and sines of pages' first positions
    const float* offsets = nullptr; // [2, half, PAGE]: of the places within a page
    int64_t half = 0;               // numbers from 2 half on are not turned
};

// A query as bytes: its numbers, turned as the keys are, are scale * (128 high + low), to 15 bits.
struct RoundedQuery {
    const int8_t* digits = nullptr; // [2, padded]: high, low
    float scale = 0;
    float total = 0; // sum of the numbers
};

// One query head of one token, multiplied with the softmax scale.
struct Query {
    const float* plain; // [head_size]: not turned as keys of 8 and 4 bits are
    RoundedQuery codes; // for those
    float* out;         // [padded]: sum of p v, not divided
    float* largest;     // of the scores
    float* sum;         // of p = exp(score - largest)
    int64_t begin, end; // positions that it attends to, of those of the split
};

// The pages of one KV head over a split.
struct KvPages {
    KvFormat format;
    const uint8_t* const* pages; // of the positions first, first + PAGE, ...; then that which is read next
    int64_t first;               // a multiple of PAGE
    float softcap;               // scores become softcap * tanh(score / softcap); 0: as they are
    Centres centres;             // `starts` begins with the page of `first`
};

// All that one instruction set has; made by `make_engine_ops` (ops.cpp), found by `engine_ops` (common/dispatch.h).
struct EngineOps {
    // y = x / sqrt(mean(x^2) + epsilon) * weight, n numbers each; returns the mean. x and y may be the same.
    float (*rms_norm)(const float* x, const float* weight, int64_t n, float epsilon, float* y);
    // x [2 half] by pairs (i, i + half): the rotation by an angle whose cosine and sine stand at i.
    void (*rotate)(float* x, const float* cosines, const float* sines, int64_t half);
    // y = activation(gate) * up.
    void (*gate)(Activation, const float* gate, const float* up, int64_t n, float* y);
    // x = cap * tanh(x / cap).
    void (*softcap)(float* x, int64_t n, float cap);
    // x = x H / sqrt(size), its own inverse: all of n where that is a power of 2, or one times 12 or 20, else blocks of
    // the greatest power of 2 in it.
    void (*hadamard)(float* x, int64_t n);
    // Write keys and values [head_size] of the token at a slot of a page. Codes: those of the range of the token's
    // head.
    void (*store)(const KvFormat&, uint8_t* page, int64_t slot, const float* key, const float* value);
    // Rounds a query [n = padded] to digits [2, n]; where it is not finite the scale is NaN.
    RoundedQuery (*round_query)(const float* query, int64_t n, int8_t* digits);
    // The key [head_size] of a token, from its codes.
    void (*load_key)(const KvFormat&, const uint8_t* page, int64_t slot, float* key);
    // Attend for some queries that share a KV head.
    void (*attend)(const KvPages&, const Query* queries, int64_t count);
    // out [n] = what the splits' parts have together, divided. A part: PART + n numbers, `stride` from the last one.
    void (*combine)(const float* parts, int64_t stride, int64_t count, int64_t n, float* out);
};

} // namespace anybit
