// The table of one instruction set's products.
#include "matmul/ops.h"

#include "common/simd.h"

namespace anybit::ANYBIT_ISA {

// Each in the file of its name.
void add_group_int_pack(MatmulOps&);
void add_group_int_gemv(MatmulOps&);
void add_group_int_gemm(MatmulOps&);
void add_group_int_gemm_int8(MatmulOps&);
void add_two_four(MatmulOps&);
void add_codebook_by_channel_pack(MatmulOps&);
void add_codebook_by_channel_gemv(MatmulOps&);
void add_codebook_by_channel_gemm(MatmulOps&);
void add_codebook_by_row_gemv(MatmulOps&);
void add_codebook_by_row_gemm(MatmulOps&);
void add_codebook_by_row_gemm_int8(MatmulOps&);
void add_codebook_by_row_tiles(MatmulOps&);
void add_codebook_by_word(MatmulOps&);
void add_float16(MatmulOps&);
void add_sparse(MatmulOps&);
void add_inputs(MatmulOps&);

MatmulOps make_matmul_ops() {
    MatmulOps ops{};
    ops.isa = Isa::ANYBIT_ISA;
    ops.lanes = LANES;
#ifdef __AMX_BF16__
    ops.gemv_tokens_bf16 = 5;
#else
    ops.gemv_tokens_bf16 = GEMV_TOKENS;
#endif
    add_group_int_pack(ops);
    add_group_int_gemv(ops);
    add_group_int_gemm(ops);
    add_group_int_gemm_int8(ops);
    add_two_four(ops);
    add_codebook_by_channel_pack(ops);
    add_codebook_by_channel_gemv(ops);
    add_codebook_by_channel_gemm(ops);
    add_codebook_by_row_gemv(ops);
    add_codebook_by_row_gemm(ops);
    add_codebook_by_row_gemm_int8(ops);
    add_codebook_by_row_tiles(ops);
    add_codebook_by_word(ops);
    add_float16(ops);
    add_sparse(ops);
    add_inputs(ops);
    return ops;
}

} // namespace anybit::ANYBIT_ISA
