// The Python module anybit._native: checks every array before a kernel sees its pointer, words the errors,
// releases the GIL and splits the rows over threads.
#include "kernels.h"
#include "moments.h"
#include "products.h"
#define ANYBIT_ISA baseline
#include "simd.h"
#include "thread_pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace anybit;
using baseline::half_to_float;

namespace {

using Input = nb::ndarray<nb::ro>;
using Output = nb::ndarray<>;
using Shape = std::initializer_list<int64_t>; // -1: any size

// Below this many multiply-adds (or weights) a call is over before a second thread has woken up.
constexpr int64_t SERIAL_WORK = 1 << 18;
constexpr int64_t PIECES_PER_THREAD = 4; // so that a thread that started late or runs slowly holds nobody up
constexpr int64_t KMEANS_WORK = 100; // multiply-adds that clustering costs per weight, about
constexpr int64_t MAX_THREADS = 1024;
constexpr float MAX_FLOAT = std::numeric_limits<float>::max();
constexpr int64_t MAX_SIZE = int64_t(1) << 31; // rows, columns: keeps every product below 2^63

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

// ---- checks ---------------------------------------------------------------------------------------------

enum class Type { u8, i8, u16, u32, i32, f16, bf16, f32, other };

const char* const TYPE_NAMES[] = {"uint8", "int8", "uint16", "uint32", "int32", "float16", "bfloat16", "float32", "another dtype"};

Type type_of(nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    const auto is = [dtype](Code code, int bits) {
        return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
    };
    if (is(Code::UInt, 8)) return Type::u8;
    if (is(Code::Int, 8)) return Type::i8;
    if (is(Code::UInt, 16)) return Type::u16;
    if (is(Code::UInt, 32)) return Type::u32;
    if (is(Code::Int, 32)) return Type::i32;
    if (is(Code::Float, 16)) return Type::f16;
    if (is(Code::Bfloat, 16)) return Type::bf16;
    if (is(Code::Float, 32)) return Type::f32;
    return Type::other;
}

std::string words(const int64_t* sizes, size_t n) {
    std::string text = "[";
    for (size_t i = 0; i < n; ++i)
        text += (i == 0 ? "" : ", ") + (sizes[i] == -1 ? std::string("any") : std::to_string(sizes[i]));
    return text + "]";
}

template <typename A> bool has_shape(const A& a, Shape shape) {
    if (a.ndim() != shape.size()) return false;
    size_t i = 0;
    for (int64_t wanted : shape) {
        const int64_t size = static_cast<int64_t>(a.shape(i++));
        if (size >= MAX_SIZE || (wanted != -1 && size != wanted)) return false;
    }
    return true;
}

// Whether the last `dims` dimensions lie in memory without gaps.
template <typename A> bool is_dense(const A& a, size_t dims) {
    int64_t stride = 1;
    for (size_t i = a.ndim(); i-- > a.ndim() - dims;) {
        if (a.shape(i) != 1 && a.stride(i) != stride) return false;
        stride *= static_cast<int64_t>(a.shape(i));
    }
    return true;
}

enum class Layout { dense, dense_rows, any };

// Throw ValueError unless `a` is a CPU array of this dtype, shape and layout.
template <typename A>
void check(const char* name, const A& a, std::initializer_list<Type> types, Shape shape, Layout layout) {
    const Type type = type_of(a.dtype());
    bool good = a.device_type() == nb::device::cpu::value && has_shape(a, shape);
    bool known = false;
    for (Type t : types) known = known || t == type;
    const size_t dims = layout == Layout::dense ? a.ndim() : layout == Layout::dense_rows ? 1 : 0;
    good = good && known && (a.size() == 0 || is_dense(a, dims));
    if (good) return;
    std::string expected;
    for (Type t : types) expected += (expected.empty() ? "" : " or ") + std::string(TYPE_NAMES[int(t)]);
    expected += " " + words(shape.begin(), shape.size()) + " on the CPU";
    if (layout == Layout::dense) expected += ", contiguous";
    if (layout == Layout::dense_rows) expected += ", with contiguous rows";
    refuse(std::string(name) + " is " + TYPE_NAMES[int(type)] + " " + words(a.shape_ptr(), a.ndim()) +
           " with strides " + words(a.stride_ptr(), a.ndim()) + ", expected " + expected);
}

// One size of an array that the other arguments are held against.
template <typename A> int64_t size_of(const char* name, const A& a, size_t dim, size_t ndim) {
    if (a.ndim() != ndim)
        refuse(std::string(name) + " has " + std::to_string(a.ndim()) + " dimensions, expected " +
               std::to_string(ndim));
    return static_cast<int64_t>(a.shape(dim));
}

int check_threads(int64_t threads) {
    if (threads < 1 || threads > MAX_THREADS)
        refuse("threads is " + std::to_string(threads) + ", expected 1 to " + std::to_string(MAX_THREADS));
    return static_cast<int>(threads);
}

template <typename K> const K& find_kernels(const K* (*find)(const char*), const std::optional<std::string>& isa) {
    const K* kernels = find(isa ? isa->c_str() : nullptr);
    if (kernels == nullptr) refuse("isa '" + *isa + "' is unknown or not what this machine has");
    return *kernels;
}

const Kernels& check_isa(const std::optional<std::string>& isa) { return find_kernels(kernels_for, isa); }
const Products& check_products(const std::optional<std::string>& isa) { return find_kernels(products_for, isa); }

int64_t row_stride(int64_t rows, int64_t stride, int64_t columns) { return rows > 1 ? stride : columns; }

// ---- running --------------------------------------------------------------------------------------------

struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Scratch = std::unique_ptr<float[], Free>;

Scratch make_scratch(int64_t floats) {
    return Scratch(static_cast<float*>(::operator new[](static_cast<size_t>(floats) * 4, std::align_val_t(64))));
}

// Rows that a thread takes at a time, a multiple of `block`: all where the work is worth one thread only.
int64_t piece_of(int64_t rows, int64_t block, int64_t work, int threads) {
    if (threads == 1 || work < SERIAL_WORK) return rows;
    const int64_t pieces = threads * PIECES_PER_THREAD, share = (rows + pieces - 1) / pieces;
    return (share + block - 1) / block * block;
}

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

// A tile in format "group int" in the order of one instruction set's kernels, which it holds.
class PackedGroupInt {
public:
    PackedGroupInt(const Input& codes, const Input& scales, const std::optional<Input>& zeros,
                   const std::optional<Input>& rows, int64_t bits, int64_t group_size, int64_t columns, int64_t threads,
                   const std::optional<std::string>& isa)
        : kernels_(check_products(isa)) {
        const int used = check_threads(threads);
        if (bits < 1 || bits > 8) refuse("bits is " + std::to_string(bits) + ", expected 1 to 8");
        if (group_size < 1) refuse("group_size is " + std::to_string(group_size) + ", expected at least 1");
        if (columns < 1 || columns >= MAX_SIZE)
            refuse("columns is " + std::to_string(columns) + ", expected 1 to 2^31 - 1");
        t_.bits = static_cast<int>(bits);
        t_.columns = columns;
        t_.group_size = group_size < columns ? group_size : columns;
        t_.groups = (columns - 1) / t_.group_size + 1;
        t_.rows = size_of("codes", codes, is_packed() ? 0 : 1, is_packed() ? 2 : 3);
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
        by_blocks(used, [&](uint8_t* scratch, int64_t begin, int64_t end) {
            kernels_.group_int_interleave(t_, from, to_codes, to_scales, to_zeros, scratch, begin, end);
        });
        t_.codes = to_codes;
        t_.scales = to_scales;
        t_.zeros = to_zeros;
        t_.out_rows = out_rows_.data();
    }
    PackedGroupInt(const PackedGroupInt&) = delete; // the view points into the object

