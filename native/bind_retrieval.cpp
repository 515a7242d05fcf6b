// Retrieval: which tokens matter to a query, and attention over those alone.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "arrays.h"
#include "bind.h"
#include "dispatch.h"
#include "half.h"
#include "outputs.h"
#include "topk.h"

using namespace nb::literals;

namespace kvtailor {
namespace {

constexpr std::int64_t TOKENS_OF_JOB = 8192;

std::int64_t size_of(const Array& array, std::size_t axis) { return static_cast<std::int64_t>(array.shape(axis)); }

void check_axes(const char* name, const Array& array, std::size_t axes, const char* allowed) {
    if (array.ndim() != axes) refuse_all(name, ": shape is ", shape_of(array), "; allowed: ", allowed);
    for (std::size_t i = 0; i < axes; ++i)
        if (array.shape(i) == 0) refuse_all(name, ": shape is ", shape_of(array), "; allowed: no axis of 0");
    check_inner(name, array, 1);
}

void check_single(const char* name, const Array& array) {
    check_kind(name, array, nb::dlpack::dtype_code::Float, 32, "float32");
}

float* singles(const Array& array, std::int64_t offset) { return static_cast<float*>(array.data()) + offset; }

bool is_whole(const Array& array, int bits) {
    return array.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int) && array.dtype().bits == bits &&
           array.dtype().lanes == 1;
}

std::int64_t whole_at(const Array& array, std::int64_t place) {
    return array.dtype().bits == 64 ? static_cast<const std::int64_t*>(array.data())[place]
                                    : static_cast<const std::int32_t*>(array.data())[place];
}

void top_rows(const Given& given, std::int64_t k, int threads, Array out) {
    const Array scores(given);
    check_axes("scores", scores, 2, "(rows, n)");
    check_single("scores", scores);
    const std::int64_t rows = size_of(scores, 0), n = size_of(scores, 1);
    if (k < 1 || k > n) refuse_all("k is ", k, "; allowed: 1 to the ", n, " scores of a row");
    check_kind("out", out, nb::dlpack::dtype_code::Int, 64, "int64");
    check_shape("out", out, {rows, k});
    check_inner("out", out, 1);
    check_apart("out", out);
    const TopJob job{singles(scores, 0), rows, scores.stride(0), n, k, static_cast<std::int64_t*>(out.data()),
                     out.stride(0)};
    bool numbers;
    {
        nb::gil_scoped_release release;
        numbers = topk(job, threads);
    }
    if (!numbers) refuse("scores: one is not a number; allowed: numbers, infinite ones too");
}

Combine combine_named(const std::string& name) {
    if (name == "max") return Combine::max;
    if (name == "sum") return Combine::sum;
    if (name == "softmax") return Combine::softmax;
    refuse_all("mode is '", name, "'; allowed: max, sum and softmax");
}

void best_of_group(const std::string& kernels, const Given& given, Array out, const std::string& mode, int threads) {
    const Array scores(given);
    check_axes("scores", scores, 3, "(H, G, n)");
    check_single("scores", scores);
    const std::int64_t heads = size_of(scores, 0), n = size_of(scores, 2);
    check_single("out", out);
    check_shape("out", out, {heads, n});
    check_inner("out", out, 1);
    check_apart("out", out);
    const Combine how = combine_named(mode);
    const Kernels& table = named(kernels);
    std::atomic<bool> numbers{true};
    {
        const double work = static_cast<double>(scores.size());
        nb::gil_scoped_release release;
        run_all(heads, threads_for(work, LEAST_NUMBERS, threads), [&](std::int64_t h) {
            const CombineJob job{singles(scores, h * scores.stride(0)), scores.stride(1),
                                 static_cast<int>(scores.shape(1)), n, how, singles(out, h * out.stride(0))};
            if (!table.combine(job)) numbers = false;
        });
    }
    if (!numbers) refuse("scores: one is inf or not a number; allowed: finite numbers, and -inf for hidden tokens");
}

// Queries in the chosen channels, times the keys' scales: (H, G, m).
std::vector<float> picked_queries(const Array& query, const Array& channels, const std::optional<Array>& scale) {
    const std::int64_t heads = size_of(query, 0), group = size_of(query, 1), count = size_of(channels, 1);
    const std::int64_t dim = size_of(query, 2);
    std::vector<float> picked(heads * group * count);
    for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t m = 0; m < count; ++m) {
            const std::int64_t channel = whole_at(channels, h * channels.stride(0) + m);
            if (channel < 0 || channel >= dim) refuse_all("channel ", channel, "; allowed: 0 to ", dim - 1);
            const float factor = scale ? *singles(*scale, h * scale->stride(0) + m) : 1;
            for (std::int64_t g = 0; g < group; ++g)
                picked[(h * group + g) * count + m] =
                    *singles(query, h * query.stride(0) + g * query.stride(1) + channel) * factor;
        }
    return picked;
}

