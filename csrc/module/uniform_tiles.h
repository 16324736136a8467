// Tiles of codes on a uniform grid - "group int", and the 2-bit channels of "two_four" - and of 16-bit weights.
#pragma once

#include "module/tile.h"

namespace anybit {

// A tile in format "group int" in the kernels' order, which it holds.
class PackedGroupInt : public Tile {
public:
    PackedGroupInt(const Input& codes, const Input& scales, const std::optional<Input>& zeros,
                   const std::optional<Input>& rows, int64_t bits, int64_t group_size, int64_t columns, int64_t threads,
                   const std::optional<std::string>& isa)
        : Tile(isa) {
        const int used = check_threads(threads);
        if (bits < 1 || bits > 8) refuse("bits is " + std::to_string(bits) + ", expected 1 to 8");
        if (group_size < 1) refuse("group_size is " + std::to_string(group_size) + ", expected at least 1");
        if (columns < 1 || columns >= MAX_SIZE)
            refuse("columns is " + std::to_string(columns) + ", expected 1 to 2^31 - 1");
        t_.bits = static_cast<int>(bits);
        t_.columns = columns_ = columns;
        t_.group_size = group_size < columns ? group_size : columns;
        t_.groups = (columns - 1) / t_.group_size + 1;
        t_.rows = rows_ = size_of("codes", codes, is_packed() ? 0 : 1, is_packed() ? 2 : 3);
        GroupInt::Stored from{};
        from.row_bytes = check_codes(codes);
        check("scales", scales, {Type::f16, Type::u16}, {t_.rows, t_.groups}, Layout::dense);
        if (zeros) check("zeros", *zeros, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        if (rows) out_rows_.copy(*rows, t_.rows);
        from.codes = static_cast<const uint8_t*>(codes.data());
        from.scales = static_cast<const uint16_t*>(scales.data());
        from.zeros = zeros ? static_cast<const uint8_t*>(zeros->data()) : nullptr;
        const int64_t entries = blocks() * kernels_.lanes * t_.groups;
        codes_ = make_weights(kernels_.group_int.bytes(t_));
        grid_ = make_weights(entries * (zeros ? 3 : 2));
        nb::gil_scoped_release release;
        uint8_t* to_codes = codes_.get();
        auto* to_scales = reinterpret_cast<uint16_t*>(grid_.get());
        auto* to_zeros = zeros ? reinterpret_cast<uint8_t*>(to_scales + entries) : nullptr;
        with_scratch(used, [&](uint8_t* scratch, int64_t begin, int64_t end) {
            kernels_.group_int.interleave(t_, from, {to_codes, to_scales, to_zeros}, scratch, begin, end);
        });
        t_.codes = to_codes;
        t_.scales = to_scales;
        t_.zeros = to_zeros;
        t_.out_rows = out_rows_.data();
    }

    void restore(const Output& codes, const Output& scales, const std::optional<Output>& zeros, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t row_bytes = check_codes(codes);
        check("scales", scales, {Type::f16, Type::u16}, {t_.rows, t_.groups}, Layout::dense);
        if (bool(zeros) != (t_.zeros != nullptr))
            refuse(std::string("zeros do not agree with the tile: it is ") + (zeros ? "symmetric" : "asymmetric"));
        if (zeros) check("zeros", *zeros, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        auto* to_codes = static_cast<uint8_t*>(codes.data());
        auto* to_scales = static_cast<uint16_t*>(scales.data());
        auto* to_zeros = zeros ? static_cast<uint8_t*>(zeros->data()) : nullptr;
        const size_t bytes = codes.size();
        nb::gil_scoped_release release;
        std::fill_n(to_codes, bytes, uint8_t(0)); // padding
        with_scratch(used, [&](uint8_t* scratch, int64_t begin, int64_t end) {
            kernels_.group_int.restore(t_, {to_codes, to_scales, to_zeros, row_bytes}, scratch, begin, end);
        });
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32, Type::bf16, Type::u16}, {t_.rows, t_.columns}, Layout::dense);
        const bool full = type_of(out.dtype()) == Type::f32;
        void* to = out.data();
        nb::gil_scoped_release release;
        by_blocks(used, [&](int64_t begin, int64_t end) {
            if (full) kernels_.group_int.dequantize(t_, static_cast<float*>(to), begin, end);
            else kernels_.group_int.dequantize_bf16(t_, static_cast<uint16_t*>(to), begin, end);
        });
    }