    void restore(const Output& codes, const Output& scales, const std::optional<Output>& zeros, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t row_bytes = check_codes(codes);
        check("scales", scales, {Type::f16, Type::u16}, {t_.rows, t_.groups}, Layout::dense);
        if (bool(zeros) != (t_.zeros != nullptr)) refuse("zeros do not agree with the tile: it is " +
                                                         std::string(zeros ? "symmetric" : "asymmetric"));
        if (zeros) check("zeros", *zeros, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        auto* to_codes = static_cast<uint8_t*>(codes.data());
        auto* to_scales = static_cast<uint16_t*>(scales.data());
        auto* to_zeros = zeros ? static_cast<uint8_t*>(zeros->data()) : nullptr;
        const size_t bytes = codes.size();
        nb::gil_scoped_release release;
        std::fill_n(to_codes, bytes, uint8_t(0)); // padding
        by_blocks(used, [&](uint8_t* scratch, int64_t begin, int64_t end) {
            kernels_.group_int_restore(t_, to_codes, row_bytes, to_scales, to_zeros, scratch, begin, end);
        });
    }

    void matmul(const Input& x, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t m = size_of("x", x, 0, 2);
        check("x", x, {Type::f32}, {m, t_.columns}, Layout::dense_rows);
        const int64_t out = check_y(y, m), x_stride = row_stride(m, x.stride(0), t_.columns);
        const float* from = static_cast<const float*>(x.data());
        float* to = static_cast<float*>(y.data());
        nb::gil_scoped_release release;
        const int64_t width = kernels_.group_int_columns(t_);
        const Scratch scratch = make_scratch(m * (width + t_.groups));
        float* sums = scratch.get() + m * width;
        for (int64_t k = 0; k < m; ++k)
            kernels_.group_int_prepare(t_, from + k * x_stride, scratch.get() + k * width, sums + k * t_.groups);
        const FloatInputs inputs{scratch.get(), sums, m};
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.group_int_matmul(t_, inputs, to, out, begin, end);
        });
    }

    bool takes_ints() const { return t_.group_size <= MAX_INT_GROUP; }

    void int_matmul(const Input& x, const Input& scales, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        if (!takes_ints()) refuse("groups of more than " + std::to_string(MAX_INT_GROUP) + " columns leave 32 bits");
        const int64_t m = size_of("x", x, 0, 2);
        check("x", x, {Type::i8}, {m, t_.columns}, Layout::dense);
        check("scales", scales, {Type::f32}, {m, t_.groups}, Layout::dense);
        const int64_t out = check_y(y, m);
        const int8_t* from = static_cast<const int8_t*>(x.data());
        float* to = static_cast<float*>(y.data());
        const float* x_scales = static_cast<const float*>(scales.data());
        nb::gil_scoped_release release;
        const int64_t width = kernels_.group_int_columns(t_); // a multiple of 4
        const Scratch scratch = make_scratch(m * (width / 4 + t_.groups));
        auto* codes = reinterpret_cast<int8_t*>(scratch.get());
        auto* sums = reinterpret_cast<int32_t*>(codes + m * width);
        for (int64_t k = 0; k < m; ++k)
            kernels_.group_int_prepare_ints(t_, from + k * t_.columns, codes + k * width, sums + k * t_.groups);
        const IntInputs inputs{codes, x_scales, sums, m};
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.group_int_int_matmul(t_, inputs, to, out, begin, end);
        });
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32, Type::bf16, Type::u16}, {t_.rows, t_.columns}, Layout::dense);
        const bool full = type_of(out.dtype()) == Type::f32;
        void* to = out.data();
        nb::gil_scoped_release release;
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
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

