// Format "group int": matrix times a few vectors straight from the packed codes, and dequantization.
#include "group_int.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t TILE = 1024;  // columns unpacked at a time: codes and floats stay in L1
constexpr int64_t CHUNK = 2048; // columns multiplied at a time: the activations of four tokens stay in L1

bool is_packed(const GroupInt& t) { return t.bits == 2 || t.bits == 4 || t.bits == 8; }

// Columns that one vector of packed code bytes holds.
int64_t block_columns(int bits) { return LANES * 8 / bits; }

// Whether `dot_rows` can take the tile: whole blocks in each group, and whole vectors in each row.
bool is_blocked(const GroupInt& t) {
    return is_packed(t) && t.row_bytes % LANES == 0 &&
           (t.groups == 1 || t.group_size % block_columns(t.bits) == 0);
}

int64_t padded_columns(const GroupInt& t) {
    const int64_t unit = is_blocked(t) ? block_columns(t.bits) : LANES;
    return ceil_div(t.columns, unit) * unit;
}

// ---- straight from packed codes -------------------------------------------------------------------------

// The activations of a blocked tile, in the order in which codes leave their bytes: within a block the weights
// in the low bits of each byte first, then those in the next bits. `sums` are the group sums lane by lane.
struct Activations {
    const float* x;    // [tokens, stride]
    const float* sums; // [tokens, groups, LANES]
    int64_t stride, sums_stride;
};

Activations activations(const GroupInt& t, const float* scratch, int64_t tokens) {
    const int64_t stride = padded_columns(t);
    return {scratch, scratch + tokens * stride, stride, t.groups * LANES};
}

template <int BITS> void reorder(const float* x, int64_t columns, float* out) {
    constexpr int64_t PHASES = 8 / BITS, BLOCK = LANES * PHASES;
    const int64_t whole = columns / BLOCK;
    for (int64_t b = 0; b < whole; ++b)
        for (int64_t p = 0; p < PHASES; ++p)
            for (int64_t l = 0; l < LANES; ++l) out[b * BLOCK + p * LANES + l] = x[b * BLOCK + l * PHASES + p];
    if (whole * BLOCK == columns) return;
    for (int64_t k = 0; k < BLOCK; ++k) { // ragged: padding codes meet zeros
        const int64_t j = whole * BLOCK + k % LANES * PHASES + k / LANES;
        out[whole * BLOCK + k] = j < columns ? x[j] : 0.0f;
    }
}

void reorder(int bits, const float* x, int64_t columns, float* out) {
    if (bits == 2) return reorder<2>(x, columns, out);
    if (bits == 4) return reorder<4>(x, columns, out);
    return reorder<8>(x, columns, out);
}

void sum_groups(const GroupInt& t, const float* x, int64_t padded, float* sums) {
    for (int64_t g = 0; g < t.groups; ++g) {
        const int64_t end = g + 1 == t.groups ? padded : (g + 1) * t.group_size;
        Floats sum{};
        for (int64_t j = g * t.group_size; j < end; j += LANES) sum += load(x + j);
        store(sums + g * LANES, sum);
    }
}

struct Groups {
    int64_t begin, end;
};

// y[k, out_row] += sum_g scale * (sum_j code * x - zero * sum_j x), for R rows and M tokens at once. Each sum
// runs in the same order whatever R and M are, so a batch equals its single tokens to the bit.
template <int BITS, int R, int M>
void dot_rows(const GroupInt& t, const Activations& a, Groups groups, float* y, int64_t y_stride, int64_t row) {
    constexpr int PHASES = 8 / BITS, MASK = (1 << BITS) - 1;
    constexpr int64_t BLOCK = LANES * PHASES;
    const int64_t blocks = a.stride / BLOCK, per_group = t.groups == 1 ? blocks : t.group_size / BLOCK;
    const uint8_t* codes = t.codes + row * t.row_bytes;
    Floats total[R][M] = {};
    for (int64_t g = groups.begin; g < groups.end; ++g) {
        Floats acc[R][M];
        for (int i = 0; i < R; ++i) {
            const Floats zero = broadcast(static_cast<float>(zero_of(t, row + i, g)));
            for (int k = 0; k < M; ++k) acc[i][k] = -zero * load(a.sums + k * a.sums_stride + g * LANES);
        }
        const int64_t end = least(blocks, (g + 1) * per_group);
        for (int64_t b = g * per_group; b < end; ++b) {
            for (int i = 0; i < R; ++i) {
                const Ints bytes = load_bytes(codes + i * t.row_bytes + b * LANES);
                for (int p = 0; p < PHASES; ++p) {
                    const Ints q = p == PHASES - 1 ? bytes >> (p * BITS) : bytes >> (p * BITS) & MASK;
                    const Floats w = to_float(q);
                    for (int k = 0; k < M; ++k) acc[i][k] += w * load(a.x + k * a.stride + b * BLOCK + p * LANES);
                }
            }
        }
        for (int i = 0; i < R; ++i) {
            const Floats scale = broadcast(scale_of(t, row + i, g));
            for (int k = 0; k < M; ++k) total[i][k] += scale * acc[i][k];
        }
    }
    for (int i = 0; i < R; ++i)
        for (int k = 0; k < M; ++k) y[k * y_stride + out_row(t, row + i)] += reduce(total[i][k]);
}

