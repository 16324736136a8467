// The KV-cache: pages of PAGE tokens, each with all blocks and KV heads of a model. Who has which page, its user keeps.
#pragma once

#include "common/array.h"
#include "common/large_pages.h"
#include "engine/ops.h"

#include <memory>

namespace anybit {

class KvCache {
public:
    // Memory is taken from the system as pages are written.
    //
    // Throws std::invalid_argument: sizes out of range. std::bad_alloc.
    KvCache(int64_t blocks, int64_t kv_heads, int64_t head_size, int bits, int64_t pages)
        : format_{bits, head_size}, blocks_(blocks), kv_heads_(kv_heads), pages_(pages) {
        if (bits != 16 && bits != 8 && bits != 4) refuse("kv_bits is " + std::to_string(bits) + ": 16, 8 or 4");
        check_range("pages", pages, 1, (int64_t(1) << 46) / page_bytes());
        memory_ = allocate(static_cast<size_t>(pages * page_bytes()));
        if (bits < 16) centres_.reset(new float[static_cast<size_t>(pages * blocks * kv_heads * head_size)]);
    }

    const KvFormat& format() const { return format_; }
    int64_t blocks() const { return blocks_; }
    int64_t kv_heads() const { return kv_heads_; }
    int64_t pages() const { return pages_; }
    int64_t page_bytes() const { return blocks_ * kv_heads_ * format_.page_bytes(); }
    uint8_t* page(int64_t page, int64_t block, int64_t head) const {
        return memory_.get() + ((page * blocks_ + block) * kv_heads_ + head) * format_.page_bytes();
    }

    // What the keys after the first page of a text are less (`Centres`), kept with its first page. [head_size]; memory
    // is taken as texts begin.
    float* centre(int64_t page, int64_t block, int64_t head) const {
        return centres_.get() + ((page * blocks_ + block) * kv_heads_ + head) * format_.head_size;
    }

private:
    KvFormat format_;
    int64_t blocks_, kv_heads_, pages_;
    Weights memory_;
    std::unique_ptr<float[]> centres_;
};

} // namespace anybit