private:
    bool is_packed() const { return t_.bits == 2 || t_.bits == 4 || t_.bits == 8; }
    int64_t blocks() const { return (t_.rows + kernels_.lanes - 1) / kernels_.lanes; }

    int64_t piece(int threads) const {
        return std::max(int64_t(1), piece_of(blocks(), 1, t_.rows * t_.columns, threads));
    }

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

    // Checks outputs of m tokens and returns their number.
    int64_t check_y(const Output& y, int64_t m) const {
        check("y", y, {Type::f32}, {m, out_rows_.given() ? -1 : t_.rows}, Layout::dense);
        const int64_t out = static_cast<int64_t>(y.shape(1));
        out_rows_.check_below(out);
        return out;
    }

    template <typename F> void by_blocks(int threads, F&& f) const {
        const int64_t n = blocks(), step = piece(threads), bytes = kernels_.group_int_scratch(t_);
        const Scratch scratch = make_scratch(((n + step - 1) / step * bytes + 3) / 4);
        parallel_for(n, step, threads, [&](int64_t begin, int64_t end) {
            f(reinterpret_cast<uint8_t*>(scratch.get()) + begin / step * bytes, begin, end);
        });
    }

    const Products& kernels_;
    Scratch codes_, grid_; // codes; scales, then zeros
    OutRows out_rows_;
    GroupInt t_{};
};

// The 2-bit channels of a tile in format "two_four" in the order of one instruction set's kernels.
class PackedSecondOrder {
public:
    PackedSecondOrder(const Input& codes, const Input& zeros, const Input& scale_codes, const Input& scales,
                      const Input& scale_zeros, int64_t group_size, int64_t threads, const std::optional<std::string>& isa)
        : kernels_(check_products(isa)) {
        const int used = check_threads(threads);
        if (group_size != 8 && group_size != 16)
            refuse("group_size is " + std::to_string(group_size) + ", expected 8 or 16");
        t_.group_size = group_size;
        t_.rows = size_of("codes", codes, 0, 2);
        t_.columns = size_of("codes", codes, 1, 2);
        t_.groups = (t_.columns + group_size - 1) / group_size;
        const int64_t parts = (t_.rows + SECOND_ROWS - 1) / SECOND_ROWS;
        check("codes", codes, {Type::u8}, {t_.rows, t_.columns}, Layout::dense);
        check("zeros", zeros, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        check("scale_codes", scale_codes, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
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
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.second_order_interleave(t_, from, to, begin, end);
        });
        t_.bytes = to;
        t_.scales = scales_.data();
        t_.zeros = zeros_.data();
    }
    PackedSecondOrder(const PackedSecondOrder&) = delete; // the view points into the object

    void restore(const Output& codes, const Output& zeros, const Output& scale_codes, int64_t threads) const {
        const int used = check_threads(threads);
        check("codes", codes, {Type::u8}, {t_.rows, t_.columns}, Layout::dense);
        check("zeros", zeros, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        check("scale_codes", scale_codes, {Type::u8}, {t_.rows, t_.groups}, Layout::dense);
        auto *to = static_cast<uint8_t*>(codes.data()), *to_zeros = static_cast<uint8_t*>(zeros.data()),
             *to_scales = static_cast<uint8_t*>(scale_codes.data());
        nb::gil_scoped_release release;
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.second_order_restore(t_, to, to_zeros, to_scales, begin, end);
        });
    }

    void matmul(const Input& x, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t m = size_of("x", x, 0, 2);
        check("x", x, {Type::f32}, {m, t_.columns}, Layout::dense);
        check("y", y, {Type::f32}, {m, t_.rows}, Layout::dense);
        const float* from = static_cast<const float*>(x.data());
        float* to = static_cast<float*>(y.data());
        nb::gil_scoped_release release;
        const int64_t width = kernels_.second_order_columns(t_);
        const Scratch scratch = make_scratch(m * (width + t_.groups));
        float* sums = scratch.get() + m * width;
        for (int64_t k = 0; k < m; ++k)
            kernels_.second_order_prepare(t_, from + k * t_.columns, scratch.get() + k * width, sums + k * t_.groups);
        const FloatInputs inputs{scratch.get(), sums, m};
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.second_order_matmul(t_, inputs, to, t_.rows, begin, end);
        });
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {t_.rows, t_.columns}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.second_order_dequantize(t_, to, begin, end);
        });
    }

private:
    int64_t blocks() const { return (t_.rows + kernels_.lanes - 1) / kernels_.lanes; }
    int64_t piece(int threads) const {
        return std::max(int64_t(1), piece_of(blocks(), 1, t_.rows * t_.columns, threads));
    }

    const Products& kernels_;
    Scratch bytes_;
    std::vector<float> scales_;
    std::vector<uint8_t> zeros_;
    SecondOrder t_{};
};

// A tile in format "codebook" by input channel, up to 4 bits, in the order of one instruction set's kernels.
class PackedChannels {
public:
    PackedChannels(const Input& planes, const Input& table, int64_t rows, int64_t threads,
                   const std::optional<std::string>& isa)
        : kernels_(check_products(isa)) {
        const int used = check_threads(threads);
        if (rows < 1 || rows >= MAX_SIZE) refuse("rows is " + std::to_string(rows) + ", expected 1 to 2^31 - 1");
        const int64_t bits = size_of("planes", planes, 0, 3);
        if (bits < 1 || bits > 4) refuse(std::to_string(bits) + " planes, expected 1 to 4");
        t_.bits = static_cast<int>(bits);
        t_.rows = rows;
        t_.channels = size_of("planes", planes, 1, 3);
        check_planes(planes);
        const int64_t entries = size_of("table", table, 1, 2);
        if (entries < 1 || entries > int64_t(1) << bits)
            refuse("table has " + std::to_string(entries) + " entries, expected up to 2^" + std::to_string(bits));
        check("table", table, {Type::f32}, {t_.channels, entries}, Layout::dense);
        const auto* from = static_cast<const uint32_t*>(planes.data());
        const auto* given = static_cast<const float*>(table.data());
        table_.assign(static_cast<size_t>(kernels_.channel_columns(t_) * CHANNEL_ENTRIES), 0.0f);
        for (int64_t j = 0; j < t_.channels; ++j)
            std::copy_n(given + j * entries, entries, table_.begin() + j * CHANNEL_ENTRIES);
        nb::gil_scoped_release release;
        bytes_ = make_scratch((kernels_.channel_bytes(t_) + 3) / 4);
        auto* to = reinterpret_cast<uint8_t*>(bytes_.get());
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.channel_interleave(t_, from, to, begin, end);
        });
        t_.bytes = to;
        t_.table = table_.data();
    }
    PackedChannels(const PackedChannels&) = delete; // the view points into the object

    void restore(const Output& planes, int64_t threads) const {
        const int used = check_threads(threads);
        if (size_of("planes", planes, 0, 3) != t_.bits) refuse("planes have another width than the tile");
        check_planes(planes);
        auto* to = static_cast<uint32_t*>(planes.data());
        const size_t size = planes.size();
        nb::gil_scoped_release release;
        std::fill_n(to, size, 0u);
        const int64_t whole = CHANNEL_ROWS / kernels_.lanes;
        parallel_for(blocks(), (piece(used) + whole - 1) / whole * whole, used, [&](int64_t begin, int64_t end) {
            kernels_.channel_restore(t_, to, begin, end);
        });
    }

    void matmul(const Input& x, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t m = size_of("x", x, 0, 2);
        check("x", x, {Type::f32}, {m, t_.channels}, Layout::dense);
        check("y", y, {Type::f32}, {m, t_.rows}, Layout::dense);
        const float* from = static_cast<const float*>(x.data());
        float* to = static_cast<float*>(y.data());
        nb::gil_scoped_release release;
        const int64_t width = kernels_.channel_columns(t_);
        const Scratch padded = make_scratch(m * width);
        for (int64_t k = 0; k < m; ++k) {
            std::copy_n(from + k * t_.channels, t_.channels, padded.get() + k * width);
            std::fill_n(padded.get() + k * width + t_.channels, width - t_.channels, 0.0f);
        }
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.channel_matmul(t_, padded.get(), m, to, t_.rows, begin, end);
        });
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {t_.rows, t_.channels}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        parallel_for(blocks(), piece(used), used, [&](int64_t begin, int64_t end) {
            kernels_.channel_dequantize(t_, to, begin, end);
        });
    }

