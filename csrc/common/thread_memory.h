#pragma once

#include <cstdint>

namespace anybit {

// Memory of this thread in whole cache lines, too much for the stack of a small one; the next call may give the same.
// What is reserved is there: then it allocates nothing.
//
// Throws std::bad_alloc.
void* thread_memory(int64_t bytes, int which = 0);

// Have so many bytes from now on; false where there is no memory.
bool reserve_thread_memory(int64_t bytes, int which = 0) noexcept;

constexpr int64_t GEMM_MEMORY = int64_t(1) << 20; // of it, that a gemm of any format and instruction set takes

constexpr int OWN_MEMORY = 1; // `which` of it products take beside that

} // namespace anybit
