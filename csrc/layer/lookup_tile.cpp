#include "layer/lookup_tile.h"

#include "common/thread_memory.h"

namespace anybit {

// Channels lie an odd number of cache lines apart, lest they compete for places in the first cache.
void LookupBytes::turn_kept() {
    const int64_t rows = kept.shape[0], channels = kept.shape[1];
    kept_stride = odd_lines(rows, 1);
    scales.resize(static_cast<size_t>(rows + KeptChannels::BEHIND));
    kept_by_channel.resize(static_cast<size_t>(channels * kept_stride + KeptChannels::BEHIND));
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < channels; ++j)
            kept_by_channel[static_cast<size_t>(j * kept_stride + i)] = kept.as<int8_t>()[i * channels + j];
}

LookupTile::Span LookupTile::span(int bits, int64_t first, int64_t last) const {
    const LookupBytes& b = *bytes_;
    CodebookByRow c{};
    c.words = (b.coded + 31) / 32;
    for (int p = 0; p < bits; ++p) c.planes[p] = b.planes[static_cast<size_t>(p)].as<uint32_t>() + first * c.words;
    c.kinds = b.kinds.empty() ? nullptr : b.kinds.data() + first;
    const std::vector<float>& scales = b.scales_at(bits);
    c.row_scales = scales.empty() ? nullptr : scales.data() + first;
    c.out_rows = out_rows_.given() ? out_rows_.data() + first : nullptr;
    c.bits = bits;
    c.rows = last - first;
    c.columns = b.coded;
    c.kept = kept_.from(first);
    return {c, first};
}

float LookupTile::kept_weight(int64_t row, int64_t j) const {
    const int64_t at = row * kept_.channels + j;
    if (kept_.codes == nullptr) return baseline::half_to_float(kept_.halves[at]);
    const int code = kept_.codes[at];
    return static_cast<float>(code * std::abs(code)) * (kept_.scales[j] * kept_.row_scales[row]);
}

CodebookByWord LookupTile::by_word(const CodebookByRow& c) const {
    CodebookByWord w{};
    std::copy_n(c.planes, c.bits, w.planes);
    w.kinds = c.kinds;
    w.row_scales = c.row_scales;
    w.out_rows = c.out_rows;
    w.bits = c.bits;
    w.rows = c.rows;
    w.columns = c.columns;
    w.words = c.words;
    centroids_->fill(w);
    return w;
}

void LookupTile::find_forms(Forms& forms, Numbers inputs) const {
    for (size_t s = 0; s < spans_.size(); ++s) {
        const TableForm own = centroids_->form(spans_[s].c.bits, inputs);
        const auto met = std::find(forms.tables.begin(), forms.tables.end(), own);
        if (met == forms.tables.end()) {
            forms.numbers.push_back(forms.first.size());
            forms.first.push_back(s);
        } else forms.numbers.push_back(forms.numbers[static_cast<size_t>(met - forms.tables.begin())]);
        forms.tables.push_back(own);
    }
}

LookupTile::Room LookupTile::room(const Way& way, int64_t tokens) const {
    Room room{};
    const int64_t size = size_of(way.inputs);
    if (way.inputs == Numbers::i8) {
        const bool many = way.kernel == Way::Kernel::gemm;
        room.stride = many ? 0 : width();
        room.factors = lines(many ? ops_.codebook_by_row.whole.bytes(spans_[0].c, tokens) : tokens * room.stride);
        room.token = room.factors + lines(tokens * room.stride / CodebookByRow::INPUT_GROUP * 4);
        room.kept = room.token + lines(tokens * static_cast<int64_t>(sizeof(WholeInputs::Token)));
        room.bytes = room.kept + tokens * kept_.channels * 4;
        return room;
    }
    if (way.kernel == Way::Kernel::gemm) {
        room.stride = odd_lines(line() + kept_.channels, size);
        room.bytes = tokens * room.stride * size;
        return room;
    }
    room.stride = width();
    room.form = lines(tokens * room.stride * size);
    room.kept = static_cast<int64_t>(forms_of(way).first.size()) * room.form;
    room.bytes = room.kept + tokens * kept_.channels * 4;
    return room;
}

