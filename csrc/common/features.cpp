#include "common/features.h"

#include <sstream>

#ifdef ANYBIT_X86
#include <cpuid.h>
#endif
#if defined(ANYBIT_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace anybit {
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

std::map<std::string, bool> find_features() {
#ifdef ANYBIT_X86
    __builtin_cpu_init();
    return {
        {"avx2", __builtin_cpu_supports("avx2")},
        {"fma", __builtin_cpu_supports("fma")},
        {"f16c", __builtin_cpu_supports("f16c")},
        {"avx512f", __builtin_cpu_supports("avx512f")},
        {"avx512bw", __builtin_cpu_supports("avx512bw")},
        {"avx512vl", __builtin_cpu_supports("avx512vl")},
        {"avx512dq", __builtin_cpu_supports("avx512dq")},
        {"avx512_vnni", __builtin_cpu_supports("avx512vnni")},
        {"avx512_bf16", __builtin_cpu_supports("avx512bf16")},
        {"avx512_vbmi", __builtin_cpu_supports("avx512vbmi")},
        {"avx_vnni", has_avx_vnni()},
        {"amx_bf16", has_amx(AMX_BF16)},
        {"amx_int8", has_amx(AMX_INT8)},
    };
#else
    return {};
#endif
}

// Those that are named, and those of the instruction set that it goes beyond.
std::vector<std::string> needs(Isa isa, const char* names) {
    std::vector<std::string> made = isa == beyond(isa) ? std::vector<std::string>() : isa_needs(beyond(isa));
    std::istringstream words(names);
    for (std::string name; std::getline(words >> std::ws, name, ',');) made.push_back(name);
    return made;
}

} // namespace

const std::map<std::string, bool>& cpu_features() {
    static const std::map<std::string, bool> features = find_features();
    return features;
}

std::vector<std::string> isa_needs(Isa isa) {
    switch (isa) {
#define ANYBIT_NEEDS(name, kinds, before, ...) \
    case Isa::name: return needs(Isa::name, #__VA_ARGS__);
        ANYBIT_ISAS(ANYBIT_NEEDS)
#undef ANYBIT_NEEDS
    }
    return {};
}

bool runs(Isa isa) {
    static const std::map<Isa, bool> found = [] {
        std::map<Isa, bool> made;
        for (Isa each : EVERY_ISA) {
            made[each] = true;
            for (const std::string& need : isa_needs(each)) made[each] = made[each] && cpu_features().at(need);
        }
        return made;
    }();
    return found.at(isa);
}

} // namespace anybit
