// Where an instruction set is chosen: asked of the processor at run time, so that one build serves every machine.
#include "common/dispatch.h"

#include "engine/ops.h"
#include "matmul/ops.h"
#include "quantize/ops.h"

namespace anybit {

// One factory of each kind per instruction set (matmul/ops.cpp, quantize/ops.cpp, engine/ops.cpp).
#define ANYBIT_FACTORIES(isa, ...)   \
    namespace isa {                  \
    MatmulOps make_matmul_ops();     \
    QuantizeOps make_quantize_ops(); \
    EngineOps make_engine_ops();     \
    }
ANYBIT_ISAS(ANYBIT_FACTORIES)
#undef ANYBIT_FACTORIES

namespace {

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
#define ANYBIT_NAME(isa, ...) \
    case Isa::isa: return #isa;
        ANYBIT_ISAS(ANYBIT_NAME)
#undef ANYBIT_NAME
    }
    return "";
}

const MatmulOps* matmul_ops(Isa isa) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
#define ANYBIT_MATMUL(isa, ...) \
    case Isa::isa: return made<isa::make_matmul_ops>();
        ANYBIT_ISAS(ANYBIT_MATMUL)
#undef ANYBIT_MATMUL
    }
    return nullptr;
}

const QuantizeOps* quantize_ops(Isa isa) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
#define ANYBIT_QUANTIZE_all(isa) \
    case Isa::isa: return made<isa::make_quantize_ops>();
#define ANYBIT_QUANTIZE_engine(isa)
#define ANYBIT_QUANTIZE_products(isa)
#define ANYBIT_QUANTIZE(isa, kinds, ...) ANYBIT_QUANTIZE_##kinds(isa)
        ANYBIT_ISAS(ANYBIT_QUANTIZE)
#undef ANYBIT_QUANTIZE
#undef ANYBIT_QUANTIZE_products
#undef ANYBIT_QUANTIZE_engine
#undef ANYBIT_QUANTIZE_all
    default: return nullptr;
    }
}

const EngineOps* engine_ops(Isa isa) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
#define ANYBIT_ENGINE_all(isa) \
    case Isa::isa: return made<isa::make_engine_ops>();
#define ANYBIT_ENGINE_engine(isa) ANYBIT_ENGINE_all(isa)
#define ANYBIT_ENGINE_products(isa)
#define ANYBIT_ENGINE(isa, kinds, ...) ANYBIT_ENGINE_##kinds(isa)
        ANYBIT_ISAS(ANYBIT_ENGINE)
#undef ANYBIT_ENGINE
#undef ANYBIT_ENGINE_products
#undef ANYBIT_ENGINE_engine
#undef ANYBIT_ENGINE_all
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

const EngineOps& best_engine_ops() {
    static const EngineOps& ops = best(engine_ops);
    return ops;
}

} // namespace anybit
