// Dot products with codes, where they lie.
//
// A block holds 64 tokens of one head. Its codes stand in lines of 64 bytes. A register is what 16 outputs times four
// contracted numbers make: byte 4 * output + contracted. A line packs 8 / bits registers into the bits of its bytes,
// register s from bit s * bits upwards; they belong to the same outputs and to quads that follow each other.
//   keys:   outputs are tokens (4 groups of 16), contracted are channels (dim / 4 quads, filled up to whole lines)
//   values: outputs are channels (dim / 16 groups), contracted are tokens (16 quads)
#pragma once

#include <type_traits>

#include "numbers.h"

namespace kvtailor {
namespace {

constexpr int KEY_QUADS = (MOST_DIM + 64) / 4;  // in a row of key weights: lines begin before a group and end after it
constexpr int VALUE_QUADS = BLOCK / 4;

constexpr int lines_of(int quads, int bits) { return (quads * bits + 7) / 8; }

// Register `tile` of W outputs in lines of 16 outputs.
inline const std::uint8_t* tile_lines(const std::uint8_t* lines, int tile, std::int64_t group_bytes) {
    constexpr int TILES = 16 / W;
    return lines + tile / TILES * group_bytes + tile % TILES * 4 * W;
}

template <int BITS, bool VALUES>
inline constexpr bool IS_WIDE = WIDE_WEIGHTS && BITS == 8;

// Sums of ROWS rows over TILES tiles. Weights are [pass][row][quad] of four int8 (keys) or uint8 (values).
template <int BITS, int ROWS, int PASSES, int TILES, bool VALUES>
struct Narrow {
    static constexpr int STRIDE = VALUES ? VALUE_QUADS : KEY_QUADS;
    static constexpr int SLOTS = 8 / BITS;
    static constexpr int LINES = quads_that_fit<BITS, VALUES>() / SLOTS;

    Sum sums[PASSES][ROWS][TILES];
    Wide wides[PASSES][ROWS][TILES];

    inline void clear() {
        for (auto& pass : sums)
            for (auto& row : pass)
                for (Sum& sum : row) sum = no_sum();
        for (auto& pass : wides)
            for (auto& row : pass)
                for (Wide& wide : row) wide = no_wide();
    }

    inline void widen() {
        for (int p = 0; p < PASSES; ++p)
            for (int r = 0; r < ROWS; ++r)
                for (int t = 0; t < TILES; ++t) flush(wides[p][r][t], sums[p][r][t]);
    }

    template <int S>
    inline void add_slots(const Bytes (&lines)[TILES], const std::int32_t* weights) {
        if constexpr (S < SLOTS) {
            Bytes codes[TILES];
            for (int t = 0; t < TILES; ++t) {
                codes[t] = slot<S * BITS, BITS>(lines[t]);
                if constexpr (VALUES && BITS == 8) codes[t] = centred(codes[t]);
            }
            for (int p = 0; p < PASSES; ++p)
                for (int r = 0; r < ROWS; ++r)
                    for (int t = 0; t < TILES; ++t)
                        add<VALUES>(sums[p][r][t], codes[t], weights[(p * ROWS + r) * STRIDE + S]);
            add_slots<S + 1>(lines, weights);
        }
    }

    inline void run(const std::uint8_t* (&lines)[TILES], const std::int32_t* weights, int count) {
        clear();
        for (int line = 0; line < count;) {
            const int stop = line + LINES < count ? line + LINES : count;
            for (; line < stop; ++line) {
                Bytes loaded[TILES];
                for (int t = 0; t < TILES; ++t) loaded[t] = load_codes(lines[t] + line * 64);
                add_slots<0>(loaded, weights + line * SLOTS);
            }
            widen();
        }
    }

    inline F result(int r, int t) const {
        const F high = numbers(wides[0][r][t]);
        if constexpr (PASSES == 1) return high;
        return fma(numbers(wides[PASSES - 1][r][t]), set(VALUES ? 1.0f / 255 : 1.0f / 254), high);
    }
};

// The same with weights of 16 bits, [row][quad] of four int16.
template <int ROWS, int TILES, bool VALUES>
struct Broad {
    static constexpr int STRIDE = VALUES ? VALUE_QUADS : KEY_QUADS;

