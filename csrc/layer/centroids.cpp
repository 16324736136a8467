// Products and sums of floats stand in statements of their own here, so that every machine rounds both.
#include "layer/centroids.h"

#include "layer/stored_bits.h"

namespace anybit {

std::vector<float> StoredTable::decode() const {
    std::vector<float> made(static_cast<size_t>(n * entries));
    if (bits == 16) {
        for (size_t i = 0; i < made.size(); ++i) made[i] = baseline::half_to_float(table.as<uint16_t>()[i]);
        return made;
    }
    std::vector<uint8_t> codes(made.size());
    unpack_bits(table.as<uint8_t>(), bits, n, entries, codes.data());
    for (int64_t row = 0; row < n; ++row) {
        const float step = baseline::half_to_float(scale.as<uint16_t>()[row]);
        const float least = baseline::half_to_float(minimum.as<uint16_t>()[row]);
        for (int64_t e = row * entries; e < (row + 1) * entries; ++e) {
            const float above = step * static_cast<float>(codes[static_cast<size_t>(e)]);
            made[static_cast<size_t>(e)] = least + above;
        }
    }
    return made;
}

namespace {

// The largest magnitude; NaN where an entry is no number, so that such a row gives none.
float largest(const float* entries, int64_t n) {
    float most = 0;
    for (int64_t e = 0; e < n; ++e) {
        const float size = std::abs(entries[e]);
        if (std::isnan(size)) return size;
        most = std::max(most, size);
    }
    return most;
}

} // namespace

std::vector<float> Tables::round_to_steps(const float* tables) {
    std::vector<float> made(static_cast<size_t>(count_ * ENTRIES));
    for (int bits = 1; bits <= 8; ++bits) {
        const int64_t entries = int64_t(1) << bits;
        const bool two = bits > CodebookByRow::MOST_BYTE_BITS;
        constexpr int32_t BYTE = CodebookByRow::MOST_BYTE, WORD = CodebookByRow::WORD, ZERO = CodebookByRow::BYTE_ZERO;
        const int32_t most = two ? BYTE * WORD + BYTE : BYTE;
        bytes_[bits].resize(static_cast<size_t>(count_ * entries * (two ? 2 : 1)));
        for (int64_t kind = 0; kind < count_; ++kind) {
            const float* own = tables + kind * ENTRIES + entries - 2;
            const float step = largest(own, entries) / static_cast<float>(most);
            steps_[bits].push_back(step);
            uint8_t* to = bytes_[bits].data() + kind * entries * (two ? 2 : 1);
            for (int64_t e = 0; e < entries; ++e) {
                const int32_t steps = step > 0 ? static_cast<int32_t>(std::lrint(own[e] / step)) : 0;
                made[static_cast<size_t>(kind * ENTRIES + entries - 2 + e)] = static_cast<float>(steps) * step;
                const int32_t high =
                    two ? (steps + most) / WORD - BYTE : steps; // what is left is a byte of either sign
                to[e] = static_cast<uint8_t>(high + ZERO);
                if (two) to[entries + e] = static_cast<uint8_t>(steps - WORD * high + ZERO);
            }
            for (const uint8_t *part = to, *end = to + entries * (two ? 2 : 1); part < end; part += entries)
                for (int64_t e = 0; e < entries; ++e) steps_mirrored_ &= part[e] + part[entries - 1 - e] == 2 * ZERO;
        }
    }
    return made;
}

const std::vector<float>& RowTables::decoded() const {
    std::call_once(decoded_once_, [this] {
        if (stored_.bits == 16 && !rounded_) return;
        decoded_ = stored_.decode();
        for (int64_t row = 0; row < stored_.n && rounded_; ++row) {
            float* own = decoded_.data() + row * stored_.entries;
            const float scale = largest(own, stored_.entries) / 127, divisor = scale == 0 ? 1.0f : scale;
            for (int64_t e = 0; e < stored_.entries; ++e) own[e] = std::nearbyint(own[e] / divisor) * scale;
        }
    });
    return decoded_;
}

// Each row's largest centroid becomes 127 steps.
void RowTables::make_bytes() const {
    const int64_t room = int64_t(1) << bits_;
    bytes_.table.assign(static_cast<size_t>(stored_.n * room), uint8_t(CodebookByRow::BYTE_ZERO));
    byte_scales_.assign(static_cast<size_t>(stored_.n), 0.0f);
    std::vector<float> own(static_cast<size_t>(stored_.entries));
    for (int64_t row = 0; row < stored_.n; ++row) {
        for (int64_t e = 0; e < stored_.entries; ++e) own[static_cast<size_t>(e)] = entry(row, e);
        float most = largest(own.data(), stored_.entries);
        if (std::isinf(most)) most = std::nanf(""); // such a row gives NaN
        const float scale = most / 127;
        byte_scales_[static_cast<size_t>(row)] = scale;
        if (!(scale > 0)) continue;
        for (int64_t e = 0; e < stored_.entries; ++e)
            bytes_.table[static_cast<size_t>(row * room + e)] =
                static_cast<uint8_t>(CodebookByRow::BYTE_ZERO + std::lrint(own[static_cast<size_t>(e)] / scale));
    }
}

} // namespace anybit
