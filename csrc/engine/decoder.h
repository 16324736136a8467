// A decoder-only transformer on stored layers: one call computes one step, which is some tokens of some sequences, at
// any positions. The model's description comes from whoever reads its configuration (src/anybit/engine/description.py).
//
// A block has five phases, between which threads wait for each other: products of queries, keys and values; attention;
// the product of its outputs; products of gate and up; the product of down. What lies between them is done by the
// calling thread where one token makes it too little to share.
#pragma once

#include "engine/kv_cache.h"
#include "engine/products.h"

#include <memory>
#include <mutex>

namespace anybit {

// Rotary embeddings of one kind: angles are position * frequencies[i] for the pairs (i, i + count), cosines and sines
// multiplied with `scale`. What is beyond the pairs is left as it is.
struct Rope {
    std::vector<float> frequencies;
    float scale = 1;
};

struct BlockSpec {
    int64_t window = 0; // positions that a token attends to, its own among them; 0: all before
    int64_t rope = -1;  // which of the decoder's; -1: none
    // Weights of norms; empty: none. Those behind are of outputs before they are added to the residual.
    std::vector<float> attention_norm, post_attention_norm, mlp_norm, post_mlp_norm, q_norm, k_norm;
    std::vector<float> q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias; // empty: none
};

struct DecoderSpec {
    int64_t vocabulary = 0, hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_size = 0;
    Activation activation = Activation::silu;
    float epsilon = 0;                              // of norms
    float softmax_scale = 0, attention_softcap = 0; // 0: no cap
    float embedding_scale = 1, logit_softcap = 0;
    std::vector<Rope> ropes;
    std::vector<BlockSpec> blocks;
    std::vector<float> final_norm;

    // Throws std::invalid_argument: sizes that do not belong together.
    void check() const;
};

using SharedLayer = std::shared_ptr<const Layer>;

// The matrices at one of a model's levels. Where embedding and head are tied they are the same layer.
struct DecoderWeights {
    struct Block {
        SharedLayer q, k, v, o, gate, up, down;
    };
    SharedLayer embedding, head;
    std::vector<Block> blocks;
};

// Tokens to run: rows. Those of a sequence stand together, at ascending positions; what comes before them in the
// sequence is in the cache, at the same level or another.
struct Step {
    const int32_t *tokens, *positions, *sequences; // [rows]; which of the sequences a row belongs to
    int64_t rows;
    // [sequences, row_pages]: pages of each sequence in the cache, in order; and those of blocks that have their own.
    // There, entries that the window has passed may name pages that are used again; the first one stays. Pages that a
    // step writes are different ones.
    const int32_t *pages, *window_pages;
    int64_t sequences_count, row_pages;
    const int32_t* wanted; // [wanted_count]: rows whose logits are asked for
    int64_t wanted_count;
    float* logits;               // [wanted_count, vocabulary]
    bool batch_invariant = true; // see `Arithmetic`
};

class Decoder {
public:
    // int8_inputs: inputs of layers that take such are rounded to 8 bits (`Layer::takes_codes`). ops: what lies between
    // the layers.
    //
    // Throws std::invalid_argument: a description whose sizes do not belong together.
    Decoder(DecoderSpec spec, bool int8_inputs, const EngineOps& ops);

    // Throws std::invalid_argument: layers of other shapes than the description says.
    size_t add_level(DecoderWeights weights);

    const DecoderSpec& spec() const { return spec_; }

    // One step at a level. One caller at a time, others wait.
    //
    // Throws std::invalid_argument: tokens, positions, rows or pages out of range. NotFinite. std::bad_alloc: then the
    // cache is undefined at these positions.
    void step(const Step& step, size_t level, KvCache& cache, int threads);

    // A hidden state or a logit that is NaN or Inf.
    struct NotFinite : std::runtime_error {
        using std::runtime_error::runtime_error;
    };

private:
    class Run;

    void check(const Step& step, const KvCache& cache) const;
    void reach(int64_t pages);

    const DecoderSpec spec_;
    const bool int8_inputs_;
    const EngineOps& ops_;
    std::vector<DecoderWeights> levels_;
    std::mutex alone_;
    Workspace memory_;
    // Of each rope, for `Centres`: places within a page, and pages' first positions, as far as they were asked for.
    std::vector<std::vector<float>> offsets_, starts_;
};

} // namespace anybit