    WideSum sums[ROWS][TILES];

    inline void run(const std::uint8_t* (&lines)[TILES], const std::int32_t* weights, int count) {
        for (auto& row : sums)
            for (WideSum& sum : row) sum = no_wide_sum();
        const std::int64_t* quads = reinterpret_cast<const std::int64_t*>(weights);
        for (int line = 0; line < count; ++line) {
            Bytes codes[TILES];
            for (int t = 0; t < TILES; ++t) codes[t] = load_codes(lines[t] + line * 64);
            for (int r = 0; r < ROWS; ++r)
                for (int t = 0; t < TILES; ++t) add_wide(sums[r][t], codes[t], quads[r * STRIDE + line]);
        }
    }

    inline F result(int r, int t) const { return numbers(sums[r][t]); }
};

template <int BITS, int ROWS, int PASSES, int TILES, bool VALUES>
inline void dot_at(const std::uint8_t* lines, std::int64_t group_bytes, int tile, const std::int32_t* weights,
                   int count, float* out, int stride) {
    const std::uint8_t* starts[TILES];
    for (int t = 0; t < TILES; ++t) starts[t] = tile_lines(lines, tile + t, group_bytes);
    std::conditional_t<IS_WIDE<BITS, VALUES>, Broad<ROWS, TILES, VALUES>, Narrow<BITS, ROWS, PASSES, TILES, VALUES>>
        dot;
    dot.run(starts, weights, count);
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TILES; ++t) store(out + r * stride + (tile + t) * W, dot.result(r, t));
}

// out[row * stride + output] = sums over `count` lines, for outputs of tiles begin ... end.
template <int BITS, int ROWS, int PASSES, bool VALUES>
[[gnu::noinline]] void dot_tiles(const std::uint8_t* lines, std::int64_t group_bytes, int begin, int end,
                                 const std::int32_t* weights, int count, float* out, int stride) {
    constexpr int AT_ONCE = tiles_at_once<ROWS, IS_WIDE<BITS, VALUES> ? 2 : PASSES>();
    int tile = begin;
    for (; tile + AT_ONCE <= end; tile += AT_ONCE)
        dot_at<BITS, ROWS, PASSES, AT_ONCE, VALUES>(lines, group_bytes, tile, weights, count, out, stride);
    if constexpr (AT_ONCE > 1)
        for (; tile < end; ++tile)
            dot_at<BITS, ROWS, PASSES, 1, VALUES>(lines, group_bytes, tile, weights, count, out, stride);
}

using DotTiles = void (*)(const std::uint8_t*, std::int64_t, int, int, const std::int32_t*, int, float*, int);

template <int BITS, bool VALUES>
inline DotTiles dot_of_width(int rows, int passes) {
    static constexpr DotTiles table[2][4] = {
        {dot_tiles<BITS, 1, 1, VALUES>, dot_tiles<BITS, 2, 1, VALUES>, dot_tiles<BITS, 3, 1, VALUES>,
         dot_tiles<BITS, 4, 1, VALUES>},
        {dot_tiles<BITS, 1, 2, VALUES>, dot_tiles<BITS, 2, 2, VALUES>, dot_tiles<BITS, 3, 2, VALUES>,
         dot_tiles<BITS, 4, 2, VALUES>},
    };
    return table[passes - 1][rows - 1];
}

// The function for planes of `bits`, tiles of `rows` rows and weights of `passes` numbers.
template <bool VALUES>
inline DotTiles dot_function(int bits, int rows, int passes) {
    switch (bits) {
        case 1: return dot_of_width<1, VALUES>(rows, passes);
        case 2: return dot_of_width<2, VALUES>(rows, passes);
        case 4: return dot_of_width<4, VALUES>(rows, passes);
        default: return dot_of_width<8, VALUES>(rows, IS_WIDE<8, VALUES> ? 1 : passes);
    }
}

// The planes of a code: their widths and what they weigh.
inline int plane_count(int bits) { return bits == 3 ? 2 : 1; }
inline int plane_bits(int bits, int plane) { return bits == 3 ? (plane == 0 ? 2 : 1) : bits; }
inline float plane_weight(int plane) { return plane == 0 ? 1.0f : 4.0f; }

}  // namespace
}  // namespace kvtailor