private:
    template <typename A> void check_planes(const A& planes) const {
        check("planes", planes, {Type::u32, Type::i32}, {t_.bits, t_.channels, (t_.rows + 31) / 32}, Layout::dense);
    }
    int64_t blocks() const { return (t_.rows + kernels_.lanes - 1) / kernels_.lanes; }
    int64_t piece(int threads) const { return std::max(int64_t(1), piece_of(blocks(), 4, t_.rows * t_.channels, threads)); }

    const Products& kernels_;
    Scratch bytes_;
    std::vector<float> table_;
    ChannelCodebook t_{};
};

// A tile in format "codebook" bound to the arrays that hold it.
class BoundCodebook {
public:
    BoundCodebook(Input planes, Input table, std::optional<Input> rows, int64_t columns, bool by_channel)
        : planes_(planes), table_(table), by_channel_(by_channel) {
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
    }
    BoundCodebook(const BoundCodebook&) = delete; // the view points into the object

    void matmul(const Input& x, const Output& y, int64_t threads, const std::optional<std::string>& isa) {
        const Products& products = check_products(isa);
        const Kernels& kernels = *kernels_for(products.lanes == 16 ? "avx512" : products.lanes == 8 ? "avx2" : "portable");
        const int used = check_threads(threads);
        const int64_t m = size_of("x", x, 0, 2), in = by_channel_ ? c_.rows : c_.columns;
        check("x", x, {Type::f32}, {m, in}, Layout::dense);
        check("y", y, {Type::f32}, {m, by_channel_ ? c_.columns : out_rows_.given() ? -1 : c_.rows}, Layout::dense);
        const int64_t out = static_cast<int64_t>(y.shape(1));
        out_rows_.check_below(out);
        const float* from = static_cast<const float*>(x.data());
        float* to = static_cast<float*>(y.data());
        const int64_t width = c_.words * 32;
        nb::gil_scoped_release release;
        const int64_t work = c_.rows * c_.columns * (1 + m);
        if (by_channel_) {
            const int64_t piece = piece_of(c_.words, 1, work, used);
            const Scratch scratch = make_scratch(((c_.words - 1) / piece + 1) * piece * 32);
            parallel_for(c_.words, piece, used, [&](int64_t begin, int64_t end) {
                kernels.codebook_channels(c_, from, m, to, out, scratch.get() + begin * 32, begin, end);
            });
            return;
        }
        if (products.lookup_takes_floats(c_.bits)) return look_up_exactly(products, from, m, to, out, used);
        const int64_t piece = piece_of(c_.rows, 1, work, used);
        const Scratch scratch = make_scratch((m + (c_.rows - 1) / piece + 1) * width);
        float* padded = scratch.get();
        for (int64_t t = 0; t < m; ++t)
            for (int64_t j = 0; j < width; ++j) padded[t * width + j] = j < in ? from[t * in + j] : 0.0f;
        parallel_for(c_.rows, piece, used, [&](int64_t begin, int64_t end) {
            kernels.codebook_rows(c_, padded, m, to, out, padded + (m + begin / piece) * width, begin, end);
        });
    }

    bool takes_ints() const { return !by_channel_; }

    // Make the table that `matmul` or `int_matmul` looks up now; each makes its own at its first call otherwise.
    void prepare(bool ints) {
        nb::gil_scoped_release release;
        if (ints && takes_ints()) std::call_once(bytes_made_, [this] { make_bytes(); });
        if (!ints && !by_channel_ && products_for(nullptr)->lookup_takes_floats(c_.bits))
            std::call_once(float_bytes_made_, [this] { make_float_bytes(); });
    }

