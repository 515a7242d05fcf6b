// Attention of few queries: tokens are read where they lie, in blocks of 64, with a running softmax.
#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "dense.h"
#include "packed.h"
#include "rotate.h"
#include "weigh.h"

namespace kvtailor {
namespace {

// Turns the logits of a block into weights, in place; returns what older sums are to be multiplied by.
inline float take_softmax(float* logits, float& most, float& total) {
    const float peak = std::fmax(most, greatest_of(logits, BLOCK));
    F sums = set(0);
    if (peak <= HIDDEN / 2) {
        for (int t = 0; t < BLOCK; t += W) {
            const F x = load(logits + t);
            sums = sums + (x - x);  // not a number where a logit is none
            store(logits + t, set(0));
        }
        total += sum(sums);
        return 1;
    }
    const float shrink = most == peak ? 1 : std::exp(most - peak);
    for (int t = 0; t < BLOCK; t += W) {
        const F x = load(logits + t);
        const F weight = exp_down(x - set(peak));
        sums = sums + (weight + (x - x));
        store(logits + t, weight);
    }
    most = peak;
    total = total * shrink + sum(sums);
    return shrink;
}

inline void scale_by(float* x, int count, float factor) {
    for (int i = 0; i < count; i += W) store(x + i, load(x + i) * set(factor));
}

inline int tile_rows(int total, int tile) { return total - 4 * tile < 4 ? total - 4 * tile : 4; }

// Calls run(rows as a constant).
template <class Run>
inline void with_rows(int rows, Run run) {
    switch (rows) {
        case 1: return run(std::integral_constant<int, 1>{});
        case 2: return run(std::integral_constant<int, 2>{});
        case 3: return run(std::integral_constant<int, 3>{});
        default: return run(std::integral_constant<int, 4>{});
    }
}

// The queries of one KV head in the bases that its pieces want.
class Queries {
public:
    explicit Queries(const Query& query) : query_(query) {}

    const float* plain(int row) const { return query_.rows + row * query_.key_dim; }

    void prepare(const Codes& codes) {
        const int rows = query_.total, dim = query_.key_dim, count = rows * dim;
        const float* from = query_.rows;
        if (codes.rotated) {
            if (turned_.empty()) {
                turned_.assign(query_.rows, query_.rows + count);
                rotate_rows(turned_.data(), rows, dim);
            }
            from = turned_.data();
        }
        if (codes.outlier_count) {
            inliers_.assign(from, from + count);
            for (int r = 0; r < rows; ++r)
                for (int m = 0; m < codes.outlier_count; ++m) inliers_[r * dim + codes.outlier_channels[m]] = 0;
            from = inliers_.data();
        }
        query = from;
        if (codes.per_channel) return;
        const int tiles = (rows + 3) / 4, per_tile = dim / codes.group;
        groups_.resize(tiles * per_tile);
        for (int tile = 0; tile < tiles; ++tile)
            for (int g = 0; g < per_tile; ++g)
                groups_[tile * per_tile + g].write(query + tile * 4 * dim, dim, tile_rows(rows, tile),
                                                   g * codes.group, codes.group, query_.key_passes,
                                                   WIDE_WEIGHTS && codes.bits == 8);
    }

    const KeyGroup* groups(int tile, const Codes& codes) const {
        return groups_.data() + tile * (query_.key_dim / codes.group);
    }

