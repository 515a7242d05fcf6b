// From products to logits: soft cap, bias, and what a query may see.
#pragma once

#include <cmath>

#include "numbers.h"

namespace kvtailor {
namespace {

inline bool is_hidden(const Weigh& weigh, std::int64_t slot, std::int64_t query_slot, int head, int query) {
    if (weigh.mask) return !weigh.mask[head * weigh.mask_head + query * weigh.mask_query + slot * weigh.mask_slot];
    if (weigh.causal && slot > query_slot) return true;
    return weigh.window && slot <= query_slot - weigh.window;
}

// Weighs `tokens` logits of one row, from token `first` of a piece.
inline void weigh_row(const Query& query, int row, const Piece& piece, std::int64_t first, int tokens,
                      float* logits) {
    const Weigh& weigh = query.weigh;
    const int head = query.head_of(row), place = query.query_of(row);
    const std::int64_t query_slot = weigh.first + place;
    if (weigh.softcap != 0)
        for (int t = 0; t < tokens; ++t) logits[t] = weigh.softcap * std::tanh(logits[t] / weigh.softcap);
    if (weigh.bias)
        for (int t = 0; t < tokens; ++t) {
            const float added = weigh.bias[head * weigh.bias_head + place * weigh.bias_query +
                                           piece.slot(first + t) * weigh.bias_slot];
            logits[t] = added < HIDDEN ? HIDDEN : logits[t] + added;
        }
    for (int t = 0; t < tokens; ++t)
        if (is_hidden(weigh, piece.slot(first + t), query_slot, head, place)) logits[t] = HIDDEN;
}

// Whether position alone hides a whole stretch of tokens from all rows.
inline bool all_hidden(const Query& query, const Piece& piece, std::int64_t first, int tokens) {
    const Weigh& weigh = query.weigh;
    if (weigh.mask) return false;
    int least = query.query_of(0), most = least + query.total - 1;
    if (most >= query.count) least = 0, most = query.count - 1;  // rows of several heads
    if (weigh.causal && piece.slot(first) > weigh.first + most) return true;
    return weigh.window && piece.slot(first + tokens - 1) <= weigh.first + least - weigh.window;
}

}  // namespace
}  // namespace kvtailor
