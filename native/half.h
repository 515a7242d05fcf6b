// Single numbers of 16 bits to fp32 and back, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "core.h"

namespace kvtailor {

inline float float_of(std::uint32_t bits) {
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}
inline std::uint32_t bits_of(float x) {
    std::uint32_t out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}

inline float from_half(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(h & 0x7fff) << 13;
    if (rest >= 0x0f800000) return float_of(sign | 0x7f800000 | (rest & 0x7fffff));
    const float moved = float_of(rest) * float_of(0x77800000);  // 2^112: small halves become normal
    return sign ? -moved : moved;
}
inline float from_brain(std::uint16_t b) { return float_of(static_cast<std::uint32_t>(b) << 16); }

inline std::uint16_t to_brain(float x) {
    std::uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
    bits += 0x7fff + ((bits >> 16) & 1);
    return static_cast<std::uint16_t>(bits >> 16);
}
inline std::uint16_t to_half(float x) {
    const std::uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
    if (rest >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: the adder of fp32 rounds at 2^-24
        const float moved = float_of(rest) + 0.5f;
        return static_cast<std::uint16_t>(sign | (bits_of(moved) - bits_of(0.5f)));
    }
    const std::uint32_t rounded = rest + 0xfff + ((rest >> 13) & 1);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

inline float number_at(Dtype dtype, const void* data, std::int64_t place) {
    if (dtype == Dtype::f32) return static_cast<const float*>(data)[place];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[place];
    return dtype == Dtype::f16 ? from_half(bits) : from_brain(bits);
}
inline void put_number(Dtype dtype, void* data, std::int64_t place, float x) {
    if (dtype == Dtype::f32) static_cast<float*>(data)[place] = x;
    else static_cast<std::uint16_t*>(data)[place] = dtype == Dtype::f16 ? to_half(x) : to_brain(x);
}

}  // namespace kvtailor
