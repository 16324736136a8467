// Arrays that layers are made of: checked for dtype, shape and address before a kernel sees a pointer, with errors in
// words. Nothing here knows Python.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace anybit {

constexpr int64_t MAX_SIZE = int64_t(1) << 31; // rows, columns: keeps every product below 2^63

// What Python raises as ValueError.
[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

enum class Type { u8, i8, u16, u32, i32, i64, f16, bf16, f32, other };

constexpr const char* TYPE_NAMES[] = {"uint8", "int8",    "uint16",   "uint32",  "int32",
                                      "int64", "float16", "bfloat16", "float32", "another dtype"};
constexpr int64_t TYPE_SIZES[] = {1, 1, 2, 4, 4, 8, 2, 2, 4, 1};

inline int64_t size_of(Type type) { return TYPE_SIZES[static_cast<int>(type)]; }

using Shape = std::vector<int64_t>;

inline std::string words(const int64_t* sizes, size_t n) {
    std::string text = "[";
    for (size_t i = 0; i < n; ++i)
        text += (i == 0 ? "" : ", ") + (sizes[i] == -1 ? std::string("any") : std::to_string(sizes[i]));
    return text + "]";
}

// A contiguous array. `keeper` keeps the memory; it may be null where somebody else does.
struct Array {
    void* data = nullptr;
    Type type = Type::other;
    Shape shape;
    std::shared_ptr<const void> keeper;

    template <typename T> T* as() const { return static_cast<T*>(data); }
    int64_t count() const {
        int64_t n = 1;
        for (int64_t size : shape) n *= size;
        return n;
    }
};

// Whether numbers of a size lie at multiples of it, as the compiler takes for granted.
inline bool is_aligned(const void* data, int64_t size) { return reinterpret_cast<uintptr_t>(data) % size == 0; }

constexpr const char* ODD = " at an address that is no multiple of its size";

// Refuse `a` unless it has one of these dtypes and this shape, and its numbers lie at multiples of their size.
inline const Array& check(const std::string& name, const Array& a, std::initializer_list<Type> types,
                          const Shape& shape) {
    bool known = false;
    for (Type type : types) known = known || type == a.type;
    const bool odd = a.count() > 0 && !is_aligned(a.data, size_of(a.type));
    if (known && !odd && a.shape == shape) return a;
    std::string expected;
    for (Type type : types) expected += (expected.empty() ? "" : " or ") + std::string(TYPE_NAMES[int(type)]);
    refuse(name + " is " + TYPE_NAMES[int(a.type)] + " " + words(a.shape.data(), a.shape.size()) + (odd ? ODD : "") +
           ", expected " + expected + " " + words(shape.data(), shape.size()));
}

inline void check_range(const std::string& name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        refuse(name + " is " + std::to_string(value) + ", expected " + std::to_string(low) + " to " +
               std::to_string(high));
}

} // namespace anybit
