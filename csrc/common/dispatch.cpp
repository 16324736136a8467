// Which kernels run here: asked of the processor at run time, so that one build serves every machine.
#include "quantize/ops.h"
#include "matmul/ops.h"

#include <cstring>
#ifdef ANYBIT_X86
#include <cpuid.h>
#endif
#if defined(ANYBIT_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace anybit {

#define ANYBIT_TABLE(ISA)         \
    {#ISA,                        \
     ISA::gptq,                   \
     ISA::codebook_rows,          \
     ISA::codebook_channels,      \
     ISA::codebook_channels_many, \
     ISA::codebook_decode,        \
     ISA::kmeans_scratch,         \
     ISA::kmeans,                 \
     ISA::nested_codes,           \
     ISA::nested_descent,         \
     ISA::nested_fit}

#ifdef ANYBIT_X86
namespace {

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

// What the flags of the kernels' build ask of the machine (CMakeLists.txt).
bool runs_avx2(const Features& f) { return f.avx2 && f.fma && f.f16c; }
bool runs_avx512(const Features& f) { return runs_avx2(f) && f.avx512f && f.avx512bw && f.avx512vl && f.avx512dq; }

} // namespace
#endif

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

const Kernels* kernels_for(const char* isa) {
    static const Kernels portable = ANYBIT_TABLE(portable);
    const auto wanted = [isa](const char* name) { return isa == nullptr || std::strcmp(isa, name) == 0; };
#ifdef ANYBIT_X86
    static const Kernels avx2 = ANYBIT_TABLE(avx2);
    static const Kernels avx512 = ANYBIT_TABLE(avx512);
    static const Features f = cpu_features();
    if (runs_avx512(f) && wanted("avx512")) return &avx512;
    if (runs_avx2(f) && wanted("avx2")) return &avx2;
#endif
    return wanted("portable") ? &portable : nullptr;
}

const Products* products_for(const char* isa) {
    const auto wanted = [isa](const char* name) { return isa == nullptr || std::strcmp(isa, name) == 0; };
#ifdef ANYBIT_X86
    static const Features f = cpu_features();
    const bool vnni = runs_avx512(f) && f.avx512_vnni;
    const bool vbmi = vnni && f.avx512_vbmi;
#ifdef ANYBIT_AMX
    if (vbmi && f.avx512_bf16 && f.amx_bf16 && f.amx_int8 && wanted("amx_bf16")) return &amx_bf16::products;
#endif
    if (vbmi && f.avx512_bf16 && wanted("avx512_bf16")) return &avx512_bf16::products;
    if (vbmi && wanted("avx512_vbmi")) return &avx512_vbmi::products;
    if (vnni && wanted("avx512_vnni")) return &avx512_vnni::products;
    if (runs_avx512(f) && wanted("avx512")) return &avx512::products;
    if (runs_avx2(f) && f.avx_vnni && wanted("avx_vnni")) return &avx_vnni::products;
    if (runs_avx2(f) && wanted("avx2")) return &avx2::products;
#endif
    return wanted("portable") ? &portable::products : nullptr;
}

} // namespace anybit
