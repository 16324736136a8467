// What a layer does for so many tokens, decided once.
#include "layer/layer.h"

#include <numeric>

namespace anybit {

// Decides for one kind of tokens, inputs and outputs.
class Planner {
public:
    Planner(const Layer& layer, int64_t tokens, Numbers inputs, Written written) : layer_(layer), tokens_(tokens) {
        plan_.layer_ = &layer;
        plan_.inputs_ = inputs;
        plan_.written_ = written;
    }

    std::unique_ptr<const Plan> make() {
        for (const Part& part : layer_.parts_) plan_.parts_.push_back(planned(part));
        choose_forms();
        choose_outputs();
        if (prepares()) plan_.steps_.push_back(token_step(Plan::Step::Kind::prepare, layer_.in_));
        add_products();
        if (narrows_ && !fused_) plan_.steps_.push_back(token_step(Plan::Step::Kind::narrow, layer_.out_));
        measure_own();
        return std::make_unique<const Plan>(std::move(plan_));
    }

private:
    using Source = Plan::Source;
    using Step = Plan::Step;

    Plan::Planned planned(const Part& part) const {
        const Tile& tile = *part.tile;
        const auto made = [&](Way way, Source source) {
            const bool copied = way.direct && (part.gather != nullptr || source == Source::restored);
            const bool placed = way.finishes() && !tile.out_rows().ascend();
            return Plan::Planned{&part, way, source, copied, placed};
        };
        const Numbers inputs = plan_.inputs_;
        const bool may_round = inputs == Numbers::i8 || part.rounding != nullptr; // else it needs no tables of bytes
        const auto rounded = may_round ? tile.way(tokens_, Numbers::i8) : std::nullopt;
        if (inputs == Numbers::i8) return made(*rounded, Source::codes);
        if (part.rounding != nullptr && rounded && tokens_ <= tile.most_rounded(inputs))
            return made(*rounded, Source::codes);
        const auto halves = inputs == Numbers::bf16 ? tile.way(tokens_, Numbers::bf16) : std::nullopt;
        const Way way = halves ? *halves : *tile.way(tokens_, Numbers::f32);
        return made(way, part.rounding != nullptr ? Source::restored : halves ? Source::halves : Source::floats);
    }

    // Which forms of all inputs are kept.
    void choose_forms() {
        const bool bf16 = plan_.inputs_ == Numbers::bf16, scaled = !layer_.scale().empty();
        const auto reads = [this](Source source) {
            return std::any_of(plan_.parts_.begin(), plan_.parts_.end(),
                               [source](const Plan::Planned& p) { return p.source == source; });
        };
        plan_.widened_ = scaled || (bf16 && (layer_.sparse().rows > 0 || reads(Source::floats)));
        plan_.narrowed_ = scaled && bf16 && reads(Source::halves);
        plan_.turned_ = layer_.sparse().rows > 0 && tokens_ > GEMV_TOKENS;
        plan_.token_unit_ = plan_.turned_ ? layer_.ops_.lanes : 1;
        for (const Plan::Planned& p : plan_.parts_) beside_ = std::max(beside_, p.way.beside);
    }

    void choose_outputs() {
        const auto& parts = plan_.parts_;
        const bool alone = layer_.alone(), rounded = plan_.written_ == Written::rounded;
        const bool finish = std::all_of(parts.begin(), parts.end(), [](const auto& p) { return p.way.finishes(); });
        plan_.direct_ = rounded && alone && finish && layer_.sparse().rows == 0;
        plan_.fresh_ = plan_.written_ != Written::add &&
                       (alone ? finish : !parts.empty() && whole(parts[0]) && parts[0].way.finishes());
        natural_ = !parts.empty() && std::all_of(parts.begin(), parts.end(), [](const auto& p) { return in_order(p); });
        const bool placed = std::any_of(parts.begin(), parts.end(), [](const auto& p) { return p.placed; });
        // Rows in no order are not: threads would write into each other's cache lines.
        const bool apart = alone && layer_.sparse().rows == 0 &&
                           std::all_of(parts.begin(), parts.end(), [](const auto& p) { return ascends(p); });
        fused_ = (natural_ || apart) && !placed;
        clears_ = plan_.written_ != Written::add && !plan_.fresh_;
        narrows_ = rounded && !plan_.direct_;
        plan_.cleared_ = clears_ && !fused_;
    }

    // Whether a part has all rows, and whether in order.
    bool whole(const Plan::Planned& p) const { return p.part->tile->rows() == layer_.out_; }
    static bool in_order(const Plan::Planned& p) { return !p.part->tile->out_rows().given(); }
    static bool ascends(const Plan::Planned& p) { return p.part->tile->out_rows().ascend(); }

    bool prepares() const {
        const auto reads_rows = [](const Plan::Planned& p) { return p.way.direct && !p.copied; };
        return plan_.widened_ || plan_.cleared_ || plan_.turned_ ||
               !std::all_of(plan_.parts_.begin(), plan_.parts_.end(), reads_rows);
    }

    void add_products() {
        const size_t n = plan_.parts_.size();
        const bool sparse = layer_.sparse().rows > 0, together = layer_.alone() || natural_;
        if (together) add_product(0, n, natural_, sparse && natural_);
        for (size_t p = 0; p < n && !together; ++p) add_product(p, p + 1, false, false);
        if (sparse && !natural_) add_product(n, n, true, true);
    }

