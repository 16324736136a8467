// Products of some layers with the same tokens, in common steps on the process' pool: the fewer steps, the less
// waiting.
#pragma once

#include "engine/workspace.h"
#include "layer/layer.h"

#include <initializer_list>

namespace anybit {

// y [tokens, out] = x [tokens, in] @ W^T in float32, or added to y.
struct Multiplication {
    const Layer& layer;
    const float* x;
    float* y;
    bool add = false;
};

struct Arithmetic {
    bool int8_inputs = false; // layers get inputs of 8 bits where they take them (`Layer::takes_codes`)
    // Every token has the bits that it has alone: layers multiply as many at a time as share them. Else as many as they
    // can, which is faster where many tokens share the decoding of a weight.
    bool batch_invariant = true;
};

// Throws std::bad_alloc; then outputs are undefined.
void multiply(std::initializer_list<Multiplication> all, int64_t tokens, Arithmetic arithmetic, Workspace& memory,
              int threads);

} // namespace anybit
