// Format "codebook" by rows times many tokens of 8 bits, by AMX. Sums are exact, so the bits are those of gemv.
//
// An input is its group's factor times its code: a number of 16 bits. Its two digits, 256 high + low, meet the same
// centroids. So a tile of inputs has the digits of 8 tokens as its 16 columns, and 64 inputs as its rows, four to a
// row. A tile of weights has 16 rows of the matrix. Products of rows of up to MOST_COLUMNS are summed in 32 bits.
#if !defined(__AMX_INT8__) || !defined(__AMX_BF16__)
#error "for AMX only: CMakeLists.txt"
#endif
#include "common/thread_memory.h"
#include "matmul/codebook_by_row_whole.h"
#include "matmul/gemm_panels.h"
#include "matmul/held_outputs.h"
#include "matmul/ops.h"
#include "matmul/outputs.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t TOKENS = 8; // of a tile
constexpr int64_t ROWS = 2;   // tiles of rows that are multiplied together
constexpr int64_t TILE = 16 * BYTES;
constexpr int64_t CHUNK = 2; // blocks of a row that are decoded at a time: with their inputs they fit the first cache
constexpr int64_t MOST_VECTORS = CHUNK * PHASES + MOST_TAILS;
constexpr int64_t MOST_COLUMNS = INT32_MAX / (128 * 255); // a digit of -128 times a centroid of 255, everywhere
constexpr int64_t LEAST_TOKENS = 4;                       // of fewer, gemv takes less time

// Vectors of codes of a row: of whole blocks, then tails.
inline int64_t vectors_of(const CodebookByRow& c) {
    const int64_t tails = tails_of(c);
    return (blocks_of(c) - (tails > 0)) * PHASES + tails;
}

int64_t input_bytes(const CodebookByRow& c, int64_t tokens) { return ceil_div(tokens, TOKENS) * vectors_of(c) * TILE; }

// ---- inputs

// Digits of four inputs to a lane, from their codes and the factor of each lane.
inline void digits_of(Codes codes, __m512i factors, Codes& high, Codes& low) {
    const auto from = reinterpret_cast<__m512i>(codes), half = _mm512_set1_epi16(128);
    const __m512i even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(from, 8), 8), factors);
    const __m512i odd = _mm512_mullo_epi16(_mm512_srai_epi16(from, 8), factors);
    const auto join = [](__m512i a, __m512i b) { // low bytes of both
        return reinterpret_cast<Codes>(_mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, a, _mm512_slli_epi16(b, 8)));
    };
    low = join(even, odd);
    high = join(_mm512_srai_epi16(_mm512_add_epi16(even, half), 8), _mm512_srai_epi16(_mm512_add_epi16(odd, half), 8));
}

void prepare_many(const CodebookByRow& c, const int8_t* codes, const float* scales, int64_t k, int8_t* x,
                  WholeInputs::Token& token) {
    const int64_t blocks = blocks_of(c), tails = tails_of(c), vectors = vectors_of(c);
    token = {find_unit(scales, ceil_div(c.columns, CodebookByRow::INPUT_GROUP)), 0};
    x += k / TOKENS * vectors * TILE + k % TOKENS * 2 * 4;
    for (int64_t b = 0, v = 0; b < blocks; ++b) {
        Codes block[PHASES];
        order_inputs(c, codes, b, block);
        int32_t factors[LANES];
        token.sum += find_factors(codes, c.columns, scales, token.unit, b * LANES, factors);
        const bool tail = b == blocks - 1 && tails > 0;
        for (int64_t s = 0; s < (tail ? tails : PHASES); ++s, ++v) {
            const Ints lanes = tail ? tail_factors(factors, s) : load_as<Ints>(factors);
            Codes high, low;
            digits_of(block[s], reinterpret_cast<__m512i>(lanes | lanes << 16), high, low);
            const auto h = reinterpret_cast<__m512i>(high), l = reinterpret_cast<__m512i>(low);
            int64_t pairs[2][LANES / 2]; // of each 128 bits the first two lanes' digits, and the last two
            _mm512_storeu_si512(pairs[0], _mm512_unpacklo_epi32(h, l));
            _mm512_storeu_si512(pairs[1], _mm512_unpackhi_epi32(h, l));
            for (int64_t i = 0; i < LANES; ++i)
                __builtin_memcpy(x + v * TILE + i * BYTES, &pairs[i / 2 % 2][i / 4 * 2 + i % 2], 8);
        }
    }
}