    const float* query = nullptr;  // after prepare: in the basis of the codes, 0 in channels kept exactly

private:
    const Query& query_;
    std::vector<float> turned_, inliers_;
    std::vector<KeyGroup> groups_;
};

inline void packed_logits(const Query& query, const Queries& queries, const Codes& codes, std::int64_t block,
                          int tokens, int tile, int rows, float* logits) {
    const float* from = queries.query + tile * 4 * query.key_dim;
    if (codes.per_channel) channel_logits(codes, block, from, rows, query.key_passes, logits);
    else token_logits(codes, block, queries.groups(tile, codes), rows, query.key_passes, logits);
    if (codes.outlier_count) add_outliers(codes, block, tokens, queries.plain(tile * 4), rows, logits);
}

// Logits of a tile of rows over one block, weighed; HIDDEN behind the last token.
template <int ROWS>
inline void block_logits(const Query& query, const Queries& queries, const Piece& piece, std::int64_t block,
                         int tokens, int tile, float* logits) {
    if (piece.packed) packed_logits(query, queries, piece.key_codes, block, tokens, tile, ROWS, logits);
    else dense_logits<ROWS>(piece, block * BLOCK, tokens, queries.plain(tile * 4), query.key_dim, logits);
    if (query.weigh.changes())
        for (int r = 0; r < ROWS; ++r)
            weigh_row(query, tile * 4 + r, piece, block * BLOCK, tokens, logits + r * BLOCK);
    for (int r = 0; r < ROWS; ++r)
        for (int t = tokens; t < BLOCK; ++t) logits[r * BLOCK + t] = HIDDEN;
}

inline void prefetch_block(const Codes& codes, std::int64_t block, std::int64_t blocks) {
    if (block + 1 >= blocks) return;
    for (int plane = 0; plane < plane_count(codes.bits); ++plane)
        prefetch_row(codes.planes[plane] + (block + 1) * codes.plane_bytes[plane], codes.plane_bytes[plane]);
    prefetch_row(codes.scale + (block + 1) * codes.scales, 2 * codes.scales);
    prefetch_row(codes.zero + (block + 1) * codes.scales, 2 * codes.scales);
}

// Calls each(piece, block of the piece, tokens, place of its first token) over a stretch, and begin(piece) before.
template <class Begin, class Each>
inline void over_all_blocks(const Stretch& stretch, Begin begin, Each each) {
    std::int64_t start = 0, place = 0;
    for (int p = 0; p < stretch.count; ++p) {
        const Piece& piece = stretch.pieces[p];
        const std::int64_t blocks = piece.blocks();
        const std::int64_t from = stretch.begin > start ? stretch.begin - start : 0;
        const std::int64_t to = stretch.end - start < blocks ? stretch.end - start : blocks;
        if (from < to) begin(piece);
        for (std::int64_t block = from; block < to; ++block) {
            const std::int64_t left = piece.length - block * BLOCK;
            each(piece, block, static_cast<int>(left < BLOCK ? left : BLOCK), place + block * BLOCK);
        }
        start += blocks;
        place += piece.length;
    }
}

// The same without the blocks that position hides from all rows.
template <class Begin, class Each>
inline void over_blocks(const Query& query, const Stretch& stretch, Begin begin, Each each) {
    over_all_blocks(stretch, begin, [&](const Piece& piece, std::int64_t block, int tokens, std::int64_t place) {
        if (!query.weigh.changes() || !all_hidden(query, piece, block * BLOCK, tokens))
            each(piece, block, tokens, place);
    });
}

inline void add_to(float* out, const float* x, int count) {
    for (int i = 0; i < count; i += W) store(out + i, load(out + i) + load(x + i));
}

void attend_few(const Query& query, const Stretch& stretch, Partial& out) {
    const int rows = query.total, dim = query.value_dim;
    Queries queries(query);
    std::vector<float> rotated;
    alignas(64) float logits[4 * BLOCK];
    over_blocks(
        query, stretch,
        [&](const Piece& piece) {
            if (!piece.packed) return;
            queries.prepare(piece.key_codes);
            if (piece.value_codes.rotated && rotated.empty()) rotated.assign(rows * dim, 0.0f);
        },
        [&](const Piece& piece, std::int64_t block, int tokens, std::int64_t) {
            if (piece.packed) {
                prefetch_block(piece.key_codes, block, piece.blocks());
                prefetch_block(piece.value_codes, block, piece.blocks());
            }
            for (int tile = 0; 4 * tile < rows; ++tile)
                with_rows(tile_rows(rows, tile), [&](auto constant) {
                    constexpr int ROWS = decltype(constant)::value;
                    block_logits<ROWS>(query, queries, piece, block, tokens, tile, logits);
                    for (int r = 0; r < ROWS; ++r) {
                        const int row = tile * 4 + r;
                        const float shrink = take_softmax(logits + r * BLOCK, out.most[row], out.sum[row]);
                        if (shrink == 1) continue;
                        scale_by(out.acc + row * dim, dim, shrink);
                        if (!rotated.empty()) scale_by(rotated.data() + row * dim, dim, shrink);
                    }
                    const bool turned = piece.packed && piece.value_codes.rotated;
                    float* acc = (turned ? rotated.data() : out.acc) + tile * 4 * dim;
                    if (!piece.packed) {
                        add_dense<ROWS>(piece, block * BLOCK, tokens, logits, dim, acc);
                        return;
                    }
                    add_values(piece.value_codes, block, logits, ROWS, query.value_passes, acc);
                });
        });
    if (rotated.empty()) return;
    rotate_rows(rotated.data(), rows, dim);
    add_to(out.acc, rotated.data(), rows * dim);
}

// Logits of few queries over a stretch, weighed, at the tokens' places among all pieces; HIDDEN where nothing is seen.
// False where one is not finite.
bool scores_of_few(const Query& query, const Stretch& stretch, float* out, std::int64_t row_stride) {
    Queries queries(query);
    alignas(64) float logits[4 * BLOCK];
    F waste[4] = {set(0), set(0), set(0), set(0)};  // of a row each: 0, or not a number
    over_all_blocks(
        stretch,
        [&](const Piece& piece) {
            if (piece.packed) queries.prepare(piece.key_codes);
        },
        [&](const Piece& piece, std::int64_t block, int tokens, std::int64_t place) {
            if (piece.packed) prefetch_block(piece.key_codes, block, piece.blocks());
            for (int tile = 0; 4 * tile < query.total; ++tile)
                with_rows(tile_rows(query.total, tile), [&](auto constant) {
                    constexpr int ROWS = decltype(constant)::value;
                    block_logits<ROWS>(query, queries, piece, block, tokens, tile, logits);
                    for (int t = 0; t < BLOCK; t += W)
                        for (int r = 0; r < ROWS; ++r) waste[r] = fma(load(logits + r * BLOCK + t), set(0), waste[r]);
                    for (int r = 0; r < ROWS; ++r)
                        std::memcpy(out + (tile * 4 + r) * row_stride + place, logits + r * BLOCK,
                                    sizeof(float) * tokens);
                });
        });
    return sum(waste[0] + waste[1] + (waste[2] + waste[3])) == 0;
}

}  // namespace
}  // namespace kvtailor
