// Outputs of many tokens, written in long runs.
#pragma once

#include "common/simd.h"
#include "matmul/ops.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Outputs of some rows, held until those of a token can be written together. Block by block they would go to as many
// pages of memory as there are tokens, one line to each, which costs more than copying where no cache holds them all.
class Held {
public:
    static constexpr int64_t MOST_ROWS = 128, MEMORY = BATCH * MOST_ROWS * 4;
    static constexpr int64_t MOST_CACHED = int64_t(1) << 20; // bytes of all outputs, other threads' too

    // Of the rows from `first` on. Only outputs that are set, and lie side by side; others go to their places at once.
    Held(const Outputs& y, int64_t tokens, int64_t first, void* memory)
        : y_(y), tokens_(tokens), first_(first), rows_(static_cast<float*>(memory)),
          holds_(y.rows == nullptr && y.fresh && y.rounded == nullptr && tokens * y.stride * 4 > MOST_CACHED) {}

    // Where outputs are made meanwhile, and the row that they begin with there.
    Outputs outputs() const { return holds_ ? Outputs{rows_, MOST_ROWS, true} : y_; }
    int64_t first() const { return holds_ ? first_ : 0; }
    // Rows up to `end` are made: writes them, unless the `more` that come next fit, too. No more come: 0.
    void write_if_full(int64_t end, int64_t more) {
        if (!holds_ || (more > 0 && end + more - first_ <= MOST_ROWS)) return;
        const auto bytes = static_cast<size_t>(end - first_) * 4;
        for (int64_t k = 0; k < tokens_; ++k)
            __builtin_memcpy(y_.sums + k * y_.stride + first_, rows_ + k * MOST_ROWS, bytes);
        first_ = end;
    }

private:
    const Outputs& y_;
    int64_t tokens_, first_;
    float* rows_;
    bool holds_;
};

} // namespace
} // namespace anybit::ANYBIT_ISA