// ---- weights

// Centroids of up to ROWS tiles of rows and a chunk of columns, a tile for each vector of codes; of entries of two
// bytes the second ones follow.
typedef Codes Panel[ROWS][MOST_VECTORS][16];

// Blocks of a row from `block` on, and whether the tails that follow belong to them.
struct Chunk {
    int64_t block, count;
    bool tails;
};

template <int B, int BYTES_EACH>
void decode_rows(const CodebookByRow& c, int64_t first, int64_t tiles, const Chunk& chunk, Panel* panels) {
    const int64_t bytes = 4 * c.words, begin = chunk.block * BYTES, whole = vectors_of(c) / PHASES;
    const int64_t tails = tails_of(c), next = 2 * ROWS * 16 * bytes; // rows that come when these two groups are done
    for (int64_t i = 0; i < tiles * 16; ++i) {
        const int64_t row = least(first + i, c.rows - 1); // nobody reads what lies behind the last row
        const RowPlanes<B> planes(c, row);
        const RowLookup<B, BYTES_EACH> tables(c, row);
        Codes(*to)[16] = panels[0][i / 16];
        const int64_t lane = i % 16;
        const auto put = [&](int64_t v, Codes code) {
            Codes found[BYTES_EACH];
            tables(code, found);
            for (int e = 0; e < BYTES_EACH; ++e) to[v + e * ROWS * MOST_VECTORS][lane] = found[e];
        };
        for (int64_t b = 0; b < chunk.count; ++b) {
            Codes plane[B], code[PHASES];
            planes.fetch(begin + b * BYTES + next);
            planes.load(begin + b * BYTES, present(bytes - begin - b * BYTES), plane);
            codes_of<B>(plane, code);
#pragma GCC unroll 8
            for (int64_t s = 0; s < PHASES; ++s) put(b * PHASES + s, code[s]);
        }
        for (int64_t t = 0; t < (chunk.tails ? tails : 0); ++t)
            put(chunk.count * PHASES + t, tail_codes<B>(c, row, whole * BYTES + t * TAIL_BYTES));
    }
}

// ---- products

// Shapes of tiles: 0 to 3 are sums, 4 and 5 weights, 6 and 7 inputs of the first and of the next TOKENS.
inline void shape_digit_tiles(int64_t tokens) {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
        const int64_t own = i == 2 || i == 3 || i == 7 ? tokens - TOKENS : tokens;
        shapes.rows[i] = 16;
        shapes.bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? BYTES : 2 * 4 * (own < 1 ? 1 : least(own, TOKENS)));
    }
    __asm__ volatile("" ::"r"(&shapes) : "memory"); // as in `shape_tiles`
    _tile_loadconfig(&shapes);
}

