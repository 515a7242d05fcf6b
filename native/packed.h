// Attention on packed tokens: queries and weights become small whole numbers, codes are never unpacked.
#pragma once

#include <cmath>

#include "dot.h"

namespace kvtailor {
namespace {

constexpr int TILES_OF_TOKENS = BLOCK / W;
constexpr float SMALLEST = 1e-30f;  // of a row's weights that are told from none

// Writes `count` numbers, times `inverse`, as weights of one row in one or two passes; returns what they sum up to.
template <bool VALUES>
inline float write_narrow(const float* x, int count, float inverse, int passes, std::int8_t* high, std::int8_t* low) {
    F total = set(0), rest_total = set(0);
    for (int i = 0; i < count; i += W) {
        const F scaled = load(x + i) * set(inverse);
        const F whole = VALUES && passes == 2 ? floor(scaled) : round(scaled);
        store_bytes(reinterpret_cast<std::uint8_t*>(high + i), whole);
        total = total + whole;
        if (passes == 2) {
            const F rest = round((scaled - whole) * set(VALUES ? 255.0f : 254.0f));
            store_bytes(reinterpret_cast<std::uint8_t*>(low + i), rest);
            rest_total = rest_total + rest;
        }
    }
    return sum(total) + sum(rest_total) * (VALUES ? 1.0f / 255 : 1.0f / 254);
}

inline float write_wide(const float* x, int count, float inverse, std::int16_t* words) {
    F total = set(0);
    for (int i = 0; i < count; i += W) {
        const F whole = round(load(x + i) * set(inverse));
        store_words(words + i, whole);
        total = total + whole;
    }
    return sum(total);
}

constexpr float WIDE_KEYS = 32385;    // 255 * 32385 * 256 channels stay below 2^31
constexpr float WIDE_VALUES = 32767;

// Queries of a tile of rows as whole numbers, for one group of channels.
struct KeyGroup {
    alignas(64) std::int32_t quads[2 * 4 * KEY_QUADS];
    float step[4];    // of the whole numbers
    float total[4];   // sum of the whole numbers
    float sum[4];     // sum of the queries
    int first_quad;   // where the first line begins, in quads of the head
    int count;        // quads

