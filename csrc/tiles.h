// Tiles of stored weights bound to the kernels of one instruction set, as Python sees them.
#pragma once

#include "arrays.h"
#define ANYBIT_ISA baseline
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

namespace anybit {

// Output rows of a tile. Copied, not referenced: what was checked here stays what the kernel indexes with.
class OutRows {
public:
    void copy(const Input& rows, int64_t n) {
        check("rows", rows, {Type::i32}, {n}, Layout::dense);
        const int32_t* from = static_cast<const int32_t*>(rows.data());
        rows_.assign(from, from + n);
        for (int64_t i = 0; i < n; ++i)
            if (rows_[i] < 0 || (i > 0 && rows_[i] <= rows_[i - 1]))
                refuse("rows[" + std::to_string(i) + "] is " + std::to_string(rows_[i]) +
                       ": expected rising output rows from 0");
        given_ = true;
    }
    void check_below(int64_t out) const {
        if (!rows_.empty() && rows_.back() >= out)
            refuse("y has " + std::to_string(out) + " columns, but rows go up to " + std::to_string(rows_.back()));
    }
    bool given() const { return given_; }
    const int32_t* data() const { return given_ ? rows_.data() : nullptr; }

private:
    bool given_ = false;
    std::vector<int32_t> rows_;
};

// Activations [count, columns]: float32, or the bit patterns of bfloat16.
struct Tokens {
    const void* data;
    bool bf16;
    int64_t count, stride; // elements from one token to the next

    const float* floats(int64_t k) const { return static_cast<const float*>(data) + k * stride; }
    const uint16_t* halves(int64_t k) const { return static_cast<const uint16_t*>(data) + k * stride; }
};

struct IntTokens {
    const int8_t* codes; // [count, columns]
    const float* scales; // [count, input groups]
    int64_t count;
};

// Of more tokens than this, weights are decoded once for all.
constexpr int64_t FEW_TOKENS = 8;

class Tile {
public:
    Tile(const Tile&) = delete; // the kernels' view points into the object
    virtual ~Tile() = default;

    // y[:, rows] += x @ W.T
    void matmul(const Input& x, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t m = size_of("x", x, 0, 2);
        if (takes_bf16(m)) check("x", x, {Type::f32, Type::bf16, Type::u16}, {m, columns_}, Layout::dense_rows);
        else check("x", x, {Type::f32}, {m, columns_}, Layout::dense_rows);
        const int64_t out = check_y(y, m);
        const Tokens tokens{x.data(), type_of(x.dtype()) != Type::f32, m, row_stride(m, x.stride(0), columns_)};
        float* to = static_cast<float*>(y.data());
        nb::gil_scoped_release release;
        add_product(tokens, to, out, used);
    }

    // y[:, rows] += (x * scales by group) @ W.T
    void int_matmul(const Input& x, const Input& scales, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        if (!takes_ints())
            refuse("this tile has no integer kernel: codebooks by row have one, and groups of up to " +
                   std::to_string(MAX_INT_GROUP) + " columns, whose sums cannot leave 32 bits");
        const int64_t m = size_of("x", x, 0, 2);
        check("x", x, {Type::i8}, {m, columns_}, Layout::dense);
        check("scales", scales, {Type::f32}, {m, input_groups()}, Layout::dense);
        const int64_t out = check_y(y, m);
        const IntTokens tokens{static_cast<const int8_t*>(x.data()), static_cast<const float*>(scales.data()), m};
        float* to = static_cast<float*>(y.data());
        nb::gil_scoped_release release;
        add_int_product(tokens, to, out, used);
    }

    virtual bool takes_bf16(int64_t) const { return false; } // whether `matmul` takes bfloat16 of so many tokens
    virtual bool takes_ints() const { return false; }        // whether there is `int_matmul`
    virtual bool prefers_ints(int64_t) const { return takes_ints(); } // whether that is fastest for so many tokens

    // The same without checks and without the GIL.
    virtual void add_product(const Tokens& x, float* y, int64_t y_stride, int threads) const = 0;
    virtual void add_int_product(const IntTokens&, float*, int64_t, int) const {}
    virtual int64_t input_groups() const { return 0; } // of `int_matmul`
    int64_t columns() const { return columns_; }

    void check_out(int64_t out) const {
        if (out_rows_.given()) out_rows_.check_below(out);
        else if (out != rows_) refuse("y has " + std::to_string(out) + " columns, expected " + std::to_string(rows_));
    }

protected:
    explicit Tile(const std::optional<std::string>& isa) : kernels_(check_products(isa)) {}