void LookupTile::arrange(const Way& way, const void* x, const float* scales, const float* exact, int64_t k,
                         int64_t tokens, char* to) const {
    const Room at = room(way, tokens);
    const int64_t coded = bytes_->coded, kept = kept_.channels;
    const CodebookByRowOps& kernels = ops_.codebook_by_row;
    const auto pad = [&](const auto* from, auto* row, int64_t stride) {
        auto* const end = row + stride;
        row = std::copy_n(from, coded, row);
        row = std::fill_n(row, line() - coded, 0);
        if (stride > line()) std::fill(std::copy_n(from + coded, kept, row), end, 0);
    };
    if (way.inputs == Numbers::i8) {
        if (kept > 0) std::copy_n(exact + coded, kept, reinterpret_cast<float*>(to + at.kept) + k * kept);
        WholeInputs::Token& token = reinterpret_cast<WholeInputs::Token*>(to + at.token)[k];
        const CodebookByRow& c = spans_[0].c;
        const auto* codes = static_cast<const int8_t*>(x);
        auto* inputs = reinterpret_cast<int8_t*>(to);
        auto* factors = reinterpret_cast<int32_t*>(to + at.factors);
        if (way.kernel == Way::Kernel::gemm) kernels.whole.prepare_many(c, codes, scales, k, inputs, token);
        else kernels.whole.prepare(c, codes, scales, k, tokens, inputs, factors, token);
        return;
    }
    const auto* floats = static_cast<const float*>(x);
    const auto* halves = static_cast<const uint16_t*>(x);
    const bool pairs = way.inputs == Numbers::bf16;
    if (way.kernel == Way::Kernel::gemm) {
        if (pairs) return pad(halves, reinterpret_cast<uint16_t*>(to) + k * at.stride, at.stride);
        return pad(floats, reinterpret_cast<float*>(to) + k * at.stride, at.stride);
    }
    const Forms& forms = forms_of(way);
    for (size_t n = 0; n < forms.first.size(); ++n, to += at.form) {
        CodebookByRow c = spans_[forms.first[n]].c;
        centroids_->fill(c, way.inputs, false);
        auto* floats_to = reinterpret_cast<float*>(to);
        if (pairs) kernels.bf16.prepare(c, halves, reinterpret_cast<uint16_t*>(to) + k * at.stride, nullptr);
        else if (forms.tables[forms.first[n]] == TableForm::none) pad(floats, floats_to + k * line(), line());
        else kernels.f32.prepare(c, floats, floats_to + k * at.stride, nullptr);
    }
    float* own = reinterpret_cast<float*>(to) + k * kept; // behind the forms
    if (pairs) baseline::widen(halves + coded, kept, own);
    else std::copy_n(floats + coded, kept, own);
}

void LookupTile::multiply(const Way& way, const TileInputs& x, const Outputs& y, int64_t begin, int64_t end,
                          char* own) const {
    for (size_t s = 0; s < spans_.size(); ++s) {
        const Span& span = spans_[s];
        const int64_t from = std::max(begin - span.first, int64_t(0)), to = std::min(end - span.first, span.c.rows);
        if (from >= to) continue;
        if (way.inputs == Numbers::i8) multiply_whole(way, x, y, span, from, to);
        else if (way.kernel == Way::Kernel::gemm) multiply_many(way, x, y, span, from, to);
        else multiply_few(way, x, y, s, from, to, own);
    }
}

// Where the rows of a span go, of outputs that are a tile's.
static Outputs outputs_of(Outputs y, int64_t first) {
    if (y.rows != nullptr) y.rows += first;
    else if (y.sums != nullptr) y.sums += first;
    if (y.rows == nullptr && y.rounded != nullptr) y.rounded += first;
    return y;
}

