// The table of one instruction set's kernels of the engine.
#include "engine/ops.h"

namespace anybit::ANYBIT_ISA {

// Each in the file of its name.
void add_elementwise(EngineOps&);
void add_attention(EngineOps&);
void add_kv_pages(EngineOps&);

EngineOps make_engine_ops() {
    EngineOps ops{};
    add_elementwise(ops);
    add_attention(ops);
    add_kv_pages(ops);
    return ops;
}

} // namespace anybit::ANYBIT_ISA
