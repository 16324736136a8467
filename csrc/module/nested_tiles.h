// Tiles in format "nested": rows of falling width whose tables are those of a few shapes.
#pragma once

#include "module/tile.h"

namespace anybit {

// The tables of all shapes as the kernels of one instruction set look them up, made once for all layers.
class ShapeTables {
public:
    // tables float32 [shapes, 2 + 4 + ... + 256]
    ShapeTables(const Input& tables, const std::optional<std::string>& isa) : kernels_(find_matmul_ops(isa)) {
        count_ = size_of("tables", tables, 0, 2);
        if (count_ < 1 || count_ > 256) refuse("tables are of 1 to 256 shapes");
        check("tables", tables, {Type::f32}, {count_, ENTRIES}, Layout::dense);
        const auto* from = static_cast<const float*>(tables.data());
        for (int64_t kind = 0; kind < count_; ++kind)
            for (int b = 1; b <= 8; ++b) {
                const float *first = from + kind * ENTRIES + (1 << b) - 2, *last = first + (1 << b) - 1;
                for (; first < last; ++first, --last)
                    mirrored_ &= baseline::is_half(*first) && *last == -*first; // neither a NaN
            }
        for (int b = 1; b <= 8; ++b) {
            plain_[b] = made<uint32_t>(from, b, TableForm::whole);
            floats_[b] = made<uint32_t>(from, b, float_form(b));
            if (kernels_.codebook_by_row.bf16.gemm != nullptr)
                halves_[b] = made<uint16_t>(from, b, kernels_.codebook_by_row.bf16_form(b));
        }
    }

    int64_t count() const { return count_; }
    const MatmulOps& kernels() const { return kernels_; }
    bool mirrored() const { return mirrored_; } // as in CodebookByRow
    TableForm float_form(int bits) const { return kernels_.codebook_by_row.f32_form(bits, mirrored_); }
    const uint8_t* plain(int bits) const { return plain_[bits].data(); }
    const uint8_t* floats(int bits) const { return floats_[bits].data(); }
    const uint8_t* halves(int bits) const { return halves_[bits].data(); }

private:
    static constexpr int64_t ENTRIES = 510;

    template <typename T> std::vector<uint8_t> made(const float* from, int bits, TableForm form) const {
        const int64_t entries = int64_t(1) << bits;
        const int64_t laid = form == TableForm::mirrored ? entries / 2 : entries;
        return lay_tables<T>(count_, laid, laid, form,
                             [&](int64_t kind, int64_t e) { return from[kind * ENTRIES + entries - 2 + e]; });
    }