// Tiles of sums of R tiles of rows, and of TOKENS tokens or MORE.
template <int R, bool MORE> struct DigitSums {
    static constexpr int64_t NEXT = 16; // vectors of a tile

    static void zero() {
        _tile_zero(0);
        if (R == 2) _tile_zero(1);
        if (MORE) _tile_zero(2);
        if (R == 2 && MORE) _tile_zero(3);
    }
    static void load(const Ints* sums) {
        _tile_loadd(0, sums, BYTES);
        if (R == 2) _tile_loadd(1, sums + NEXT, BYTES);
        if (MORE) _tile_loadd(2, sums + 2 * NEXT, BYTES);
        if (R == 2 && MORE) _tile_loadd(3, sums + 3 * NEXT, BYTES);
    }
    static void save(Ints* sums) {
        _tile_stored(0, sums, BYTES);
        if (R == 2) _tile_stored(1, sums + NEXT, BYTES);
        if (MORE) _tile_stored(2, sums + 2 * NEXT, BYTES);
        if (R == 2 && MORE) _tile_stored(3, sums + 3 * NEXT, BYTES);
    }
    // += so many vectors of a panel times inputs, of which the next tokens' are `stride` further.
    static void add(const Codes (*panel)[16], int64_t vectors, const int8_t* x, int64_t stride) {
        __asm__ volatile("" ::: "memory"); // GCC 12 does not see that tiles are loaded from memory: what was written
        for (int64_t v = 0; v < vectors; ++v, x += TILE) {
            _tile_loadd(4, panel[v], BYTES);
            _tile_loadd(6, x, BYTES);
            _tile_dpbusd(0, 4, 6);
            if (R == 2) _tile_loadd(5, panel[MOST_VECTORS + v], BYTES);
            if (R == 2) _tile_dpbusd(1, 5, 6);
            if (MORE) _tile_loadd(7, x + stride, BYTES);
            if (MORE) _tile_dpbusd(2, 4, 7);
            if (R == 2 && MORE) _tile_dpbusd(3, 5, 7);
        }
        __asm__ volatile("" ::: "memory"); // is so before, and what will be is behind
    }
};

// use(DigitSums) for so many tiles of rows, and tokens.
template <typename F> inline void by_tiles(int64_t rows, bool more, F&& use) {
    if (rows == 2) return more ? use(DigitSums<2, true>{}) : use(DigitSums<2, false>{});
    return more ? use(DigitSums<1, true>{}) : use(DigitSums<1, false>{});
}

// What finishing TOKENS tokens needs of them.
struct Tokens {
    int64_t first, count;
    __m512i sums; // of factor times code
    __m256 units;

    Tokens() = default;
    Tokens(const WholeInputs& in, int64_t k) : first(k), count(least(TOKENS, in.tokens - k)) {
        int64_t all[TOKENS] = {};
        float own[TOKENS] = {};
        for (int64_t i = 0; i < count; ++i) all[i] = in.token[k + i].sum, own[i] = in.token[k + i].unit;
        sums = load_as<__m512i>(all);
        units = load_as<__m256>(own);
    }
};

// 256 high + low of a row's sums, for TOKENS tokens; of those that are missing, what happens to lie there.
inline __m512i join_digits(Ints sums) {
    const auto both = reinterpret_cast<__m512i>(sums);
    return _mm512_add_epi64(_mm512_mul_epi32(both, _mm512_set1_epi64(256)), _mm512_srai_epi64(both, 32));
}