    void dequantize_rows(const Input& ids, const Output& out) const {
        const int64_t n = size_of("ids", ids, 0, 1);
        check("ids", ids, {Type::i64}, {n}, Layout::dense);
        check("out", out, {Type::f32}, {n, t_.columns}, Layout::dense);
        const int64_t* from = static_cast<const int64_t*>(ids.data());
        const std::vector<int64_t> wanted(from, from + n);
        for (int64_t row : wanted)
            if (row < 0 || row >= t_.rows)
                refuse("row " + std::to_string(row) + " of a tile of " + std::to_string(t_.rows) + " rows");
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        for (int64_t i = 0; i < n; ++i)
            kernels_.group_int.dequantize_row(t_, wanted[static_cast<size_t>(i)], to + i * t_.columns);
    }

    bool takes_bf16(int64_t) const override { return kernels_.group_int.bf16.gemv != nullptr; }
    bool takes_ints() const override { return t_.group_size <= MAX_INT_GROUP; }

private:
    void add_product(const Tokens& x, const Outputs& y, int threads) const override {
        const int64_t m = x.count, width = kernels_.group_int.columns(t_);
        if (m > few(x.bf16)) {
            const auto pad = [this, width](const auto* from, auto* to) {
                for (int64_t g = 0, room = width / t_.groups; g < t_.groups; ++g, to += room) {
                    const int64_t first = g * t_.group_size, count = std::min(t_.group_size, columns_ - first);
                    std::copy_n(from + first, count, to);
                    std::fill_n(to + count, room - count, 0);
                }
            };
            return add_many(t_, kernels_.group_int, x, width, pad, y, threads);
        }
        add_few(t_, kernels_.group_int, x, y, threads);
    }

    void add_int_product(const IntTokens& x, const Outputs& y, int threads) const override {
        const int64_t m = x.count, stride = odd_lines(kernels_.group_int.columns(t_), 1);
        const Scratch scratch = make_scratch(m * (stride / 4 + t_.groups) + INTS_BEHIND / 4);
        auto* codes = reinterpret_cast<int8_t*>(scratch.get());
        auto* sums = reinterpret_cast<int32_t*>(codes + m * stride);
        for_tokens(m, columns_, threads, [&](int64_t k) {
            kernels_.group_int.int8.prepare(t_, x.codes + k * columns_, nullptr,
                                            {codes + k * stride, nullptr, sums + k * t_.groups, nullptr});
        });
        const Inputs<int8_t> inputs{codes, m, stride, x.scales, sums, nullptr};
        const auto product = [&](const Outputs& outputs) {
            by_blocks(
                threads,
                [&](int64_t begin, int64_t end) {
                    const auto& int8 = kernels_.group_int.int8;
                    if (m > kernels_.gemv_tokens_int8) int8.gemm(t_, inputs, outputs, begin, end);
                    else int8.gemv(t_, inputs, outputs.sums, outputs.stride, begin, end);
                },
                GEMM_BLOCKS, m);
        };
        if (finishes_ints(m)) place(m, y, threads, product);
        else product({y.sums, y.stride, false, nullptr, t_.out_rows});
    }

    bool finishes_ints(int64_t tokens) const override { return tokens > GEMV_TOKENS; }
    int64_t input_groups() const override { return t_.groups; }
    int64_t input_group_size() const override { return t_.group_size; }
    bool is_packed() const { return t_.bits == 2 || t_.bits == 4 || t_.bits == 8; }

