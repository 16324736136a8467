#pragma once

#include <cstdint>

namespace anybit {

// Memory of this thread in whole cache lines, too much for the stack of a small one; the next call may give the same.
void* thread_memory(int64_t bytes, int which = 0);

constexpr int64_t GEMM_MEMORY = int64_t(1) << 20; // of it, that a gemm of any format and instruction set takes

} // namespace anybit