    void add_product(size_t first, size_t last, bool shared, bool sparse) {
        Step step{Step::Kind::multiply, first, last, sparse, fused_ && clears_, fused_ && narrows_, shared};
        if (sparse) {
            step.unit = layer_.ops_.lanes;
            step.work = layer_.sparse().row_ptr[layer_.out_] * SPARSE_WORK;
        }
        bool placed = false;
        for (size_t p = first; p < last; ++p) {
            const Plan::Planned& planned = plan_.parts_[p];
            const Tile& tile = *planned.part->tile;
            step.unit = std::max(step.unit, planned.way.unit); // all are powers of 2
            step.units += tile.units(planned.way);
            step.work += tile.rows() * tile.columns();
            placed = placed || planned.placed;
        }
        const bool one = last - first == 1 && !sparse; // whose units may be uneven
        if (shared && !one) step.units = (layer_.out_ + step.unit - 1) / step.unit;
        if (one) step.shared = false;
        plan_.steps_.push_back(step);
        if (!placed) return;
        Step place = token_step(Step::Kind::place, layer_.out_);
        place.first = first;
        place.last = last;
        bool pieces = false;
        for (size_t p = first; p < last; ++p)
            pieces = pieces || plan_.parts_[p].part->tile->out_rows().inverse() != nullptr;
        place.units = pieces ? (layer_.out_ - 1) / Plan::PLACED_OUTPUTS + 1 : 1;
        plan_.steps_.push_back(place);
    }

    Step token_step(Step::Kind kind, int64_t numbers) const {
        Step step{kind};
        step.unit = kind == Step::Kind::prepare ? std::max(plan_.token_unit_, beside_) : 1; // all are powers of 2
        step.work = numbers * (kind == Step::Kind::prepare ? PREPARE_WORK : NUMBER_WORK);
        return step;
    }

    void measure_own() {
        const auto keeps = [](const Plan::Planned& p) {
            return p.part->gather != nullptr || p.part->rounding != nullptr;
        };
        if (std::any_of(plan_.parts_.begin(), plan_.parts_.end(), keeps))
            plan_.own_ = Product::own_row_bytes(layer_.in_);
        for (const Plan::Planned& p : plan_.parts_) plan_.own_ = std::max(plan_.own_, p.way.own);
    }

    // Multiply-adds of a dense matrix that it costs, about: one here, a number that is moved, and one that is rounded
    // and arranged.
    static constexpr int64_t SPARSE_WORK = 8, NUMBER_WORK = 24, PREPARE_WORK = 64;

    const Layer& layer_;
    const int64_t tokens_; // any number of the kind
    Plan plan_;
    int64_t beside_ = 1;   // `Way::beside`, of all parts
    bool natural_ = false; // all parts have all rows, in order
    bool fused_ = false;   // what clears and rounds rows is who adds to them
    bool clears_ = false, narrows_ = false;
};

int64_t Plan::units(int step, int64_t tokens) const {
    const Step& s = steps_[static_cast<size_t>(step)];
    if (s.kind == Step::Kind::place) return tokens * s.units;
    return s.kind == Step::Kind::multiply ? s.units : (tokens + s.unit - 1) / s.unit;
}

int64_t Plan::work(int step, int64_t tokens) const { return steps_[static_cast<size_t>(step)].work * tokens; }

int64_t Plan::region_bytes(size_t region, int64_t tokens) const {
    const int64_t in = layer_->in_, out = layer_->out_, m = tokens;
    const bool rounds = written_ == Written::rounded;
    switch (region) {
    case BEGINNINGS: return lines(static_cast<int64_t>(regions() * sizeof(int64_t)));
    case FLOATS: return widened_ ? lines(m * in * 4) : 0;
    case HALVES: return narrowed_ ? lines(m * in * 2) : 0;
    case SUMS: return rounds && !direct_ ? lines(m * out * 4) : 0;
    case TURNED: return turned_ ? lines((m + token_unit_ - 1) / token_unit_ * token_unit_ * in * 4) : 0;
    default: break;
    }
    const Planned& planned = parts_[(region - PARTS) / 2];
    const Tile& tile = *planned.part->tile;
    const bool outputs = (region - PARTS) % 2 != 0;
    if (outputs) return planned.placed ? lines(m * tile.rows() * (direct_ ? 2 : 4)) : 0;
    if (planned.copied) return lines(m * tile.columns() * size_of(planned.way.inputs));
    return planned.way.direct ? 0 : lines(tile.bytes(planned.way, m));
}

int64_t Plan::bytes(int64_t tokens) const {
    int64_t all = 0;
    for (size_t region = 0; region < regions(); ++region) all += region_bytes(region, tokens);
    return all;
}

const Plan& Layer::plan(int64_t tokens, Numbers inputs, Written written) const {
    check_range("tokens", tokens, 1, BATCH);
    if (inputs == Numbers::i8 && int8_group_size() == 0) refuse(NO_INT8);
    size_t kind = 0;
    while (kind < kinds_.size() && tokens > kinds_[kind]) ++kind;
    std::atomic<const Plan*>& kept = plans_[static_cast<size_t>(inputs)][static_cast<size_t>(written)][kind];
    if (const Plan* found = kept.load(std::memory_order_acquire)) return *found;
    const std::lock_guard<std::mutex> lock(planning_);
    if (const Plan* found = kept.load(std::memory_order_acquire)) return *found;
    made_.push_back(Planner(*this, tokens, inputs, written).make());
    kept.store(made_.back().get(), std::memory_order_release);
    return *made_.back();
}

} // namespace anybit