void LookupTile::multiply_whole(const Way& way, const TileInputs& x, Outputs y, const Span& span, int64_t from,
                                int64_t to) const {
    const Room at = room(way, x.tokens);
    const auto* base = static_cast<const char*>(x.data);
    CodebookByRow c = span.c;
    centroids_->fill(c, way.inputs, false);
    const WholeInputs inputs{x.codes(),
                             x.tokens,
                             x.tokens * ops_.lanes *
                                 CodebookByRow::INPUT_GROUP, // a token's block: as many groups as lanes
                             reinterpret_cast<const int32_t*>(base + at.factors),
                             reinterpret_cast<const WholeInputs::Token*>(base + at.token),
                             reinterpret_cast<const float*>(base + at.kept)};
    const WholeOps& kernels = ops_.codebook_by_row.whole;
    y = outputs_of(y, span.first);
    if (way.kernel == Way::Kernel::gemm) kernels.gemm(c, inputs, y, from / ops_.lanes, blocks_of(to));
    else kernels.gemv(c, inputs, y, from, to);
}

void LookupTile::multiply_few(const Way& way, const TileInputs& x, const Outputs& y, size_t span, int64_t from,
                              int64_t to, char* own) const {
    const Room at = room(way, x.tokens);
    const CodebookByRowOps& kernels = ops_.codebook_by_row;
    const auto* base = static_cast<const char*>(x.data);
    const auto* kept = reinterpret_cast<const float*>(base + at.kept);
    CodebookByRow c = spans_[span].c;
    centroids_->fill(c, way.inputs, false);
    const Forms& forms = forms_of(way);
    base += static_cast<int64_t>(forms.numbers[span]) * at.form;
    if (way.inputs == Numbers::bf16)
        return kernels.bf16.gemv(c, {reinterpret_cast<const uint16_t*>(base), x.tokens, at.stride, nullptr, kept},
                                 y.sums, y.stride, from, to);
    const auto* floats = reinterpret_cast<const float*>(base);
    if (forms.tables[span] != TableForm::none)
        return kernels.f32.gemv(c, {floats, x.tokens, at.stride, nullptr, kept}, y.sums, y.stride, from, to);
    ops_.codebook_by_word.gemv_by_row(by_word(c), {floats, x.tokens, line(), nullptr}, y.sums, y.stride,
                                      reinterpret_cast<float*>(own), from, to);
    if (kept_.channels > 0) add_kept(span, {kept, x.tokens, kept_.channels, nullptr}, y, from, to);
}

void LookupTile::add_kept(size_t span, const Inputs<float>& x, const Outputs& y, int64_t from, int64_t to) const {
    const CodebookByRow& c = spans_[span].c;
    for (int64_t i = from; i < to; ++i) {
        float* to_row = y.sums + c.out_rows[i]; // a tile that keeps channels has rows in an order of its own
        for (int64_t j = 0; j < kept_.channels; ++j) {
            const float weight = kept_weight(spans_[span].first + i, j);
            for (int64_t k = 0; k < x.tokens; ++k) to_row[k * y.stride] += weight * x.x[k * x.stride + j];
        }
    }
}

void LookupTile::multiply_many(const Way& way, const TileInputs& x, Outputs y, const Span& span, int64_t from,
                               int64_t to) const {
    const Room at = room(way, x.tokens);
    const CodebookByRowOps& kernels = ops_.codebook_by_row;
    CodebookByRow c = span.c;
    centroids_->fill(c, way.inputs, true);
    y = outputs_of(y, span.first);
    const int64_t first = from / ops_.lanes, last = blocks_of(to);
    if (way.inputs == Numbers::bf16) kernels.bf16.gemm(c, {x.halves(), x.tokens, at.stride, nullptr}, y, first, last);
    else kernels.f32.gemm(c, {x.floats(), x.tokens, at.stride, nullptr}, y, first, last);
}