// Vectors of 8 tokens of 16 rows become those of 16 rows of 8 tokens.
inline void turn(const __m256 (&rows)[16], Floats (&tokens)[TOKENS]) {
    __m512 v[8], w[8];
    for (int i = 0; i < 8; ++i) // rows i and i + 8, of which each half is transposed
        v[i] = _mm512_castpd_ps(
            _mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(rows[i])), _mm256_castps_pd(rows[i + 8]), 1));
    for (int i = 0; i < 8; i += 2)
        w[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), w[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int o = 0; o < 2; ++o) {
            const __m512d a = _mm512_castps_pd(w[i + o]), b = _mm512_castps_pd(w[i + o + 2]);
            v[i + 2 * o] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            v[i + 2 * o + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    const __m512i high = _mm512_setr_epi32(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int k = 0; k < 4; ++k) {
        tokens[k] = reinterpret_cast<Floats>(_mm512_permutex2var_ps(v[k], low, v[k + 4]));
        tokens[k + 4] = reinterpret_cast<Floats>(_mm512_permutex2var_ps(v[k], high, v[k + 4]));
    }
}

// Sums of tiles of rows go where outputs say.
template <int EACH> class Finish {
public:
    Finish(const CodebookByRow& c, const WholeInputs& in) : c_(c), in_(in), groups_(ceil_div(in.tokens, TOKENS)) {
        for (int64_t g = 0; g < groups_; ++g) tokens_[g] = Tokens(in, g * TOKENS);
    }

    // What finishing a block of rows needs of it.
    struct Block {
        Outputs y;
        Places places;
        int64_t number;
        double steps[LANES];
    };
    // `first`: the row that outputs begin with, where they lie side by side; else it is 0.
    Block block(const Outputs& y, int64_t number, int64_t first = 0) const {
        Block made;
        made.y = y, made.places = find_places(y, number, c_.rows), made.number = number;
        made.places.first -= first;
        for (int64_t i = 0; i < LANES; i += 8)
            _mm512_storeu_pd(made.steps + i, whole_steps(c_, number * LANES + i, made.places.count - i));
        return made;
    }

    // Groups begin <= g < end of TOKENS tokens, whose sums lie `stride` vectors apart, those of second bytes `second`
    // further.
    void operator()(const Block& own, int64_t begin, int64_t end, const Ints* sums, int64_t stride,
                    int64_t second = 0) const {
        for (int64_t g = begin; g < end && g < groups_; ++g, sums += stride)
            finish_tokens(own, tokens_[g], sums, second);
    }

private:
    void finish_tokens(const Block& own, const Tokens& tokens, const Ints* sums, int64_t second) const {
        const __m512i excess = _mm512_mullo_epi64(tokens.sums, _mm512_set1_epi64(ENTRY_EXCESS<EACH>));
        __m256 rows[LANES];
        for (int i = 0; i < LANES; ++i) {
            __m512i all = join_digits(sums[i]);
            if constexpr (EACH == 2)
                all = _mm512_add_epi64(_mm512_mullo_epi64(all, _mm512_set1_epi64(CodebookByRow::WORD)),
                                       join_digits(sums[second + i]));
            rows[i] = whole_values(_mm512_sub_epi64(all, excess), _mm512_set1_pd(own.steps[i]), tokens.units);
        }
        Floats values[TOKENS];
        turn(rows, values);
        by_tokens<TOKENS>(tokens.count, [&](auto m, int64_t k) {
            Floats kept[m.value] = {};
            if (c_.kept.channels > 0)
                sum_kept<m.value>(c_, in_.kept + (tokens.first + k) * c_.kept.channels, own.number * LANES,
                                  own.places.count, kept);
            for (int l = 0; l < m.value; ++l)
                finish(own.y, tokens.first + k + l, own.places,
                       c_.kept.channels > 0 ? kept[l] + values[k + l] : values[k + l]);
        });
    }

    const CodebookByRow& c_;
    const WholeInputs& in_;
    int64_t groups_;
    Tokens tokens_[BATCH / TOKENS];
};

// ---- up to 2 TOKENS tokens: all sums of a tile of rows stay in tiles

// Vectors take turns at two tiles of sums, as the next product with one has to wait for the last.
template <bool MORE> struct FewSums {
    static constexpr int64_t BOTH = 2 * 16; // vectors of both

    static void zero() {
        _tile_zero(0);
        _tile_zero(1);
        if (MORE) _tile_zero(2);
        if (MORE) _tile_zero(3);
    }
    static void add(const Codes (*panel)[16], int64_t vectors, const int8_t* x, int64_t stride) {
        __asm__ volatile("" ::: "memory"); // as in DigitSums
        for (int64_t v = 0; v < vectors; ++v, x += TILE) {
            _tile_loadd(4, panel[v], BYTES);
            _tile_loadd(6, x, BYTES);
            _tile_dpbusd(0, 4, 6);
            if (MORE) _tile_loadd(7, x + stride, BYTES);
            if (MORE) _tile_dpbusd(2, 4, 7);
            if (++v == vectors) break;
            x += TILE;
            _tile_loadd(5, panel[v], BYTES);
            _tile_loadd(6, x, BYTES);
            _tile_dpbusd(1, 5, 6);
            if (MORE) _tile_loadd(7, x + stride, BYTES);
            if (MORE) _tile_dpbusd(3, 5, 7);
        }
        __asm__ volatile("" ::: "memory");
    }
    // The sums of the first TOKENS, then of the next.
    static void save(Ints* sums) {
        _tile_stored(0, sums, BYTES);
        _tile_stored(1, sums + 16, BYTES);
        if (MORE) _tile_stored(2, sums + BOTH, BYTES);
        if (MORE) _tile_stored(3, sums + BOTH + 16, BYTES);
    }
    // Both tiles of sums become one.
    static void join(Ints* sums) {
        for (int64_t i = 0; i < (MORE ? 2 : 1) * BOTH; i += BOTH)
            for (int64_t l = 0; l < 16; ++l) // lanes of tokens that are not there may hold anything, and overflow
                sums[i + l] = reinterpret_cast<Ints>(_mm512_add_epi32(reinterpret_cast<__m512i>(sums[i + l]),
                                                                      reinterpret_cast<__m512i>(sums[i + 16 + l])));
    }
};

// The centroids of a block of a tile of rows, or of their tails. The tile that comes next is fetched meanwhile, in the
// order in which it lies in memory. What the loop needs of `c` is at hand: bytes that are written may be anything.
// Planes share their offsets, so that their addresses stay in registers.
template <int B> void decode_block(const CodebookByRow& c, int64_t first, int64_t b, Codes (*to)[16]) {
    const int64_t bytes = 4 * c.words, at = b * BYTES, tile = first * bytes, next = tile + 16 * (bytes + at);
    const int64_t lines = least(ceil_div(16 * bytes, BYTES) - 16 * b, 16), last = least(15, c.rows - 1 - first);
    const RowPlanes<B> planes(c, 0);
    const uint8_t *const tables = c.table, *const kinds = c.kinds;
    const auto table_of = [=](int64_t row) { return Table<B>(tables + ((kinds == nullptr ? row : kinds[row]) << B)); };
    if (b == vectors_of(c) / PHASES) {
        const int64_t tails = tails_of(c);
        for (int64_t i = 0; i <= last; ++i) {
            const Table<B> table = table_of(first + i);
            if (i < lines) planes.fetch(next + i * BYTES);
            for (int64_t t = 0; t < tails; ++t) to[t][i] = table(tail_codes<B>(c, first + i, at + t * TAIL_BYTES));
        }
        return;
    }
    const Present there = present(bytes - at);
    for (int64_t i = 0; i <= last; ++i) { // nobody reads what lies behind the last row
        const Table<B> table = table_of(first + i);
        if (i < lines) planes.fetch(next + i * BYTES);
        Codes plane[B], code[PHASES];
        planes.load(tile + i * bytes + at, there, plane);
        codes_of<B>(plane, code);
#pragma GCC unroll 8
        for (int64_t s = 0; s < PHASES; ++s) to[s][i] = table(code[s]);
    }
}

// A block is multiplied when the next one is decoded: until then its centroids have come out of the store buffer, which
// tiles cannot read. The sums of a tile of rows are saved when the one after has been decoded, and finished when that
// is being multiplied: tiles take long to be ready, and nothing has to wait for them.
template <int B, bool MORE>
void gemm_few(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    using Few = FewSums<MORE>;
    const int64_t vectors = vectors_of(c), blocks = ceil_div(vectors, PHASES), all = (end - begin) * blocks;
    if (all == 0) return; // no rows
    auto* panels = static_cast<Codes(*)[16]>(thread_memory((2 * PHASES + 4) * TILE));
    auto* sums = reinterpret_cast<Ints*>(panels + 2 * PHASES);
    const auto panel = [&](int64_t i) { return panels + i % 2 * PHASES; };
    const Finish<1> finish(c, in);
    shape_digit_tiles(in.tokens);
    const auto finish_tile = [&](int64_t tile) {
        Few::join(sums);
        finish(finish.block(y, begin + tile), 0, 2, sums, Few::BOTH);
    };
    const auto multiply = [&](int64_t i) {
        const int64_t b = i % blocks, first = b * PHASES;
        if (b == 0 && i > 0) Few::save(sums);
        if (b == 0) Few::zero();
        Few::add(panel(i), least(PHASES, vectors - first), in.x + first * TILE, vectors * TILE);
        if (b == 0 && i > 0) finish_tile(i / blocks - 1);
    };
    for (int64_t i = 0; i < all; ++i) {
        decode_block<B>(c, (begin + i / blocks) * LANES, i % blocks, panel(i));
        if (i > 0) multiply(i - 1);
    }
    multiply(all - 1);
    Few::save(sums);
    finish_tile(end - begin - 1);
    _tile_release();
}

// ---- any number of tokens

template <int B, int EACH>
void gemm_many(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    const int64_t vectors = vectors_of(c), whole = vectors / PHASES, groups = ceil_div(in.tokens, TOKENS);
    const int64_t chunks = ceil_div(whole > 0 ? whole : 1, CHUNK), stride = vectors * TILE;
    const int64_t half = groups * ROWS * 16; // vectors of sums of a byte of the entries
    constexpr int64_t PANELS = EACH * sizeof(Panel), MOST = EACH * BATCH / TOKENS * ROWS * TILE;
    static_assert(PANELS + MOST + Held::MEMORY <= GEMM_MEMORY);
    auto* panels = static_cast<Panel*>(thread_memory(PANELS + MOST + Held::MEMORY));
    auto* sums = reinterpret_cast<Ints*>(panels + EACH);
    Held held(y, in.tokens, begin * LANES, reinterpret_cast<char*>(sums) + MOST);
    const Finish<EACH> finish(c, in);
    for (int64_t block = begin; block < end; block += ROWS) {
        const int64_t tiles = least(ROWS, end - block);
        typename Finish<EACH>::Block made[ROWS];
        for (int64_t t = 0; t < tiles; ++t) made[t] = finish.block(held.outputs(), block + t, held.first());
        for (int64_t q = 0; q < chunks; ++q) {
            const Chunk chunk{q * CHUNK, least(CHUNK, whole - q * CHUNK), q == chunks - 1};
            decode_rows<B, EACH>(c, block * LANES, tiles, chunk, panels);
            const int64_t here = chunk.count * PHASES + (chunk.tails ? vectors % PHASES : 0);
            for (int64_t g = 0; g < groups; g += 2) {
                const int64_t tokens = least(2 * TOKENS, in.tokens - g * TOKENS);
                if (g == 0 || tokens < 2 * TOKENS) shape_digit_tiles(tokens);
                const int8_t* x = in.x + g * stride + chunk.block * PHASES * TILE;
                Ints* own = sums + g * ROWS * 16;
                for (int64_t e = 0; e < EACH; ++e)
                    by_tiles(tiles, tokens > TOKENS, [&](auto tile) {
                        if (q == 0) tile.zero();
                        else tile.load(own + e * half);
                        tile.add(panels[e][0], here, x, stride);
                        tile.save(own + e * half);
                    });
                if (q + 1 < chunks) continue;
                for (int64_t t = 0; t < tiles; ++t) finish(made[t], g, g + 2, own + t * 16, ROWS * 16, half);
            }
        }
        held.write_if_full(least((block + tiles) * LANES, c.rows), least(end - block - tiles, ROWS) * LANES);
    }
    _tile_release();
}

template <int B, int EACH>
void gemm_bits(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    if (EACH > 1 || in.tokens > 2 * TOKENS) return gemm_many<B, EACH>(c, in, y, begin, end);
    if (in.tokens > TOKENS) return gemm_few<B, true>(c, in, y, begin, end);
    gemm_few<B, false>(c, in, y, begin, end);
}

void gemm_whole(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    by_entries(c, [&](auto bits, auto each) { gemm_bits<bits.value, each.value>(c, in, y, begin, end); });
}

} // namespace

void add_codebook_by_row_tiles(MatmulOps& ops) {
    WholeOps& own = ops.codebook_by_row.whole;
    own.least = LEAST_TOKENS;
    own.most_columns = MOST_COLUMNS;
    own.bytes = input_bytes;
    own.beside = TOKENS;
    own.prepare_many = prepare_many;
    own.gemm = gemm_whole;
}

} // namespace anybit::ANYBIT_ISA
