// Eight numbers at a time in plain C++, for every processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core.h"
#include "half.h"

namespace kvtailor {
namespace {

constexpr int W = 8;  // fp32 numbers, or outputs of a register of codes

struct F {
    float v[W];
};

template <class Operation>
inline F each(Operation operation) {
    F out;
    for (int i = 0; i < W; ++i) out.v[i] = operation(i);
    return out;
}

inline F set(float x) {
    return each([&](int) { return x; });
}
inline F load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
inline F operator+(F a, F b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F operator-(F a, F b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F operator*(F a, F b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F operator/(F a, F b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F fma(F a, F b, F c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F max(F a, F b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F min(F a, F b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F abs(F a) {
    return each([&](int i) { return std::fabs(a.v[i]); });
}
inline F round(F a) {
    return each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline F floor(F a) {
    return each([&](int i) { return std::floor(a.v[i]); });
}
// a where x > y, else b.
inline F where_greater(F x, F y, F a, F b) {
    return each([&](int i) { return x.v[i] > y.v[i] ? a.v[i] : b.v[i]; });
}

inline F load_half(const std::uint16_t* p) {
    return each([&](int i) { return from_half(p[i]); });
}
inline F load_brain(const std::uint16_t* p) {
    return each([&](int i) { return from_brain(p[i]); });
}

inline float sum(F a) { return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7])); }
inline float greatest(F a) {
    float out = a.v[0];
    for (int i = 1; i < W; ++i) out = a.v[i] > out ? a.v[i] : out;
    return out;
}
// The sums of four vectors.
inline void sum4(F a, F b, F c, F d, float* out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
}

// 2^n for whole n in -126 ... 127.
inline F power_of_two(F n) {
    return each([&](int i) { return float_of(static_cast<std::uint32_t>(static_cast<int>(n.v[i]) + 127) << 23); });
}

// W whole numbers in 0 ... 255, or -128 ... 127, as bytes.
inline void store_bytes(std::uint8_t* p, F x) {
    for (int i = 0; i < W; ++i) p[i] = static_cast<std::uint8_t>(static_cast<int>(std::nearbyint(x.v[i])));
}
inline void store_words(std::int16_t* p, F x) {
    for (int i = 0; i < W; ++i) p[i] = static_cast<std::int16_t>(std::nearbyint(x.v[i]));
}

// A register of codes: W outputs of four codes each.
struct Bytes {
    std::uint8_t v[4 * W];
};

inline Bytes load_codes(const std::uint8_t* p) {
    Bytes out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}

template <int SHIFT, int BITS>
inline Bytes slot(Bytes line) {
    Bytes out;
    for (int i = 0; i < 4 * W; ++i) out.v[i] = (line.v[i] >> SHIFT) & ((1 << BITS) - 1);
    return out;
}

// Sums of products in 32 bits.
struct Sum {
    std::int32_t v[W];
};

inline Sum no_sum() { return {}; }

template <bool VALUES>
inline void add(Sum& sum, Bytes codes, std::int32_t weights) {
    int w[4];
    for (int i = 0; i < 4; ++i) {
        const int byte = (weights >> (8 * i)) & 255;
        w[i] = VALUES || byte < 128 ? byte : byte - 256;
    }
    for (int o = 0; o < W; ++o)
        for (int i = 0; i < 4; ++i) sum.v[o] += codes.v[4 * o + i] * w[i];
}

// Quads of codes whose products fit into a sum.
template <int BITS, bool VALUES>
constexpr int quads_that_fit() {
    return 1 << 14;
}

using Wide = Sum;

inline Wide no_wide() { return {}; }
inline void flush(Wide& wide, Sum& sum) { wide = sum; }  // a sum goes on where it stands
inline F numbers(Wide wide) {
    return each([&](int i) { return static_cast<float>(wide.v[i]); });
}

constexpr bool WIDE_WEIGHTS = false;
constexpr float VALUE_OFFSET = 0;  // what is taken from 8-bit codes of values before they are multiplied

inline Bytes centred(Bytes codes) { return codes; }

// Never used: weights are not wide here.
using WideSum = Sum;
inline WideSum no_wide_sum() { return no_sum(); }
inline void add_wide(WideSum&, Bytes, std::int64_t) {}

// Tiles of W outputs that are summed at once for `rows` rows in `passes` passes.
template <int ROWS, int PASSES>
constexpr int tiles_at_once() {
    return 1;
}

// For packing, unpacking and retrieval.

inline F root(F a) {
    return each([&](int i) { return std::sqrt(a.v[i]); });
}

// The Hadamard transform of W numbers, not scaled.
inline F butterflies(F x) {
    for (int span = 1; span < W; span *= 2)
        x = each([&](int i) { return i & span ? x.v[i - span] - x.v[i] : x.v[i] + x.v[i + span]; });
    return x;
}

inline std::uint16_t half_down(float x) {
    const std::uint32_t bits = bits_of(x), rest = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
    std::uint32_t cut;
    bool exact;
    if (rest < 0x38800000) {  // small halves count in steps of 2^-24
        const float steps = float_of(rest) * 16777216.0f;
        cut = static_cast<std::uint32_t>(steps);
        exact = static_cast<float>(cut) == steps;
    } else {
        cut = (rest - 0x38000000) >> 13;
        exact = (rest & 0x1fff) == 0;
    }
    return static_cast<std::uint16_t>(sign | (cut + (sign && !exact)));  // more of a negative number is less
}
// Rounded down to 16 bits; what is too large for them must not come here.
inline void store_half_down(std::uint16_t* p, F x) {
    for (int i = 0; i < W; ++i) p[i] = half_down(x.v[i]);
}
inline void store_brain_down(std::uint16_t* p, F x) {
    for (int i = 0; i < W; ++i) {
        const std::uint32_t bits = bits_of(x.v[i]);
        p[i] = static_cast<std::uint16_t>((bits + (bits >> 31) * 0xffff) >> 16);
    }
}

// W words of 32 bits that codes are pushed into, the last one lowest.
struct Words {
    std::uint32_t v[W];
};

inline Words no_words() { return {}; }
template <int BITS>
inline void push(Words& words, F code) {
    for (int i = 0; i < W; ++i) words.v[i] = (words.v[i] << BITS) | static_cast<std::uint32_t>(code.v[i]);
}
inline void store_lines(std::uint8_t* p, Words words) { std::memcpy(p, words.v, sizeof words.v); }

// Bits `shift` and up, below `mask`, of W words of 32 bits.
inline F load_field(const std::uint8_t* p, int shift, int mask) {
    std::uint32_t words[W];
    std::memcpy(words, p, sizeof words);
    return each([&](int i) { return static_cast<float>(static_cast<int>(words[i] >> shift) & mask); });
}
inline F load_unsigned(const std::uint8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
}
inline F load_signed(const std::int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
}

// Rows become columns.
inline void transpose(F (&rows)[W]) {
    for (int i = 0; i < W; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = rows[i].v[j];
            rows[i].v[j] = rows[j].v[i];
            rows[j].v[i] = kept;
        }
}

}  // namespace
}  // namespace kvtailor
