// Keys and values into the pages of a KV-cache, rounded to what it holds.
#include "engine/ops.h"

#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

uint16_t round_to_half(float value) {
#ifdef __F16C__
    return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
    const auto all = load_as<uint32_t>(&value);
    const uint32_t sign = all >> 16 & 0x8000u, size = all & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (size >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (size < 0x38800000u) { // no normal number of 16 bits: the sum with 1/2 is rounded where its last bit is
        const float sum = load_as<float>(&size) + 0.5f;
        return static_cast<uint16_t>(sign | (load_as<uint32_t>(&sum) - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13);
#endif
}

// Codes of n numbers, and the scale and minimum that give them back: as `QuantizedStates.of` (formats/states.py).
class Grid {
public:
    uint16_t scale_bits, least_bits;

    Grid(const float* x, int64_t n, int bits) : top_(static_cast<float>((1 << bits) - 1)) {
        float low = MOST_HALF, high = -MOST_HALF;
        bool finite = true;
        int64_t i = 0;
        if (n >= LANES) {
            Floats lows = broadcast(low), highs = broadcast(high), wrong{};
            for (; i + LANES <= n; i += LANES) {
                const Floats v = load(x + i);
                lows = v < lows ? v : lows;
                highs = v > highs ? v : highs;
                wrong += v - v;
            }
            for (int l = 0; l < LANES; ++l) {
                low = lows[l] < low ? lows[l] : low;
                high = highs[l] > high ? highs[l] : high;
                finite = finite && wrong[l] == 0;
            }
        }
        for (; i < n; ++i) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            finite = finite && x[i] - x[i] == 0;
        }
        low = low > -MOST_HALF ? low : -MOST_HALF;
        high = high < MOST_HALF ? high : MOST_HALF;
        least_bits = round_to_half(low);
        least_ = half_to_float(least_bits);
        const float spread = high > least_ ? high - least_ : 0.0f;
        scale_bits = round_to_half(spread / top_);
        if (half_to_float(scale_bits) * top_ < spread) ++scale_bits; // never down: the range stays covered
        if (!finite) scale_bits = NOT_A_NUMBER;
        scale_ = half_to_float(scale_bits);
    }

    // f(i, code) for all n numbers.
    template <typename F> void codes(const float* x, int64_t n, F&& f) const {
        constexpr int64_t PIECE = 64; // whose divisions the compiler makes vectors of
        int32_t made[PIECE];
        for (int64_t first = 0; first < n; first += PIECE) {
            const int64_t count = least(PIECE, n - first);
            for (int64_t i = 0; i < count; ++i) {
                float q = scale_ > 0 ? (x[first + i] - least_) / scale_ : 0.0f;
                q = q > 0 ? q : 0.0f;
                q = q < top_ ? q : top_;
                made[i] = static_cast<int32_t>((q + 0x1.8p23f) - 0x1.8p23f);
            }
            for (int64_t i = 0; i < count; ++i) f(first + i, static_cast<uint8_t>(made[i]));
        }
    }

private:
    static constexpr float MOST_HALF = 65504; // the largest float16
    static constexpr uint16_t NOT_A_NUMBER = 0x7e00;

    float top_, least_, scale_;
};

void store_codes(const KvFormat& format, uint8_t* page, int64_t slot, const float* key, const float* value) {
    const Grid keys(key, format.head_size, format.bits), values(value, format.head_size, format.bits);
    auto* scales = format.scales(page) + slot;
    scales[0] = keys.scale_bits;
    scales[PAGE] = keys.least_bits;
    scales[2 * PAGE] = values.scale_bits;
    scales[3 * PAGE] = values.least_bits;
    const int64_t row = format.row_bytes(); // of 4 bits it has two numbers a byte: the second ones come behind it
    uint8_t* to = page + format.key_bytes();
    keys.codes(key, format.head_size, [&](int64_t i, uint8_t code) {
        if (i < row) page[format.key_place(i, slot)] = code;
        else page[format.key_place(i - row, slot)] |= static_cast<uint8_t>(code << 4);
    });
    values.codes(value, format.head_size, [&](int64_t i, uint8_t code) {
        if (i < row) to[format.value_place(i, slot)] = code;
        else to[format.value_place(i - row, slot)] |= static_cast<uint8_t>(code << 4);
    });
    for (int64_t i = format.head_size; i < row; ++i)
        page[format.key_place(i, slot)] = to[format.value_place(i, slot)] = 0;
}

void store(const KvFormat& format, uint8_t* page, int64_t slot, const float* key, const float* value) {
    if (format.bits < 16) return store_codes(format, page, slot, key, value);
    const int64_t n = padded(format.head_size);
    auto* keys = reinterpret_cast<uint16_t*>(page);
    auto* row = reinterpret_cast<uint16_t*>(page + format.key_bytes()) + slot * n;
    for (int64_t i = 0; i < n; ++i) row[i] = i < format.head_size ? round_to_half(value[i]) : uint16_t(0);
    for (int64_t i = 0; i < format.head_size; ++i) keys[i * PAGE + slot] = round_to_half(key[i]);
}

void load_key(const KvFormat& format, const uint8_t* page, int64_t slot, float* key) {
    const uint16_t* scales = format.scales(page) + slot;
    const float scale = half_to_float(scales[0]), least = half_to_float(scales[PAGE]);
    const int64_t row = format.row_bytes();
    for (int64_t i = 0; i < format.head_size; ++i) {
        const uint8_t byte = page[format.key_place(i < row ? i : i - row, slot)];
        const int code = format.bits == 8 ? byte : i < row ? byte & 15 : byte >> 4;
        key[i] = static_cast<float>(code) * scale + least;
    }
}

} // namespace

void add_kv_pages(EngineOps& ops) {
    ops.store = store;
    ops.load_key = load_key;
}

} // namespace anybit::ANYBIT_ISA
