// Scores of queries on some channels of the keys, which lie channel by channel.
#pragma once

#include "decode.h"

namespace kvtailor {
namespace {

constexpr int CHANNELS_AT_ONCE = 4;  // streams that are read side by side: more push each other out of the cache
constexpr std::int64_t SPAN = 512;   // tokens whose scores stay in the cache for all channels

struct Whole {
    using Number = std::int8_t;
    static F read(const Number* p) { return load_signed(p); }
};

// Some channels of the keys of some tokens, and where their products with a query are added to.
template <class Kind>
struct ChannelPart {
    const float* query;  // (rows, query_stride)
    int query_stride;
    int channels;
    const typename Kind::Number* keys;
    std::int64_t key_stride;
    float* out;
    std::int64_t out_stride;
    bool first;  // nothing is there yet to add to
};

// COLUMNS vectors of tokens from `token` on.
template <class Kind, int ROWS, int COLUMNS>
inline void channel_strip(const ChannelPart<Kind>& part, std::int64_t token) {
    F sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c)
            sums[r][c] = part.first ? set(0) : load(part.out + r * part.out_stride + token + c * W);
    for (int m = 0; m < part.channels; ++m) {
        F k[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) k[c] = Kind::read(part.keys + m * part.key_stride + token + c * W);
        for (int r = 0; r < ROWS; ++r) {
            const F q = set(part.query[r * part.query_stride + m]);
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] = fma(q, k[c], sums[r][c]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store(part.out + r * part.out_stride + token + c * W, sums[r][c]);
}

// The last tokens, fewer than a vector: they are read from and written to padded copies.
template <class Kind, int ROWS>
inline void channel_end(const ChannelPart<Kind>& part, std::int64_t token, int tokens) {
    typename Kind::Number keys[CHANNELS_AT_ONCE * W] = {};
    float out[ROWS * W] = {};
    for (int m = 0; m < part.channels; ++m)
        std::memcpy(keys + m * W, part.keys + m * part.key_stride + token, tokens * sizeof *keys);
    for (int r = 0; r < ROWS; ++r)
        std::memcpy(out + r * W, part.out + r * part.out_stride + token, tokens * sizeof *out);
    channel_strip<Kind, ROWS, 1>({part.query, part.query_stride, part.channels, keys, W, out, W, part.first}, 0);
    for (int r = 0; r < ROWS; ++r)
        std::memcpy(part.out + r * part.out_stride + token, out + r * W, tokens * sizeof *out);
}

template <class Kind, int ROWS>
inline void add_channels(const ChannelPart<Kind>& part, std::int64_t tokens) {
    std::int64_t t = 0;
    for (; t + 2 * W <= tokens; t += 2 * W) channel_strip<Kind, ROWS, 2>(part, t);
    for (; t + W <= tokens; t += W) channel_strip<Kind, ROWS, 1>(part, t);
    if (t < tokens) channel_end<Kind, ROWS>(part, t, static_cast<int>(tokens - t));
}

template <class Kind>
inline void add_all_channels(const ChannelJob& job) {
    const auto* keys = static_cast<const typename Kind::Number*>(job.keys);
    for (std::int64_t t = 0; t < job.tokens; t += SPAN) {
        const std::int64_t tokens = job.tokens - t < SPAN ? job.tokens - t : SPAN;
        for (int row = 0; row < job.rows; row += 4)
            for (int m = 0; m < job.channels; m += CHANNELS_AT_ONCE) {
                const int left = job.channels - m;
                const ChannelPart<Kind> part{job.query + row * job.channels + m,
                                             job.channels,
                                             left < CHANNELS_AT_ONCE ? left : CHANNELS_AT_ONCE,
                                             keys + m * job.key_stride + t,
                                             job.key_stride,
                                             job.out + row * job.out_stride + t,
                                             job.out_stride,
                                             m == 0};
                with_rows(job.rows - row, [&](auto rows) {
                    add_channels<Kind, decltype(rows)::value>(part, tokens);
                });
            }
    }
}

void scores_on_channels(const ChannelJob& job) {
    if (job.whole) return add_all_channels<Whole>(job);
    with_kind(job.dtype, [&](auto kind) { add_all_channels<decltype(kind)>(job); });
}

}  // namespace
}  // namespace kvtailor