    static constexpr int64_t TOGETHER = 2; // blocks of rows that the kernels of many tokens work on at once

    // Products of many tokens: inputs are brought into plain order with padding by `pad(k, from, to)`, `width` of them
    // to a token, and multiplied by `floats` or `halves`, the kernels' functions.
    template <typename T, typename P>
    void add_many(const T& tile, const Tokens& x, int64_t width, P&& pad,
                  void (*floats)(const T&, const float*, int64_t, int64_t, float*, int64_t, int64_t, int64_t),
                  void (*halves)(const T&, const uint16_t*, int64_t, int64_t, float*, int64_t, int64_t, int64_t),
                  float* y, int64_t y_stride, int threads) const {
        const int64_t m = x.count, row = width + columns_; // a row of scratch: padded, and before
        const int64_t stride = odd_lines(width, x.bf16 ? 2 : 4);
        const Scratch padded = make_scratch(x.bf16 ? m * stride / 2 : m * stride);
        auto* narrow = reinterpret_cast<uint16_t*>(padded.get());
        const int64_t piece = piece_of(m, 1, m * width, threads);
        const Scratch scratch = make_scratch(x.bf16 && width != columns_ ? ((m - 1) / piece + 1) * row : 0);
        parallel_for(m, piece, threads, [&](int64_t begin, int64_t end) {
            float *to = scratch.get() + begin / piece * row, *before = to + width;
            for (int64_t k = begin; k < end; ++k) {
                if (!x.bf16) pad(k, x.floats(k), padded.get() + k * stride);
                else if (width == columns_) std::copy_n(x.halves(k), width, narrow + k * stride);
                else {
                    baseline::widen(x.halves(k), columns_, before);
                    pad(k, before, to);
                    for (int64_t j = 0; j < width; ++j) narrow[k * stride + j] = baseline::upper_half(to[j]);
                }
            }
        });
        const int64_t step = piece_of(blocks(), TOGETHER, m * rows_ * columns_, threads);
        parallel_for(blocks(), step, threads, [&](int64_t begin, int64_t end) {
            if (x.bf16) halves(tile, narrow, stride, m, y, y_stride, begin, end);
            else floats(tile, padded.get(), stride, m, y, y_stride, begin, end);
        });
    }

    // Inputs as they are, then zeros.
    auto plain(int64_t width) const {
        return [this, width](int64_t, const float* from, float* to) {
            std::copy_n(from, columns_, to);
            std::fill_n(to + columns_, width - columns_, 0.0f);
        };
    }

    // f(begin, end) for all blocks of `lanes` rows, ranges beginning at multiples of `whole`.
    template <typename F> void by_blocks(int threads, F&& f, int64_t whole = 1) const {
        parallel_for(blocks(), piece(threads, whole), threads, f);
    }
    int64_t blocks() const { return (rows_ + kernels_.lanes - 1) / kernels_.lanes; }
    int64_t piece(int threads, int64_t whole = 1) const {
        return std::max(int64_t(1), piece_of(blocks(), whole, rows_ * columns_, threads));
    }

