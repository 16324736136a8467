// One product, a part of a step at a time.
#include "layer/layer.h"

#include <cstring>

namespace anybit {

struct Product::Row {
    const float* floats;    // null where they are not there
    const uint16_t* halves; // the same
    const int8_t* codes;    // rounded by the caller; or null
    const float* scales;
};

struct Product::Own {
    Own(char* memory, int64_t in)
        : floats(reinterpret_cast<float*>(memory)), scales(floats + lines(in * 4) / 4),
          halves(reinterpret_cast<uint16_t*>(scales + lines(in * 4) / 4)),
          codes(reinterpret_cast<int8_t*>(halves + lines(in * 2) / 2)) {}

    float *floats, *scales;
    uint16_t* halves;
    int8_t* codes;
};

int64_t Product::own_row_bytes(int64_t in) { return 2 * lines(in * 4) + lines(in * 2) + lines(in); }

Product::Product(const Layer& layer, const Plan& plan, int64_t tokens, const LayerInputs& x, const LayerOutputs& y,
                 void* scratch)
    : layer_(layer), plan_(plan), tokens_(tokens), x_(x), y_(y), scratch_(static_cast<char*>(scratch)),
      beginnings_(static_cast<int64_t*>(scratch)) {
    int64_t begin = 0;
    for (size_t region = 0; region < plan.regions(); ++region) {
        beginnings_[region] = begin;
        begin += plan.region_bytes(region, tokens);
    }
}

int64_t Product::sums_stride() const { return plan_.written_ == Written::rounded ? layer_.out() : y_.stride; }

void Product::run(int step, int64_t begin, int64_t end, void* own) const noexcept {
    const Plan::Step& s = plan_.steps_[static_cast<size_t>(step)];
    const int64_t first = begin * s.unit, last = std::min(end * s.unit, tokens_);
    switch (s.kind) {
    case Plan::Step::Kind::prepare: return prepare(first, last, Own(static_cast<char*>(own), layer_.in()));
    case Plan::Step::Kind::multiply: return multiply(s, begin, end, static_cast<char*>(own));
    case Plan::Step::Kind::place:
        for (int64_t u = begin; u < end; ++u)
            for (size_t p = s.first; p < s.last; ++p) place(p, u / s.units, u % s.units);
        return;
    case Plan::Step::Kind::narrow:
        for (int64_t k = first; k < last; ++k)
            layer_.ops_.to_bfloat16(sums() + k * sums_stride(), layer_.out(), y_.halves + k * y_.stride);
        return;
    }
}

void Product::prepare(int64_t first, int64_t last, const Own& own) const {
    for (int64_t k = first; k < last; ++k) {
        const Row forms = row(k);
        if (plan_.cleared_) std::fill_n(sums() + k * sums_stride(), layer_.out(), 0.0f);
        for (size_t p = 0; p < plan_.parts_.size(); ++p) arrange(p, k, forms, own);
    }
    for (int64_t k = first; k < last && plan_.turned_; k += plan_.token_unit_) turn(k);
}

// A token's inputs as they came, and widened, scaled and narrowed again where somebody reads them so.
Product::Row Product::row(int64_t k) const {
    const int64_t in = layer_.in_, groups = plan_.inputs_ == Numbers::i8 ? (in - 1) / layer_.int8_group_size() + 1 : 0;
    const auto* from = static_cast<const char*>(x_.data) + k * x_.stride * size_of(plan_.inputs_);
    const auto* floats = reinterpret_cast<const float*>(from);
    const auto* halves = reinterpret_cast<const uint16_t*>(from);
    if (plan_.inputs_ == Numbers::i8)
        return {nullptr, nullptr, reinterpret_cast<const int8_t*>(from), x_.scales + k * groups};
    const bool bf16 = plan_.inputs_ == Numbers::bf16;
    if (!plan_.widened_) return {bf16 ? nullptr : floats, bf16 ? halves : nullptr, nullptr, nullptr};
    float* wide = region<float>(Plan::FLOATS) + k * in;
    if (bf16) baseline::widen(halves, in, wide);
    if (!layer_.scale().empty())
        for (int64_t j = 0; j < in; ++j) wide[j] = (bf16 ? wide[j] : floats[j]) * layer_.scale().data()[j];
    if (!plan_.narrowed_) return {wide, bf16 ? halves : nullptr, nullptr, nullptr};
    uint16_t* narrow = region<uint16_t>(Plan::HALVES) + k * in; // as the weights would be that absorb the scales
    layer_.ops_.to_bfloat16(wide, in, narrow);
    return {wide, narrow, nullptr, nullptr};
}

// What a part reads of a token, in its kernels' order.
void Product::arrange(size_t p, int64_t k, const Row& row, const Own& own) const {
    const Plan::Planned& planned = plan_.parts_[p];
    const Part& part = *planned.part;
    const Tile& tile = *part.tile;
    const bool rounds = part.rounding != nullptr && plan_.inputs_ != Numbers::i8;
    if (planned.way.direct && !planned.copied) return;
    if (rounds && !part.rounds_alike) round(part, row, own);
    const float* exact = part.gather == nullptr && row.floats != nullptr ? row.floats : own.floats; // where it rounds
    const void* from = nullptr;
    switch (planned.source) {
    case Plan::Source::floats: from = part.pick(row.floats, own.floats); break;
    case Plan::Source::halves: from = part.pick(row.halves, own.halves); break;
    case Plan::Source::codes: from = rounds ? own.codes : row.codes; break;
    case Plan::Source::restored:
        if (exact != own.floats) std::copy(exact + tile.rounded(), exact + tile.columns(), own.floats + tile.rounded());
        part.rounding->restore(own.codes, own.scales, tile.rounded(), own.floats);
        from = own.floats;
        if (planned.way.inputs == Numbers::bf16) {
            layer_.ops_.to_bfloat16(own.floats, tile.columns(), own.halves);
            from = own.halves;
        }
        break;
    }
    char* to = region<char>(Plan::PARTS + 2 * p);
    const int64_t bytes = tile.columns() * size_of(planned.way.inputs);
    if (planned.way.direct) std::memcpy(to + k * bytes, from, static_cast<size_t>(bytes));
    else tile.arrange(planned.way, from, rounds ? own.scales : row.scales, exact, k, tokens_, to);
}

// Codes and scales of what a part reads, of floats where they are there.
void Product::round(const Part& part, const Row& row, const Own& own) const {
    const float* from = row.floats;
    const int64_t columns = part.tile->columns();
    if (from != nullptr) from = part.pick(from, own.floats);
    else {
        baseline::widen(part.pick(row.halves, own.halves), columns, own.floats);
        from = own.floats;
    }
    layer_.ops_.quantize_inputs(from, part.rounding->grid(part.tile->rounded()), own.codes, own.scales);
}

// Tokens as lanes, for the sparse part.
void Product::turn(int64_t first) const {
    const int64_t lanes = plan_.token_unit_, in = layer_.in_, there = std::min(lanes, tokens_ - first);
    const bool kept = plan_.widened_;
    const float* from = kept ? region<float>(Plan::FLOATS) : static_cast<const float*>(x_.data);
    const int64_t stride = kept ? in : x_.stride;
    float* to = region<float>(Plan::TURNED) + first * in;
    for (int64_t j = 0; j < in; ++j, to += lanes)
        for (int64_t l = 0; l < lanes; ++l) to[l] = l < there ? from[(first + l) * stride + j] : 0.0f;
}

void Product::multiply(const Plan::Step& step, int64_t begin, int64_t end, char* own) const {
    const auto finish = [&](const int32_t* rows, int64_t first, int64_t last, auto&& add) {
        if (step.clears) clear(rows, first, last);
        add();
        if (step.narrows) narrow(rows, first, last);
    };
    if (step.shared) {
        const int64_t first = begin * step.unit, last = std::min(end * step.unit, layer_.out_);
        return finish(nullptr, first, last, [&] {
            for (size_t p = step.first; p < step.last; ++p) multiply_rows(p, first, last, own);
            if (step.sparse) multiply_sparse(first, last);
        });
    }
    for (size_t p = step.first; p < step.last; ++p) { // one part's units after another's
        const Plan::Planned& planned = plan_.parts_[p];
        const Tile& tile = *planned.part->tile;
        const int64_t units = tile.units(planned.way), from = std::max(begin, int64_t(0)), to = std::min(end, units);
        if (from < to) {
            const int64_t first = tile.unit_row(planned.way, from), last = tile.unit_row(planned.way, to);
            finish(tile.out_rows().data(), first, last, [&] { multiply_rows(p, first, last, own); });
        }
        begin -= units;
        end -= units;
    }
}

void Product::multiply_rows(size_t p, int64_t begin, int64_t end, char* own) const {
    const Plan::Planned& planned = plan_.parts_[p];
    const Tile& tile = *planned.part->tile;
    TileInputs x{region<char>(Plan::PARTS + 2 * p), tokens_, tile.columns()};
    if (planned.way.direct && !planned.copied) {
        const bool kept = planned.source == Plan::Source::floats && plan_.widened_;
        x.data = kept ? region<void>(Plan::FLOATS) : x_.data;
        x.stride = kept ? layer_.in_ : x_.stride;
    }
    const int32_t* rows = tile.out_rows().data();
    Outputs y{sums(), sums_stride(), plan_.fresh_ && (p == 0 || layer_.alone()), nullptr, rows};
    if (planned.placed) {
        auto* to = region<char>(Plan::PARTS + 2 * p + 1);
        y = {reinterpret_cast<float*>(to), tile.rows(), true};
        if (plan_.direct_) y = {nullptr, tile.rows(), true, reinterpret_cast<uint16_t*>(to)};
    } else if (plan_.direct_) y = {nullptr, y_.stride, true, y_.halves, rows};
    tile.multiply(planned.way, x, y, begin, end, own);
}

void Product::multiply_sparse(int64_t begin, int64_t end) const {
    const bool kept = plan_.widened_;
    Inputs<float> x{kept ? region<float>(Plan::FLOATS) : static_cast<const float*>(x_.data), tokens_,
                    kept ? layer_.in_ : x_.stride, nullptr};
    if (!plan_.turned_) return layer_.ops_.sparse.f32.gemv(layer_.sparse(), x, sums(), sums_stride(), begin, end);
    x.x = region<float>(Plan::TURNED);
    x.stride = layer_.in_;
    layer_.ops_.sparse.f32.gemm(layer_.sparse(), x, Outputs{sums(), sums_stride()}, begin, end);
}

// Put a part's sums where its rows belong: those of one block are all over the outputs, those of a token are not. Rows
// that are not all outputs are put there with the first piece of them.
void Product::place(size_t p, int64_t k, int64_t piece) const {
    if (!plan_.parts_[p].placed) return;
    const Tile& tile = *plan_.parts_[p].part->tile;
    const int32_t *rows = tile.out_rows().data(), *inverse = tile.out_rows().inverse();
    const int64_t first = piece * Plan::PLACED_OUTPUTS, last = std::min(first + Plan::PLACED_OUTPUTS, layer_.out_);
    const int64_t few = inverse == nullptr && piece == 0 ? tile.rows() : 0;
    const size_t from = Plan::PARTS + 2 * p + 1;
    if (plan_.direct_) {
        const uint16_t* made = region<uint16_t>(from) + k * tile.rows();
        uint16_t* to = y_.halves + k * y_.stride;
        for (int64_t i = 0; i < few; ++i) to[rows[i]] = made[i];
        for (int64_t i = first; i < last && inverse != nullptr; ++i) to[i] = made[inverse[i]];
        return;
    }
    const bool set = plan_.fresh_ && (p == 0 || layer_.alone());
    const float* made = region<float>(from) + k * tile.rows();
    float* to = sums() + k * sums_stride();
    for (int64_t i = 0; i < few; ++i) to[rows[i]] = set ? made[i] : to[rows[i]] + made[i];
    if (inverse != nullptr) layer_.ops_.put_in_order(made, inverse + first, last - first, set, to + first);
}

// Outputs begin <= i < end, or those of these rows, to 0.
void Product::clear(const int32_t* rows, int64_t begin, int64_t end) const {
    for (int64_t k = 0; k < tokens_; ++k) {
        float* y = sums() + k * sums_stride();
        if (rows == nullptr) std::fill_n(y + begin, end - begin, 0.0f);
        else
            for (int64_t i = begin; i < end; ++i) y[rows[i]] = 0;
    }
}

void Product::narrow(const int32_t* rows, int64_t begin, int64_t end) const {
    for (int64_t k = 0; k < tokens_; ++k) {
        const float* from = sums() + k * sums_stride();
        uint16_t* to = y_.halves + k * y_.stride;
        if (rows == nullptr) layer_.ops_.to_bfloat16(from + begin, end - begin, to + begin);
        else
            for (int64_t i = begin; i < end; ++i) to[rows[i]] = baseline::to_bf16(from[rows[i]]);
    }
}

} // namespace anybit
