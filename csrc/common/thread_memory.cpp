#include "common/thread_memory.h"

#include <memory>
#include <new>

namespace anybit {

void* thread_memory(int64_t bytes, int which) {
    struct Free {
        void operator()(char* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    struct Memory {
        std::unique_ptr<char[], Free> bytes;
        int64_t size = 0;
    };
    thread_local Memory memories[2];
    Memory& memory = memories[which];
    if (bytes > memory.size) {
        memory.bytes.reset(new (std::align_val_t(64)) char[static_cast<size_t>(bytes)]);
        memory.size = bytes;
    }
    return memory.bytes.get();
}

bool reserve_thread_memory(int64_t bytes, int which) noexcept {
    try {
        thread_memory(bytes, which);
        return true;
    } catch (const std::bad_alloc&) { return false; }
}

} // namespace anybit