    const Products& kernels_;
    int64_t rows_ = 0, columns_ = 0; // of the matrix
    OutRows out_rows_;

private:
    // Checks outputs of m tokens and returns their number.
    int64_t check_y(const Output& y, int64_t m) const {
        check("y", y, {Type::f32}, {m, out_rows_.given() ? -1 : rows_}, Layout::dense);
        const int64_t out = static_cast<int64_t>(y.shape(1));
        check_out(out);
        return out;
    }
};

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
        StoredGroupInt from{};
        from.row_bytes = check_codes(codes);
        check("scales", scales, {Type::f16, Type::u16}, {t_.rows, t_.groups}, Layout::dense);
        if (zeros) check("zeros", *zeros, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        if (rows) out_rows_.copy(*rows, t_.rows);
        from.codes = static_cast<const uint8_t*>(codes.data());
        from.scales = static_cast<const uint16_t*>(scales.data());
        from.zeros = zeros ? static_cast<const uint8_t*>(zeros->data()) : nullptr;
        nb::gil_scoped_release release;
        const int64_t entries = blocks() * kernels_.lanes * t_.groups;
        codes_ = make_scratch((kernels_.group_int_bytes(t_) + 3) / 4);
        grid_ = make_scratch((entries * 3 + 3) / 4);
        auto* to_codes = reinterpret_cast<uint8_t*>(codes_.get());
        auto* to_scales = reinterpret_cast<uint16_t*>(grid_.get());
        auto* to_zeros = zeros ? reinterpret_cast<uint8_t*>(to_scales + entries) : nullptr;
        with_scratch(used, [&](uint8_t* scratch, int64_t begin, int64_t end) {
            kernels_.group_int_interleave(t_, from, to_codes, to_scales, to_zeros, scratch, begin, end);
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
            kernels_.group_int_restore(t_, to_codes, row_bytes, to_scales, to_zeros, scratch, begin, end);
        });
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32, Type::bf16, Type::u16}, {t_.rows, t_.columns}, Layout::dense);
        const bool full = type_of(out.dtype()) == Type::f32;
        void* to = out.data();
        nb::gil_scoped_release release;
        by_blocks(used, [&](int64_t begin, int64_t end) {
            if (full) kernels_.group_int_dequantize_f32(t_, static_cast<float*>(to), begin, end);
            else kernels_.group_int_dequantize_bf16(t_, static_cast<uint16_t*>(to), begin, end);
        });
    }

    void dequantize_rows(const Input& ids, const Output& out) const {
        const int64_t n = size_of("ids", ids, 0, 1);
        check("ids", ids, {Type::i32}, {n}, Layout::dense);
        check("out", out, {Type::f32}, {n, t_.columns}, Layout::dense);
        const int32_t* from = static_cast<const int32_t*>(ids.data());
        const std::vector<int32_t> wanted(from, from + n);
        for (int32_t row : wanted)
            if (row < 0 || row >= t_.rows)
                refuse("row " + std::to_string(row) + " of a tile of " + std::to_string(t_.rows) + " rows");
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        for (int64_t i = 0; i < n; ++i) kernels_.group_int_row(t_, wanted[static_cast<size_t>(i)], to + i * t_.columns);
    }

    bool takes_bf16(int64_t) const override { return kernels_.group_int_bf16_matmul != nullptr; }
    bool takes_ints() const override { return t_.group_size <= MAX_INT_GROUP; }

