// The table of one instruction set's products.
#include "matmul/ops.h"
#include "common/simd.h"

#define ANYBIT_NAME(ISA) ANYBIT_QUOTED(ISA)
#define ANYBIT_QUOTED(ISA) #ISA

#ifdef __AVX512BF16__
#define ANYBIT_BF16(F) F
#else
#define ANYBIT_BF16(F) nullptr
#endif
#ifdef __AMX_BF16__
#define ANYBIT_FEW_BF16 5
#else
#define ANYBIT_FEW_BF16 FEW_TOKENS
#endif
#ifdef __AVX2__
#define ANYBIT_VECTORS(F) F
#else
#define ANYBIT_VECTORS(F) nullptr
#endif

namespace anybit::ANYBIT_ISA {

extern const Products products = {
    ANYBIT_NAME(ANYBIT_ISA),
    LANES,
    ANYBIT_FEW_BF16,
    group_int_bytes,
    group_int_scratch,
    group_int_interleave,
    group_int_restore,
    group_int_columns,
    group_int_prepare,
    group_int_prepare_ints,
    group_int_matmul,
    group_int_int_matmul,
    ANYBIT_BF16(group_int_prepare_bf16),
    ANYBIT_BF16(group_int_bf16_matmul),
    group_int_gemm,
    ANYBIT_BF16(group_int_gemm_bf16),
    group_int_dequantize_f32,
    group_int_dequantize_bf16,
    group_int_row,
    second_order_bytes,
    second_order_interleave,
    second_order_restore,
    second_order_columns,
    second_order_prepare,
    second_order_matmul,
    ANYBIT_BF16(second_order_prepare_bf16),
    ANYBIT_BF16(second_order_bf16_matmul),
    second_order_gemm,
    ANYBIT_BF16(second_order_gemm_bf16),
    second_order_dequantize,
    channel_bytes,
    channel_columns,
    channel_planes_bytes,
    channel_planes,
    channel_interleave,
    channel_restore,
    channel_matmul,
    channel_gemm,
    ANYBIT_BF16(channel_gemm_bf16),
    channel_dequantize,
    lookup_blocks,
    lookup_prepare,
    lookup_matmul,
    lookup_float_form,
    lookup_prepare_floats,
    lookup_float_matmul,
    ANYBIT_VECTORS(lookup_bf16_form),
    ANYBIT_VECTORS(lookup_prepare_bf16),
    ANYBIT_VECTORS(lookup_bf16_matmul),
    lookup_gemm,
    ANYBIT_BF16(lookup_gemm_bf16),
    half_matmul,
    half_gemm,
    ANYBIT_BF16(half_gemm_bf16),
    sparse_matmul,
    sparse_gemm,
    quantize_row,
    narrow,
};

} // namespace anybit::ANYBIT_ISA
