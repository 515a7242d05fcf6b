// From numbers to codes, in the lines that dot.h describes. The arithmetic is that of kvtailor.quantize, in its order.
#pragma once

#include <vector>

#include "dot.h"
#include "levels.h"
#include "rotate.h"
#include "unpack.h"

namespace kvtailor {
namespace {

constexpr int PAD = 16;  // numbers between rows, so that a column does not fill one set of the cache

// A block of 64 tokens on its way to codes. Numbers are coded against `zeros` and `steps`, which lie like the scales.
struct Draft {
    const PackJob& job;
    const Codes& out;
    std::int64_t block;
    int stride;  // from token to token
    std::vector<float> numbers, turned;
    alignas(64) float zeros[MOST_SCALES], steps[MOST_SCALES];

    explicit Draft(const PackJob& given)
        : job(given), out(given.out), block(0), stride(given.out.dim + PAD), numbers(BLOCK * stride) {}

    const float* row(int token) const { return numbers.data() + token * stride; }
    float* row(int token) { return numbers.data() + token * stride; }
    std::uint8_t* plane(int number) const {
        return const_cast<std::uint8_t*>(out.planes[number]) + block * out.plane_bytes[number];
    }
    F top() const { return set(static_cast<float>((1 << out.bits) - 1)); }
};

// Reads a draft's block, in the basis that it is stored in; returns whether all numbers are finite.
inline bool read_block(Draft& draft) {
    const int dim = draft.out.dim;
    F waste = set(0);  // 0, or not a number
    with_kind(draft.job.from.dtype, [&](auto kind) {
        using Kind = decltype(kind);
        for (int t = 0; t < BLOCK; ++t) {
            float* out = draft.row(t);
            read_row<Kind>(row_of<Kind>(draft.job.from, nullptr, draft.block * BLOCK + t), dim, out);
            if (draft.out.rotated) rotate_row(out, dim);
            for (int c = 0; c < dim; c += W) waste = fma(load(out + c), set(0), waste);
        }
    });
    return sum(waste) == 0;
}

inline void store_down(Dtype dtype, std::uint16_t* p, F x) {
    if (dtype == Dtype::f16) store_half_down(p, min(max(x, set(-65504.0f)), set(65504.0f)));
    else store_brain_down(p, min(max(x, set(-3.38953139e38f)), set(3.38953139e38f)));
}

// Stores zero and step of W groups at `place` of the block, the zero rounded down, the step up.
inline void write_scales(Draft& draft, int place, F low, F high) {
    const Dtype dtype = draft.out.scale_dtype;
    const std::int64_t at = draft.block * draft.out.scales + place;
    std::uint16_t* zeros = const_cast<std::uint16_t*>(draft.out.zero) + at;
    std::uint16_t* scales = const_cast<std::uint16_t*>(draft.out.scale) + at;
    store_down(dtype, zeros, low);
    const F zero = load_scale(dtype, zeros);
    store_down(dtype, scales, (zero - high) / draft.top());
    for (int i = 0; i < W; ++i) scales[i] ^= 0x8000;
    store(draft.zeros + place, zero);
    store(draft.steps + place, positive_or_one(load_scale(dtype, scales)));
}

// The same for one bit between the means of the halves. Numbers are then compared with what stands in `zeros`.
inline void write_halves(Draft& draft, int place, Columns groups) {
    const Range range = range_of(groups);
    const F spread = range.high - range.low, middle = range.low + spread * set(0.5f);
    const Range means = means_of_halves(groups, middle);
    write_scales(draft, place, means.low, means.high);
    const F zero = load(draft.zeros + place);
    const F scale = load_scale(draft.out.scale_dtype, draft.out.scale + draft.block * draft.out.scales + place);
    // Where rounding moved the zero by much of the range, the middle of the range no longer picks the nearer level.
    store(draft.zeros + place,
          where_greater(means.low - zero, spread * set(0.125f), zero + scale * set(0.5f), middle));
}

inline void write_columns(Draft& draft, int place, Columns groups) {
    if (draft.job.levels == Levels::centroid) return write_halves(draft, place, groups);
    const Range range =
        draft.job.levels == Levels::fit ? fitted_levels(groups, draft.out.bits) : range_of(groups);
    write_scales(draft, place, range.low, range.high);
}

// Levels of groups of channels by their range, token by token.
inline void write_ranges(Draft& draft, int group, int place) {
    alignas(64) float lows[BLOCK], highs[BLOCK];
    for (int t = 0; t < BLOCK; ++t) {
        const float* x = draft.row(t) + group * draft.out.group;
        Range range{load(x), load(x)};
        for (int c = W; c < draft.out.group; c += W) {
            range.low = min(range.low, load(x + c));
            range.high = max(range.high, load(x + c));
        }
        lows[t] = -greatest(set(0) - range.low);
        highs[t] = greatest(range.high);
    }
    for (int t = 0; t < BLOCK; t += W) write_scales(draft, place + t, load(lows + t), load(highs + t));
}

// A group of channels with one token to a column.
inline Columns turned_group(Draft& draft, int group) {
    const int size = draft.out.group, stride = BLOCK + PAD;
    draft.turned.resize(size * stride);
    for (int t = 0; t < BLOCK; t += W)
        for (int c = 0; c < size; c += W) {
            F tile[W];
            for (int i = 0; i < W; ++i) tile[i] = load(draft.row(t + i) + group * size + c);
            transpose(tile);
            for (int i = 0; i < W; ++i) store(draft.turned.data() + (c + i) * stride + t, tile[i]);
        }
    return {draft.turned.data(), stride, size};
}

inline void write_levels(Draft& draft) {
    const int dim = draft.out.dim, size = draft.out.group;
    if (draft.out.per_channel) {
        for (int part = 0; part < BLOCK / size; ++part)
            for (int c = 0; c < dim; c += W)
                write_columns(draft, part * dim + c, {draft.row(part * size) + c, draft.stride, size});
        return;
    }
    for (int g = 0; g < dim / size; ++g) {
        if (draft.job.levels == Levels::minmax) {
            write_ranges(draft, g, g * BLOCK);
            continue;
        }
        Columns groups = turned_group(draft, g);
        for (int t = 0; t < BLOCK; t += W, groups.x += W) write_columns(draft, g * BLOCK + t, groups);
    }
}

struct NearestCode {
    F top;
    F operator()(F x, F zero, F step) const { return code_of((x - zero) / step, top); }
};

struct UpperHalf {
    F operator()(F x, F middle, F) const { return where_greater(x, middle, set(1), set(0)); }
};

// The planes of 3-bit codes.
inline F high_bit(F code) { return where_greater(code, set(3.5f), set(1), set(0)); }
inline F low_bits(F code) { return code - set(4) * high_bit(code); }

// What a code is to be multiplied by to stand in its slot of a line, for the channels of a line or of a vector.
template <int BITS>
struct SlotWeights {
    static constexpr int CHANNELS = 32 / BITS;  // of a line
    static constexpr int COUNT = CHANNELS > W ? CHANNELS : W;
    alignas(64) float v[COUNT];