    void int_matmul(const Input& x, const Input& scales, const Output& y, int64_t threads,
                    const std::optional<std::string>& isa) {
        const Products& kernels = check_products(isa);
        const int used = check_threads(threads);
        if (!takes_ints()) refuse("this tile has no integer kernel: codebooks by row have one");
        const int64_t m = size_of("x", x, 0, 2), groups = (c_.columns + LOOKUP_GROUP - 1) / LOOKUP_GROUP;
        check("x", x, {Type::i8}, {m, c_.columns}, Layout::dense);
        check("scales", scales, {Type::f32}, {m, groups}, Layout::dense);
        check("y", y, {Type::f32}, {m, out_rows_.given() ? -1 : c_.rows}, Layout::dense);
        const int64_t out = static_cast<int64_t>(y.shape(1));
        out_rows_.check_below(out);
        const int8_t* from = static_cast<const int8_t*>(x.data());
        const float* x_scales = static_cast<const float*>(scales.data());
        float* to = static_cast<float*>(y.data());
        nb::gil_scoped_release release;
        std::call_once(bytes_made_, [this] { make_bytes(); });
        const ByteCodebook b{c_.planes, bytes_.data(), byte_scales_.data(), c_.out_rows, c_.bits, c_.rows, c_.columns,
                             c_.words};
        const int64_t lanes = kernels.lookup_blocks(b) * kernels.lanes, width = lanes * LOOKUP_GROUP;
        const Scratch scratch = make_scratch(m * (width / 4 + lanes + 1));
        auto* codes = reinterpret_cast<int8_t*>(scratch.get());
        float* lane_scales = scratch.get() + m * width / 4;
        float* sums = lane_scales + m * lanes;
        for (int64_t k = 0; k < m; ++k)
            kernels.lookup_prepare(b, from + k * c_.columns, x_scales + k * groups, codes + k * width,
                                   lane_scales + k * lanes, sums + k);
        const LookupInputs inputs{codes, lane_scales, sums, m};
        const int64_t piece = piece_of(c_.rows, LOOKUP_ROWS, c_.rows * c_.columns, used);
        parallel_for(c_.rows, piece, used, [&](int64_t begin, int64_t end) {
            kernels.lookup_matmul(b, inputs, to, out, begin, end);
        });
    }

    void dequantize(const Output& out, int64_t threads, const std::optional<std::string>& isa) const {
        const Kernels& kernels = check_isa(isa);
        const int used = check_threads(threads);
        check("out", out, {Type::f32}, {c_.rows, c_.columns}, Layout::dense);
        float* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        const int64_t piece = piece_of(c_.rows, 1, c_.rows * c_.columns, used), width = c_.words * 32;
        const Scratch scratch = make_scratch(((c_.rows - 1) / piece + 1) * width);
        parallel_for(c_.rows, piece, used, [&](int64_t begin, int64_t end) {
            kernels.codebook_decode(c_, to, scratch.get() + begin / piece * width, begin, end);
        });
    }

private:
    float entry(int64_t row, int64_t e) const {
        const int64_t at = row * c_.entries + e;
        return c_.table32 != nullptr ? c_.table32[at] : half_to_float(c_.table16[at]);
    }

    void look_up_exactly(const Products& products, const float* x, int64_t m, float* y, int64_t out, int threads) {
        std::call_once(float_bytes_made_, [this] { make_float_bytes(); });
        const ByteCodebook b{c_.planes, float_bytes_.data(), nullptr, c_.out_rows, c_.bits, c_.rows, c_.columns, c_.words};
        const int64_t width = products.lookup_blocks(b) * products.lanes * LOOKUP_GROUP;
        const Scratch scratch = make_scratch(m * width);
        for (int64_t k = 0; k < m; ++k)
            products.lookup_prepare_floats(b, x + k * c_.columns, scratch.get() + k * width);
        const int64_t piece = piece_of(c_.rows, LOOKUP_ROWS, c_.rows * c_.columns, threads);
        parallel_for(c_.rows, piece, threads, [&](int64_t begin, int64_t end) {
            products.lookup_float_matmul(b, scratch.get(), m, y, out, begin, end);
        });
    }

    // Centroids as floats, byte by byte.
    void make_float_bytes() {
        const int64_t entries = int64_t(1) << c_.bits;
        float_bytes_.assign(static_cast<size_t>(c_.rows * entries * 4), uint8_t(0));
        for (int64_t row = 0; row < c_.rows; ++row)
            for (int64_t e = 0; e < c_.entries; ++e) {
                const float value = entry(row, e);
                uint8_t bytes[4];
                std::memcpy(bytes, &value, 4);
                for (int64_t i = 0; i < 4; ++i)
                    float_bytes_[static_cast<size_t>((row * 4 + i) * entries + e)] = bytes[i];
            }
    }

