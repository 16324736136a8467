// Memory of one step, taken piece by piece and given back in the opposite order.
#pragma once

#include "common/large_pages.h"

#include <algorithm>
#include <vector>

namespace anybit {

class Workspace {
public:
    // Uninitialized, at a cache line. Throws std::bad_alloc.
    template <typename T> T* take(int64_t count) {
        const auto bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        for (; current_ < blocks_.size(); ++current_, used_ = 0)
            if (used_ + bytes <= blocks_[current_].bytes) break;
        if (current_ == blocks_.size()) {
            const size_t size = std::max(bytes, blocks_.empty() ? LEAST : 2 * blocks_.back().bytes);
            blocks_.push_back({allocate(size), size});
        }
        auto* made = blocks_[current_].memory.get() + used_;
        used_ += bytes;
        return reinterpret_cast<T*>(made);
    }

    // What is taken within its life is given back at its end.
    class Frame {
    public:
        explicit Frame(Workspace& memory) : memory_(memory), current_(memory.current_), used_(memory.used_) {}
        Frame(const Frame&) = delete;
        ~Frame() {
            memory_.current_ = current_;
            memory_.used_ = used_;
        }

    private:
        Workspace& memory_;
        size_t current_, used_;
    };

private:
    struct Block {
        Weights memory;
        size_t bytes;
    };
    static constexpr size_t LEAST = size_t(1) << 18;

    std::vector<Block> blocks_;
    size_t current_ = 0, used_ = 0; // where the next piece begins
};

} // namespace anybit