    constexpr SlotWeights() : v() {
        for (int c = 0; c < COUNT; ++c) v[c] = static_cast<float>(1 << c % CHANNELS / 4 * BITS);
    }
};

// Writes a token's codes as one word of each of its lines, which are 64 bytes apart.
template <int BITS>
inline void write_words(const float* codes, int dim, std::uint8_t* words) {
    using Weights = SlotWeights<BITS>;
    static constexpr Weights weights{};
    constexpr int VECTORS = Weights::COUNT / W;              // that make up a line
    constexpr int LINES = Weights::COUNT / Weights::CHANNELS;  // that a vector makes up
    constexpr int QUADS = W / 4 / LINES;                     // of a line in a vector
    for (int c = 0; c < dim; c += Weights::COUNT) {
        F total = load(codes + c) * load(weights.v);
        for (int v = 1; v < VECTORS; ++v) total = fma(load(codes + c + v * W), load(weights.v + v * W), total);
        std::uint8_t bytes[W];
        store_bytes(bytes, total);
        for (int line = 0; line < LINES; ++line, words += 64) {
            std::uint32_t word = 0;
            for (int q = 0; q < QUADS; ++q) {
                std::uint32_t quad;
                std::memcpy(&quad, bytes + 4 * (line * QUADS + q), sizeof quad);
                word |= quad;
            }
            std::memcpy(words, &word, sizeof word);
        }
    }
}

template <int BITS>
inline void write_key_row(const Draft& draft, int plane, int token, const float* codes) {
    const int lines = lines_of(draft.out.dim / 4, BITS);
    std::uint8_t* block = draft.plane(plane);
    write_words<BITS>(codes, draft.out.dim, block + token / 16 * lines * 64 + token % 16 * 4);
}

template <class Rule>
inline void key_codes(const Draft& draft, int token, Rule rule, float* codes) {
    const int dim = draft.out.dim, size = draft.out.group;
    const float* x = draft.row(token);
    if (draft.out.per_channel) {
        const float* zeros = draft.zeros + token / size * dim;
        const float* steps = draft.steps + token / size * dim;
        for (int c = 0; c < dim; c += W) store(codes + c, rule(load(x + c), load(zeros + c), load(steps + c)));
        return;
    }
    for (int g = 0; g < dim / size; ++g) {
        const F zero = set(draft.zeros[g * BLOCK + token]), step = set(draft.steps[g * BLOCK + token]);
        for (int c = g * size; c < (g + 1) * size; c += W) store(codes + c, rule(load(x + c), zero, step));
    }
}

template <class Rule>
inline void write_keys(const Draft& draft, Rule rule) {
    const int dim = draft.out.dim;
    alignas(64) float codes[MOST_DIM + 32] = {}, part[MOST_DIM + 32] = {};  // a last line is filled up with zeros
    for (int t = 0; t < BLOCK; ++t) {
        key_codes(draft, t, rule, codes);
        switch (draft.out.bits) {
            case 1: write_key_row<1>(draft, 0, t, codes); break;
            case 2: write_key_row<2>(draft, 0, t, codes); break;
            case 3:
                for (int c = 0; c < dim; c += W) store(part + c, low_bits(load(codes + c)));
                write_key_row<2>(draft, 0, t, part);
                for (int c = 0; c < dim; c += W) store(part + c, high_bit(load(codes + c)));
                write_key_row<1>(draft, 1, t, part);
                break;
            case 4: write_key_row<4>(draft, 0, t, codes); break;
            default: write_key_row<8>(draft, 0, t, codes);
        }
    }
}

template <int BITS, class Rule>
inline void write_value_lines(const Draft& draft, Rule rule) {
    constexpr int SLOTS = 8 / BITS, LINES = lines_of(VALUE_QUADS, BITS);
    std::uint8_t* block = draft.plane(0);
    for (int c = 0; c < draft.out.dim; c += W) {
        const float* zeros = draft.zeros + c / draft.out.group * BLOCK;
        const float* steps = draft.steps + c / draft.out.group * BLOCK;
        for (int line = 0; line < LINES; ++line) {
            Words words = no_words();
            for (int place = 3; place >= 0; --place)
                for (int s = SLOTS - 1; s >= 0; --s) {
                    const int t = (line * SLOTS + s) * 4 + place;
                    push<BITS>(words, rule(load(draft.row(t) + c), set(zeros[t]), set(steps[t])));
                }
            store_lines(block + (c / 16 * LINES + line) * 64 + c % 16 * 4, words);
        }
    }
}

// The same for 3 bits: two lines of low bits for each line of high bits.
template <class Rule>
inline void write_value_lines_of_3(const Draft& draft, Rule rule) {
    std::uint8_t *low = draft.plane(0), *high = draft.plane(1);
    for (int c = 0; c < draft.out.dim; c += W) {
        const float* zeros = draft.zeros + c / draft.out.group * BLOCK;
        const float* steps = draft.steps + c / draft.out.group * BLOCK;
        for (int line = 0; line < 2; ++line) {
            Words lows[2] = {no_words(), no_words()}, highs = no_words();
            for (int place = 3; place >= 0; --place)
                for (int s = 7; s >= 0; --s) {
                    const int t = (line * 8 + s) * 4 + place;
                    const F code = rule(load(draft.row(t) + c), set(zeros[t]), set(steps[t]));
                    push<2>(lows[s / 4], low_bits(code));
                    push<1>(highs, high_bit(code));
                }
            for (int i = 0; i < 2; ++i)
                store_lines(low + (c / 16 * 4 + line * 2 + i) * 64 + c % 16 * 4, lows[i]);
            store_lines(high + (c / 16 * 2 + line) * 64 + c % 16 * 4, highs);
        }
    }
}

template <class Rule>
inline void write_values(const Draft& draft, Rule rule) {
    switch (draft.out.bits) {
        case 1: return write_value_lines<1>(draft, rule);
        case 2: return write_value_lines<2>(draft, rule);
        case 3: return write_value_lines_of_3(draft, rule);
        case 4: return write_value_lines<4>(draft, rule);
        default: return write_value_lines<8>(draft, rule);
    }
}

template <class Rule>
inline void write_codes(const Draft& draft, Rule rule) {
    if (draft.job.values) write_values(draft, rule);
    else write_keys(draft, rule);
}

// Packs whole blocks; false, with some of them unwritten, where a number is not finite.
bool pack_tokens(const PackJob& job) {
    Draft draft(job);
    for (; draft.block * BLOCK < job.tokens; ++draft.block) {
        if (!read_block(draft)) return false;
        write_levels(draft);
        if (job.levels == Levels::centroid) write_codes(draft, UpperHalf{});
        else write_codes(draft, NearestCode{draft.top()});
    }
    return true;
}

// The largest absolute number of a row; not a number where one is not finite.
template <class Kind>
inline float peak_of_row(const typename Kind::Number* row, int dim) {
    F most = set(0), waste = set(0);
    for (int c = 0; c < dim; c += W) {
        const F x = Kind::read(row + c);
        most = max(most, abs(x));
        waste = fma(x, set(0), waste);
    }
    return greatest(most) + sum(waste);
}

// The same of all rows, as they would be stored.
float peak_of(const Rows& from, std::int64_t tokens, int dim, bool rotated) {
    alignas(64) float turned[MOST_DIM];
    float most = 0;
    with_kind(from.dtype, [&](auto kind) {
        using Kind = decltype(kind);
        for (std::int64_t t = 0; t < tokens && most == most; ++t) {
            const auto* row = row_of<Kind>(from, nullptr, t);
            if (rotated) {
                read_row<Kind>(row, dim, turned);
                rotate_row(turned, dim);
            }
            const float peak = rotated ? peak_of_row<Single>(turned, dim) : peak_of_row<Kind>(row, dim);
            most = most > peak ? most : peak;  // a peak that is not a number stays
        }
    });
    return most;
}

}  // namespace
}  // namespace kvtailor
