// Tiles in format "codebook": by input channel, and by rows.
#pragma once

#include "module/tile.h"

#include <cmath>
#include <mutex>

namespace anybit {

// A tile in format "codebook" by input channel, in the kernels' order.
class PackedChannels : public Tile {
public:
    PackedChannels(const Input& planes, const Input& table, int64_t rows, int64_t threads,
                   const std::optional<std::string>& isa)
        : Tile(isa) {
        const int used = check_threads(threads);
        if (rows < 1 || rows >= MAX_SIZE) refuse("rows is " + std::to_string(rows) + ", expected 1 to 2^31 - 1");
        const int64_t bits = size_of("planes", planes, 0, 3);
        if (bits < 1 || bits > 8) refuse(std::to_string(bits) + " planes, expected 1 to 8");
        t_.bits = static_cast<int>(bits);
        t_.rows = rows_ = rows;
        t_.columns = columns_ = size_of("planes", planes, 1, 3);
        check_planes(planes);
        const int64_t entries = size_of("table", table, 1, 2);
        if (entries < 1 || entries > int64_t(1) << bits)
            refuse("table has " + std::to_string(entries) + " entries, expected up to 2^" + std::to_string(bits));
        const bool narrow = bits > CodebookByChannel::FLOAT_BITS;
        if (narrow) check("table", table, {Type::f16, Type::u16}, {t_.columns, entries}, Layout::dense);
        else check("table", table, {Type::f32}, {t_.columns, entries}, Layout::dense);
        const auto* from = static_cast<const uint32_t*>(planes.data());
        if (narrow) copy_table(static_cast<const uint16_t*>(table.data()), entries, halves_);
        else copy_table(static_cast<const float*>(table.data()), entries, table_);
        bytes_ = make_weights(kernels_.codebook_by_channel.bytes(t_));
        nb::gil_scoped_release release;
        uint8_t* to = bytes_.get();
        by_blocks(used, [&](int64_t begin, int64_t end) {
            kernels_.codebook_by_channel.interleave(t_, {from}, {to}, nullptr, begin, end);
        });
        t_.bytes = to;
        t_.table = table_.data();
        t_.halves = halves_.data();
        table_planes_.resize(static_cast<size_t>(kernels_.codebook_by_channel.table_planes_bytes(t_)));
        if (table_planes_.empty()) return;
        kernels_.codebook_by_channel.table_planes(t_, table_planes_.data());
        t_.planes = table_planes_.data();
    }

    void restore(const Output& planes, int64_t threads) const {
        const int used = check_threads(threads);
        if (size_of("planes", planes, 0, 3) != t_.bits) refuse("planes have another width than the tile");
        check_planes(planes);
        auto* to = static_cast<uint32_t*>(planes.data());
        const size_t size = planes.size();
        nb::gil_scoped_release release;
        std::fill_n(to, size, 0u);
        by_blocks(
            used,
            [&](int64_t begin, int64_t end) { kernels_.codebook_by_channel.restore(t_, {to}, nullptr, begin, end); },
            CodebookByChannel::WHOLE_ROWS / kernels_.lanes);
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {t_.rows, t_.columns}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        by_blocks(used,
                  [&](int64_t begin, int64_t end) { kernels_.codebook_by_channel.dequantize(t_, to, begin, end); });
    }

    bool takes_bf16(int64_t tokens) const override {
        // Up to 6 bits a channel's entries are looked up in registers.
        const int64_t few_here = t_.bits <= 6 ? std::min(GEMV_TOKENS, 2 * few(true)) : few(true);
        return tokens > few_here && kernels_.codebook_by_channel.bf16.gemm != nullptr;
    }

private:
    // With room for all entries of a width for every channel of a cell, and one more.
    template <typename T> void copy_table(const T* from, int64_t entries, std::vector<T>& to) const {
        const int64_t room = CodebookByChannel::entries(t_.bits);
        to.assign(static_cast<size_t>(kernels_.codebook_by_channel.columns(t_) * room + 1), T(0));
        for (int64_t j = 0; j < t_.columns; ++j) std::copy_n(from + j * entries, entries, to.begin() + j * room);
    }

    template <typename A> void check_planes(const A& planes) const {
        check("planes", planes, {Type::u32, Type::i32}, {t_.bits, t_.columns, (t_.rows + 31) / 32}, Layout::dense);
    }

