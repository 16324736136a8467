// Which instruction sets kernels are compiled for, and which of them this machine runs.
#pragma once

namespace anybit {

struct MatmulOps;   // matmul/ops.h
struct QuantizeOps; // quantize/ops.h

// Every instruction set that kernels are compiled for (CMakeLists.txt), each in a namespace of that name. Of those that
// a machine runs, the last one is the best.
enum class Isa { portable, avx2, avx_vnni, avx512, avx512_vnni, avx512_vbmi, avx512_bf16, amx_bf16 };
constexpr Isa EVERY_ISA[] = {Isa::portable,    Isa::avx2,        Isa::avx_vnni,    Isa::avx512,
                             Isa::avx512_vnni, Isa::avx512_vbmi, Isa::avx512_bf16, Isa::amx_bf16};
const char* isa_name(Isa isa);

// What the processor has, and the operating system lets programs use.
struct Features {
    bool avx2, fma, f16c, avx512f, avx512bw, avx512vl, avx512dq, avx512_vnni, avx512_bf16, avx512_vbmi, avx_vnni,
        amx_bf16, amx_int8;
};
Features cpu_features();

// The kernels of an instruction set; null where the machine does not run it, or it has none of these.
const MatmulOps* matmul_ops(Isa isa);
const QuantizeOps* quantize_ops(Isa isa);

// The best of this machine.
const MatmulOps& best_matmul_ops();
const QuantizeOps& best_quantize_ops();

} // namespace anybit
