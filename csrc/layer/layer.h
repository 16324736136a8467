// A linear layer bound to the kernels of one instruction set: the contract between stored weights and whoever
// multiplies with them, the Python module (module/layer_module.cpp) or an engine. Nothing here knows Python, and
// products have no threads of their own.
//
//     Layer layer(layout, fields, options);      // checks and repacks the stored arrays; some of them may go then
//     auto narrow = layer.at(layout_of_a_level); // the same weights at fewer bits: no bytes are copied
//     const Plan& plan = layer.plan(tokens, Numbers::bf16, Written::set); // kept: made at the first call of its kind
//     void* scratch = ...;                       // plan.bytes(tokens), at a multiple of 64; all threads share it
//     Product product(layer, plan, tokens, inputs, outputs, scratch);
//     for (int step = 0; step < plan.steps(); ++step) {
//         // on each of the caller's threads, for parts of [0, plan.units(step, tokens)) that no other has:
//         product.run(step, begin, end, own);    // own: plan.own_bytes() of this thread, at a multiple of 64
//         // a barrier: every part of a step is done before any part of the next
//     }
//
// Most products have two steps: the inputs, put into the kernels' order a token at a time, and the rows. Whatever the
// threads and parts, the bits are the same. One token and its row among as many as a plan of few tokens takes give the
// same bits. `run` does not throw. It allocates nothing on a thread that is warm (`warm_thread`); on another, its first
// product of many tokens allocates what the next ones use again, and ends the process where there is no memory.
#pragma once

#include "layer/layout.h"
#include "layer/part.h"
#include "layer/plan.h"

#include <atomic>
#include <functional>
#include <map>
#include <mutex>

namespace anybit {

constexpr const char* NO_INT8 =
    "this layer scales, picks or rounds its inputs itself, or has no kernel for rounded ones: give it others";

class Tables; // of nested tiles (centroids.h)

using Fields = std::map<std::string, Array>; // the stored arrays by field: "codes", "1.codes", "sparse.values"

// A stored tile in the hands of kernels: one tile of theirs, or two.
struct BoundTile {
    struct Piece {
        std::shared_ptr<const Tile> tile;
        std::shared_ptr<const std::vector<int32_t>> columns; // of the stored tile's; null: all
    };
    std::vector<Piece> pieces;
    std::vector<std::string> repacked;                             // fields that kernels hold in an order of their own
    std::function<void(const Fields& fields, int threads)> unpack; // fills arrays of these
};

class Layer {
public:
    struct Options {
        const MatmulOps* ops = nullptr;       // null: the best of this machine
        bool int8_codebooks = false;          // codebooks by row: inputs and centroids are rounded to 8 bits
        std::shared_ptr<const Tables> tables; // of nested tiles: those of the same instruction set
        int threads = 1;                      // of the process' pool, while weights are put into order
    };

    // Arrays of fields that are not repacked stay referenced, by their keepers; indices are copied.
    //
    // Throws std::invalid_argument: a field that is missing, or of another dtype or shape than the layout says; an
    // index out of range; numbers at odd addresses.
    Layer(const LayerLayout& layout, const Fields& fields, const Options& options);

    // The same weights at fewer bits: nested tiles by the rows that each plane has, codebooks by the width.
    // Microseconds, but for a codebook's tables, which the first plan at a width makes.
    //
    // Throws std::invalid_argument: another layout than that of this layer with less.
    std::shared_ptr<const Layer> at(const LayerLayout& layout) const;

    // Fields that kernels hold in an order of their own: whoever holds the arrays may drop them.
    const std::vector<std::string>& repacked() const { return stored_->repacked; }
    // Fill arrays of these fields with what was given.
    void unpack(const Fields& fields, int threads) const;

    int64_t out() const { return out_; }
    int64_t in() const { return in_; }

    // How so many tokens are multiplied, up to BATCH: more are multiplied a range at a time. Plans live as long as the
    // layer. Written::add is for float32 outputs.
    //
    // Throws std::invalid_argument: more tokens; inputs rounded by the caller where `int8_group_size` is 0.
    const Plan& plan(int64_t tokens, Numbers inputs, Written written) const;

