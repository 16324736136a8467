// Memory in large pages, where the system has them: what reads ahead stops at the end of a page, a matrix has more
// pages of 4 KB than the hardware remembers addresses of, and the system takes its time to hand out each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

#include <pthread.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace anybit {

constexpr size_t LARGE_PAGE = size_t(1) << 21;
#if defined(MADV_HUGEPAGE) && !defined(ANYBIT_SANITIZE)
constexpr size_t REGION = LARGE_PAGE * 32;
#else
constexpr size_t REGION = 0; // every tile alone: a sanitizer then sees who reads beyond one
#endif

// The large pages within.
inline void advise_large([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(MADV_HUGEPAGE)
    const auto begin = reinterpret_cast<uintptr_t>(memory), end = (begin + bytes) / LARGE_PAGE * LARGE_PAGE;
    const uintptr_t first = (begin + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE); // all works without
#endif
}

using Weights = std::shared_ptr<uint8_t>;

inline Weights allocate(size_t bytes) {
    const bool large = REGION > 0 && bytes >= LARGE_PAGE;
    const auto alignment = std::align_val_t(large ? LARGE_PAGE : 64);
    const Weights made(static_cast<uint8_t*>(::operator new[](bytes, alignment)),
                       [alignment](uint8_t* p) { ::operator delete[](p, alignment); });
    if (large) advise_large(made.get(), bytes);
    return made;
}

// Memory for a tile, taken as it is filled. Tiles lie one after another in regions, so that small ones have large pages
// too. A region is freed with the last of its tiles; what those before leave is not used again.
inline Weights make_weights(int64_t bytes) {
    struct Regions {
        std::mutex mutex;
        std::weak_ptr<uint8_t> newest;
        size_t used = 0;
    };
    static Regions& regions = *new Regions; // never destroyed: at exit, threads may still make tiles
    // A forked child must not find the mutex locked by a thread that it does not have.
    static const int at_fork =
        pthread_atfork([] { regions.mutex.lock(); }, [] { regions.mutex.unlock(); }, [] { regions.mutex.unlock(); });
    (void)at_fork;
    const size_t needed = static_cast<size_t>(bytes);
    if (needed >= REGION / 2) return allocate(needed);
    const std::lock_guard<std::mutex> lock(regions.mutex);
    Weights region = regions.newest.lock();
    if (!region || REGION - regions.used < needed) {
        try {
            region = allocate(REGION);
        } catch (const std::bad_alloc&) { return allocate(needed); }
        regions.newest = region;
        regions.used = 0;
    }
    const Weights made(region, region.get() + regions.used);
    regions.used += (needed + 63) / 64 * 64; // up to REGION, itself a multiple
    return made;
}

} // namespace anybit