template <int BITS, int R, int M>
void dot_range(const GroupInt& t, const Activations& a, Groups groups, float* y, int64_t y_stride, int64_t begin,
               int64_t end) {
    int64_t row = begin;
    for (; row + R <= end; row += R) dot_rows<BITS, R, M>(t, a, groups, y, y_stride, row);
    for (; row < end; ++row) dot_rows<BITS, 1, M>(t, a, groups, y, y_stride, row);
}

// Eight sums in flight hide the latency of the multiply-add: many rows for one token, fewer for more.
template <int BITS>
void dot_tokens(const GroupInt& t, Activations a, Groups groups, int64_t tokens, float* y, int64_t y_stride,
                int64_t begin, int64_t end) {
    while (tokens > 0) {
        const int64_t step = tokens >= 4 ? 4 : tokens >= 2 ? 2 : 1;
        if (step == 4) dot_range<BITS, 2, 4>(t, a, groups, y, y_stride, begin, end);
        if (step == 2) dot_range<BITS, 4, 2>(t, a, groups, y, y_stride, begin, end);
        if (step == 1) dot_range<BITS, 8, 1>(t, a, groups, y, y_stride, begin, end);
        a.x += step * a.stride;
        a.sums += step * a.sums_stride;
        y += step * y_stride;
        tokens -= step;
    }
}

// A block of rows is read once, in chunks of columns that all tokens pass over.
template <int BITS>
void matmul_blocked(const GroupInt& t, const Activations& a, int64_t tokens, float* y, int64_t y_stride,
                    int64_t begin, int64_t end) {
    const int64_t step = t.group_size < CHUNK ? CHUNK / t.group_size : 1;
    for (int64_t row = begin; row < end; row += ROW_BLOCK)
        for (int64_t g = 0; g < t.groups; g += step)
            dot_tokens<BITS>(t, a, {g, least(t.groups, g + step)}, tokens, y, y_stride, row,
                             least(end, row + ROW_BLOCK));
}

// ---- any width, any group: unpack first -----------------------------------------------------------------

void unpack_4(const uint8_t* bytes, int64_t n, uint8_t* codes) {
    for (int64_t i = 0; i < n; ++i) {
        codes[2 * i] = bytes[i] & 15;
        codes[2 * i + 1] = bytes[i] >> 4;
    }
}

void unpack_2(const uint8_t* bytes, int64_t n, uint8_t* codes) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t nibbles = (bytes[i] | uint32_t(bytes[i]) << 12) & 0x000f000fu;
        const uint32_t four = (nibbles | nibbles << 6) & 0x03030303u; // a code to a byte
        __builtin_memcpy(codes + 4 * i, &four, 4);
    }
}