    const MatmulOps& kernels_;
    int64_t count_;
    bool mirrored_ = true;
    std::vector<uint8_t> plain_[9], floats_[9], halves_[9];
};

// A tile in format "nested", bound to the arrays that hold it. Its columns are the coded channels, then the kept ones.
class BoundNested : public Tile {
public:
    // planes: of bit p, uint32 [rows that have it, words], the most significant first; order int32, kinds uint8 and
    // scales float32 [rows]; kept float16 [rows, channels], rows as they are stored.
    BoundNested(std::vector<Input> planes, const Input& order, Input kinds, Input scales, std::optional<Input> kept,
                int64_t columns, nb::object shapes, const std::optional<std::string>& isa)
        : Tile(isa), keeper_(shapes), tables_(*nb::cast<const ShapeTables*>(shapes)), planes_(std::move(planes)),
          kinds_(kinds), scales_(scales), kept_values_(kept), coded_(columns) {
        if (&tables_.kernels() != &kernels_) refuse("the shapes are those of another instruction set");
        if (columns < 1 || columns >= MAX_SIZE)
            refuse("columns is " + std::to_string(columns) + ", expected 1 to 2^31 - 1");
        if (planes_.empty() || planes_.size() > 8) refuse("a nested tile has 1 to 8 planes");
        rows_ = size_of("planes", planes_[0], 0, 2);
        if (rows_ < 1) refuse("the first plane has no rows");
        if (kept) {
            kept_.columns = size_of("kept", *kept, 1, 2);
            check("kept", *kept, {Type::f16, Type::u16}, {rows_, kept_.columns}, Layout::dense);
            kept_.values = static_cast<const uint16_t*>(kept->data());
        }
        columns_ = columns + kept_.columns;
        if (columns_ >= MAX_SIZE) refuse("a tile of " + std::to_string(columns_) + " columns");
        const int64_t words = (columns + 31) / 32;
        std::vector<int64_t> counts;
        for (const Input& plane : planes_) {
            counts.push_back(size_of("planes", plane, 0, 2));
            if (counts.size() > 1 && counts.back() > counts[counts.size() - 2])
                refuse("planes grow from one to the next");
            check("planes", plane, {Type::u32, Type::i32}, {counts.back(), words}, Layout::dense);
        }
        counts.push_back(0);
        check("kinds", kinds_, {Type::u8}, {rows_}, Layout::dense);
        check("scales", scales_, {Type::f32}, {rows_}, Layout::dense);
        const auto* of_rows = static_cast<const uint8_t*>(kinds_.data());
        for (int64_t i = 0; i < rows_; ++i)
            if (of_rows[i] >= tables_.count()) refuse("kinds hold a shape that there is not");
        out_rows_.copy(order, rows_);
        kept_.rows = rows_;
        kept_.out_rows = out_rows_.data();
        for (size_t bits = planes_.size(); bits > 0; --bits) {
            const int64_t first = counts[bits], last = counts[bits - 1];
            if (first == last) continue;
            CodebookByRow b{};
            for (size_t p = 0; p < bits; ++p)
                b.planes[p] = static_cast<const uint32_t*>(planes_[p].data()) + first * words;
            b.kinds = of_rows + first;
            b.row_scales = static_cast<const float*>(scales_.data()) + first;
            b.out_rows = out_rows_.data() + first;
            b.mirrored = tables_.mirrored();
            b.bits = static_cast<int>(bits);
            b.rows = last - first;
            b.columns = columns;
            b.words = words;
            b.kept = kept_.columns == 0 ? nullptr : kept_.values + first * kept_.columns;
            b.kept_columns = kept_.columns;
            spans_.push_back(b);
        }
    }

    // out float32 [rows, coded channels] in stored order
    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {rows_, coded_}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        for_spans([&](const CodebookByRow& b, int64_t first) {
            const int64_t piece = piece_of(b.rows, 1, b.rows * coded_, used), width = b.words * 32;
            const Scratch scratch = make_scratch(((b.rows - 1) / piece + 1) * width);
            const CodebookByWord c = by_words(b);
            parallel_for(b.rows, piece, used, [&](int64_t begin, int64_t end) {
                kernels_.codebook_by_word.dequantize(c, to + first * coded_, scratch.get() + begin / piece * width,
                                                     begin, end);
            });
        });
    }

    // Of any width, as its rows are.
    bool takes_bf16(int64_t) const override { return kernels_.codebook_by_row.bf16.gemm != nullptr; }

private:
    // f(codebook, its first row) for all spans.
    template <typename F> void for_spans(F&& f) const {
        int64_t first = 0;
        for (const CodebookByRow& span : spans_) {
            f(span, first);
            first += span.rows;
        }
    }

    CodebookByWord by_words(const CodebookByRow& b) const {
        CodebookByWord c{};
        std::copy_n(b.planes, b.bits, c.planes);
        c.table32 = reinterpret_cast<const float*>(tables_.plain(b.bits));
        c.kinds = b.kinds;
        c.row_scales = b.row_scales;
        c.out_rows = b.out_rows;
        c.bits = b.bits;
        c.rows = b.rows;
        c.columns = b.columns;
        c.words = b.words;
        c.entries = int64_t(1) << b.bits;
        return c;
    }

