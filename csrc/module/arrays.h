// Arrays from Python: checked for dtype, shape and layout before a kernel sees their pointers, with errors in words.
#pragma once

#include "common/array.h"
#include "common/dispatch.h"
#include "engine/ops.h"
#include "matmul/ops.h"
#include "quantize/ops.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace anybit {

namespace nb = nanobind;

using Input = nb::ndarray<nb::ro>;
using Output = nb::ndarray<>;

constexpr int64_t MAX_THREADS = 1024; // Python has it as `_native.MAX_THREADS`

inline Type type_of(nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    const auto is = [dtype](Code code, int bits) {
        return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
    };
    if (is(Code::UInt, 8)) return Type::u8;
    if (is(Code::Int, 8)) return Type::i8;
    if (is(Code::UInt, 16)) return Type::u16;
    if (is(Code::UInt, 32)) return Type::u32;
    if (is(Code::Int, 32)) return Type::i32;
    if (is(Code::Int, 64)) return Type::i64;
    if (is(Code::Float, 16)) return Type::f16;
    if (is(Code::Bfloat, 16)) return Type::bf16;
    if (is(Code::Float, 32)) return Type::f32;
    return Type::other;
}

template <typename A> bool has_shape(const A& a, const Shape& shape) {
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
void check(const char* name, const A& a, std::initializer_list<Type> types, const Shape& shape, Layout layout) {
    const Type type = type_of(a.dtype());
    bool good = a.device_type() == nb::device::cpu::value && has_shape(a, shape);
    bool known = false;
    for (Type t : types) known = known || t == type;
    const size_t dims = layout == Layout::dense ? a.ndim() : layout == Layout::dense_rows ? 1 : 0;
    const bool odd = a.size() > 0 && !is_aligned(a.data(), static_cast<int64_t>(a.itemsize()));
    good = good && known && !odd && (a.size() == 0 || is_dense(a, dims));
    if (good) return;
    std::string expected;
    for (Type t : types) expected += (expected.empty() ? "" : " or ") + std::string(TYPE_NAMES[int(t)]);
    expected += " " + words(shape.data(), shape.size()) + " on the CPU";
    if (layout == Layout::dense) expected += ", contiguous";
    if (layout == Layout::dense_rows) expected += ", with contiguous rows";
    refuse(std::string(name) + " is " + TYPE_NAMES[int(type)] + " " + words(a.shape_ptr(), a.ndim()) +
           " with strides " + words(a.stride_ptr(), a.ndim()) + (odd ? ODD : "") + ", expected " + expected);
}

// One size of an array that the other arguments are held against.
template <typename A> int64_t size_of(const char* name, const A& a, size_t dim, size_t ndim) {
    if (a.ndim() != ndim)
        refuse(std::string(name) + " has " + std::to_string(a.ndim()) + " dimensions, expected " +
               std::to_string(ndim));
    return static_cast<int64_t>(a.shape(dim));
}

inline int check_threads(int64_t threads) {
    if (threads < 1 || threads > MAX_THREADS)
        refuse("threads is " + std::to_string(threads) + ", expected 1 to " + std::to_string(MAX_THREADS));
    return static_cast<int>(threads);
}

// The kernels of a named instruction set, or the best.
template <typename K> const K& find_ops(const K* (*find)(Isa), const K& best, const std::optional<std::string>& name) {
    if (!name) return best;
    for (Isa isa : EVERY_ISA)
        if (*name == isa_name(isa))
            if (const K* ops = find(isa)) return *ops;
    refuse("isa '" + *name + "' is unknown or not what this machine has");
}

inline const QuantizeOps& find_quantize_ops(const std::optional<std::string>& isa) {
    return find_ops(quantize_ops, best_quantize_ops(), isa);
}
inline const MatmulOps& find_matmul_ops(const std::optional<std::string>& isa) {
    return find_ops(matmul_ops, best_matmul_ops(), isa);
}
inline const EngineOps& find_engine_ops(const std::optional<std::string>& isa) {
    return find_ops(engine_ops, best_engine_ops(), isa);
}

// Those that this machine has kernels of some kind in.
template <typename K> std::vector<std::string> isa_names(const K* (*find)(Isa)) {
    std::vector<std::string> found;
    for (Isa isa : EVERY_ISA)
        if (find(isa) != nullptr) found.emplace_back(isa_name(isa));
    return found;
}

inline int64_t row_stride(int64_t rows, int64_t stride, int64_t columns) { return rows > 1 ? stride : columns; }

} // namespace anybit
