// Attention on tokens in fp32, fp16 or bf16.
#pragma once

#include "numbers.h"

namespace kvtailor {
namespace {

inline void prefetch_row(const void* row, int bytes) {
    for (int i = 0; i < bytes; i += 64) prefetch(static_cast<const char*>(row) + i);
}

// Products of TOKENS keys with the queries: two at a time keep more sums in flight than one.
template <class Kind, int ROWS, int TOKENS>
inline void key_products(const typename Kind::Number* const (&keys)[TOKENS], const float* query, int dim,
                         float* logits) {
    F sums[TOKENS][4];
    for (auto& of_token : sums)
        for (F& one : of_token) one = set(0);
    for (int c = 0; c < dim; c += W) {
        F k[TOKENS];
        for (int t = 0; t < TOKENS; ++t) k[t] = Kind::read(keys[t] + c);
        for (int r = 0; r < ROWS; ++r) {
            const F q = load(query + r * dim + c);
            for (int t = 0; t < TOKENS; ++t) sums[t][r] = fma(q, k[t], sums[t][r]);
        }
    }
    for (int t = 0; t < TOKENS; ++t) {
        float four[4];
        sum4(sums[t][0], sums[t][1], sums[t][2], sums[t][3], four);
        for (int r = 0; r < ROWS; ++r) logits[r * BLOCK + t] = four[r];
    }
}

// logits[row * BLOCK + t] = query . key of token first + t, for `tokens` tokens.
template <class Kind, int ROWS>
inline void dense_logits_of(const Piece& piece, std::int64_t first, int tokens, const float* query, int dim,
                            float* logits) {
    constexpr int BYTES = sizeof(typename Kind::Number);
    const std::int64_t last = piece.length - 1;
    const auto row = [&](std::int64_t token) {
        return row_of<Kind>(piece.keys, piece.index, token < last ? token : last);
    };
    int t = 0;
    for (; t + 2 <= tokens; t += 2) {
        prefetch_row(row(first + t + BLOCK), dim * BYTES);
        prefetch_row(row(first + t + 1 + BLOCK), dim * BYTES);
        const typename Kind::Number* const keys[2] = {row(first + t), row(first + t + 1)};
        key_products<Kind, ROWS, 2>(keys, query, dim, logits + t);
    }
    if (t < tokens) {
        const typename Kind::Number* const keys[1] = {row(first + t)};
        key_products<Kind, ROWS, 1>(keys, query, dim, logits + t);
    }
}

template <int ROWS>
inline void dense_logits(const Piece& piece, std::int64_t first, int tokens, const float* query, int dim,
                         float* logits) {
    with_kind(piece.keys.dtype, [&](auto kind) {
        dense_logits_of<decltype(kind), ROWS>(piece, first, tokens, query, dim, logits);
    });
}

// A strip of COLUMNS vectors of channels.
template <class Kind, int ROWS, int COLUMNS>
inline void add_dense_strip(const Piece& piece, std::int64_t first, int tokens, const float* weights, int dim,
                            int channel, float* acc) {
    F sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = load(acc + r * dim + channel + c * W);
    for (int t = 0; t < tokens; ++t) {
        const auto* value = row_of<Kind>(piece.values, piece.index, first + t) + channel;
        F v[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) v[c] = Kind::read(value + c * W);
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] = fma(set(weights[r * BLOCK + t]), v[c], sums[r][c]);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store(acc + r * dim + channel + c * W, sums[r][c]);
}

// acc[row * dim + channel] += weights of `tokens` tokens times their values.
template <class Kind, int ROWS>
inline void add_dense_of(const Piece& piece, std::int64_t first, int tokens, const float* weights, int dim,
                         float* acc) {
    constexpr int BYTES = sizeof(typename Kind::Number);
    const std::int64_t last = piece.length - 1;
    for (int t = 0; t < tokens; ++t) {
        const std::int64_t ahead = first + t + BLOCK;
        prefetch_row(row_of<Kind>(piece.values, piece.index, ahead < last ? ahead : last), dim * BYTES);
    }
    int channel = 0;
    for (; channel + 2 * W <= dim; channel += 2 * W)
        add_dense_strip<Kind, ROWS, 2>(piece, first, tokens, weights, dim, channel, acc);
    for (; channel < dim; channel += W)
        add_dense_strip<Kind, ROWS, 1>(piece, first, tokens, weights, dim, channel, acc);
}

template <int ROWS>
inline void add_dense(const Piece& piece, std::int64_t first, int tokens, const float* weights, int dim, float* acc) {
    with_kind(piece.values.dtype, [&](auto kind) {
        add_dense_of<decltype(kind), ROWS>(piece, first, tokens, weights, dim, acc);
    });
}

}  // namespace
}  // namespace kvtailor