    // Tokens up to which each has the bits that it has alone.
    int64_t few_tokens(Numbers inputs) const;

    // Inputs that share a scale, where the layer multiplies inputs that its caller has rounded to 8 bits: all of them,
    // in groups of this size. 0: it does not, since it scales or picks them itself, or rounds them in another way.
    int64_t int8_group_size() const { return int8_group_size_; }
    // Whether an engine that may round inputs to 8 bits does so for this layer.
    bool takes_codes() const { return int8_group_size_ > 0 && int8_group_size_ <= MOST_SHARED; }
    // Whether it rounds inputs itself, of any part.
    bool rounds_inputs() const;
    // Whether their scales must be whole multiples of one number (InputGrid::multiples).
    bool int8_multiples() const { return int8_multiples_; }

    // out float32 [out, in] = the matrix that is multiplied with, or rounded to bfloat16; on the pool.
    void dequantize(float* out, int threads) const;
    void dequantize(uint16_t* out, int threads) const;
    // Rows of it, float32 [n, in]: of one tile over all inputs, else `has_rows` is false. On the calling thread.
    //
    // Throws std::invalid_argument: an id that is no row; a layer that has none.
    bool has_rows() const;
    void rows(const int64_t* ids, int64_t n, float* out) const;

private:
    friend class Plan;
    friend class Planner;
    friend class Product;

    // What layers at all levels share.
    struct Stored {
        LayerLayout layout;
        std::vector<std::pair<std::string, BoundTile>> tiles; // by the prefix of their fields
        std::vector<std::string> repacked;
        std::vector<float> scale;        // that inputs are multiplied with first; or nothing
        Array values;                    // of the sparse part
        std::vector<uint16_t> columns16; // what was checked stays what the kernels index with
        std::vector<uint32_t> columns32;
        std::vector<int32_t> row_ptr;
        SparseRows sparse{};
    };

    Layer(const Layer& other, const LayerLayout& layout);
    void bind_sparse(Stored& stored, const Fields& fields, int64_t n) const;
    void add_parts(const TileLayout& layout, const BoundTile& bound, const Fields& fields, const std::string& prefix,
                   bool int8_codebook);
    bool parts_are_alone() const;
    int64_t common_group_size() const;
    std::vector<int64_t> token_kinds() const;
    template <typename X> void dequantize_as(X* out, int threads) const;
    void add_sparse_and_scale(float* dense, int threads) const;
    // Whether each part is all there is of its rows, and every row has one.
    bool alone() const { return alone_; }
    const std::vector<float>& scale() const { return stored_->scale; }
    const SparseRows& sparse() const { return stored_->sparse; }

    const MatmulOps& ops_;
    int64_t out_, in_;
    std::shared_ptr<const Stored> stored_;
    std::vector<Part> parts_;
    bool alone_ = false;
    int64_t int8_group_size_ = 0;
    bool int8_multiples_ = false;

    static constexpr int64_t MOST_SHARED = 256; // inputs that share a scale; the largest of more drowns the others
    static constexpr size_t KINDS = 7;
    std::vector<int64_t> kinds_; // of tokens: up to the first, up to the second and so on are multiplied alike
    mutable std::atomic<const Plan*> plans_[3][3][KINDS] = {}; // by inputs, outputs and kind
    mutable std::vector<std::unique_ptr<const Plan>> made_;
    mutable std::mutex planning_;
};

// A tile as its format is stored, of r rows and c columns; `fields` begin with `prefix` (bind.cpp).
BoundTile bind_tile(const TileLayout& layout, int64_t r, int64_t c, int64_t out, const Fields& fields,
                    const std::string& prefix, const Layer::Options& options);

// Let this thread have now what products of many tokens keep for each thread.
//
// Throws std::bad_alloc.
void warm_thread();

} // namespace anybit
