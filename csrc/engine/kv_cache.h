// The KV-cache: pages of PAGE tokens, each with the blocks and KV heads of a model. Who has which page, its user keeps.
// Blocks with a sliding window may have pages of their own: a text needs few of them at a time.
#pragma once

#include "common/array.h"
#include "common/large_pages.h"
#include "engine/ops.h"

#include <memory>
#include <vector>

namespace anybit {

// Which blocks have pages of their own, and how many of them there are.
struct Windowed {
    std::vector<bool> blocks; // [blocks]; empty: none
    int64_t pages = 0;
};

class KvCache {
public:
    // Memory is taken from the system as pages are written.
    //
    // Throws std::invalid_argument: sizes out of range. std::bad_alloc.
    KvCache(int64_t blocks, int64_t kv_heads, int64_t head_size, int bits, int64_t pages, Windowed windowed = {})
        : format_{bits, head_size}, kv_heads_(kv_heads), windowed_(std::move(windowed.blocks)) {
        if (bits != 16 && bits != 8 && bits != 4) refuse("kv_bits is " + std::to_string(bits) + ": 16, 8 or 4");
        if (windowed_.empty()) windowed_.resize(static_cast<size_t>(blocks));
        if (static_cast<int64_t>(windowed_.size()) != blocks)
            refuse("windowed has " + std::to_string(windowed_.size()) + " blocks, expected " + std::to_string(blocks));
        for (const bool own : windowed_) places_.push_back(groups_[own].blocks++);
        groups_[0].make(*this, "pages", pages);
        groups_[1].make(*this, "window_pages", windowed.pages);
        if (groups_[1].blocks == 0 && windowed.pages != 0) refuse("window_pages, but no block is windowed");
    }

    const KvFormat& format() const { return format_; }
    int64_t blocks() const { return static_cast<int64_t>(places_.size()); }
    int64_t kv_heads() const { return kv_heads_; }
    bool windowed(size_t block) const { return windowed_[block]; }
    int64_t pages(bool windowed) const { return groups_[windowed].pages; }
    int64_t page_bytes(bool windowed) const { return groups_[windowed].blocks * kv_heads_ * format_.page_bytes(); }

    uint8_t* page(int64_t page, int64_t block, int64_t head) const {
        return group(block).memory.get() + index(page, block, head) * format_.page_bytes();
    }
    // What is subtracted from the keys after the first page of a text (`Centres`), kept with its first page.
    // [head_size]; memory is taken as texts begin.
    float* centre(int64_t page, int64_t block, int64_t head) const {
        return group(block).centres.get() + index(page, block, head) * format_.head_size;
    }

private:
    // Blocks that share pages.
    struct Group {
        int64_t blocks = 0, pages = 0;
        Weights memory;
        std::unique_ptr<float[]> centres;

        void make(const KvCache& cache, const char* name, int64_t wanted) {
            if (blocks == 0) return; // all others have the pages
            const int64_t heads = blocks * cache.kv_heads_, bytes = heads * cache.format_.page_bytes();
            check_range(name, wanted, 1, (int64_t(1) << 46) / bytes);
            pages = wanted;
            memory = allocate(static_cast<size_t>(pages * bytes));
            if (cache.format_.bits < 16)
                centres.reset(new float[static_cast<size_t>(pages * heads * cache.format_.head_size)]);
        }
    };

    const Group& group(int64_t block) const { return groups_[windowed_[static_cast<size_t>(block)]]; }
    int64_t index(int64_t page, int64_t block, int64_t head) const {
        return (page * group(block).blocks + places_[static_cast<size_t>(block)]) * kv_heads_ + head;
    }

    KvFormat format_;
    int64_t kv_heads_;
    std::vector<bool> windowed_;
    std::vector<int64_t> places_; // of blocks within their groups
    Group groups_[2];             // blocks with all pages, and those with pages of their own
};

} // namespace anybit