    // Rows of `x`, `stride` apart, hold the group's channels `begin` ... `begin + size`.
    void write(const float* x, int stride, int rows, int begin, int size, int passes, bool wide) {
        const int from = begin & ~31, to = (begin + size + 31) & ~31;
        first_quad = from / 4;
        count = (to - from) / 4;
        alignas(64) float padded[MOST_DIM + 64];
        for (int r = 0; r < rows; ++r) {
            for (int i = 0; i < to - from; ++i) padded[i] = 0;
            std::memcpy(padded + (begin - from), x + r * stride + begin, sizeof(float) * size);
            float most = 0;
            for (int i = 0; i < to - from; i += W) most = std::fmax(most, greatest(abs(load(padded + i))));
            const float range = wide ? WIDE_KEYS : 127.0f;
            const float inverse = most > SMALLEST ? range / most : 0;
            step[r] = most / range;
            sum[r] = sum_of(padded, to - from);
            if (wide)
                total[r] = write_wide(padded, to - from, inverse,
                                      reinterpret_cast<std::int16_t*>(
                                          reinterpret_cast<std::int64_t*>(quads) + r * KEY_QUADS));
            else
                total[r] = write_narrow<false>(padded, to - from, inverse, passes,
                                               reinterpret_cast<std::int8_t*>(quads + r * KEY_QUADS),
                                               reinterpret_cast<std::int8_t*>(quads + (rows + r) * KEY_QUADS));
        }
    }
};

// sums[row * BLOCK + token] = products of whole numbers and codes, for tiles begin ... end.
inline void key_sums(const Codes& codes, std::int64_t block, const KeyGroup& group, int rows, int passes, int begin,
                     int end, float* sums) {
    alignas(64) float upper[4 * BLOCK];
    for (int plane = 0; plane < plane_count(codes.bits); ++plane) {
        const int bits = plane_bits(codes.bits, plane), all = lines_of(codes.dim / 4, bits);
        const int first = group.first_quad * bits / 8, wanted = lines_of(group.count, bits);
        dot_function<false>(bits, rows, passes)(
            codes.planes[plane] + block * codes.plane_bytes[plane] + first * 64, 64 * all, begin, end, group.quads,
            first + wanted < all ? wanted : all - first, plane == 0 ? sums : upper, BLOCK);
    }
    if (plane_count(codes.bits) == 1) return;
    for (int r = 0; r < rows; ++r)
        for (int t = r * BLOCK + begin * W; t < r * BLOCK + end * W; t += W)
            store(sums + t, fma(load(upper + t), set(plane_weight(1)), load(sums + t)));
}

inline float middle_of(const Codes& codes) { return 0.5f * static_cast<float>((1 << codes.bits) - 1); }

// Packed keys on the token axis: the query is written once, each token brings its scale.
inline void token_logits(const Codes& codes, std::int64_t block, const KeyGroup* groups, int rows, int passes,
                         float* logits) {
    const float middle = middle_of(codes);
    alignas(64) float sums[4 * BLOCK];
    for (int g = 0; g < codes.dim / codes.group; ++g) {
        const KeyGroup& group = groups[g];
        key_sums(codes, block, group, rows, passes, 0, TILES_OF_TOKENS, sums);
        const std::uint16_t* scales = codes.scale + block * codes.scales + g * BLOCK;
        const std::uint16_t* zeros = codes.zero + block * codes.scales + g * BLOCK;
        for (int t = 0; t < BLOCK; t += W) {
            const F scale = load_scale(codes.scale_dtype, scales + t);
            const F zero = fma(scale, set(middle), load_scale(codes.scale_dtype, zeros + t));
            for (int r = 0; r < rows; ++r) {
                const F product = (load(sums + r * BLOCK + t) - set(middle * group.total[r])) * set(group.step[r]);
                F logit = fma(product, scale, zero * set(group.sum[r]));
                if (g > 0) logit = logit + load(logits + r * BLOCK + t);
                store(logits + r * BLOCK + t, logit);
            }
        }
    }
}

// Packed keys on the channel axis: the scales go into the query, once for each group of tokens.
inline void channel_logits(const Codes& codes, std::int64_t block, const float* query, int rows, int passes,
                           float* logits) {
    const float middle = middle_of(codes);
    const int dim = codes.dim;
    alignas(64) float scaled[4 * MOST_DIM];
    for (int part = 0; part < BLOCK / codes.group; ++part) {
        const std::uint16_t* scales = codes.scale + block * codes.scales + part * dim;
        const std::uint16_t* zeros = codes.zero + block * codes.scales + part * dim;
        F constants[4];
        for (int r = 0; r < rows; ++r) constants[r] = set(0);
        for (int c = 0; c < dim; c += W) {
            const F scale = load_scale(codes.scale_dtype, scales + c);
            const F zero = fma(scale, set(middle), load_scale(codes.scale_dtype, zeros + c));
            for (int r = 0; r < rows; ++r) {
                const F q = load(query + r * dim + c);
                store(scaled + r * dim + c, q * scale);
                constants[r] = fma(q, zero, constants[r]);
            }
        }
        KeyGroup group;
        group.write(scaled, dim, rows, 0, dim, passes, WIDE_WEIGHTS && codes.bits == 8);
        const int begin = part * codes.group / W, end = (part + 1) * codes.group / W;
        key_sums(codes, block, group, rows, passes, begin, end, logits);
        for (int r = 0; r < rows; ++r) {
            const F constant = set(sum(constants[r]) - middle * group.total[r] * group.step[r]);
            for (int t = begin * W; t < end * W; t += W)
                store(logits + r * BLOCK + t, fma(load(logits + r * BLOCK + t), set(group.step[r]), constant));
        }
    }
}

// What channels kept exactly add to the logits.
inline void add_outliers(const Codes& codes, std::int64_t block, int tokens, const float* query, int rows,
                         float* logits) {
    const std::int64_t first = block * BLOCK;
    for (int t = 0; t < tokens; ++t)
        for (int m = 0; m < codes.outlier_count; ++m) {
            const float number = number_at(codes.outlier_dtype, codes.outliers, (first + t) * codes.outlier_count + m);
            for (int r = 0; r < rows; ++r)
                logits[r * BLOCK + t] += query[r * codes.dim + codes.outlier_channels[m]] * number;
        }
}

// acc[row * dim + channel] += weights of 64 tokens times packed values.
inline void add_values(const Codes& codes, std::int64_t block, const float* weights, int rows, int passes,
                       float* acc) {
    const float middle = middle_of(codes) - (codes.bits == 8 ? VALUE_OFFSET : 0);
    const bool wide = WIDE_WEIGHTS && codes.bits == 8;
    const float range = wide ? WIDE_VALUES : passes == 2 ? 254.99f : 255.0f;
    alignas(64) std::int32_t quads[2 * 4 * VALUE_QUADS];
    alignas(64) float scaled[BLOCK], sums[4 * MOST_DIM];
    for (int g = 0; g < codes.dim / codes.group; ++g) {
        const std::uint16_t* scales = codes.scale + block * codes.scales + g * BLOCK;
        const std::uint16_t* zeros = codes.zero + block * codes.scales + g * BLOCK;
        float step[4], constant[4];
        for (int r = 0; r < rows; ++r) {
            F most = set(0), fixed = set(0);
            for (int t = 0; t < BLOCK; t += W) {
                const F scale = load_scale(codes.scale_dtype, scales + t);
                const F zero = fma(scale, set(middle_of(codes)), load_scale(codes.scale_dtype, zeros + t));
                const F p = load(weights + r * BLOCK + t), product = p * scale;
                store(scaled + t, product);
                most = max(most, product);
                fixed = fma(p, zero, fixed);
            }
            const float peak = greatest(most), inverse = peak > SMALLEST ? range / peak : 0;
            step[r] = peak / range;
            const float total =
                wide ? write_wide(scaled, BLOCK, inverse,
                                  reinterpret_cast<std::int16_t*>(
                                      reinterpret_cast<std::int64_t*>(quads) + r * VALUE_QUADS))
                     : write_narrow<true>(scaled, BLOCK, inverse, passes,
                                          reinterpret_cast<std::int8_t*>(quads + r * VALUE_QUADS),
                                          reinterpret_cast<std::int8_t*>(quads + (rows + r) * VALUE_QUADS));
            constant[r] = sum(fixed) - middle * total * step[r];
        }
        const int begin = g * codes.group / W, end = (g + 1) * codes.group / W;
        for (int plane = 0; plane < plane_count(codes.bits); ++plane) {
            const int bits = plane_bits(codes.bits, plane), count = lines_of(VALUE_QUADS, bits);
            dot_function<true>(bits, rows, passes)(codes.planes[plane] + block * codes.plane_bytes[plane], 64 * count,
                                                   begin, end, quads, count, sums, MOST_DIM);
            for (int r = 0; r < rows; ++r) {
                const F factor = set(step[r] * plane_weight(plane)), base = set(plane == 0 ? constant[r] : 0);
                for (int c = begin * W; c < end * W; c += W) {
                    float* place = acc + r * codes.dim + c;
                    store(place, load(place) + fma(load(sums + r * MOST_DIM + c), factor, base));
                }
            }
        }
    }
}

}  // namespace
}  // namespace kvtailor
