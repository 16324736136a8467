// Products on the threads of the process' pool: what Python calls.
#pragma once

#include "common/thread_memory.h"
#include "layer/layer.h"

namespace anybit {

// Any number of tokens: many in turns, so that what lies between takes no more memory the more they are. None is of
// few.
//
// Throws std::bad_alloc; then outputs are undefined.
inline void multiply(const Layer& layer, int64_t tokens, Numbers inputs, const LayerInputs& x, Written written,
                     const LayerOutputs& y, int threads) {
    const int64_t turns = tokens <= BATCH ? 1 : (tokens - 1) / (BATCH - 32) + 1;
    for (int64_t i = 0; i < turns && tokens > 0; ++i) {
        const int64_t first = tokens * i / turns / 32 * 32;
        const int64_t m = (i + 1 == turns ? tokens : tokens * (i + 1) / turns / 32 * 32) - first;
        const Plan& plan = layer.plan(m, inputs, written);
        const Scratch scratch = make_scratch((plan.bytes(m) + 3) / 4);
        LayerInputs from = x;
        from.data = static_cast<const char*>(x.data) + first * x.stride * size_of(inputs);
        if (x.scales != nullptr) from.scales += first * ((layer.in() - 1) / layer.int8_group_size() + 1);
        LayerOutputs to = y;
        if (y.floats != nullptr) to.floats += first * y.stride;
        if (y.halves != nullptr) to.halves += first * y.stride;
        const Product product(layer, plan, m, from, to, scratch.get());
        const int64_t own = plan.own_bytes();
        warm_thread();
        thread_memory(own, OWN_MEMORY);
        const auto ready = [own] {
            return reserve_thread_memory(GEMM_MEMORY) && reserve_thread_memory(own, OWN_MEMORY);
        };
        for (int step = 0; step < plan.steps(); ++step) {
            const int64_t units = plan.units(step, m), piece = piece_of(units, 1, plan.work(step, m), threads);
            const auto part = [&](int64_t begin, int64_t end) {
                product.run(step, begin, end, thread_memory(own, OWN_MEMORY));
            };
            parallel_for(units, std::max(int64_t(1), piece), threads, part, ready);
        }
    }
}

} // namespace anybit
