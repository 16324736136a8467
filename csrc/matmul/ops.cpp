// The table of one instruction set's products.
#include "matmul/ops.h"

#include "common/simd.h"

namespace anybit {

#ifdef ANYBIT_BEYOND
static_assert(beyond(Isa::ANYBIT_ISA) == Isa::ANYBIT_BEYOND);
namespace ANYBIT_BEYOND {
MatmulOps make_matmul_ops();
}
#endif

namespace ANYBIT_ISA {

// In each file that is compiled for this instruction set (CMakeLists.txt).
#define ANYBIT_FILE(name) void add_##name(MatmulOps&);
ANYBIT_FILES
#undef ANYBIT_FILE

MatmulOps make_matmul_ops() {
#ifdef ANYBIT_BEYOND // functions of files that are not compiled for this instruction set
    MatmulOps ops = ANYBIT_BEYOND::make_matmul_ops();
#else
    MatmulOps ops{};
#endif
    ops.isa = Isa::ANYBIT_ISA;
    ops.lanes = LANES;
#ifdef __AMX_BF16__
    ops.gemv_tokens_bf16 = 5;
#else
    ops.gemv_tokens_bf16 = GEMV_TOKENS;
#endif
#define ANYBIT_FILE(name) add_##name(ops);
    ANYBIT_FILES
#undef ANYBIT_FILE
    return ops;
}

} // namespace ANYBIT_ISA
} // namespace anybit