    // Centroids as bytes: each row's largest one becomes 127 steps.
    void make_bytes() {
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
    OutRows out_rows_;
    Codebook c_{};
    std::once_flag bytes_made_, float_bytes_made_;
    std::vector<uint8_t> bytes_, float_bytes_;
    std::vector<float> byte_scales_;
};

// Scales or zeros of GPTQ: one number per weight, or one per row.
Matrix grid_matrix(const char* name, const Input& a, int64_t rows, int64_t columns) {
    if (a.ndim() == 1) check(name, a, {Type::f32}, {rows}, Layout::any);
    else check(name, a, {Type::f32}, {rows, columns}, Layout::any);
    return {static_cast<const float*>(a.data()), a.stride(0), a.ndim() == 1 ? 0 : a.stride(1)};
}

void check_pivots(const GptqBlock& b) {
    for (int64_t j = 0; j < b.columns; ++j) {
        const float pivot = b.hinv[j * (b.hinv_stride + 1)];
        if (!(pivot > 0.0f) || std::isinf(pivot))
            refuse("hinv[" + std::to_string(j) + ", " + std::to_string(j) + "] is " + std::to_string(pivot) +
                   ", expected a positive number: raise the damping");
    }
}

void check_codes_fit(const GptqBlock& b) {
    for (int64_t i = 0; i < b.rows; ++i)
        if (!(b.maxq[i] >= 0.0f && b.maxq[i] <= 255.0f))
            refuse("maxq[" + std::to_string(i) + "] is " + std::to_string(b.maxq[i]) + ", expected 0 to 255");
}

void gptq_block(const Output& weight, const Input& hinv, const Input& scales, const Input& zeros,
                const Input& maxq, const Output& codes, const Output& error, int64_t threads,
                const std::optional<std::string>& isa) {
    const Kernels& kernels = check_isa(isa);
    const int used = check_threads(threads);
    check("weight", weight, {Type::f32}, {-1, -1}, Layout::dense_rows);
    GptqBlock b{};
    b.rows = static_cast<int64_t>(weight.shape(0));
    b.columns = static_cast<int64_t>(weight.shape(1));
    check("hinv", hinv, {Type::f32}, {b.columns, b.columns}, Layout::dense_rows);
    check("maxq", maxq, {Type::f32}, {b.rows}, Layout::dense);
    check("codes", codes, {Type::u8}, {b.rows, b.columns}, Layout::dense);
    check("error", error, {Type::f32}, {b.rows, b.columns}, Layout::dense);
    b.scales = grid_matrix("scales", scales, b.rows, b.columns);
    b.zeros = grid_matrix("zeros", zeros, b.rows, b.columns);
    if (b.rows == 0 || b.columns == 0) return;
    b.weight = static_cast<float*>(weight.data());
    b.weight_stride = row_stride(b.rows, weight.stride(0), b.columns);
    b.hinv = static_cast<const float*>(hinv.data());
    b.hinv_stride = row_stride(b.columns, hinv.stride(0), b.columns);
    b.maxq = static_cast<const float*>(maxq.data());
    b.codes = static_cast<uint8_t*>(codes.data());
    b.error = static_cast<float*>(error.data());
    check_pivots(b);
    check_codes_fit(b);
    nb::gil_scoped_release release;
    const int64_t piece = piece_of(b.rows, GPTQ_ROWS, b.rows * b.columns * b.columns / 2, used);
    const int64_t floats = GPTQ_ROWS * b.columns;
    const Scratch scratch = make_scratch(((b.rows - 1) / piece + 1) * floats); // here: workers must not throw
    parallel_for(b.rows, piece, used, [&](int64_t begin, int64_t end) {
        kernels.gptq(b, scratch.get() + begin / piece * floats, begin, end);
    });
}

void check_values(const char* name, const float* data, int64_t rows, int64_t columns, int64_t stride, float low) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            const float value = data[i * stride + j];
            if (!(value >= low && value <= MAX_FLOAT))
                refuse(std::string(name) + "[" + std::to_string(i) + ", " + std::to_string(j) + "] is " +
                       std::to_string(value) + ", expected a finite number" + (low == 0 ? " not below 0" : ""));
        }
}

void kmeans(const Input& weight, const std::optional<Input>& importance, int64_t seed_bits, int64_t bits,
            const Output& codes, const Output& centroids, int64_t threads, const std::optional<std::string>& isa) {
    const Kernels& kernels = check_isa(isa);
    const int used = check_threads(threads);
    if (seed_bits < 1 || seed_bits > bits || bits > 8)
        refuse("seed_bits and bits are " + std::to_string(seed_bits) + " and " + std::to_string(bits) +
               ", expected 1 <= seed_bits <= bits <= 8");
    check("weight", weight, {Type::f32}, {-1, -1}, Layout::dense_rows);
    Clustering c{};
    c.rows = static_cast<int64_t>(weight.shape(0));
    c.columns = static_cast<int64_t>(weight.shape(1));
    check("codes", codes, {Type::u8}, {c.rows, c.columns}, Layout::dense);
    check("centroids", centroids, {Type::f32}, {c.rows, (2 << bits) - (1 << seed_bits)}, Layout::dense);
    if (c.rows == 0 || c.columns == 0) return;
    c.seed_bits = static_cast<int>(seed_bits);
    c.bits = static_cast<int>(bits);
    c.weight = static_cast<const float*>(weight.data());
    c.weight_stride = row_stride(c.rows, weight.stride(0), c.columns);
    if (importance) {
        const bool shared = importance->ndim() == 1;
        if (shared) check("importance", *importance, {Type::f32}, {c.columns}, Layout::dense);
        else check("importance", *importance, {Type::f32}, {c.rows, c.columns}, Layout::dense_rows);
        c.importance = static_cast<const float*>(importance->data());
        c.importance_stride = shared ? 0 : row_stride(c.rows, importance->stride(0), c.columns);
        check_values("importance", c.importance, shared ? 1 : c.rows, c.columns, c.importance_stride, 0);
    }
    check_values("weight", c.weight, c.rows, c.columns, c.weight_stride, -MAX_FLOAT);
    c.codes = static_cast<uint8_t*>(codes.data());
    c.centroids = static_cast<float*>(centroids.data());
    nb::gil_scoped_release release;
    const int64_t piece = piece_of(c.rows, 1, c.rows * c.columns * KMEANS_WORK, used);
    const int64_t floats = (kernels.kmeans_scratch(c.columns, c.seed_bits) / 64 + 1) * 16;
    const Scratch scratch = make_scratch(((c.rows - 1) / piece + 1) * floats);
    parallel_for(c.rows, piece, used, [&](int64_t begin, int64_t end) {
        kernels.kmeans(c, reinterpret_cast<char*>(scratch.get() + begin / piece * floats), begin, end);
    });
}

void quantize_activations(const Input& x, const std::optional<Input>& clip, const std::optional<Input>& fixed,
                          int64_t bits, int64_t group_size, const Output& codes, const Output& scales,
                          const std::optional<std::string>& isa) {
    const Products& kernels = check_products(isa);
    if (bits < 2 || bits > 8) refuse("bits is " + std::to_string(bits) + ", expected 2 to 8");
    if (group_size < 1) refuse("group_size is " + std::to_string(group_size) + ", expected at least 1");
    if (bool(clip) == bool(fixed)) refuse("give either clip or fixed");
    check("x", x, {Type::f32}, {-1, -1}, Layout::dense_rows);
    const int64_t m = static_cast<int64_t>(x.shape(0)), columns = static_cast<int64_t>(x.shape(1));
    const int64_t groups = columns == 0 ? 0 : (columns - 1) / group_size + 1;
    check("codes", codes, {Type::i8}, {m, columns}, Layout::dense);
    check("scales", scales, {Type::f32}, {m, groups}, Layout::dense);
    const Input& given = clip ? *clip : *fixed;
    check(clip ? "clip" : "fixed", given, {Type::f16, Type::u16}, {groups}, Layout::dense);
    const auto* table = static_cast<const uint16_t*>(given.data());
    const ActivationGrid grid{static_cast<int>(bits), columns, group_size, clip ? table : nullptr,
                              clip ? nullptr : table};
    const int64_t stride = row_stride(m, x.stride(0), columns);
    const float* from = static_cast<const float*>(x.data());
    auto* q = static_cast<int8_t*>(codes.data());
    float* s = static_cast<float*>(scales.data());
    nb::gil_scoped_release release;
    for (int64_t k = 0; k < m; ++k)
        kernels.quantize_row(from + k * stride, grid, q + k * columns, s + k * groups);
}