    void add_product(const Tokens& x, const Outputs& y, int threads) const override {
        const int64_t m = x.count, width = kernels_.codebook_by_channel.columns(t_);
        if (m > few(x.bf16)) return add_many(t_, kernels_.codebook_by_channel, x, width, plain(width), y, threads);
        const Scratch padded = make_scratch(m * width);
        const auto pad = plain(width);
        for (int64_t k = 0; k < m; ++k) pad(x.floats(k), padded.get() + k * width);
        by_blocks(
            threads,
            [&](int64_t begin, int64_t end) {
                kernels_.codebook_by_channel.f32.gemv(t_, {padded.get(), m, width, nullptr}, y.sums, y.stride, begin,
                                                      end);
            },
            4); // which the kernel works on together
    }

    Weights bytes_;
    std::vector<float> table_;
    std::vector<uint16_t> halves_;
    std::vector<uint8_t> table_planes_;
    CodebookByChannel t_{};
};

// A tile in format "codebook" bound to the arrays that hold it; the tables that products look up are made at the first.
class BoundCodebook : public Tile {
public:
    BoundCodebook(Input planes, Input table, std::optional<Input> rows, int64_t columns, bool by_channel,
                  const std::optional<std::string>& isa)
        : Tile(isa), planes_(planes), table_(table), by_channel_(by_channel) {
        if (columns < 1 || columns >= MAX_SIZE)
            refuse("columns is " + std::to_string(columns) + ", expected 1 to 2^31 - 1");
        const int64_t bits = size_of("planes", planes, 0, 3);
        if (bits < 1 || bits > 8) refuse(std::to_string(bits) + " planes, expected 1 to 8");
        c_.bits = static_cast<int>(bits);
        c_.rows = size_of("planes", planes, 1, 3);
        c_.columns = columns;
        c_.words = (columns + 31) / 32;
        if (c_.rows < 1) refuse("planes have no rows");
        check("planes", planes, {Type::u32, Type::i32}, {bits, c_.rows, c_.words}, Layout::dense);
        c_.entries = size_of("table", table, 1, 2);
        if (c_.entries < 1 || c_.entries > int64_t(1) << bits)
            refuse("table has " + std::to_string(c_.entries) + " entries, expected up to 2^" + std::to_string(bits));
        check("table", table, {Type::f16, Type::u16, Type::f32}, {c_.rows, c_.entries}, Layout::dense);
        for (int64_t p = 0; p < bits; ++p)
            c_.planes[p] = static_cast<const uint32_t*>(planes.data()) + p * c_.rows * c_.words;
        const bool wide = type_of(table.dtype()) == Type::f32;
        c_.table16 = wide ? nullptr : static_cast<const uint16_t*>(table.data());
        c_.table32 = wide ? static_cast<const float*>(table.data()) : nullptr;
        if (rows && by_channel) refuse("a codebook by channel holds all output rows: leave rows out");
        if (rows) out_rows_.copy(*rows, c_.rows);
        c_.out_rows = out_rows_.data();
        rows_ = by_channel ? c_.columns : c_.rows;
        columns_ = by_channel ? c_.rows : c_.columns;
    }

    // out = the table as it lies, which is W.T by channel.
    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {c_.rows, c_.columns}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        const int64_t piece = piece_of(c_.rows, 1, c_.rows * c_.columns, used), width = c_.words * 32;
        const Scratch scratch = make_scratch(((c_.rows - 1) / piece + 1) * width);
        parallel_for(c_.rows, piece, used, [&](int64_t begin, int64_t end) {
            kernels_.codebook_by_word.dequantize(c_, to, scratch.get() + begin / piece * width, begin, end);
        });
    }

    bool takes_bf16(int64_t tokens) const override {
        if (by_channel_ || kernels_.codebook_by_row.bf16_form == nullptr) return false;
        return tokens > few(true) ? kernels_.codebook_by_row.bf16.gemm != nullptr
                                  : kernels_.codebook_by_row.bf16_form(c_.bits) != TableForm::none;
    }
    bool takes_ints() const override { return !by_channel_; }
    bool finishes(int64_t tokens, bool bf16) const override { return !by_channel_ && Tile::finishes(tokens, bf16); }
    // Beyond, decoding the exact weights once for all tokens takes no longer.
    bool prefers_ints(int64_t tokens, bool bf16) const override { return takes_ints() && tokens <= 2 * few(bf16); }

private:
    void add_product(const Tokens& x, const Outputs& y, int threads) const override {
        if (by_channel_) add_by_channel(x, y, threads);
        else if (x.count > few(x.bf16)) look_up_many(x, y, threads);
        else if (x.bf16) look_up_bf16(x, y, threads);
        else if (float_form() != TableForm::none) look_up_floats(x, y, threads);
        else add_by_row(x, y, threads);
    }

