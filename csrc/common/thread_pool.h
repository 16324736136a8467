// A small pool of sleeping threads that split a range of rows.
#pragma once

#include <cstdint>
#include <type_traits>

namespace anybit {

using RangeFunction = void (*)(void* context, int64_t begin, int64_t end);

// Run `function` over [0, n) in pieces of `grain` on up to `threads` threads, the caller's among them, and
// return when all is done. May be called from several threads at once: one of them gets the pool, the others
// do their work alone. Works in a forked child. `function` must not throw.
void parallel_ranges(int64_t n, int64_t grain, int threads, RangeFunction function, void* context);

// The same for a lambda `f(begin, end)`.
template <typename F> void parallel_for(int64_t n, int64_t grain, int threads, F&& f) {
    using Lambda = std::remove_reference_t<F>;
    const RangeFunction call = [](void* context, int64_t begin, int64_t end) {
        (*static_cast<Lambda*>(context))(begin, end);
    };
    parallel_ranges(n, grain, threads, call, &f);
}

} // namespace anybit
