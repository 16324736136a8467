// What is subtracted from keys before they are rounded (`Centres`).
#pragma once

#include "engine/ops.h"

#include <algorithm>
#include <cmath>

namespace anybit {

// Whether keys with such a bias are to be rounded to 16 bits without it. Numbers from 16 on are rounded by up to 1/128,
// which changes scores by thousandths; to put a centre back takes as long as to multiply the keys.
inline bool needs_centre(const float* bias, int64_t n) {
    constexpr float LARGE = 16;
    float most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, std::abs(bias[i]));
    return most >= LARGE;
}

// key -= R(position) centre.
inline void subtract_centre(const Centres& from, int64_t position, float* key, int64_t n) {
    const float* centre = position < PAGE ? from.first : from.others;
    if (centre == nullptr) return;
    const int64_t half = from.half;
    const int64_t page = position / PAGE * 2 * half, place = position % PAGE;
    for (int64_t i = 0, j = half; i < half; ++i, ++j) {
        const float *start = from.starts + page, *offset = from.offsets + place;
        const float x = centre[i] * start[i] - centre[j] * start[j], y = centre[j] * start[i] + centre[i] * start[j];
        const float cosine = offset[i * PAGE], sine = offset[j * PAGE];
        key[i] -= x * cosine - y * sine;
        key[j] -= y * cosine + x * sine;
    }
    for (int64_t i = 2 * half; i < n; ++i) key[i] -= centre[i];
}

} // namespace anybit
