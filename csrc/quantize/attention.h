// Causal attention of bfloat16; see attention.cpp. Only where `cpu_features` has AVX512-BF16.
#pragma once

#include <cstdint>

namespace anybit {

constexpr int64_t ATTENTION_QUERIES = 48; // that one piece of work is for
constexpr int64_t ATTENTION_KEYS = 64;    // that lie together
constexpr int64_t MOST_HEAD_SIZE = 256;   // numbers of a head; Python has it as `_native.MOST_HEAD_SIZE`

// What is inline here runs only where the processor was asked before: it may be compiled for AVX-512.

// bfloat16 [heads, tokens, size] in memory: strides in elements, the numbers of a head side by side.
struct Heads {
    const uint16_t* data;
    int64_t head_stride, token_stride;

    const uint16_t* at(int64_t head, int64_t token) const { return data + head * head_stride + token * token_stride; }
};

struct CausalAttention {
    Heads queries, keys, values;
    int64_t heads, shared; // of queries, and how many of them share a head of keys
    int64_t tokens, size;  // `size` is even
    float scale;
    uint16_t* out;       // [tokens, heads, size]
    float* log_sums;     // [heads, tokens]: of the exponentials of each query's scores
    uint32_t* key_pairs; // [heads / shared, key words], `value_pairs` [heads / shared, value words]: scratch
    uint32_t* value_pairs;

    int64_t key_words() const { return padded_tokens() * size / 2; }
    int64_t value_words() const { return padded_tokens() / 2 * padded_size(); }
    int64_t padded_tokens() const { return (tokens + ATTENTION_KEYS - 1) / ATTENTION_KEYS * ATTENTION_KEYS; }
    int64_t padded_size() const { return (size + 15) / 16 * 16; }
    int64_t pieces() const { return (tokens + ATTENTION_QUERIES - 1) / ATTENTION_QUERIES; } // of a head
};

// Fill `key_pairs` and `value_pairs` of one head of keys: first, and of all heads.
void pack_attention(const CausalAttention& a, int64_t head);

// Whether this thread has the memory that `attend` takes; it is there from then on.
bool ready_to_attend() noexcept;

// What the queries of one piece attend to, in `out` and `log_sums`. The last piece of a head takes longest. A value
// that is no number may spoil up to 5 queries before it.
void attend(const CausalAttention& a, int64_t head, int64_t piece);

} // namespace anybit
