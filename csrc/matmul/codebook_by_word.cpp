// Format "codebook" word by word: what every width and every instruction set has, for whatever the other files have no
// kernel of, and for dequantization. Weights are looked up 32 at a time (a word of each bitplane) into a row
// of floats, which then meets the activations.
#include "matmul/gemm.h"
#include "matmul/ops.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int WORD = 32; // weights in a word of a plane

// One row's table, as floats; entries beyond it are never named by a code (readers check), lanes beyond may be read.
struct Table {
    alignas(64) float entry[256];
};

void load_table(const CodebookByWord& c, int64_t row, Table& table) {
    if (c.kinds != nullptr) {
        for (int64_t e = 0; e < c.entries; ++e)
            table.entry[e] = c.row_scales[row] * c.table32[c.kinds[row] * c.entries + e];
        return;
    }
    if (c.table32 != nullptr) {
        __builtin_memcpy(table.entry, c.table32 + row * c.entries, static_cast<size_t>(c.entries) * sizeof(float));
        return;
    }
    const uint16_t* from = c.table16 + row * c.entries;
    int64_t e = 0;
    for (; e + LANES <= c.entries; e += LANES) store(table.entry + e, load_halves(from + e));
    for (; e < c.entries; ++e) table.entry[e] = half_to_float(from[e]);
}

inline Floats look_up(const Table& table, int bits, Ints code) {
#if defined(__AVX512F__)
    const auto index = reinterpret_cast<__m512i>(code);
    if (bits <= 4) return _mm512_permutexvar_ps(index, _mm512_load_ps(table.entry));
    if (bits == 5) return _mm512_permutex2var_ps(_mm512_load_ps(table.entry), index, _mm512_load_ps(table.entry + 16));
    return _mm512_i32gather_ps(index, table.entry, 4);
#elif defined(__AVX2__)
    const auto index = reinterpret_cast<__m256i>(code);
    if (bits <= 3) return _mm256_permutevar8x32_ps(_mm256_load_ps(table.entry), index);
    return _mm256_i32gather_ps(table.entry, index, 4);
#else
    (void)bits;
    Floats values;
    for (int l = 0; l < LANES; ++l) values[l] = table.entry[code[l]];
    return values;
#endif
}

// Weights of the words `begin` to `end` of a row.
void decode(const CodebookByWord& c, int64_t row, const Table& table, int64_t begin, int64_t end, float* out) {
    Ints lane;
    for (int l = 0; l < LANES; ++l) lane[l] = l;
    for (int64_t w = begin; w < end; ++w)
        for (int part = 0; part < WORD; part += LANES, out += LANES) {
            Ints code{};
            for (int p = 0; p < c.bits; ++p) {
                const auto word = static_cast<int32_t>(c.planes[p][row * c.words + w] >> part);
                code = (code + code) | (((word - Ints{}) >> lane) & 1);
            }
            store(out, look_up(table, c.bits, code));
        }
}

float dot(const float* w, const float* x, int64_t n) {
    Floats sum[4] = {};
    for (int64_t j = 0; j < n; j += WORD)
        for (int v = 0; v < WORD / LANES; ++v) sum[v % 4] += load(w + j + v * LANES) * load(x + j + v * LANES);
    return reduce((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// A tile by channel as rows of outputs.
struct Channels {
    const CodebookByWord& c;
    int64_t rows; // outputs
};

// The channels from `column` on of a block of outputs, a lane for each.
int64_t decode_panel(const Channels& t, int64_t block, int64_t column, Floats* panel) {
    const CodebookByWord& c = t.c;
    const int64_t n = least(PANEL, c.rows - column), first = block * LANES; // LANES divides 32: it lies in one word
    Ints lane;
    for (int l = 0; l < LANES; ++l) lane[l] = l;
    for (int64_t j = 0; j < n; ++j) {
        const int64_t channel = column + j;
        Ints code{};
        for (int p = 0; p < c.bits; ++p) {
            const auto word = static_cast<int32_t>(c.planes[p][channel * c.words + first / WORD] >> first % WORD);
            code = (code + code) | (((word - Ints{}) >> lane) & 1);
        }
        if (c.table32 != nullptr)
            for (int l = 0; l < LANES; ++l)
                panel[j][l] = code[l] < c.entries ? c.table32[channel * c.entries + code[l]] : 0.0f;
        else {
            uint16_t halves[LANES];
            for (int l = 0; l < LANES; ++l)
                halves[l] = code[l] < c.entries ? c.table16[channel * c.entries + code[l]] : uint16_t(0);
            panel[j] = load_halves(halves);
        }
    }
    return n;
}

void gemv_by_row(const CodebookByWord& c, const Inputs<float>& in, float* y, int64_t y_stride, float* scratch,
                 int64_t begin, int64_t end) {
    Table table{};
    const int64_t width = c.words * WORD;
    for (int64_t row = begin; row < end; ++row) {
        load_table(c, row, table);
        decode(c, row, table, 0, c.words, scratch);
        const int64_t out = c.out_rows ? c.out_rows[row] : row;
        for (int64_t t = 0; t < in.tokens; ++t) y[t * y_stride + out] += dot(scratch, in.x + t * in.stride, width);
    }
}

void gemv_by_channel(const CodebookByWord& c, const Inputs<float>& in, float* y, int64_t y_stride, float* scratch,
                     int64_t begin, int64_t end) {
    Table table{};
    const int64_t first = begin * WORD, last = least(end * WORD, c.columns);
    for (int64_t row = 0; row < c.rows; ++row) {
        load_table(c, row, table);
        decode(c, row, table, begin, end, scratch);
        for (int64_t t = 0; t < in.tokens; ++t) {
            const float scale = in.x[t * in.stride + row];
            for (int64_t j = first; j < last; ++j) y[t * y_stride + j] += scale * scratch[j - first];
        }
    }
}

void gemm_by_channel(const CodebookByWord& c, const Inputs<float>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(Channels{c, c.columns}, decode_panel, c.rows, in, y, begin, end);
}

void dequantize(const CodebookByWord& c, float* out, float* scratch, int64_t begin, int64_t end) {
    Table table{};
    for (int64_t row = begin; row < end; ++row) {
        load_table(c, row, table);
        decode(c, row, table, 0, c.words, scratch);
        __builtin_memcpy(out + row * c.columns, scratch, static_cast<size_t>(c.columns) * sizeof(float));
    }
}

} // namespace

void add_codebook_by_word(MatmulOps& ops) {
    ops.codebook_by_word = {gemv_by_row, gemv_by_channel, gemm_by_channel, dequantize};
}

} // namespace anybit::ANYBIT_ISA
