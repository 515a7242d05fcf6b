// Scores of the query heads of a KV head become one score for each token.
#pragma once

#include <cmath>
#include <vector>

#include "numbers.h"

namespace kvtailor {
namespace {

// Calls each(place, vector of scores, scores in it); what a last vector lacks reads as `fill`.
template <class Each>
inline void over_scores(const float* scores, std::int64_t tokens, float fill, Each each) {
    std::int64_t t = 0;
    for (; t + W <= tokens; t += W) each(t, load(scores + t), W);
    if (t == tokens) return;
    float padded[W];
    for (int i = 0; i < W; ++i) padded[i] = t + i < tokens ? scores[t + i] : fill;
    each(t, load(padded), static_cast<int>(tokens - t));
}

inline F wrong_ones(F x) { return where_greater(set(INFINITY), x, set(0), set(1)); }

// A row of scores, and what makes it comparable to the others of its group.
struct ScoreRow {
    const float* scores;
    float most = 0;   // the greatest score
    float share = 0;  // makes the weights of a row sum up to one

    // `wrong` grows where a score is infinite or not a number.
    void find_most(std::int64_t tokens, F& wrong) {
        F best = set(-INFINITY);
        over_scores(scores, tokens, -INFINITY, [&](std::int64_t, F x, int) {
            best = max(best, x);
            wrong = wrong + wrong_ones(x);
        });
        most = greatest(best);
    }
    void find_share(std::int64_t tokens) {
        F total = set(0);
        over_scores(scores, tokens, -INFINITY,
                    [&](std::int64_t, F x, int) { total = total + exp_down(x - set(most)); });
        share = 1 / sum(total);
    }
};

// out = each(out, score) for every token.
template <class Each>
inline void update(float* out, const float* scores, std::int64_t tokens, Each each) {
    over_scores(scores, tokens, 0, [&](std::int64_t t, F x, int count) {
        if (count == W) return store(out + t, each(load(out + t), x));
        float padded[W] = {};
        std::memcpy(padded, out + t, count * sizeof *out);
        store(padded, each(load(padded), x));
        std::memcpy(out + t, padded, count * sizeof *out);
    });
}

bool combine_group(const CombineJob& job) {
    constexpr std::int64_t SPAN_OF_SCORES = 2048;  // that stay in the cache for all rows
    F wrong = set(0);
    std::vector<ScoreRow> rows;
    for (int r = 0; r < job.rows; ++r) {
        ScoreRow row{job.scores + r * job.row_stride};
        if (job.how != Combine::sum) row.find_most(job.tokens, wrong);
        if (row.most <= HIDDEN / 2) continue;  // sees nothing
        if (job.how == Combine::softmax) row.find_share(job.tokens);
        rows.push_back(row);
    }
    const float first = job.how == Combine::max ? -INFINITY : 0;
    for (std::int64_t t = 0; t < job.tokens; t += SPAN_OF_SCORES) {
        const std::int64_t tokens = job.tokens - t < SPAN_OF_SCORES ? job.tokens - t : SPAN_OF_SCORES;
        float* out = job.out + t;
        for (std::int64_t i = 0; i < tokens; ++i) out[i] = first;
        for (const ScoreRow& row : rows) {
            const F most = set(row.most), share = set(row.share);
            switch (job.how) {
                case Combine::max:
                    update(out, row.scores + t, tokens, [&](F best, F x) { return max(best, x - most); });
                    break;
                case Combine::sum:
                    update(out, row.scores + t, tokens, [&](F total, F x) {
                        wrong = wrong + wrong_ones(x);
                        return total + x;
                    });
                    break;
                case Combine::softmax:
                    update(out, row.scores + t, tokens,
                           [&](F total, F x) { return fma(exp_down(x - most), share, total); });
            }
        }
    }
    return greatest(wrong) == 0;
}

}  // namespace
}  // namespace kvtailor