int64_t LookupTile::units(const Way& way) const {
    if (way.kernel != Way::Kernel::gemm) return Tile::units(way);
    int64_t n = 0;
    for (const Span& span : spans_) n += (span.c.rows + way.unit - 1) / way.unit;
    return n;
}

int64_t LookupTile::unit_row(const Way& way, int64_t unit) const {
    if (way.kernel != Way::Kernel::gemm) return Tile::unit_row(way, unit);
    for (const Span& span : spans_) {
        const int64_t units = (span.c.rows + way.unit - 1) / way.unit;
        if (unit < units) return span.first + unit * way.unit;
        unit -= units;
    }
    return rows_;
}

// Kept channels behind the others, rows as they are stored.
void LookupTile::dequantize(float* out, int threads) const {
    const int64_t coded = bytes_->coded, kept = kept_.channels;
    for (const Span& span : spans_) {
        float* to = out + span.first * columns_;
        if (kept == 0) {
            decode_rows(ops_, by_word(span.c), to, threads);
            continue;
        }
        const Scratch made = make_scratch(span.c.rows * coded);
        decode_rows(ops_, by_word(span.c), made.get(), threads);
        for (int64_t i = 0; i < span.c.rows; ++i) {
            std::copy_n(made.get() + i * coded, coded, to + i * columns_);
            for (int64_t j = 0; j < kept; ++j) to[i * columns_ + coded + j] = kept_weight(span.first + i, j);
        }
    }
}

void LookupTile::row(int64_t i, float* out) const {
    const int64_t stored = out_rows_.given() ? out_rows_.inverse()[i] : i;
    for (const Span& span : spans_) {
        const int64_t at = stored - span.first;
        if (at < 0 || at >= span.c.rows) continue;
        const CodebookByRow own = this->span(span.c.bits, stored, stored + 1).c;
        CodebookByWord c = by_word(own);
        if (c.kinds == nullptr && c.table16 != nullptr) c.table16 += stored * c.entries;
        if (c.kinds == nullptr && c.table32 != nullptr) c.table32 += stored * c.entries;
        auto* line = static_cast<float*>(thread_memory(this->line() * 4, OWN_MEMORY));
        ops_.codebook_by_word.dequantize(c, out, line, 0, 1);
        for (int64_t j = 0; j < kept_.channels; ++j) out[bytes_->coded + j] = kept_weight(stored, j);
    }
}

std::shared_ptr<const Tile> LookupTile::at(const TileLayout& layout) const {
    if (layout.format == "nested") {
        const std::vector<int64_t>& counts = layout.counts;
        const auto& planes = bytes_->planes;
        bool fits = !counts.empty() && counts.size() <= planes.size() && counts[0] == rows_;
        for (size_t p = 0; fits && p < counts.size(); ++p)
            fits = counts[p] > 0 && counts[p] <= planes[p].shape[0] && (p == 0 || counts[p] <= counts[p - 1]);
        if (!fits) refuse("counts of planes are not some of this tile's, falling from all of its rows");
        return std::make_shared<const LookupTile>(ops_, bytes_, centroids_, counts);
    }
    const auto is_stored = [this](int width) {
        return std::any_of(widths.begin(), widths.end(), [width](const auto& own) { return own.first == width; });
    };
    const bool fits = std::all_of(layout.widths.begin(), layout.widths.end(), is_stored) &&
                      std::is_sorted(layout.widths.begin(), layout.widths.end());
    for (const auto& [bits, centroids] : widths)
        if (fits && bits == layout.bits && !layout.widths.empty() && layout.widths.back() == bits) {
            const std::vector<int64_t> counts(static_cast<size_t>(bits), rows_);
            auto made = std::make_shared<LookupTile>(ops_, bytes_, centroids, counts);
            made->widths = widths;
            return made;
        }
    refuse("a codebook has no such width");
}

} // namespace anybit