void channel_scores(const std::string& kernels, const Given& given_query, const Given& given_keys,
                    const std::optional<Given>& given_scale, const Given& given_channels, Array out, int threads) {
    const Array query(given_query), keys(given_keys), channels(given_channels);
    const std::optional<Array> scale = given_scale ? std::optional<Array>(Array(*given_scale)) : std::nullopt;
    check_axes("query", query, 3, "(H, G, D)");
    check_single("query", query);
    check_axes("keys", keys, 3, "(H, m, n)");
    const bool whole = is_whole(keys, 8);
    if (!whole && !is_float(keys)) refuse("keys: dtype is not allowed; allowed: float32, float16, bfloat16 and int8");
    const std::int64_t heads = size_of(query, 0), group = size_of(query, 1);
    const std::int64_t count = size_of(keys, 1), n = size_of(keys, 2);
    check_shape("keys", keys, {heads, count, n});
    check_axes("channels", channels, 2, "(H, m)");
    if (!is_whole(channels, 64) && !is_whole(channels, 32))
        refuse("channels: dtype is not allowed; allowed: int64 and int32");
    check_shape("channels", channels, {heads, count});
    if (scale) {
        check_single("scale", *scale);
        check_shape("scale", *scale, {heads, count});
        check_inner("scale", *scale, 1);
    }
    check_single("out", out);
    check_shape("out", out, {heads, group, n});
    check_inner("out", out, 1);
    check_apart("out", out);
    const std::vector<float> picked = picked_queries(query, channels, scale);
    const Kernels& table = named(kernels);
    const std::int64_t jobs = (n + TOKENS_OF_JOB - 1) / TOKENS_OF_JOB;
    const double work = static_cast<double>(out.size());
    nb::gil_scoped_release release;
    run_all(heads * jobs, threads_for(work, LEAST_NUMBERS, threads), [&](std::int64_t i) {
        const std::int64_t h = i / jobs, first = i % jobs * TOKENS_OF_JOB;
        table.channel_scores({picked.data() + h * group * count, static_cast<int>(group), static_cast<int>(count),
                              at(keys, h * keys.stride(0) + first), keys.stride(1),
                              whole ? Dtype::f32 : dtype_of("keys", keys), whole, std::min(TOKENS_OF_JOB, n - first),
                              singles(out, h * out.stride(0) + first), out.stride(1)});
    });
}

// Attention over chosen rows of the keys and values, by KV head or by query head.
class Gathering {
public:
    Gathering(Array query, Array keys, Array values, Array index, float scale)
        : query_(std::move(query)), keys_(std::move(keys)), values_(std::move(values)), index_(std::move(index)) {
        check_axes("query", query_, 3, "(H, G, D)");
        check_axes("keys", keys_, 3, "(H, n, D)");
        check_axes("values", values_, 3, "(H, n, D)");
        dtype_of("keys", keys_);
        dtype_of("values", values_);
        check_dim("keys", size_of(keys_, 2));
        check_dim("values", size_of(values_, 2));
        check_shape("query", query_, {size_of(keys_, 0), -1, size_of(keys_, 2)});
        check_shape("values", values_, {size_of(keys_, 0), size_of(keys_, 1), -1});
        if (!std::isfinite(scale)) refuse_all("scale is ", scale, "; allowed: a finite number");
        check_index();
        const std::int64_t rows = by_head() ? 1 : group();
        for (std::int64_t h = 0; h < heads(); ++h)
            for (std::int64_t g = 0; g < group(); g += rows) add_task(h, g, rows, scale);
    }

