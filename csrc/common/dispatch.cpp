// Where an instruction set is chosen: asked of the processor at run time, so that one build serves every machine.
#include "common/dispatch.h"

#include "matmul/ops.h"
#include "quantize/ops.h"

#ifdef ANYBIT_X86
#include <cpuid.h>
#endif
#if defined(ANYBIT_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace anybit {

// One factory of each kind per instruction set (matmul/ops.cpp, quantize/ops.cpp).
namespace portable {
MatmulOps make_matmul_ops();
QuantizeOps make_quantize_ops();
} // namespace portable
namespace avx2 {
MatmulOps make_matmul_ops();
QuantizeOps make_quantize_ops();
} // namespace avx2
namespace avx512 {
MatmulOps make_matmul_ops();
QuantizeOps make_quantize_ops();
} // namespace avx512
namespace avx_vnni {
MatmulOps make_matmul_ops();
}
namespace avx512_vnni {
MatmulOps make_matmul_ops();
}
namespace avx512_vbmi {
MatmulOps make_matmul_ops();
}
namespace avx512_bf16 {
MatmulOps make_matmul_ops();
}
namespace amx_bf16 {
MatmulOps make_matmul_ops();
}

namespace {

#ifdef ANYBIT_X86
// AVX-VNNI: bit 4 of EAX in leaf 7, subleaf 1. Compilers learned its name late; its registers are AVX2's.
bool has_avx_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}

// AMX with bfloat16 or bytes: bit 24 and bit 22 or 25 of EDX in leaf 7; and Linux must be asked for room for the tiles.
constexpr int AMX_BF16 = 22, AMX_INT8 = 25;
bool has_amx([[maybe_unused]] int kind) {
#if defined(ANYBIT_AMX) && defined(__linux__)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool there = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 24 & 1) != 0 && (d >> kind & 1) != 0;
    return there && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

// Whether the machine has what the flags of an instruction set's build ask for (CMakeLists.txt).
bool runs(Isa isa) {
    static const Features f = cpu_features();
    const bool avx2 = f.avx2 && f.fma && f.f16c;
    const bool avx512 = avx2 && f.avx512f && f.avx512bw && f.avx512vl && f.avx512dq;
    const bool vnni = avx512 && f.avx512_vnni, vbmi = vnni && f.avx512_vbmi, bf16 = vbmi && f.avx512_bf16;
    switch (isa) {
    case Isa::portable: return true;
    case Isa::avx2: return avx2;
    case Isa::avx_vnni: return avx2 && f.avx_vnni;
    case Isa::avx512: return avx512;
    case Isa::avx512_vnni: return vnni;
    case Isa::avx512_vbmi: return vbmi;
    case Isa::avx512_bf16: return bf16;
    case Isa::amx_bf16: return bf16 && f.amx_bf16 && f.amx_int8;
    }
    return false;
}

// The best that `find` has kernels of.
template <typename K> const K& best(const K* (*find)(Isa)) {
    const K* found = nullptr;
    for (Isa isa : EVERY_ISA)
        if (const K* own = find(isa)) found = own;
    return *found; // the portable ones at least
}

// What a factory makes, made once. Factories are compiled with the flags of their instruction set: only a machine that
// runs it may come here.
template <auto MAKE> auto* made() {
    static const auto ops = MAKE();
    return &ops;
}

} // namespace

const char* isa_name(Isa isa) {
    switch (isa) {
    case Isa::portable: return "portable";
    case Isa::avx2: return "avx2";
    case Isa::avx_vnni: return "avx_vnni";
    case Isa::avx512: return "avx512";
    case Isa::avx512_vnni: return "avx512_vnni";
    case Isa::avx512_vbmi: return "avx512_vbmi";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::amx_bf16: return "amx_bf16";
    }
    return "";
}

Features cpu_features() {
    Features f{};
#ifdef ANYBIT_X86
    __builtin_cpu_init();
    f.avx2 = __builtin_cpu_supports("avx2");
    f.fma = __builtin_cpu_supports("fma");
    f.f16c = __builtin_cpu_supports("f16c");
    f.avx512f = __builtin_cpu_supports("avx512f");
    f.avx512bw = __builtin_cpu_supports("avx512bw");
    f.avx512vl = __builtin_cpu_supports("avx512vl");
    f.avx512dq = __builtin_cpu_supports("avx512dq");
    f.avx512_vnni = __builtin_cpu_supports("avx512vnni");
    f.avx512_bf16 = __builtin_cpu_supports("avx512bf16");
    f.avx512_vbmi = __builtin_cpu_supports("avx512vbmi");
    f.avx_vnni = has_avx_vnni();
    f.amx_bf16 = has_amx(AMX_BF16);
    f.amx_int8 = has_amx(AMX_INT8);
#endif
    return f;
}

const MatmulOps* matmul_ops(Isa isa) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
    case Isa::portable: return made<portable::make_matmul_ops>();
#ifdef ANYBIT_X86
    case Isa::avx2: return made<avx2::make_matmul_ops>();
    case Isa::avx_vnni: return made<avx_vnni::make_matmul_ops>();
    case Isa::avx512: return made<avx512::make_matmul_ops>();
    case Isa::avx512_vnni: return made<avx512_vnni::make_matmul_ops>();
    case Isa::avx512_vbmi: return made<avx512_vbmi::make_matmul_ops>();
    case Isa::avx512_bf16: return made<avx512_bf16::make_matmul_ops>();
#endif
#ifdef ANYBIT_AMX
    case Isa::amx_bf16: return made<amx_bf16::make_matmul_ops>();
#endif
    default: return nullptr;
    }
}

const QuantizeOps* quantize_ops(Isa isa) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
    case Isa::portable: return made<portable::make_quantize_ops>();
#ifdef ANYBIT_X86
    case Isa::avx2: return made<avx2::make_quantize_ops>();
    case Isa::avx512: return made<avx512::make_quantize_ops>();
#endif
    default: return nullptr;
    }
}

const MatmulOps& best_matmul_ops() {
    static const MatmulOps& ops = best(matmul_ops);
    return ops;
}

const QuantizeOps& best_quantize_ops() {
    static const QuantizeOps& ops = best(quantize_ops);
    return ops;
}

} // namespace anybit
