#include "engine/products.h"

#include "common/thread_memory.h"

namespace anybit {
namespace {

// Products of one layer with ranges of tokens that it multiplies alike: they have the same steps and units, and a piece
// of the weights is read once for all of them.
struct Alike {
    const Plan* plan;
    int64_t tokens; // of each
    std::vector<Product> products;

    int64_t units(int step) const { return step < plan->steps() ? plan->units(step, tokens) : 0; }
    int64_t work(int step) const {
        return step < plan->steps() ? plan->work(step, tokens) * static_cast<int64_t>(products.size()) : 0;
    }
};

class Together {
public:
    Together(int64_t tokens, Arithmetic arithmetic, Workspace& memory, int threads)
        : tokens_(tokens), arithmetic_(arithmetic), memory_(memory), threads_(threads) {}

    void add(const Multiplication& m) {
        const bool codes = arithmetic_.int8_inputs && m.layer.takes_codes();
        const Numbers numbers = codes ? Numbers::i8 : Numbers::f32;
        const int64_t in = m.layer.in(), most = arithmetic_.batch_invariant ? m.layer.few_tokens(numbers) : BATCH;
        const int64_t whole = tokens_ / most;
        LayerInputs x{m.x, in};
        if (codes) x = round(m);
        const auto range = [&](int64_t first, int64_t count, int64_t each) {
            if (count == 0) return;
            const Plan& plan = m.layer.plan(each, numbers, m.add ? Written::add : Written::set);
            Alike alike{&plan, each, {}};
            for (int64_t i = 0; i < count; ++i, first += each) {
                LayerInputs from = x;
                from.data = static_cast<const char*>(x.data) + first * in * size_of(numbers);
                if (codes) from.scales += first * groups(m.layer);
                const LayerOutputs to{m.y + first * m.layer.out(), nullptr, m.layer.out()};
                alike.products.emplace_back(m.layer, plan, each, from, to, memory_.take<char>(plan.bytes(each)));
            }
            own_ = std::max(own_, plan.own_bytes());
            all_.push_back(std::move(alike));
        };
        range(0, whole, most);
        range(whole * most, tokens_ % most > 0, tokens_ % most);
    }

    void run() {
        warm_thread();
        thread_memory(own_, OWN_MEMORY);
        int steps = 0;
        for (const Alike& alike : all_) steps = std::max(steps, alike.plan->steps());
        for (int step = 0; step < steps; ++step) run(step);
    }

private:
    static int64_t groups(const Layer& layer) { return (layer.in() - 1) / layer.int8_group_size() + 1; }

    // Inputs as codes, once for layers that read the same ones alike.
    LayerInputs round(const Multiplication& m) {
        const int64_t in = m.layer.in(), size = m.layer.int8_group_size(), n = groups(m.layer);
        if (m.x == rounded_from_ && size == rounded_by_ && m.layer.int8_multiples() == multiples_) return rounded_;
        auto* codes = memory_.take<int8_t>(tokens_ * in);
        auto* scales = memory_.take<float>(tokens_ * n);
        auto* clip = memory_.take<uint16_t>(n);
        std::fill_n(clip, n, WHOLE_RANGE);
        const InputGrid grid{8, in, size, clip, nullptr, m.layer.int8_multiples()};
        const auto quantize = best_matmul_ops().quantize_inputs; // the same bits in every instruction set
        for_tokens(tokens_, in * ROUND_WORK, threads_,
                   [&](int64_t k) { quantize(m.x + k * in, grid, codes + k * in, scales + k * n); });
        rounded_from_ = m.x;
        rounded_by_ = size;
        multiples_ = grid.multiples;
        return rounded_ = {codes, in, scales};
    }

    void run(int step) {
        int64_t units = 0, work = 0;
        for (const Alike& alike : all_) {
            units += alike.units(step);
            work += alike.work(step);
        }
        const auto part = [&](int64_t begin, int64_t end) {
            void* own = thread_memory(own_, OWN_MEMORY);
            for (const Alike& alike : all_) {
                const int64_t last = std::min(end, alike.units(step));
                if (begin < last)
                    for (const Product& product : alike.products)
                        product.run(step, std::max(begin, int64_t(0)), last, own);
                begin -= alike.units(step);
                end -= alike.units(step);
            }
        };
        const auto ready = [this] {
            return reserve_thread_memory(GEMM_MEMORY) && reserve_thread_memory(own_, OWN_MEMORY);
        };
        parallel_for(units, std::max(int64_t(1), piece_of(units, 1, work, threads_)), threads_, part, ready);
    }

    static constexpr int64_t ROUND_WORK = 24; // multiply-adds that it costs as much as to round a number, about

    int64_t tokens_;
    Arithmetic arithmetic_;
    Workspace& memory_;
    int threads_;
    std::vector<Alike> all_;
    int64_t own_ = 0; // bytes that each thread needs for itself
    const float* rounded_from_ = nullptr;
    int64_t rounded_by_ = 0;
    bool multiples_ = false;
    LayerInputs rounded_{};
};

} // namespace

void multiply(std::initializer_list<Multiplication> all, int64_t tokens, Arithmetic arithmetic, Workspace& memory,
              int threads) {
    const Workspace::Frame frame(memory);
    Together together(tokens, arithmetic, memory, threads);
    for (const Multiplication& one : all) together.add(one);
    together.run();
}

} // namespace anybit