bool has_moments() {
#ifdef ANYBIT_X86
    const Features f = cpu_features();
    return f.avx512f && f.avx512bw && f.avx512vl && f.avx512_bf16;
#else
    return false;
#endif
}

void moments(const Input& x, const Output& h, int64_t threads) {
    if (!has_moments()) refuse("moments needs AVX512-BF16, which this machine does not have");
    const int used = check_threads(threads);
    check("x", x, {Type::bf16, Type::u16}, {-1, -1}, Layout::dense_rows);
    const int64_t tokens = static_cast<int64_t>(x.shape(0)), columns = static_cast<int64_t>(x.shape(1));
    check("h", h, {Type::f32}, {columns, columns}, Layout::dense);
    if (tokens == 0 || columns == 0) return;
#ifdef ANYBIT_X86
    const int64_t stride = row_stride(tokens, x.stride(0), columns), pairs = (tokens + 1) / 2;
    const auto* from = static_cast<const uint16_t*>(x.data());
    float* to = static_cast<float*>(h.data());
    nb::gil_scoped_release release;
    const int64_t n = (columns + MOMENT_PANEL - 1) / MOMENT_PANEL, size = pairs * MOMENT_PANEL;
    const Scratch scratch = make_scratch(n * size);
    auto* panels = reinterpret_cast<uint32_t*>(scratch.get());
    parallel_for(n, 1, used, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) pack_moments(from, stride, tokens, columns, i, panels + i * size);
    });
    parallel_for(n * n, n, used, [&](int64_t begin, int64_t end) { // blocks below the diagonal mirror those above
        for (int64_t b = begin; b < end; ++b)
            if (b / n <= b % n) add_moments(panels, pairs, columns, b / n, b % n, to);
    });
#endif
}

