// How a layer multiplies so many tokens: planned once, then run in parts on the threads of whoever calls.
#pragma once

#include "layer/tile.h"

namespace anybit {

class Layer;
struct Part;

// What becomes of the outputs: float32 that are set, float32 that are added to, or bfloat16 that are set, rounded to
// nearest even from float32.
enum class Written { set, add, rounded };

// A layer's inputs: [tokens, in] of a stride, in numbers. Rounded ones (codes of 8 bits) have scales [tokens, groups].
struct LayerInputs {
    const void* data;
    int64_t stride;
    const float* scales = nullptr;
};

// Its outputs: [tokens, out] of a stride, in numbers; as Written says, one of the two.
struct LayerOutputs {
    float* floats;
    uint16_t* halves;
    int64_t stride;
};

// What steps of a product do, and where what lies between them is. Immutable; its memory is linear in tokens.
class Plan {
public:
    int steps() const { return static_cast<int>(steps_.size()); }
    // Pieces of work of a step, any of which may be done apart from the others.
    int64_t units(int step, int64_t tokens) const;
    // Multiply-adds (or numbers) of a step, about: whether it is worth several threads.
    int64_t work(int step, int64_t tokens) const;
    // Bytes that all threads share, and that each needs for itself.
    int64_t bytes(int64_t tokens) const;
    int64_t own_bytes() const { return own_; }

private:
    friend class Planner;
    friend class Product;

    static constexpr int64_t PLACED_OUTPUTS = 4096; // of a token, that a thread puts in place together

    // What a part of the layer reads: inputs as they came, widened or narrowed, or codes; or what codes stand for.
    enum class Source { floats, halves, codes, restored };

    struct Planned {
        const Part* part;
        Way way;
        Source source;
        bool copied; // what it reads lies apart, though it reads it as it is
        bool placed; // its rows are in no order: those of a token are put in place together
    };

    struct Step {
        enum class Kind { prepare, multiply, place, narrow };
        Kind kind;
        size_t first = 0, last = 0; // parts
        bool sparse = false;        // and the weights beside them
        bool clears = false, narrows = false;
        bool shared = false; // all parts have the same rows, in order; else each has rows that no other has
        int64_t unit = 1;    // of shared rows; of tokens
        int64_t units = 0;   // of rows; where they are placed, pieces of a token's outputs
        int64_t work = 0;    // of a token
    };

    // The shared memory: where regions begin, inputs as floats and as bfloat16, sums, turned inputs; then of each part
    // its inputs, and its outputs where they are placed later.
    enum Region : size_t { BEGINNINGS, FLOATS, HALVES, SUMS, TURNED, PARTS };
    size_t regions() const { return PARTS + 2 * parts_.size(); }
    int64_t region_bytes(size_t region, int64_t tokens) const;

    const Layer* layer_ = nullptr;
    Numbers inputs_ = Numbers::f32;
    Written written_ = Written::set;
    bool widened_ = false;  // inputs are kept as floats: widened, or scaled
    bool narrowed_ = false; // and as bfloat16 again: scaled
    bool cleared_ = false;  // outputs are, beforehand
    bool fresh_ = false;    // the first part of every row sets it
    bool direct_ = false;   // parts round what they write
    bool turned_ = false;   // tokens are lanes for the sparse part
    int64_t token_unit_ = 1;
    int64_t own_ = 0;
    std::vector<Planned> parts_;
    std::vector<Step> steps_;
};

// One product: a plan, and the memory that it works on, which stays where it is meanwhile.
class Product {
public:
    // scratch: plan.bytes(tokens), at a multiple of 64.
    Product(const Layer& layer, const Plan& plan, int64_t tokens, const LayerInputs& x, const LayerOutputs& y,
            void* scratch);

    // What a thread needs for itself to pick and round a token of so many inputs.
    static int64_t own_row_bytes(int64_t in);

    // Units begin <= i < end of a step. own: plan.own_bytes(), at a multiple of 64.
    void run(int step, int64_t begin, int64_t end, void* own) const noexcept;

private:
    struct Row; // one token's inputs, in all their forms
    struct Own; // a thread's memory for what one token becomes

    void prepare(int64_t first, int64_t last, const Own& own) const;
    Row row(int64_t k) const;
    void arrange(size_t p, int64_t k, const Row& row, const Own& own) const;
    void round(const Part& part, const Row& row, const Own& own) const;
    void turn(int64_t first) const;
    void multiply(const Plan::Step& step, int64_t begin, int64_t end, char* own) const;
    void multiply_rows(size_t p, int64_t begin, int64_t end, char* own) const;
    void multiply_sparse(int64_t begin, int64_t end) const;
    void place(size_t p, int64_t k, int64_t piece) const;
    void clear(const int32_t* rows, int64_t begin, int64_t end) const;
    void narrow(const int32_t* rows, int64_t begin, int64_t end) const;

    template <typename T> T* region(size_t region) const {
        return reinterpret_cast<T*>(scratch_ + beginnings_[region]);
    }
    // Where sums go: the outputs, or what is rounded later.
    float* sums() const { return plan_.written_ == Written::rounded ? region<float>(Plan::SUMS) : y_.floats; }
    int64_t sums_stride() const;

    const Layer& layer_;
    const Plan& plan_;
    int64_t tokens_;
    LayerInputs x_;
    LayerOutputs y_;
    char* scratch_;
    int64_t* beginnings_; // of regions, from `scratch_` on
};

} // namespace anybit