    void add_by_channel(const Tokens& x, const Outputs& y, int threads) const {
        if (x.count > few(x.bf16)) {
            by_blocks(
                threads,
                [&](int64_t begin, int64_t end) {
                    kernels_.codebook_by_word.gemm_by_channel(c_, {x.floats(0), x.count, x.stride, nullptr},
                                                              {y.sums, y.stride}, begin, end);
                },
                GEMM_BLOCKS, x.count);
            return;
        }
        const int64_t piece = piece_of(c_.words, 1, c_.rows * c_.columns * (1 + x.count), threads);
        const Scratch dense = make_scratch(x.count * c_.rows);
        for (int64_t k = 0; k < x.count; ++k) std::copy_n(x.floats(k), c_.rows, dense.get() + k * c_.rows);
        const Scratch scratch = make_scratch(((c_.words - 1) / piece + 1) * piece * 32);
        parallel_for(c_.words, piece, threads, [&](int64_t begin, int64_t end) {
            kernels_.codebook_by_word.gemv_by_channel(c_, {dense.get(), x.count, c_.rows, nullptr}, y.sums, y.stride,
                                                      scratch.get() + begin * 32, begin, end);
        });
    }

    void add_by_row(const Tokens& x, const Outputs& y, int threads) const {
        const int64_t m = x.count, width = c_.words * 32;
        const int64_t piece = piece_of(c_.rows, 1, c_.rows * c_.columns * (1 + m), threads);
        const Scratch scratch = make_scratch((m + (c_.rows - 1) / piece + 1) * width);
        float* padded = scratch.get();
        const auto pad = plain(width);
        for (int64_t k = 0; k < m; ++k) pad(x.floats(k), padded + k * width);
        parallel_for(c_.rows, piece, threads, [&](int64_t begin, int64_t end) {
            kernels_.codebook_by_word.gemv_by_row(c_, {padded, m, width, nullptr}, y.sums, y.stride,
                                                  padded + (m + begin / piece) * width, begin, end);
        });
    }

    void look_up_many(const Tokens& x, const Outputs& y, int threads) const {
        const CodebookByRow b = x.bf16 ? half_codebook() : float_codebook();
        const int64_t width = 32 * b.words;
        add_many(b, kernels_.codebook_by_row, x, width, plain(width), y, threads);
    }

    TableForm float_form() const { return kernels_.codebook_by_row.f32_form(c_.bits, false); }

    CodebookByRow float_codebook() const {
        std::call_once(floats_made_, [this] { float_bytes_ = table_of<uint32_t>(float_form()); });
        return byte_codebook(float_bytes_, nullptr);
    }

    CodebookByRow half_codebook() const {
        std::call_once(halves_made_,
                       [this] { half_bytes_ = table_of<uint16_t>(kernels_.codebook_by_row.bf16_form(c_.bits)); });
        CodebookByRow b = byte_codebook(half_bytes_, nullptr);
        b.halves = true;
        return b;
    }

    void look_up_floats(const Tokens& x, const Outputs& y, int threads) const {
        const CodebookByRow b = float_codebook();
        const int64_t m = x.count, width = kernels_.codebook_by_row.columns(b);
        const Scratch scratch = make_scratch(m * width);
        const auto& f32 = kernels_.codebook_by_row.f32;
        for (int64_t k = 0; k < m; ++k) f32.prepare(b, x.floats(k), scratch.get() + k * width, nullptr);
        by_rows(threads, [&](int64_t begin, int64_t end) {
            f32.gemv(b, {scratch.get(), m, width, nullptr}, y.sums, y.stride, begin, end);
        });
    }

    void look_up_bf16(const Tokens& x, const Outputs& y, int threads) const {
        const CodebookByRow b = half_codebook();
        const int64_t m = x.count, width = kernels_.codebook_by_row.columns(b);
        const Scratch scratch = make_scratch(m * width / 2);
        auto* halves = reinterpret_cast<uint16_t*>(scratch.get());
        const auto& bf16 = kernels_.codebook_by_row.bf16;
        for (int64_t k = 0; k < m; ++k) bf16.prepare(b, x.halves(k), halves + k * width, nullptr);
        by_rows(threads, [&](int64_t begin, int64_t end) {
            bf16.gemv(b, {halves, m, width, nullptr}, y.sums, y.stride, begin, end);
        });
    }

