// From codes back to numbers.
#pragma once

#include "dot.h"

namespace kvtailor {
namespace {

constexpr int MOST_SCALES = 4 * MOST_DIM;  // of a block: groups of 16 channels

// Scales and zeros of a block.
struct Scales {
    alignas(64) float scale[MOST_SCALES], zero[MOST_SCALES];

    Scales(const Codes& codes, std::int64_t block) {
        const std::int64_t first = block * codes.scales;
        for (int i = 0; i < codes.scales; i += W) {
            store(scale + i, load_scale(codes.scale_dtype, codes.scale + first + i));
            store(zero + i, load_scale(codes.scale_dtype, codes.zero + first + i));
        }
    }
};

// The codes of one token of keys as bytes, from its words, which are 64 bytes apart; ADDED: above two that are there.
template <int BITS, bool ADDED>
inline void spread_words(const std::uint8_t* words, int lines, std::uint8_t* out) {
    constexpr int SLOTS = 8 / BITS;
    for (int line = 0; line < lines; ++line, words += 64)
        for (int s = 0; s < SLOTS; ++s, out += 4) {
            std::uint32_t word, below;
            std::memcpy(&word, words, sizeof word);
            word = (word >> (s * BITS)) & 0x01010101u * ((1u << BITS) - 1);
            if (ADDED) {
                std::memcpy(&below, out, sizeof below);
                word = word << 2 | below;
            }
            std::memcpy(out, &word, sizeof word);
        }
}

template <int BITS, bool ADDED = false>
inline void read_plane(const Codes& codes, int plane, std::int64_t block, int token, std::uint8_t* out) {
    const int lines = lines_of(codes.dim / 4, BITS);
    spread_words<BITS, ADDED>(codes.planes[plane] + block * codes.plane_bytes[plane] + token / 16 * lines * 64 +
                                  token % 16 * 4,
                              lines, out);
}

inline void read_key_codes(const Codes& codes, std::int64_t block, int token, float* out) {
    std::uint8_t bytes[MOST_DIM + 32];
    switch (codes.bits) {
        case 1: read_plane<1>(codes, 0, block, token, bytes); break;
        case 2: read_plane<2>(codes, 0, block, token, bytes); break;
        case 3:
            read_plane<2>(codes, 0, block, token, bytes);
            read_plane<1, true>(codes, 1, block, token, bytes);
            break;
        case 4: read_plane<4>(codes, 0, block, token, bytes); break;
        default: read_plane<8>(codes, 0, block, token, bytes);
    }
    for (int c = 0; c < codes.dim; c += W) store(out + c, load_unsigned(bytes + c));
}

inline void read_value_codes(const Codes& codes, std::int64_t block, int token, float* out) {
    for (int plane = 0; plane < plane_count(codes.bits); ++plane) {
        const int bits = plane_bits(codes.bits, plane), slots = 8 / bits, lines = lines_of(VALUE_QUADS, bits);
        const int quad = token / 4, shift = token % 4 * 8 + quad % slots * bits;
        const std::uint8_t* words = codes.planes[plane] + block * codes.plane_bytes[plane] + quad / slots * 64;
        for (int c = 0; c < codes.dim; c += W) {
            const F code = load_field(words + c / 16 * lines * 64 + c % 16 * 4, shift, (1 << bits) - 1);
            store(out + c, plane == 0 ? code : fma(code, set(plane_weight(plane)), load(out + c)));
        }
    }
}

// Turns the codes of a token into numbers.
inline void scale_codes(const Codes& codes, const Scales& scales, int token, float* x) {
    const int dim = codes.dim, size = codes.group;
    if (codes.per_channel) {
        const int row = token / size * dim;
        for (int c = 0; c < dim; c += W)
            store(x + c, fma(load(x + c), load(scales.scale + row + c), load(scales.zero + row + c)));
        return;
    }
    for (int g = 0; g < dim / size; ++g) {
        const F scale = set(scales.scale[g * BLOCK + token]), zero = set(scales.zero[g * BLOCK + token]);
        for (int c = g * size; c < (g + 1) * size; c += W) store(x + c, fma(load(x + c), scale, zero));
    }
}

// out[token * dim + channel] for the first `tokens` tokens of a block, in the stored basis.
inline void unpack_block(const Codes& codes, bool values, std::int64_t block, int tokens, float* out) {
    const Scales scales(codes, block);
    for (int t = 0; t < tokens; ++t) {
        float* x = out + t * codes.dim;
        if (values) read_value_codes(codes, block, t, x);
        else read_key_codes(codes, block, t, x);
        scale_codes(codes, scales, t, x);
        for (int m = 0; m < codes.outlier_count; ++m)
            x[codes.outlier_channels[m]] =
                number_at(codes.outlier_dtype, codes.outliers, (block * BLOCK + t) * codes.outlier_count + m);
    }
}

void unpack_tokens(const Codes& codes, bool values, std::int64_t tokens, float* out) {
    for (std::int64_t block = 0; block * BLOCK < tokens; ++block) {
        const std::int64_t left = tokens - block * BLOCK;
        unpack_block(codes, values, block, static_cast<int>(left < BLOCK ? left : BLOCK),
                     out + block * BLOCK * codes.dim);
    }
}

}  // namespace
}  // namespace kvtailor
