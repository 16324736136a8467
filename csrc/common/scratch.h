// Memory for what lies between the steps of a product, and ranges split over the pool's threads.
#pragma once

#include "common/large_pages.h"
#include "common/thread_pool.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <new>

namespace anybit {

// Below this many multiply-adds (or weights) a call is over before a second thread has woken up.
constexpr int64_t SERIAL_WORK = 1 << 18;
// How many pieces a range has for each thread, at least and at most; between these one for SERIAL_WORK. Threads take
// several at a time at first and single ones at the end: one that started late or runs slowly holds nobody up.
constexpr int64_t LEAST_PIECES = 4, MOST_PIECES = 16;

// Scratch memory that a thread gave back, to be used again: the system takes milliseconds to hand out what many tokens
// need. What was not used for longest goes first.
class KeptMemory {
public:
    KeptMemory() = default;
    KeptMemory(const KeptMemory&) = delete;
    ~KeptMemory() {
        for (const Block& block : blocks_) ::operator delete[](block.memory, ALIGNMENT);
    }
    // The least block of at least so many bytes, if it is not far larger; else a new one. `bytes` becomes its size.
    float* take(size_t& bytes) {
        Block* found = nullptr;
        for (Block& block : blocks_)
            if (block.bytes >= bytes && block.bytes / 4 <= bytes && (found == nullptr || block.bytes < found->bytes))
                found = &block;
        if (found != nullptr) {
            bytes = found->bytes;
            return remove(found);
        }
        auto* made = static_cast<float*>(::operator new[](bytes, ALIGNMENT));
        advise_large(made, bytes);
        return made;
    }
    void give(float* memory, size_t bytes) noexcept {
        if (bytes < LEAST || bytes > MOST) return ::operator delete[](memory, ALIGNMENT);
        while (blocks_[0].memory != nullptr || all() + bytes > MOST)
            ::operator delete[](remove(std::find_if(blocks_, std::end(blocks_), held)), ALIGNMENT);
        std::move(blocks_ + 1, std::end(blocks_), blocks_);
        blocks_[COUNT - 1] = {memory, bytes};
    }

private:
    struct Block {
        float* memory = nullptr;
        size_t bytes = 0;
    };
    static bool held(const Block& block) { return block.memory != nullptr; }
    size_t all() const {
        size_t bytes = 0;
        for (const Block& block : blocks_) bytes += block.bytes;
        return bytes;
    }
    // The older ones move up.
    float* remove(Block* block) noexcept {
        float* memory = block->memory;
        std::move_backward(blocks_, block, block + 1);
        blocks_[0] = {};
        return memory;
    }

    static constexpr std::align_val_t ALIGNMENT{64};
    static constexpr size_t LEAST = size_t(1) << 17; // bytes of a block; less is the allocator's business
#ifdef ANYBIT_SANITIZE
    static constexpr size_t MOST = 0; // a sanitizer sees who reads beyond a block
#else
    static constexpr size_t MOST = size_t(1) << 25; // bytes of all blocks
#endif
    static constexpr int COUNT = 8;
    Block blocks_[COUNT]; // empty ones first, the newest last
};

inline KeptMemory& kept_memory() {
    thread_local KeptMemory memory;
    return memory;
}

struct Free {
    size_t bytes = 0;
    void operator()(float* p) const { kept_memory().give(p, bytes); }
};
using Scratch = std::unique_ptr<float[], Free>; // to be freed by the thread that made it

inline Scratch make_scratch(int64_t floats) {
    size_t bytes = static_cast<size_t>(floats) * 4;
    float* memory = kept_memory().take(bytes);
    return Scratch(memory, Free{bytes});
}

// Elements from one row of `columns` to the next: an odd number of cache lines, so that no two rows among many compete
// for the same place in a cache.
inline int64_t odd_lines(int64_t columns, int64_t size) { return ((columns * size + 63) / 64 | 1) * 64 / size; }

// Rows that a thread takes at a time at least, a multiple of `block`: all where the work is worth one thread only.
inline int64_t piece_of(int64_t rows, int64_t block, int64_t work, int threads) {
    if (threads == 1 || work < SERIAL_WORK) return rows;
    const int64_t pieces = std::clamp(work / SERIAL_WORK, threads * LEAST_PIECES, threads * MOST_PIECES);
    const int64_t share = (rows + pieces - 1) / pieces;
    return (share + block - 1) / block * block;
}

// f(k) for all tokens (or k of whatever) of `columns` numbers each.
template <typename F> void for_tokens(int64_t m, int64_t columns, int threads, F&& f) {
    parallel_for(m, piece_of(m, 1, m * columns, threads), threads, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) f(k);
    });
}

inline void clear(float* y, int64_t m, int64_t columns, int threads) {
    for_tokens(m, columns, threads, [&](int64_t k) { std::fill_n(y + k * columns, columns, 0.0f); });
}

} // namespace anybit
