// The table of one instruction set's kernels that quantize.
#include "quantize/ops.h"

namespace anybit::ANYBIT_ISA {

// Each in the file of its name.
void add_gptq(QuantizeOps&);
void add_kmeans(QuantizeOps&);
void add_nested_codes(QuantizeOps&);

QuantizeOps make_quantize_ops() {
    QuantizeOps ops{};
    ops.isa = Isa::ANYBIT_ISA;
    add_gptq(ops);
    add_kmeans(ops);
    add_nested_codes(ops);
    return ops;
}

} // namespace anybit::ANYBIT_ISA