    std::vector<Task> tasks;
    std::int64_t heads() const { return size_of(query_, 0); }
    std::int64_t group() const { return size_of(query_, 1); }
    int value_dim() const { return static_cast<int>(values_.shape(2)); }

private:
    bool by_head() const { return index_.ndim() == 3; }

    const std::int64_t* chosen(std::int64_t head, std::int64_t g) const {
        return static_cast<const std::int64_t*>(index_.data()) + head * index_.stride(0) +
               (by_head() ? g * index_.stride(1) : 0);
    }

    void check_index() const {
        check_kind("index", index_, nb::dlpack::dtype_code::Int, 64, "int64");
        if (index_.ndim() != 2 && index_.ndim() != 3)
            refuse_all("index: shape is ", shape_of(index_), "; allowed: (H, k) or (H, G, k)");
        check_axes("index", index_, index_.ndim(), "");
        if (by_head()) check_shape("index", index_, {heads(), group(), -1});
        else check_shape("index", index_, {heads(), -1});
        const std::int64_t n = size_of(keys_, 1), count = size_of(index_, index_.ndim() - 1);
        for (std::int64_t h = 0; h < heads(); ++h)
            for (std::int64_t g = 0; g < (by_head() ? group() : 1); ++g)
                for (std::int64_t i = 0; i < count; ++i) {
                    const std::int64_t row = chosen(h, g)[i];
                    if (row < 0 || row >= n) refuse_all("index: row ", row, " of head ", h, "; allowed: 0 to ", n - 1);
                }
    }

    void add_task(std::int64_t head, std::int64_t first, std::int64_t rows, float scale) {
        const int dim = static_cast<int>(keys_.shape(2));
        const Dtype dtype = dtype_of("query", query_);
        Task& task = tasks.emplace_back();
        task.rows.resize(rows * dim);
        for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t place = head * query_.stride(0) + (first + r) * query_.stride(1);
            for (int c = 0; c < dim; ++c) task.rows[r * dim + c] = number_at(dtype, query_.data(), place + c) * scale;
        }
        Piece& piece = task.pieces.emplace_back();
        piece.length = task.tokens = size_of(index_, index_.ndim() - 1);
        piece.keys = {at(keys_, head * keys_.stride(0)), keys_.stride(1), dtype_of("keys", keys_)};
        piece.values = {at(values_, head * values_.stride(0)), values_.stride(1), dtype_of("values", values_)};
        piece.index = chosen(head, first);
        task.query.heads = task.query.total = static_cast<int>(rows);
        task.query.key_dim = dim;
        task.query.value_dim = value_dim();
    }

    Array query_, keys_, values_, index_;
};

void gather_attend(const std::string& kernels, const Given& query, const Given& keys, const Given& values,
                   const Given& index, float scale, Array out, std::optional<Array> lse, int threads) {
    const Gathering gathering{Array(query), Array(keys), Array(values), Array(index), scale};
    dtype_of("out", out);
    check_shape("out", out, {gathering.heads(), gathering.group(), gathering.value_dim()});
    check_inner("out", out, 1);
    check_apart("out", out);
    if (lse) {
        check_single("lse", *lse);
        check_shape("lse", *lse, {gathering.heads(), gathering.group()});
        check_inner("lse", *lse, 2);
    }
    const Kernels& table = named(kernels);
    std::vector<Result> results;
    {
        nb::gil_scoped_release release;
        results = attend(table, gathering.tasks, threads);
    }
    write_attention(gathering.tasks, results, out, lse);
}

}  // namespace

void bind_retrieval(nb::module_& m) {
    m.def("topk", &top_rows, "scores"_a, "k"_a, "threads"_a, "out"_a);
    m.def("best_of_group", &best_of_group, "kernels"_a, "scores"_a, "out"_a, "mode"_a, "threads"_a);
    m.def("channel_scores", &channel_scores, "kernels"_a, "query"_a, "keys_by_channel"_a, "scale"_a.none(),
          "channels"_a, "out"_a, "threads"_a);
    m.def("gather_attend", &gather_attend, "kernels"_a, "query"_a, "keys"_a, "values"_a, "index"_a, "scale"_a, "out"_a,
          "lse"_a.none(), "threads"_a);
}

}  // namespace kvtailor
