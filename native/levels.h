// The levels of groups of numbers, one group to a lane.
#pragma once

#include "numbers.h"

namespace kvtailor {
namespace {

constexpr int FIT_ROUNDS = 6;
constexpr float NORMAL_STEP[3] = {0, 2 * 0.798f, 0.9957f};  // best for 1 and 2 bits, in standard deviations

// Groups of `count` numbers: number i of W groups lies at x + i * stride.
struct Columns {
    const float* x;
    int stride;
    int count;

    F operator[](int i) const { return load(x + static_cast<std::int64_t>(i) * stride); }
};

struct Range {
    F low, high;
};

inline Range range_of(Columns groups) {
    Range range{groups[0], groups[0]};
    for (int i = 1; i < groups.count; ++i) {
        range.low = min(range.low, groups[i]);
        range.high = max(range.high, groups[i]);
    }
    return range;
}

// The means of the lower and the upper half of each range.
inline Range means_of_halves(Columns groups, F middle) {
    F count = set(0), low = set(0), high = set(0);
    for (int i = 0; i < groups.count; ++i) {
        const F x = groups[i];
        count = count + where_greater(x, middle, set(1), set(0));
        high = high + where_greater(x, middle, x, set(0));
        low = low + where_greater(x, middle, set(0), x);
    }
    low = low / (set(static_cast<float>(groups.count)) - count);  // the least is always in it
    return {low, where_greater(count, set(0), high / max(count, set(1)), low)};
}

inline F positive_or_one(F x) { return where_greater(x, set(0), x, set(1)); }

// The nearest code, from how many steps a number lies above the zero.
inline F code_of(F steps, F top) { return round(min(max(steps, set(0)), top)); }

// Of codes, and of the numbers that they stand for.
struct Sums {
    F codes = set(0), squares = set(0), products = set(0);

    void add(F x, F code) {
        codes = codes + code;
        squares = fma(code, code, squares);
        products = fma(code, x, products);
    }
};

// Lowest and highest of 2^bits evenly spaced levels by least squares; groups of an even number.
inline Range fitted_levels(Columns groups, int bits) {
    alignas(64) float numbers[MOST_DIM * W];
    const Columns centred{numbers, W, groups.count};
    const F one_of = set(1 / static_cast<float>(groups.count)), top = set(static_cast<float>((1 << bits) - 1));
    F mean = set(0), squares = set(0), low = set(0), high = set(0);
    for (int i = 0; i < groups.count; ++i) mean = mean + groups[i];
    mean = mean * one_of;
    for (int i = 0; i < groups.count; ++i) {
        const F x = groups[i] - mean;
        squares = fma(x, x, squares);
        low = min(low, x);
        high = max(high, x);
        store(numbers + i * W, x);
    }
    F step, zero;
    if (bits <= 2) {
        step = set(NORMAL_STEP[bits]) * root(squares * one_of);
        zero = set(-0.5f) * top * step;
    } else {
        zero = low;
        step = (high - low) / top;
    }
    for (int turn = 0; turn < FIT_ROUNDS; ++turn) {
        const F inverse = set(1) / positive_or_one(step);
        // Codes are counted from the one of the mean: sums of small numbers keep their last bits.
        const F own = code_of((set(0) - zero) * inverse, top), least = set(0) - own, most = top - own;
        const F shift = least - zero * inverse;
        Sums even, odd;  // two chains of sums, not to wait for one
        for (int i = 0; i < groups.count; i += 2) {
            even.add(centred[i], round(min(max(fma(centred[i], inverse, shift), least), most)));
            odd.add(centred[i + 1], round(min(max(fma(centred[i + 1], inverse, shift), least), most)));
        }
        const F code_mean = (even.codes + odd.codes) * one_of;
        const F spread = even.squares + odd.squares - (even.codes + odd.codes) * code_mean;
        const F refit = (even.products + odd.products) / max(spread, set(0.25f));
        step = where_greater(spread, set(0.25f), refit, step);
        zero = set(0) - step * (code_mean + own);
    }
    low = mean + zero;
    return {low, low + top * step};
}

}  // namespace
}  // namespace kvtailor
