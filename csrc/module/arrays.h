// Arrays from Python: checked for dtype, shape and layout before a kernel sees their pointers, with errors in words.
#pragma once

#include "common/dispatch.h"
#include "common/large_pages.h"
#include "common/thread_memory.h"
#include "common/thread_pool.h"
#include "matmul/ops.h"
#include "quantize/ops.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

namespace anybit {

namespace nb = nanobind;

using Input = nb::ndarray<nb::ro>;
using Output = nb::ndarray<>;
using Shape = std::initializer_list<int64_t>; // -1: any size

// Below this many multiply-adds (or weights) a call is over before a second thread has woken up.
constexpr int64_t SERIAL_WORK = 1 << 18;
constexpr int64_t PIECES_PER_THREAD = 4; // so that a thread that started late or runs slowly holds nobody up
constexpr int64_t MAX_THREADS = 1024;
constexpr int64_t MAX_SIZE = int64_t(1) << 31; // rows, columns: keeps every product below 2^63

[[noreturn]] inline void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

// ---- checks ---------------------------------------------------------------------------------------------

enum class Type { u8, i8, u16, u32, i32, i64, f16, bf16, f32, other };

const char* const TYPE_NAMES[] = {"uint8", "int8",    "uint16",   "uint32",  "int32",
                                  "int64", "float16", "bfloat16", "float32", "another dtype"};

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

inline std::string words(const int64_t* sizes, size_t n) {
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

// Whether the elements lie at multiples of their size, as the compiler takes for granted.
template <typename A> bool is_aligned(const A& a) {
    return a.size() == 0 || reinterpret_cast<uintptr_t>(a.data()) % a.itemsize() == 0;
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
    good = good && known && is_aligned(a) && (a.size() == 0 || is_dense(a, dims));
    if (good) return;
    std::string expected;
    for (Type t : types) expected += (expected.empty() ? "" : " or ") + std::string(TYPE_NAMES[int(t)]);
    expected += " " + words(shape.begin(), shape.size()) + " on the CPU";
    if (layout == Layout::dense) expected += ", contiguous";
    if (layout == Layout::dense_rows) expected += ", with contiguous rows";
    const char* odd = is_aligned(a) ? "" : " at an address that is no multiple of its size";
    refuse(std::string(name) + " is " + TYPE_NAMES[int(type)] + " " + words(a.shape_ptr(), a.ndim()) +
           " with strides " + words(a.stride_ptr(), a.ndim()) + odd + ", expected " + expected);
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

inline int64_t row_stride(int64_t rows, int64_t stride, int64_t columns) { return rows > 1 ? stride : columns; }

// ---- running --------------------------------------------------------------------------------------------

// Scratch memory that a thread gave back, to be used again: the system takes milliseconds to hand out what many tokens
// need. What was not used for longest goes first.
class KeptMemory {
public:
    KeptMemory() = default;
    KeptMemory(const KeptMemory&) = delete;
    ~KeptMemory() {
        for (const Block& block : blocks_) ::operator delete[](block.memory, ALIGNMENT);
    }
    // The least block of at least so many bytes, if it is not far larger; else a new one. `bytes` becomes its size.
    float* take(size_t& bytes) {
        Block* found = nullptr;
        for (Block& block : blocks_)
            if (block.bytes >= bytes && block.bytes / 4 <= bytes && (found == nullptr || block.bytes < found->bytes))
                found = &block;
        if (found != nullptr) {
            bytes = found->bytes;
            return remove(found);
        }
        auto* made = static_cast<float*>(::operator new[](bytes, ALIGNMENT));
        advise_large(made, bytes);
        return made;
    }
    void give(float* memory, size_t bytes) noexcept {
        if (bytes < LEAST || bytes > MOST) return ::operator delete[](memory, ALIGNMENT);
        while (blocks_[0].memory != nullptr || all() + bytes > MOST)
            ::operator delete[](remove(std::find_if(blocks_, std::end(blocks_), held)), ALIGNMENT);
        std::move(blocks_ + 1, std::end(blocks_), blocks_);
        blocks_[COUNT - 1] = {memory, bytes};
    }

private:
    struct Block {
        float* memory = nullptr;
        size_t bytes = 0;
    };
    static bool held(const Block& block) { return block.memory != nullptr; }
    size_t all() const {
        size_t bytes = 0;
        for (const Block& block : blocks_) bytes += block.bytes;
        return bytes;
    }
    // The older ones move up.
    float* remove(Block* block) noexcept {
        float* memory = block->memory;
        std::move_backward(blocks_, block, block + 1);
        blocks_[0] = {};
        return memory;
    }

    static constexpr std::align_val_t ALIGNMENT{64};
    static constexpr size_t LEAST = size_t(1) << 17; // bytes of a block; less is the allocator's business
#ifdef ANYBIT_SANITIZE
    static constexpr size_t MOST = 0; // a sanitizer sees who reads beyond a block
#else
    static constexpr size_t MOST = size_t(1) << 25; // bytes of all blocks
#endif
    static constexpr int COUNT = 8;
    Block blocks_[COUNT]; // empty ones first, the newest last
};

inline KeptMemory& kept_memory() {
    thread_local KeptMemory memory;
    return memory;
}

struct Free {
    size_t bytes = 0;
    void operator()(float* p) const { kept_memory().give(p, bytes); }
};
using Scratch = std::unique_ptr<float[], Free>; // to be freed by the thread that made it

inline Scratch make_scratch(int64_t floats) {
    size_t bytes = static_cast<size_t>(floats) * 4;
    float* memory = kept_memory().take(bytes);
    return Scratch(memory, Free{bytes});
}

// Elements from one row of `columns` to the next: an odd number of cache lines, so that no two rows among many compete
// for the same place in a cache.
inline int64_t odd_lines(int64_t columns, int64_t size) { return ((columns * size + 63) / 64 | 1) * 64 / size; }

// Rows that a thread takes at a time, a multiple of `block`: all where the work is worth one thread only.
inline int64_t piece_of(int64_t rows, int64_t block, int64_t work, int threads) {
    if (threads == 1 || work < SERIAL_WORK) return rows;
    const int64_t pieces = threads * PIECES_PER_THREAD, share = (rows + pieces - 1) / pieces;
    return (share + block - 1) / block * block;
}

// f(k) for all tokens (or k of whatever) of `columns` numbers each.
template <typename F> void for_tokens(int64_t m, int64_t columns, int threads, F&& f) {
    parallel_for(m, piece_of(m, 1, m * columns, threads), threads, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) f(k);
    });
}

inline void clear(float* y, int64_t m, int64_t columns, int threads) {
    for_tokens(m, columns, threads, [&](int64_t k) { std::fill_n(y + k * columns, columns, 0.0f); });
}

} // namespace anybit