    // Checks stored codes and returns the bytes of a row of them.
    template <typename A> int64_t check_codes(const A& codes) const {
        const size_t ndim = is_packed() ? 2 : 3;
        if (codes.ndim() != ndim)
            refuse("codes have " + std::to_string(codes.ndim()) + " dimensions, expected " + std::to_string(ndim));
        const int64_t row_bytes = static_cast<int64_t>(codes.shape(ndim - 1));
        if (is_packed()) check("codes", codes, {Type::u8}, {t_.rows, row_bytes}, Layout::dense);
        else check("codes", codes, {Type::u8}, {t_.bits, t_.rows, row_bytes}, Layout::dense);
        const int64_t needed = (t_.columns * (is_packed() ? t_.bits : 1) + 7) / 8;
        if (row_bytes < needed)
            refuse("codes have " + std::to_string(row_bytes) + " bytes a row, but " + std::to_string(t_.columns) +
                   " columns need " + std::to_string(needed));
        return row_bytes;
    }

    template <typename F> void with_scratch(int threads, F&& f) const {
        const int64_t n = blocks(), step = piece(threads), bytes = kernels_.group_int.scratch(t_);
        const Scratch scratch = make_scratch(((n + step - 1) / step * bytes + 3) / 4);
        by_blocks(threads, [&](int64_t begin, int64_t end) {
            f(reinterpret_cast<uint8_t*>(scratch.get()) + begin / step * bytes, begin, end);
        });
    }

    Weights codes_, grid_; // codes; scales, then zeros
    GroupInt t_{};
};

// The 2-bit channels of a tile in format "two_four" in the kernels' order.
class PackedSecondOrder : public Tile {
public:
    PackedSecondOrder(const Input& codes, const Input& zeros, const Input& scale_codes, const Input& scales,
                      const Input& scale_zeros, int64_t group_size, int64_t threads,
                      const std::optional<std::string>& isa)
        : Tile(isa) {
        const int used = check_threads(threads);
        if (group_size != 8 && group_size != 16)
            refuse("group_size is " + std::to_string(group_size) + ", expected 8 or 16");
        t_.group_size = group_size;
        t_.rows = rows_ = size_of("codes", codes, 0, 2);
        t_.columns = columns_ = size_of("codes", codes, 1, 2);
        t_.groups = (t_.columns + group_size - 1) / group_size;
        const int64_t parts = (t_.rows + TwoFour::SCALE_ROWS - 1) / TwoFour::SCALE_ROWS;
        check_bytes(codes, zeros, scale_codes);
        check("scales", scales, {Type::f32}, {parts, t_.groups}, Layout::dense);
        check("scale_zeros", scale_zeros, {Type::u8}, {parts, t_.groups}, Layout::dense);
        const auto bytes_of = [](const Input& a) { return static_cast<const uint8_t*>(a.data()); };
        const TwoFour::Stored from{bytes_of(codes), bytes_of(zeros), bytes_of(scale_codes)};
        check_below("codes", from.codes, t_.rows * t_.columns, 4);
        check_below("zeros", from.zeros, t_.rows * t_.groups, 4);
        check_below("scale_codes", from.scale_codes, t_.rows * t_.groups, 16);
        const auto* given = static_cast<const float*>(scales.data());
        scales_.assign(given, given + parts * t_.groups);
        zeros_.assign(bytes_of(scale_zeros), bytes_of(scale_zeros) + parts * t_.groups);
        bytes_ = make_weights(kernels_.two_four.bytes(t_));
        nb::gil_scoped_release release;
        uint8_t* to = bytes_.get();
        by_blocks(used, [&](int64_t begin, int64_t end) {
            kernels_.two_four.interleave(t_, from, {to}, nullptr, begin, end);
        });
        t_.bytes = to;
        t_.scales = scales_.data();
        t_.zeros = zeros_.data();
    }