    void add_product(const Tokens& x, const Outputs& y, int threads) const override {
        const int64_t m = x.count, width = kernels_.codebook_by_row.columns(spans_[0]);
        if (m > few(x.bf16)) {
            const int64_t words = 32 * spans_[0].words;
            const auto pad = [this, words](const auto* from, auto* to) {
                std::copy_n(from, coded_, to);
                std::fill_n(to + coded_, words - coded_, 0);
                std::copy_n(from + coded_, kept_.columns, to + words);
            };
            const Many padded = pad_many(x, words + kept_.columns, pad, threads);
            return place(m, y, threads, [&](const Outputs& to) {
                for_spans([&](CodebookByRow b, int64_t first) {
                    b.table = x.bf16 ? tables_.plain(b.bits) : tables_.floats(b.bits);
                    multiply_padded(b, kernels_.codebook_by_row, first, b.rows, padded, to, threads);
                });
            });
        }
        const CodebookByRowOps& rows = kernels_.codebook_by_row;
        const bool pairs = x.bf16;
        const auto form = [&](int bits) { return pairs ? rows.bf16_form(bits) : tables_.float_form(bits); };
        const int64_t piece = piece_of(rows_, WHOLE_ROWS, rows_ * columns_, threads), line = spans_[0].words * 32;
        const Scratch scratch = make_scratch(3 * m * width + ((rows_ - 1) / piece + 1) * line + m * kept_.columns);
        float* at[4] = {}; // by form
        float* free = scratch.get();
        for (const CodebookByRow& b : spans_) {
            float*& to = at[static_cast<int>(form(b.bits))];
            if (to != nullptr) continue;
            to = free;
            free += m * width;
            for (int64_t k = 0; k < m; ++k)
                if (pairs) rows.bf16.prepare(b, x.halves(k), reinterpret_cast<uint16_t*>(to) + k * width, nullptr);
                else if (form(b.bits) == TableForm::none) pad(x.floats(k), line, to + k * line);
                else rows.f32.prepare(b, x.floats(k), to + k * width, nullptr);
        }
        float* kept = scratch.get() + 3 * m * width + ((rows_ - 1) / piece + 1) * line;
        for (int64_t k = 0; k < m; ++k)
            if (pairs) baseline::widen(x.halves(k) + coded_, kept_.columns, kept + k * kept_.columns);
            else std::copy_n(x.floats(k) + coded_, kept_.columns, kept + k * kept_.columns);
        parallel_for(rows_, piece, threads, [&](int64_t begin, int64_t end) {
            for_spans([&](CodebookByRow b, int64_t first) {
                const int64_t from = std::max(begin - first, int64_t(0)), to = std::min(end - first, b.rows);
                if (from >= to) return;
                float* inputs = at[static_cast<int>(form(b.bits))];
                if (pairs) {
                    b.table = tables_.halves(b.bits);
                    rows.bf16.gemv(b, {reinterpret_cast<uint16_t*>(inputs), m, width, nullptr}, y.sums, y.stride, from,
                                   to);
                } else if (form(b.bits) == TableForm::none) {
                    float* own = scratch.get() + 3 * m * width + begin / piece * line;
                    kernels_.codebook_by_word.gemv_by_row(by_words(b), {inputs, m, line, nullptr}, y.sums, y.stride,
                                                          own, from, to);
                } else {
                    b.table = tables_.floats(b.bits);
                    rows.f32.gemv(b, {inputs, m, width, nullptr}, y.sums, y.stride, from, to);
                }
            });
            add_kept(kept, m, y, begin, end);
        });
    }

    void pad(const float* from, int64_t line, float* to) const {
        std::copy_n(from, coded_, to);
        std::fill_n(to + coded_, line - coded_, 0.0f);
    }

    // y += the product of the kept channels x [m, kept], for the rows begin <= i < end.
    void add_kept(const float* x, int64_t m, const Outputs& y, int64_t begin, int64_t end) const {
        const int64_t columns = kept_.columns, lanes = kernels_.lanes;
        const Inputs<float> inputs{x, m, columns, nullptr};
        if (columns > NARROW) kernels_.float16.f32.gemv(kept_, inputs, y.sums, y.stride, begin, end);
        else if (columns > 0)
            kernels_.float16.f32.gemm(kept_, inputs, {y.sums, y.stride, false, nullptr, kept_.out_rows}, begin / lanes,
                                      (end + lanes - 1) / lanes);
    }

    static constexpr int64_t WHOLE_ROWS = 16; // of `TOGETHER` and of blocks that a thread takes at a time
    static_assert(WHOLE_ROWS % CodebookByRow::TOGETHER == 0);

    nb::object keeper_; // of the shapes
    const ShapeTables& tables_;
    std::vector<Input> planes_;
    Input kinds_, scales_;
    std::optional<Input> kept_values_;
    Float16 kept_{};
    int64_t coded_;                    // channels
    std::vector<CodebookByRow> spans_; // the rows of every width, without tables
};

} // namespace anybit