private:
    void add_product(const Tokens& x, float* y, int64_t y_stride, int threads) const override {
        const int64_t m = x.count, width = kernels_.group_int_columns(t_);
        if (m > FEW_TOKENS) {
            const Scratch sums = make_scratch(m * t_.groups); // which nobody reads
            const auto pad = [&](int64_t k, const float* from, float* to) {
                kernels_.group_int_prepare(t_, from, to, sums.get() + k * t_.groups);
            };
            return add_many(t_, x, width, pad, kernels_.group_int_gemm, kernels_.group_int_gemm_bf16, y, y_stride,
                            threads);
        }
        const Scratch scratch = make_scratch(m * (width + t_.groups));
        float *floats = scratch.get(), *sums = floats + m * width;
        auto* halves = reinterpret_cast<uint16_t*>(floats);
        for (int64_t k = 0; k < m; ++k)
            if (x.bf16) kernels_.group_int_prepare_bf16(t_, x.halves(k), halves + k * width, sums + k * t_.groups);
            else kernels_.group_int_prepare(t_, x.floats(k), floats + k * width, sums + k * t_.groups);
        by_blocks(threads, [&](int64_t begin, int64_t end) {
            if (x.bf16) kernels_.group_int_bf16_matmul(t_, {halves, sums, m}, y, y_stride, begin, end);
            else kernels_.group_int_matmul(t_, {floats, sums, m}, y, y_stride, begin, end);
        });
    }

    void add_int_product(const IntTokens& x, float* y, int64_t y_stride, int threads) const override {
        const int64_t m = x.count, stride = odd_lines(kernels_.group_int_columns(t_), 1);
        const Scratch scratch = make_scratch(m * (stride / 4 + t_.groups));
        auto* codes = reinterpret_cast<int8_t*>(scratch.get());
        auto* sums = reinterpret_cast<int32_t*>(codes + m * stride);
        for (int64_t k = 0; k < m; ++k)
            kernels_.group_int_prepare_ints(t_, x.codes + k * t_.columns, codes + k * stride, sums + k * t_.groups);
        const IntInputs inputs{codes, x.scales, sums, m, stride};
        by_blocks(
            threads,
            [&](int64_t begin, int64_t end) { kernels_.group_int_int_matmul(t_, inputs, y, y_stride, begin, end); },
            TOGETHER);
    }

    int64_t input_groups() const override { return t_.groups; }
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
        const int64_t n = blocks(), step = piece(threads), bytes = kernels_.group_int_scratch(t_);
        const Scratch scratch = make_scratch(((n + step - 1) / step * bytes + 3) / 4);
        by_blocks(threads, [&](int64_t begin, int64_t end) {
            f(reinterpret_cast<uint8_t*>(scratch.get()) + begin / step * bytes, begin, end);
        });
    }

    Scratch codes_, grid_; // codes; scales, then zeros
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
        const int64_t parts = (t_.rows + SECOND_ROWS - 1) / SECOND_ROWS;
        check_bytes(codes, zeros, scale_codes);
        check("scales", scales, {Type::f32}, {parts, t_.groups}, Layout::dense);
        check("scale_zeros", scale_zeros, {Type::u8}, {parts, t_.groups}, Layout::dense);
        const auto bytes_of = [](const Input& a) { return static_cast<const uint8_t*>(a.data()); };
        const StoredSecondOrder from{bytes_of(codes), bytes_of(zeros), bytes_of(scale_codes)};
        const auto* given = static_cast<const float*>(scales.data());
        scales_.assign(given, given + parts * t_.groups);
        zeros_.assign(bytes_of(scale_zeros), bytes_of(scale_zeros) + parts * t_.groups);
        nb::gil_scoped_release release;
        bytes_ = make_scratch((kernels_.second_order_bytes(t_) + 3) / 4);
        auto* to = reinterpret_cast<uint8_t*>(bytes_.get());
        by_blocks(used,
                  [&](int64_t begin, int64_t end) { kernels_.second_order_interleave(t_, from, to, begin, end); });
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
            kernels_.second_order_restore(t_, to, to_zeros, to_scales, begin, end);
        });
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {t_.rows, t_.columns}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        by_blocks(used, [&](int64_t begin, int64_t end) { kernels_.second_order_dequantize(t_, to, begin, end); });
    }

    bool takes_bf16(int64_t) const override { return kernels_.second_order_bf16_matmul != nullptr; }