    void restore(const Output& codes, const Output& zeros, const Output& scale_codes, int64_t threads) const {
        const int used = check_threads(threads);
        check_bytes(codes, zeros, scale_codes);
        auto *to = static_cast<uint8_t*>(codes.data()), *to_zeros = static_cast<uint8_t*>(zeros.data()),
             *to_scales = static_cast<uint8_t*>(scale_codes.data());
        nb::gil_scoped_release release;
        by_blocks(used, [&](int64_t begin, int64_t end) {
            kernels_.two_four.restore(t_, {to, to_zeros, to_scales}, nullptr, begin, end);
        });
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {t_.rows, t_.columns}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        by_blocks(used, [&](int64_t begin, int64_t end) { kernels_.two_four.dequantize(t_, to, begin, end); });
    }

    bool takes_bf16(int64_t) const override { return kernels_.two_four.bf16.gemv != nullptr; }

private:
    template <typename A> void check_bytes(const A& codes, const A& zeros, const A& scale_codes) const {
        check("codes", codes, {Type::u8}, {t_.rows, t_.columns}, Layout::dense);
        check("zeros", zeros, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        check("scale_codes", scale_codes, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
    }

    // bound: a power of 2
    static void check_below(const char* name, const uint8_t* values, int64_t n, int bound) {
        int all = 0;
        for (int64_t i = 0; i < n; ++i) all |= values[i];
        if (all >= bound) refuse(std::string(name) + " go beyond " + std::to_string(bound - 1));
    }

    void add_product(const Tokens& x, const Outputs& y, int threads) const override {
        const int64_t m = x.count, width = kernels_.two_four.columns(t_);
        if (m > few(x.bf16)) return add_many(t_, kernels_.two_four, x, width, plain(width), y, threads);
        add_few(t_, kernels_.two_four, x, y, threads);
    }

    Weights bytes_;
    std::vector<float> scales_;
    std::vector<uint8_t> zeros_;
    TwoFour t_{};
};

// A tile in format "float16" (or one of bfloat16, which no artifact has), bound to the array that holds it.
class BoundHalves : public Tile {
public:
    BoundHalves(Input values, const std::optional<Input>& rows, const std::optional<std::string>& isa)
        : Tile(isa), values_(values) {
        t_.rows = rows_ = size_of("values", values, 0, 2);
        t_.columns = columns_ = size_of("values", values, 1, 2);
        check("values", values, {Type::f16, Type::bf16}, {rows_, columns_}, Layout::dense);
        t_.bf16 = type_of(values.dtype()) == Type::bf16;
        if (rows) out_rows_.copy(*rows, rows_);
        t_.values = static_cast<const uint16_t*>(values.data());
        t_.out_rows = out_rows_.data();
    }

    bool takes_bf16(int64_t tokens) const override {
        return tokens > few(true) && kernels_.float16.bf16.gemm != nullptr;
    }

private:
    void add_product(const Tokens& x, const Outputs& y, int threads) const override {
        if (x.bf16) {
            const int64_t width = columns_ + columns_ % 2;
            return add_many(t_, kernels_.float16, x, width, plain(width), y, threads);
        }
        const Inputs<float> inputs{x.floats(0), x.count, x.stride, nullptr};
        if (x.count > GEMV_TOKENS || columns_ <= NARROW)
            return place(x.count, y, threads, [&](const Outputs& outputs) {
                by_blocks(
                    threads,
                    [&](int64_t begin, int64_t end) { kernels_.float16.f32.gemm(t_, inputs, outputs, begin, end); },
                    GEMM_BLOCKS, x.count);
            });
        const int64_t piece = piece_of(rows_, kernels_.lanes, rows_ * columns_, threads); // it takes few rows at a time
        parallel_for(rows_, piece, threads, [&](int64_t begin, int64_t end) {
            kernels_.float16.f32.gemv(t_, inputs, y.sums, y.stride, begin, end);
        });
    }

    Input values_;
    Float16 t_{};
};

} // namespace anybit