// Byte t of the result is bit t of `byte`.
uint64_t spread_bits(uint8_t byte) {
    const uint64_t picked = byte * 0x0101010101010101u & 0x8040201008040201u; // bit t left standing in byte t
    return (picked + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

void unpack_planes(const uint8_t* planes, int bits, int64_t plane_stride, int64_t n, uint8_t* codes) {
    for (int64_t i = 0; i < n; ++i) {
        uint64_t eight = 0;
        for (int p = 0; p < bits; ++p) eight = eight << 1 | spread_bits(planes[p * plane_stride + i]);
        __builtin_memcpy(codes + i * 8, &eight, 8);
    }
}

// The codes of columns begin <= j < begin + count of a row; `begin` is a multiple of 8 and `codes` has room for
// `count` rounded up to a multiple of 8.
void unpack(const GroupInt& t, int64_t row, int64_t begin, int64_t count, uint8_t* codes) {
    const int stored = is_packed(t) ? t.bits : 1;
    const uint8_t* bytes = t.codes + row * t.row_bytes + begin * stored / 8;
    const int64_t n = ceil_div(count * stored, 8);
    if (t.bits == 8) __builtin_memcpy(codes, bytes, static_cast<size_t>(n));
    else if (t.bits == 4) unpack_4(bytes, n, codes);
    else if (t.bits == 2) unpack_2(bytes, n, codes);
    else unpack_planes(bytes, t.bits, t.rows * t.row_bytes, n, codes);
}

// Weights of columns begin <= j < begin + count <= begin + TILE of a row.
void dequantize(const GroupInt& t, int64_t row, int64_t begin, int64_t count, float* out) {
    uint8_t codes[TILE];
    unpack(t, row, begin, count, codes);
    for (int64_t j = 0; j < count;) {
        const int64_t g = (begin + j) / t.group_size;
        const int64_t end = g + 1 == t.groups ? count : least(count, (g + 1) * t.group_size - begin);
        const int zero = zero_of(t, row, g);
        const float scale = scale_of(t, row, g);
        for (; j + LANES <= end; j += LANES) store(out + j, to_float(load_bytes(codes + j) - zero) * scale);
        for (; j < end; ++j) out[j] = static_cast<float>(codes[j] - zero) * scale;
    }
}

void matmul_unpacked(const GroupInt& t, const float* x, int64_t tokens, float* y, int64_t y_stride, int64_t begin,
                     int64_t end) {
    const int64_t padded = padded_columns(t);
    for (int64_t row = begin; row < end; ++row) {
        Floats total[MAX_TOKENS] = {};
        for (int64_t first = 0; first < t.columns; first += TILE) {
            const int64_t count = least(TILE, t.columns - first), whole = ceil_div(count, LANES) * LANES;
            float w[TILE];
            dequantize(t, row, first, count, w);
            for (int64_t j = count; j < whole; ++j) w[j] = 0.0f;
            for (int64_t k = 0; k < tokens; ++k) {
                const float* from = x + k * padded + first;
                Floats sum[4] = {};
                int64_t j = 0;
                for (; j + 4 * LANES <= whole; j += 4 * LANES)
                    for (int v = 0; v < 4; ++v) sum[v] += load(w + j + v * LANES) * load(from + j + v * LANES);
                for (; j < whole; j += LANES) sum[0] += load(w + j) * load(from + j);
                total[k] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
            }
        }
        for (int64_t k = 0; k < tokens; ++k) y[k * y_stride + out_row(t, row)] += reduce(total[k]);
    }
}

uint16_t to_bf16(float value) {
    const uint32_t bits = load_as<uint32_t>(&value);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40); // a NaN stays one
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

} // namespace

int64_t scratch_floats(const GroupInt& t, int64_t tokens) {
    return tokens * (padded_columns(t) + (is_blocked(t) ? t.groups * LANES : 0));
}

void prepare(const GroupInt& t, const float* x, int64_t x_stride, int64_t tokens, float* scratch) {
    const int64_t padded = padded_columns(t);
    float* sums = scratch + tokens * padded;
    for (int64_t k = 0; k < tokens; ++k, scratch += padded) {
        reorder(is_blocked(t) ? t.bits : 8, x + k * x_stride, t.columns, scratch);
        if (is_blocked(t)) sum_groups(t, scratch, padded, sums + k * t.groups * LANES);
    }
}

void matmul(const GroupInt& t, const float* scratch, int64_t tokens, float* y, int64_t y_stride, int64_t begin,
            int64_t end) {
    if (!is_blocked(t)) return matmul_unpacked(t, scratch, tokens, y, y_stride, begin, end);
    const Activations a = activations(t, scratch, tokens);
    if (t.bits == 2) return matmul_blocked<2>(t, a, tokens, y, y_stride, begin, end);
    if (t.bits == 4) return matmul_blocked<4>(t, a, tokens, y, y_stride, begin, end);
    return matmul_blocked<8>(t, a, tokens, y, y_stride, begin, end);
}

void dequantize_f32(const GroupInt& t, float* out, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        for (int64_t j = 0; j < t.columns; j += TILE)
            dequantize(t, row, j, least(TILE, t.columns - j), out + row * t.columns + j);
}

void dequantize_bf16(const GroupInt& t, uint16_t* out, int64_t begin, int64_t end) {
    float w[TILE];
    for (int64_t row = begin; row < end; ++row)
        for (int64_t first = 0; first < t.columns; first += TILE) {
            const int64_t count = least(TILE, t.columns - first);
            dequantize(t, row, first, count, w);
            for (int64_t j = 0; j < count; ++j) out[row * t.columns + first + j] = to_bf16(w[j]);
        }
}

} // namespace anybit::ANYBIT_ISA