private:
    template <typename A> void check_bytes(const A& codes, const A& zeros, const A& scale_codes) const {
        check("codes", codes, {Type::u8}, {t_.rows, t_.columns}, Layout::dense);
        check("zeros", zeros, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        check("scale_codes", scale_codes, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
    }

    void add_product(const Tokens& x, float* y, int64_t y_stride, int threads) const override {
        const int64_t m = x.count, width = kernels_.second_order_columns(t_);
        if (m > FEW_TOKENS)
            return add_many(t_, x, width, plain(width), kernels_.second_order_gemm, kernels_.second_order_gemm_bf16, y,
                            y_stride, threads);
        const Scratch scratch = make_scratch(m * (width + t_.groups));
        float *floats = scratch.get(), *sums = floats + m * width;
        auto* halves = reinterpret_cast<uint16_t*>(floats);
        for (int64_t k = 0; k < m; ++k)
            if (x.bf16) kernels_.second_order_prepare_bf16(t_, x.halves(k), halves + k * width, sums + k * t_.groups);
            else kernels_.second_order_prepare(t_, x.floats(k), floats + k * width, sums + k * t_.groups);
        by_blocks(threads, [&](int64_t begin, int64_t end) {
            if (x.bf16) kernels_.second_order_bf16_matmul(t_, {halves, sums, m}, y, y_stride, begin, end);
            else kernels_.second_order_matmul(t_, {floats, sums, m}, y, y_stride, begin, end);
        });
    }

    Scratch bytes_;
    std::vector<float> scales_;
    std::vector<uint8_t> zeros_;
    SecondOrder t_{};
};

// A tile in format "codebook" by input channel, up to 4 bits, in the kernels' order.
class PackedChannels : public Tile {
public:
    PackedChannels(const Input& planes, const Input& table, int64_t rows, int64_t threads,
                   const std::optional<std::string>& isa)
        : Tile(isa) {
        const int used = check_threads(threads);
        if (rows < 1 || rows >= MAX_SIZE) refuse("rows is " + std::to_string(rows) + ", expected 1 to 2^31 - 1");
        const int64_t bits = size_of("planes", planes, 0, 3);
        if (bits < 1 || bits > 4) refuse(std::to_string(bits) + " planes, expected 1 to 4");
        t_.bits = static_cast<int>(bits);
        t_.rows = rows_ = rows;
        t_.columns = columns_ = size_of("planes", planes, 1, 3);
        check_planes(planes);
        const int64_t entries = size_of("table", table, 1, 2);
        if (entries < 1 || entries > int64_t(1) << bits)
            refuse("table has " + std::to_string(entries) + " entries, expected up to 2^" + std::to_string(bits));
        check("table", table, {Type::f32}, {t_.columns, entries}, Layout::dense);
        const auto* from = static_cast<const uint32_t*>(planes.data());
        const auto* given = static_cast<const float*>(table.data());
        table_.assign(static_cast<size_t>(kernels_.channel_columns(t_) * CHANNEL_ENTRIES), 0.0f);
        for (int64_t j = 0; j < t_.columns; ++j)
            std::copy_n(given + j * entries, entries, table_.begin() + j * CHANNEL_ENTRIES);
        nb::gil_scoped_release release;
        bytes_ = make_scratch((kernels_.channel_bytes(t_) + 3) / 4);
        auto* to = reinterpret_cast<uint8_t*>(bytes_.get());
        by_blocks(used, [&](int64_t begin, int64_t end) { kernels_.channel_interleave(t_, from, to, begin, end); });
        t_.bytes = to;
        t_.table = table_.data();
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
            used, [&](int64_t begin, int64_t end) { kernels_.channel_restore(t_, to, begin, end); },
            CHANNEL_ROWS / kernels_.lanes);
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {t_.rows, t_.columns}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        by_blocks(used, [&](int64_t begin, int64_t end) { kernels_.channel_dequantize(t_, to, begin, end); });
    }

    bool takes_bf16(int64_t tokens) const override {
        return tokens > FEW_TOKENS && kernels_.channel_gemm_bf16 != nullptr;
    }

private:
    template <typename A> void check_planes(const A& planes) const {
        check("planes", planes, {Type::u32, Type::i32}, {t_.bits, t_.columns, (t_.rows + 31) / 32}, Layout::dense);
    }

    void add_product(const Tokens& x, float* y, int64_t y_stride, int threads) const override {
        const int64_t m = x.count, width = kernels_.channel_columns(t_);
        if (m > FEW_TOKENS)
            return add_many(t_, x, width, plain(width), kernels_.channel_gemm, kernels_.channel_gemm_bf16, y, y_stride,
                            threads);
        const Scratch padded = make_scratch(m * width);
        for (int64_t k = 0; k < m; ++k) {
            std::copy_n(x.floats(k), t_.columns, padded.get() + k * width);
            std::fill_n(padded.get() + k * width + t_.columns, width - t_.columns, 0.0f);
        }
        by_blocks(
            threads,
            [&](int64_t begin, int64_t end) { kernels_.channel_matmul(t_, padded.get(), m, y, y_stride, begin, end); },
            4); // which the kernel works on together
    }

    Scratch bytes_;
    std::vector<float> table_;
    ChannelCodebook t_{};
};

// A tile in format "codebook" bound to the arrays that hold it; the tables that products look up are made at the first.
class BoundCodebook : public Tile {
public:
    BoundCodebook(Input planes, Input table, std::optional<Input> rows, int64_t columns, bool by_channel,
                  const std::optional<std::string>& isa)
        : Tile(isa), planes_(planes), table_(table), by_channel_(by_channel),
          by_words_(*kernels_for(kernels_.lanes == 16  ? "avx512"
                                 : kernels_.lanes == 8 ? "avx2"
                                                       : "portable")) {
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
        c_.planes = static_cast<const uint32_t*>(planes.data());
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
            by_words_.codebook_decode(c_, to, scratch.get() + begin / piece * width, begin, end);
        });
    }

    bool takes_bf16(int64_t) const override { return !by_channel_ && kernels_.lookup_bf16_matmul != nullptr; }
    bool takes_ints() const override { return !by_channel_; }
    bool prefers_ints(int64_t tokens) const override { return !by_channel_ && tokens <= FEW_TOKENS; }

