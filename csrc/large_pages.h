// Memory of weights in large pages, where the system has them: what reads ahead stops at the end of a page, and a
// matrix has more pages of 4 KB than the hardware remembers addresses of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace anybit {

constexpr size_t LARGE_PAGE = size_t(1) << 21;
#if defined(ANYBIT_SANITIZE)
constexpr size_t REGION = 0; // every tile alone, so that reading beyond one is seen
#else
constexpr size_t REGION = LARGE_PAGE * 32;
#endif

using Weights = std::shared_ptr<uint8_t>;

// Memory for a tile. Tiles lie one after another in regions, so that small ones have large pages too; a region is freed
// with the last of its tiles, and takes memory as it is filled.
inline Weights make_weights(int64_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<uint8_t> newest;
    static size_t used = 0, size = 0;
    const size_t needed = (static_cast<size_t>(bytes) + 63) / 64 * 64;
    const std::lock_guard<std::mutex> lock(mutex);
    Weights region = newest.lock();
    if (!region || size - used < needed) {
        constexpr auto alignment = std::align_val_t(LARGE_PAGE);
        const size_t pages = std::max(REGION, (needed + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE);
        size = REGION == 0 ? needed : pages;
        used = 0;
        region.reset(static_cast<uint8_t*>(::operator new[](size, alignment)),
                     [](uint8_t* p) { ::operator delete[](p, alignment); });
#if defined(__linux__)
        if (REGION > 0) madvise(region.get(), size, MADV_HUGEPAGE); // advice: without them all works
#endif
        newest = region;
    }
    const Weights made(region, region.get() + used);
    used += needed;
    return made;
}

} // namespace anybit
