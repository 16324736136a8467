// Which instruction sets kernels are compiled for, and which of them this machine runs.
#pragma once

namespace anybit {

struct MatmulOps;   // matmul/ops.h
struct QuantizeOps; // quantize/ops.h
struct EngineOps;   // engine/ops.h

// Every instruction set that kernels are compiled for (CMakeLists.txt has the flags), each in a namespace of its name:
// which kernels (all; products and the engine's; products only), the one that it goes beyond, and what it needs of the
// processor besides. Of those that a machine runs, the last one is the best.
#ifdef ANYBIT_AMX
#define ANYBIT_AMX_ISAS(X) X(amx_bf16, products, avx512_bf16, amx_bf16, amx_int8)
#else
#define ANYBIT_AMX_ISAS(X)
#endif
#ifdef ANYBIT_X86
#define ANYBIT_ISAS(X)                                          \
    X(portable, all, portable)                                  \
    X(avx2, all, portable, avx2, fma, f16c)                     \
    X(avx_vnni, engine, avx2, avx_vnni)                         \
    X(avx512, all, avx2, avx512f, avx512bw, avx512vl, avx512dq) \
    X(avx512_vnni, engine, avx512, avx512_vnni)                 \
    X(avx512_vbmi, products, avx512_vnni, avx512_vbmi)          \
    X(avx512_bf16, products, avx512_vbmi, avx512_bf16)          \
    ANYBIT_AMX_ISAS(X)
#else
#define ANYBIT_ISAS(X) X(portable, all, portable)
#endif

#define ANYBIT_NAME(isa, ...) isa,
enum class Isa { ANYBIT_ISAS(ANYBIT_NAME) };
#undef ANYBIT_NAME
#define ANYBIT_VALUE(isa, ...) Isa::isa,
constexpr Isa EVERY_ISA[] = {ANYBIT_ISAS(ANYBIT_VALUE)};
#undef ANYBIT_VALUE

// The instruction set that it goes beyond; itself, if there is none.
constexpr Isa beyond(Isa isa) {
    switch (isa) {
#define ANYBIT_BEYOND_OF(name, kinds, before, ...) \
    case Isa::name: return Isa::before;
        ANYBIT_ISAS(ANYBIT_BEYOND_OF)
#undef ANYBIT_BEYOND_OF
    }
    return isa;
}

const char* isa_name(Isa isa);
// Whether this machine has all that it needs (common/features.cpp).
bool runs(Isa isa);

// The kernels of an instruction set; null where the machine does not run it, or it has none of these.
const MatmulOps* matmul_ops(Isa isa);
const QuantizeOps* quantize_ops(Isa isa);
const EngineOps* engine_ops(Isa isa);

// The best of this machine.
const MatmulOps& best_matmul_ops();
const QuantizeOps& best_quantize_ops();
const EngineOps& best_engine_ops();

} // namespace anybit
