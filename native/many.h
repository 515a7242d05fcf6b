// Attention of many queries: each block becomes fp32 once and serves all of them. No matrix of queries times tokens.
#pragma once

#include <vector>

#include "decode.h"
#include "unpack.h"

namespace kvtailor {
namespace {

// One block in fp32: keys turned to (dim, 64), values as (64, dim), in the basis that they are stored in.
struct Block {
    std::vector<float> rows, keys, values;
    const float* queries = nullptr;  // in the keys' basis

    void read(const Piece& piece, bool values_too, std::int64_t block, int tokens, int key_dim, int value_dim) {
        rows.resize(BLOCK * key_dim);
        keys.resize(BLOCK * key_dim);
        if (piece.packed) unpack_block(piece.key_codes, false, block, tokens, rows.data());
        else read_tokens(piece.keys, piece.index, block * BLOCK, tokens, key_dim, rows.data());
        for (int t = 0; t < BLOCK; ++t)
            for (int c = 0; c < key_dim; ++c) keys[c * BLOCK + t] = t < tokens ? rows[t * key_dim + c] : 0;
        if (!values_too) return;
        values.assign(BLOCK * value_dim, 0.0f);
        if (piece.packed) unpack_block(piece.value_codes, true, block, tokens, values.data());
        else read_tokens(piece.values, piece.index, block * BLOCK, tokens, value_dim, values.data());
    }

private:
    static void read_tokens(const Rows& from, const std::int64_t* index, std::int64_t first, int tokens, int dim,
                            float* out) {
        with_kind(from.dtype, [&](auto kind) {
            using Kind = decltype(kind);
            for (int t = 0; t < tokens; ++t) read_row<Kind>(row_of<Kind>(from, index, first + t), dim, out + t * dim);
        });
    }
};

// out[row * BLOCK + token] = query . key.
template <int ROWS>
inline void products(const float* query, const float* keys, int dim, float* out) {
    for (int t = 0; t < BLOCK; t += 2 * W) {
        F sums[ROWS][2];
        for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = set(0);
        for (int c = 0; c < dim; ++c) {
            const F k0 = load(keys + c * BLOCK + t), k1 = load(keys + c * BLOCK + t + W);
            for (int r = 0; r < ROWS; ++r) {
                const F q = set(query[r * dim + c]);
                sums[r][0] = fma(q, k0, sums[r][0]);
                sums[r][1] = fma(q, k1, sums[r][1]);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            store(out + r * BLOCK + t, sums[r][0]);
            store(out + r * BLOCK + t + W, sums[r][1]);
        }
    }
}

// Logits of a tile of rows over a block in fp32, weighed; HIDDEN behind the last token.
template <int ROWS>
inline void many_logits(const Query& query, const Piece& piece, const float* queries, const float* keys,
                        std::int64_t block, int tokens, int tile, float* logits) {
    products<ROWS>(queries + tile * 4 * query.key_dim, keys, query.key_dim, logits);
    for (int r = 0; r < ROWS; ++r) {
        if (query.weigh.changes())
            weigh_row(query, tile * 4 + r, piece, block * BLOCK, tokens, logits + r * BLOCK);
        for (int t = tokens; t < BLOCK; ++t) logits[r * BLOCK + t] = HIDDEN;
    }
}

// Calls each(rows as a constant, piece, block in fp32, tile, logits, place of the first token, tokens).
template <class Each>
inline void over_tiles(const Query& query, const Stretch& stretch, bool values_too, Each each) {
    std::vector<float> turned;
    Block fp32;
    alignas(64) float logits[4 * BLOCK];
    over_blocks(
        query, stretch,
        [&](const Piece& piece) {
            fp32.queries = query.rows;
            if (!piece.packed || !piece.key_codes.rotated) return;
            if (turned.empty()) {
                turned.assign(query.rows, query.rows + query.total * query.key_dim);
                rotate_rows(turned.data(), query.total, query.key_dim);
            }
            fp32.queries = turned.data();
        },
        [&](const Piece& piece, std::int64_t block, int tokens, std::int64_t place) {
            fp32.read(piece, values_too, block, tokens, query.key_dim, query.value_dim);
            for (int tile = 0; 4 * tile < query.total; ++tile)
                with_rows(tile_rows(query.total, tile), [&](auto rows) {
                    many_logits<decltype(rows)::value>(query, piece, fp32.queries, fp32.keys.data(), block, tokens,
                                                       tile, logits);
                    each(rows, piece, fp32, tile, logits, place, tokens);
                });
        });
}

void attend_many(const Query& query, const Stretch& stretch, Partial& out) {
    const int dim = query.value_dim;
    std::vector<float> rotated;
    over_tiles(query, stretch, true, [&](auto rows, const Piece& piece, const Block& fp32, int tile, float* logits,
                                         std::int64_t, int tokens) {
        constexpr int ROWS = decltype(rows)::value;
        const bool is_rotated = piece.packed && piece.value_codes.rotated;
        if (is_rotated && rotated.empty()) rotated.assign(query.total * dim, 0.0f);
        for (int r = 0; r < ROWS; ++r) {
            const int row = tile * 4 + r;
            const float shrink = take_softmax(logits + r * BLOCK, out.most[row], out.sum[row]);
            if (shrink == 1) continue;
            scale_by(out.acc + row * dim, dim, shrink);
            if (!rotated.empty()) scale_by(rotated.data() + row * dim, dim, shrink);
        }
        Piece values;
        values.length = tokens;
        values.values = {fp32.values.data(), dim, Dtype::f32};
        add_dense_of<Single, ROWS>(values, 0, tokens, logits, dim,
                                   (is_rotated ? rotated.data() : out.acc) + tile * 4 * dim);
    });
    if (rotated.empty()) return;
    rotate_rows(rotated.data(), query.total, dim);
    add_to(out.acc, rotated.data(), query.total * dim);
}

void sums_of_rows(const Query& query, const Stretch& stretch, Partial& out) {
    over_tiles(query, stretch, false,
               [&](auto rows, const Piece&, const Block&, int tile, float* logits, std::int64_t, int) {
                   for (int r = 0; r < decltype(rows)::value; ++r)
                       take_softmax(logits + r * BLOCK, out.most[tile * 4 + r], out.sum[tile * 4 + r]);
               });
}

// Adds the attention that each token gets: out (heads of the group, tokens).
void add_mass(const Query& query, const Stretch& stretch, const float* lse, float* out, std::int64_t head_stride) {
    over_tiles(query, stretch, false,
               [&](auto rows, const Piece&, const Block&, int tile, float* logits, std::int64_t place, int tokens) {
                   for (int r = 0; r < decltype(rows)::value; ++r) {
                       const int row = tile * 4 + r;
                       if (!(lse[row] > HIDDEN / 2)) continue;  // sees nothing
                       float* weights = logits + r * BLOCK;
                       for (int t = 0; t < BLOCK; t += W)
                           store(weights + t, exp_down(min(load(weights + t) - set(lse[row]), set(0))));
                       float* sums = out + query.head_of(row) * head_stride + place;
                       for (int t = 0; t < tokens; ++t) sums[t] += weights[t];
                   }
               });
}

void attend_rows(const Query& query, const Stretch& stretch, Partial& out) {
    for (int r = 0; r < query.total; ++r) out.most[r] = HIDDEN, out.sum[r] = 0;
    for (int i = 0; i < query.total * query.value_dim; ++i) out.acc[i] = 0;
    if (query.total <= MOST_ROWS) attend_few(query, stretch, out);
    else attend_many(query, stretch, out);
}

void start_sums(const Query& query, const Stretch& stretch, Partial& out) {
    for (int r = 0; r < query.total; ++r) out.most[r] = HIDDEN, out.sum[r] = 0;
    sums_of_rows(query, stretch, out);
}

}  // namespace
}  // namespace kvtailor
