// A part of a layer: a tile, and what it reads of the layer's inputs.
#pragma once

#include "layer/tile.h"

namespace anybit {

// The inputs that a tile reads, in its order.
class Gather {
public:
    explicit Gather(std::vector<int32_t> columns) : columns_(std::move(columns)) {
        for (int32_t j : columns_)
            if (runs_.empty() || j != runs_.back().first + runs_.back().count) runs_.push_back({j, 1});
            else ++runs_.back().count;
        if (runs_.size() * LEAST_RUN > columns_.size()) runs_.clear();
    }

    template <typename X> void pick(const X* from, X* to) const {
        if (runs_.empty())
            for (int32_t j : columns_) *to++ = from[j];
        for (const Run& run : runs_) to = std::copy_n(from + run.first, run.count, to);
    }

    const std::vector<int32_t>& columns() const { return columns_; }

private:
    struct Run { // inputs beside each other
        int32_t first, count;
    };
    static constexpr size_t LEAST_RUN = 8; // inputs beside each other, on average, that are copied as such

    std::vector<int32_t> columns_;
    std::vector<Run> runs_; // the same, where that makes few
};

constexpr uint16_t WHOLE_RANGE = 0x3c00; // a clip of 1, in float16

// How a tile's inputs are rounded: to `clip` shares of a group's largest, or to `fixed` scales, one of the two.
struct Rounding {
    int bits = 8;
    int64_t group_size = 0;
    std::vector<uint16_t> clip, fixed; // float16
    bool multiples = false;            // of one number (InputGrid)

    InputGrid grid(int64_t columns) const {
        return {
            bits,     columns, group_size, clip.empty() ? nullptr : clip.data(), fixed.empty() ? nullptr : fixed.data(),
            multiples};
    }
    // What the codes of a token stand for.
    void restore(const int8_t* codes, const float* scales, int64_t columns, float* to) const {
        for (int64_t j = 0; j < columns; ++scales)
            for (const int64_t end = std::min(columns, j + group_size); j < end; ++j)
                to[j] = static_cast<float>(codes[j]) * *scales;
    }
    // Whether an engine that rounds inputs to 8 bits in such groups does the same.
    bool is_plain(int64_t size) const {
        const bool whole = std::all_of(clip.begin(), clip.end(), [](uint16_t c) { return c == WHOLE_RANGE; });
        return bits == 8 && group_size == size && fixed.empty() && whole;
    }
    bool operator==(const Rounding& other) const {
        return bits == other.bits && group_size == other.group_size && clip == other.clip && fixed == other.fixed &&
               multiples == other.multiples;
    }
};

struct Part {
    std::shared_ptr<const Tile> tile;
    std::shared_ptr<const Gather> gather;     // null: all inputs
    std::shared_ptr<const Rounding> rounding; // null: inputs as they come
    bool rounds_alike = false;                // as the part before

    // What it reads of a token: the inputs themselves, or `to`, which they are copied to.
    template <typename X> const X* pick(const X* from, X* to) const {
        if (gather == nullptr) return from;
        gather->pick(from, to);
        return to;
    }
};

} // namespace anybit