private:
    void add_product(const Tokens& x, float* y, int64_t y_stride, int threads) const override {
        if (by_channel_) add_by_channel(x, y, y_stride, threads);
        else if (x.count > FEW_TOKENS) look_up_many(x, y, y_stride, threads);
        else if (x.bf16) look_up_bf16(x, y, y_stride, threads);
        else if (kernels_.lookup_float_form(c_.bits) != TableForm::none) look_up_floats(x, y, y_stride, threads);
        else add_by_row(x, y, y_stride, threads);
    }

    void add_by_channel(const Tokens& x, float* y, int64_t y_stride, int threads) const {
        const int64_t piece = piece_of(c_.words, 1, c_.rows * c_.columns * (1 + x.count), threads);
        const Scratch dense = make_scratch(x.count * c_.rows);
        for (int64_t k = 0; k < x.count; ++k) std::copy_n(x.floats(k), c_.rows, dense.get() + k * c_.rows);
        const Scratch scratch = make_scratch(((c_.words - 1) / piece + 1) * piece * 32);
        parallel_for(c_.words, piece, threads, [&](int64_t begin, int64_t end) {
            by_words_.codebook_channels(c_, dense.get(), x.count, y, y_stride, scratch.get() + begin * 32, begin, end);
        });
    }

    void add_by_row(const Tokens& x, float* y, int64_t y_stride, int threads) const {
        const int64_t m = x.count, width = c_.words * 32;
        const int64_t piece = piece_of(c_.rows, 1, c_.rows * c_.columns * (1 + m), threads);
        const Scratch scratch = make_scratch((m + (c_.rows - 1) / piece + 1) * width);
        float* padded = scratch.get();
        for (int64_t k = 0; k < m; ++k) {
            std::copy_n(x.floats(k), c_.columns, padded + k * width);
            std::fill_n(padded + k * width + c_.columns, width - c_.columns, 0.0f);
        }
        parallel_for(c_.rows, piece, threads, [&](int64_t begin, int64_t end) {
            by_words_.codebook_rows(c_, padded, m, y, y_stride, padded + (m + begin / piece) * width, begin, end);
        });
    }

    void look_up_many(const Tokens& x, float* y, int64_t y_stride, int threads) const {
        const ByteCodebook b = float_codebook();
        const int64_t width = kernels_.lookup_blocks(b) * kernels_.lanes * LOOKUP_GROUP;
        add_many(b, x, width, plain(width), kernels_.lookup_gemm, kernels_.lookup_gemm_bf16, y, y_stride, threads);
    }

    ByteCodebook float_codebook() const {
        std::call_once(floats_made_,
                       [this] { float_bytes_ = table_of<uint32_t>(kernels_.lookup_float_form(c_.bits)); });
        return byte_codebook(float_bytes_, nullptr);
    }

    void look_up_floats(const Tokens& x, float* y, int64_t y_stride, int threads) const {
        std::call_once(floats_made_,
                       [this] { float_bytes_ = table_of<uint32_t>(kernels_.lookup_float_form(c_.bits)); });
        const ByteCodebook b = byte_codebook(float_bytes_, nullptr);
        const int64_t m = x.count, width = kernels_.lookup_blocks(b) * kernels_.lanes * LOOKUP_GROUP;
        const Scratch scratch = make_scratch(m * width);
        for (int64_t k = 0; k < m; ++k) kernels_.lookup_prepare_floats(b, x.floats(k), scratch.get() + k * width);
        by_rows(threads, [&](int64_t begin, int64_t end) {
            kernels_.lookup_float_matmul(b, {scratch.get(), m}, y, y_stride, begin, end);
        });
    }

    void look_up_bf16(const Tokens& x, float* y, int64_t y_stride, int threads) const {
        std::call_once(halves_made_, [this] { half_bytes_ = table_of<uint16_t>(kernels_.lookup_bf16_form(c_.bits)); });
        const ByteCodebook b = byte_codebook(half_bytes_, nullptr);
        const int64_t m = x.count, width = kernels_.lookup_blocks(b) * kernels_.lanes * LOOKUP_GROUP;
        const Scratch scratch = make_scratch(m * width / 2);
        auto* halves = reinterpret_cast<uint16_t*>(scratch.get());
        for (int64_t k = 0; k < m; ++k) kernels_.lookup_prepare_bf16(b, x.halves(k), halves + k * width);
        by_rows(threads, [&](int64_t begin, int64_t end) {
            kernels_.lookup_bf16_matmul(b, {halves, m}, y, y_stride, begin, end);
        });
    }

    void add_int_product(const IntTokens& x, float* y, int64_t y_stride, int threads) const override {
        std::call_once(bytes_made_, [this] { make_bytes(); });
        const ByteCodebook b = byte_codebook(bytes_, byte_scales_.data());
        const int64_t m = x.count, lanes = kernels_.lookup_blocks(b) * kernels_.lanes, width = lanes * LOOKUP_GROUP;
        const Scratch scratch = make_scratch(m * (width / 4 + lanes + 1));
        auto* codes = reinterpret_cast<int8_t*>(scratch.get());
        float* lane_scales = scratch.get() + m * width / 4;
        float* sums = lane_scales + m * lanes;
        for (int64_t k = 0; k < m; ++k)
            kernels_.lookup_prepare(b, x.codes + k * c_.columns, x.scales + k * input_groups(), codes + k * width,
                                    lane_scales + k * lanes, sums + k);
        const LookupInputs inputs{codes, lane_scales, sums, m};
        by_rows(threads,
                [&](int64_t begin, int64_t end) { kernels_.lookup_matmul(b, inputs, y, y_stride, begin, end); });
    }

    int64_t input_groups() const override { return (c_.columns + LOOKUP_GROUP - 1) / LOOKUP_GROUP; }

    template <typename F> void by_rows(int threads, F&& f) const {
        parallel_for(c_.rows, piece_of(c_.rows, LOOKUP_ROWS, c_.rows * c_.columns, threads), threads, f);
    }

    ByteCodebook byte_codebook(const std::vector<uint8_t>& table, const float* scales) const {
        return {c_.planes, table.data(), scales, c_.out_rows, c_.bits, c_.rows, c_.columns, c_.words};
    }

    float entry(int64_t row, int64_t e) const {
        const int64_t at = row * c_.entries + e;
        return c_.table32 != nullptr ? c_.table32[at] : baseline::half_to_float(c_.table16[at]);
    }

    // All centroids as floats, or rounded to bfloat16.
    template <typename T> std::vector<uint8_t> table_of(TableForm form) const {
        const int64_t entries = int64_t(1) << c_.bits, size = sizeof(T);
        std::vector<uint8_t> made(static_cast<size_t>(c_.rows * entries * size));
        for (int64_t row = 0; row < c_.rows; ++row)
            for (int64_t e = 0; e < c_.entries; ++e) {
                const float value = entry(row, e);
                uint32_t word;
                std::memcpy(&word, &value, 4);
                if (size == 2) word = baseline::to_bf16(value);
                for (int64_t i = 0; i < size; ++i) {
                    const int64_t at =
                        form == TableForm::bytes ? (row * size + i) * entries + e : (row * entries + e) * size + i;
                    made[static_cast<size_t>(at)] = static_cast<uint8_t>(word >> 8 * i);
                }
            }
        return made;
    }

    // Centroids as bytes: each row's largest one becomes 127 steps.
    void make_bytes() const {
        const int64_t entries = int64_t(1) << c_.bits;
        bytes_.assign(static_cast<size_t>(c_.rows * entries), uint8_t(BYTE_ZERO));
        byte_scales_.assign(static_cast<size_t>(c_.rows), 0.0f);
        for (int64_t row = 0; row < c_.rows; ++row) {
            float most = 0;
            for (int64_t e = 0; e < c_.entries; ++e) most = std::max(most, std::abs(entry(row, e)));
            const float scale = most / 127;
            byte_scales_[static_cast<size_t>(row)] = scale;
            if (scale == 0) continue;
            for (int64_t e = 0; e < c_.entries; ++e)
                bytes_[static_cast<size_t>(row * entries + e)] =
                    static_cast<uint8_t>(BYTE_ZERO + std::lrint(entry(row, e) / scale));
        }
    }

    Input planes_, table_;
    bool by_channel_;
    const Kernels& by_words_; // what decodes word by word
    Codebook c_{};
    mutable std::once_flag bytes_made_, floats_made_, halves_made_;
    mutable std::vector<uint8_t> bytes_, float_bytes_, half_bytes_;
    mutable std::vector<float> byte_scales_;
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

private:
    void add_product(const Tokens& x, float* y, int64_t y_stride, int threads) const override {
        parallel_for(rows_, piece_of(rows_, 1, rows_ * columns_, threads), threads, [&](int64_t begin, int64_t end) {
            kernels_.half_matmul(t_, x.floats(0), x.stride, x.count, y, y_stride, begin, end);
        });
    }

    Input values_;
    HalfRows t_{};
};

} // namespace anybit
