// A small pool of sleeping threads that split a range of rows.
#pragma once

#include <cstdint>
#include <type_traits>

namespace anybit {

using RangeFunction = void (*)(void* context, int64_t begin, int64_t end) noexcept;
using ReadyFunction = bool (*)(void* context) noexcept;

// Run `function` over [0, n) in pieces of a multiple of `grain`, the last ones the smallest, on up to `threads`
// threads, the caller's among them, and return when all is done. May be called from several threads at once: one of
// them gets the pool, the others do their work alone. Works in a forked child. Every other thread is asked first
// whether it is ready, where that is asked: one that is not does nothing.
//
// Throws std::bad_alloc, before anything is done.
void parallel_ranges(int64_t n, int64_t grain, int threads, RangeFunction function, void* context,
                     ReadyFunction ready = nullptr);

// The same for a lambda `f(begin, end)` that does not throw: what it may want, such as memory, is got beforehand.
template <typename F> void parallel_for(int64_t n, int64_t grain, int threads, F&& f) {
    using Lambda = std::remove_reference_t<F>;
    const RangeFunction call = [](void* context, int64_t begin, int64_t end) noexcept {
        (*static_cast<Lambda*>(context))(begin, end);
    };
    parallel_ranges(n, grain, threads, call, &f);
}

// And with a lambda `ready()`, by which each thread gets what it wants for itself.
template <typename F, typename R> void parallel_for(int64_t n, int64_t grain, int threads, F&& f, R&& ready) {
    struct Both {
        std::remove_reference_t<F>& f;
        std::remove_reference_t<R>& ready;
    } both{f, ready};
    const RangeFunction call = [](void* context, int64_t begin, int64_t end) noexcept {
        static_cast<Both*>(context)->f(begin, end);
    };
    const ReadyFunction ask = [](void* context) noexcept -> bool { return static_cast<Both*>(context)->ready(); };
    parallel_ranges(n, grain, threads, call, &both, ask);
}

} // namespace anybit