    void add_int_product(const IntTokens& x, const Outputs& y, int threads) const override {
        std::call_once(bytes_made_, [this] { make_bytes(); });
        const CodebookByRow b = byte_codebook(bytes_, byte_scales_.data());
        const int64_t m = x.count, width = kernels_.codebook_by_row.columns(b);
        const int64_t lanes = width / CodebookByRow::INPUT_GROUP;
        const Scratch scratch = make_scratch(m * (width / 4 + lanes + 1));
        auto* codes = reinterpret_cast<int8_t*>(scratch.get());
        float* lane_scales = scratch.get() + m * width / 4;
        float* sums = lane_scales + m * lanes;
        for (int64_t k = 0; k < m; ++k)
            kernels_.codebook_by_row.int8.prepare(b, x.codes + k * c_.columns, x.scales + k * input_groups(),
                                                  {codes + k * width, lane_scales + k * lanes, nullptr, sums + k});
        const Inputs<int8_t> inputs{codes, m, width, lane_scales, nullptr, sums};
        by_rows(threads, [&](int64_t begin, int64_t end) {
            kernels_.codebook_by_row.int8.gemv(b, inputs, y.sums, y.stride, begin, end);
        });
    }

    int64_t input_group_size() const override { return CodebookByRow::INPUT_GROUP; }
    int64_t input_groups() const override {
        return (c_.columns + CodebookByRow::INPUT_GROUP - 1) / CodebookByRow::INPUT_GROUP;
    }

    template <typename F> void by_rows(int threads, F&& f) const {
        parallel_for(c_.rows, piece_of(c_.rows, CodebookByRow::TOGETHER, c_.rows * c_.columns, threads), threads, f);
    }

    CodebookByRow byte_codebook(const std::vector<uint8_t>& table, const float* scales) const {
        CodebookByRow b{};
        std::copy_n(c_.planes, c_.bits, b.planes);
        b.table = table.data();
        b.scales = scales;
        b.out_rows = c_.out_rows;
        b.bits = c_.bits;
        b.rows = c_.rows;
        b.columns = c_.columns;
        b.words = c_.words;
        return b;
    }

    float entry(int64_t row, int64_t e) const {
        const int64_t at = row * c_.entries + e;
        return c_.table32 != nullptr ? c_.table32[at] : baseline::half_to_float(c_.table16[at]);
    }

    // All centroids as floats, or rounded to bfloat16.
    template <typename T> std::vector<uint8_t> table_of(TableForm form) const {
        return lay_tables<T>(c_.rows, c_.entries, int64_t(1) << c_.bits, form,
                             [this](int64_t row, int64_t e) { return entry(row, e); });
    }

    // Centroids as bytes: each row's largest one becomes 127 steps.
    void make_bytes() const {
        const int64_t entries = int64_t(1) << c_.bits;
        bytes_.assign(static_cast<size_t>(c_.rows * entries), uint8_t(CodebookByRow::BYTE_ZERO));
        byte_scales_.assign(static_cast<size_t>(c_.rows), 0.0f);
        for (int64_t row = 0; row < c_.rows; ++row) {
            float most = 0;
            for (int64_t e = 0; e < c_.entries && !std::isnan(most); ++e) {
                const float size = std::abs(entry(row, e));
                most = std::isfinite(size) ? std::max(most, size) : std::nanf(""); // such a row gives NaN
            }
            const float scale = most / 127;
            byte_scales_[static_cast<size_t>(row)] = scale;
            if (!(scale > 0)) continue;
            for (int64_t e = 0; e < c_.entries; ++e)
                bytes_[static_cast<size_t>(row * entries + e)] =
                    static_cast<uint8_t>(CodebookByRow::BYTE_ZERO + std::lrint(entry(row, e) / scale));
        }
    }

    Input planes_, table_;
    bool by_channel_;
    CodebookByWord c_{};
    mutable std::once_flag bytes_made_, floats_made_, halves_made_;
    mutable std::vector<uint8_t> bytes_, float_bytes_, half_bytes_;
    mutable std::vector<float> byte_scales_;
};

} // namespace anybit