nb::dict features() {
    const Features f = cpu_features();
    nb::dict d;
    d["avx2"] = f.avx2;
    d["fma"] = f.fma;
    d["f16c"] = f.f16c;
    d["avx512f"] = f.avx512f;
    d["avx512bw"] = f.avx512bw;
    d["avx512vl"] = f.avx512vl;
    d["avx512dq"] = f.avx512dq;
    d["avx512_vnni"] = f.avx512_vnni;
    d["avx512_bf16"] = f.avx512_bf16;
    d["avx512_vbmi"] = f.avx512_vbmi;
    d["avx_vnni"] = f.avx_vnni;
    return d;
}

} // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kernels of anybit for the CPU. Arguments of the wrong dtype, shape or layout raise ValueError.";
    m.def("cpu_features", &features, "What this processor has of what kernels could use: {name: bool}.");
    m.def("isa", [] { return kernels_for(nullptr)->isa; }, "The instruction set chosen for this machine.");
    m.def("matmul_isa", [] { return products_for(nullptr)->isa; }, "How products with stored tiles run on this machine.");
    m.def("matmul_isas", [] {
        std::vector<std::string> found;
        for (const char* isa : PRODUCT_ISAS)
            if (products_for(isa) != nullptr) found.emplace_back(isa);
        return found;
    }, "The ways to multiply that this machine has, the best last.");
    m.def("quantize_activations", &quantize_activations, nb::arg("x").noconvert(), nb::arg("clip").noconvert().none(),
          nb::arg("fixed").noconvert().none(), nb::arg("bits"), nb::arg("group_size"), nb::arg("codes").noconvert(),
          nb::arg("scales").noconvert(), nb::arg("isa") = nb::none(),
          "Round x float32 [m, n] to codes int8 [m, n] and scales float32 [m, groups]; clip or fixed float16 [groups].");
    m.def("has_moments", &has_moments, "Whether this machine has what `moments` needs (AVX512-BF16).");
    m.def("moments", &moments, nb::arg("x").noconvert(), nb::arg("h").noconvert(), nb::arg("threads"),
          "h += x.T @ x, summed in float32; x bfloat16 (or its bits as uint16) [tokens, n], h float32 [n, n].");
    m.def("gptq_block", &gptq_block, nb::arg("weight").noconvert(), nb::arg("hinv").noconvert(),
          nb::arg("scales").noconvert(), nb::arg("zeros").noconvert(), nb::arg("maxq").noconvert(),
          nb::arg("codes").noconvert(), nb::arg("error").noconvert(), nb::arg("threads"),
          nb::arg("isa") = nb::none(),
          "Quantize one block of columns by GPTQ: weight float32 [rows, n] is compensated in place, codes\n"
          "uint8 and error float32 [rows, n] are filled; hinv float32 [n, n] upper triangular, scales and\n"
          "zeros float32 [rows, n] or [rows], maxq float32 [rows].");
    m.def("kmeans", &kmeans, nb::arg("weight").noconvert(), nb::arg("importance").noconvert().none(),
          nb::arg("seed_bits"), nb::arg("bits"), nb::arg("codes").noconvert(), nb::arg("centroids").noconvert(),
          nb::arg("threads"), nb::arg("isa") = nb::none(),
          "Nested weighted k-means of the rows of weight float32 [rows, n]; importance float32 [rows, n], [n] or\n"
          "None; fills codes uint8 [rows, n] and centroids float32 [rows, sum of 2^b for b in seed_bits..bits].");
    nb::class_<PackedGroupInt>(m, "GroupInt", "A tile in format \"group int\" in the kernels' order; holds its bytes.")
        .def(nb::init<const Input&, const Input&, const std::optional<Input>&, const std::optional<Input>&, int64_t, int64_t,
                      int64_t, int64_t, const std::optional<std::string>&>(),
             nb::arg("codes").noconvert(), nb::arg("scales").noconvert(), nb::arg("zeros").noconvert().none(),
             nb::arg("rows").noconvert().none(), nb::arg("bits"), nb::arg("group_size"), nb::arg("columns"),
             nb::arg("threads"), nb::arg("isa") = nb::none(),
             "codes uint8 [r, bytes] (bits 2, 4, 8) or [bits, r, bytes], scales float16 [r, groups], zeros\n"
             "uint8 [r, groups] or None (symmetric), rows int32 [r] or None (all).")
        .def("restore", &PackedGroupInt::restore, nb::arg("codes").noconvert(), nb::arg("scales").noconvert(),
             nb::arg("zeros").noconvert().none(), nb::arg("threads"), "Fill the arrays that the tile was made of.")
        .def("matmul", &PackedGroupInt::matmul, nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("threads"),
             "y[:, rows] += x @ W.T; x float32 [m, columns], y float32 [m, out].")
        .def("takes_ints", &PackedGroupInt::takes_ints, "Whether `int_matmul` takes this tile.")
        .def("int_matmul", &PackedGroupInt::int_matmul, nb::arg("x").noconvert(), nb::arg("scales").noconvert(),
             nb::arg("y").noconvert(), nb::arg("threads"),
             "y[:, rows] += (x * scales by group) @ W.T; x int8 [m, columns], scales float32 [m, groups].")
        .def("dequantize", &PackedGroupInt::dequantize, nb::arg("out").noconvert(), nb::arg("threads"),
             "out[r, columns] = W; float32, bfloat16 or its bits as uint16.")
        .def("dequantize_rows", &PackedGroupInt::dequantize_rows, nb::arg("ids").noconvert(), nb::arg("out").noconvert(),
             "out float32 [n, columns] = W[ids], ids int32 [n].");
    nb::class_<PackedSecondOrder>(m, "SecondOrder", "The 2-bit channels of a tile in format \"two_four\"; holds its bytes.")
        .def(nb::init<const Input&, const Input&, const Input&, const Input&, const Input&, int64_t, int64_t,
                      const std::optional<std::string>&>(),
             nb::arg("codes").noconvert(), nb::arg("zeros").noconvert(), nb::arg("scale_codes").noconvert(),
             nb::arg("scales").noconvert(), nb::arg("scale_zeros").noconvert(), nb::arg("group_size"), nb::arg("threads"),
             nb::arg("isa") = nb::none(),
             "codes uint8 [r, c], zeros and scale_codes uint8 [r, g], scales float32 and scale_zeros uint8 [r / 16, g].")
        .def("restore", &PackedSecondOrder::restore, nb::arg("codes").noconvert(), nb::arg("zeros").noconvert(),
             nb::arg("scale_codes").noconvert(), nb::arg("threads"), "Fill the arrays that the tile was made of.")
        .def("matmul", &PackedSecondOrder::matmul, nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("threads"),
             "y += x @ W.T; x float32 [m, c], y float32 [m, r].")
        .def("dequantize", &PackedSecondOrder::dequantize, nb::arg("out").noconvert(), nb::arg("threads"),
             "out float32 [r, c] = W.");
    nb::class_<PackedChannels>(m, "Channels", "A tile in format \"codebook\" by input channel; holds its bytes.")
        .def(nb::init<const Input&, const Input&, int64_t, int64_t, const std::optional<std::string>&>(),
             nb::arg("planes").noconvert(), nb::arg("table").noconvert(), nb::arg("rows"), nb::arg("threads"),
             nb::arg("isa") = nb::none(),
             "planes uint32 [bits, channels, rows / 32], 1 to 4 bits; table float32 [channels, entries]; every code must be\n"
             "below `entries`.")
        .def("restore", &PackedChannels::restore, nb::arg("planes").noconvert(), nb::arg("threads"),
             "Fill the planes that the tile was made of.")
        .def("matmul", &PackedChannels::matmul, nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("threads"),
             "y += x @ W.T; x float32 [m, channels], y float32 [m, rows].")
        .def("dequantize", &PackedChannels::dequantize, nb::arg("out").noconvert(), nb::arg("threads"),
             "out float32 [rows, channels] = W.");
    nb::class_<BoundCodebook>(m, "Codebook", "A tile in format \"codebook\", bound to the arrays that hold it.")
        .def(nb::init<Input, Input, std::optional<Input>, int64_t, bool>(), nb::arg("planes").noconvert(),
             nb::arg("table").noconvert(), nb::arg("rows").noconvert().none(), nb::arg("columns"),
             nb::arg("by_channel"),
             "planes uint32 [bits, n, words], table float16 or float32 [n, entries], rows int32 [n] or None (all);\n"
             "every code must be below `entries`.")
        .def("matmul", &BoundCodebook::matmul, nb::arg("x").noconvert(), nb::arg("y").noconvert(),
             nb::arg("threads"), nb::arg("isa") = nb::none(),
             "y[:, rows] += x @ W.T, x float32 [m, columns]; by channel y += x @ W, x float32 [m, n].")
        .def("prepare", &BoundCodebook::prepare, nb::arg("ints"), "Make the table that products look up now.")
        .def("takes_ints", &BoundCodebook::takes_ints, "Whether `int_matmul` takes this tile.")
        .def("int_matmul", &BoundCodebook::int_matmul, nb::arg("x").noconvert(), nb::arg("scales").noconvert(),
             nb::arg("y").noconvert(), nb::arg("threads"), nb::arg("isa") = nb::none(),
             "y[:, rows] += (x * scales by 32) @ W.T with centroids rounded to bytes; x int8 [m, columns], scales\n"
             "float32 [m, columns / 32, rounded up].")
        .def("dequantize", &BoundCodebook::dequantize, nb::arg("out").noconvert(), nb::arg("threads"),
             nb::arg("isa") = nb::none(), "out float32 [n, columns] = W.");
}
