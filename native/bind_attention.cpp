// Attention: rows of segments and tails, and what is computed on them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "bind.h"
#include "codes.h"
#include "dispatch.h"
#include "half.h"
#include "outputs.h"

using namespace nb::literals;

namespace kvtailor {
namespace {

// `count` slots from `first` on must be numbers of 32 bits.
void check_slots(std::int64_t first, std::int64_t count) {
    constexpr std::int64_t LAST = std::numeric_limits<std::int32_t>::max();
    if (first < 0 || first > LAST - count)
        refuse_all("first slot is ", first, " for ", count, " tokens; allowed: 0 to ", LAST - count);
}

// The last of a head's slots; -1 of none. Kernels skip blocks by their first and their last slot, so they must ascend.
std::int64_t last_of(const std::int32_t* slots, std::int64_t count) {
    std::int64_t last = -1;
    for (std::int64_t i = 0; i < count; ++i) {
        if (slots[i] < 0) refuse_all("position ", slots[i], "; allowed: 0 or more");
        if (slots[i] <= last) refuse_all("position ", slots[i], " behind ", last, "; allowed: ascending ones");
        last = slots[i];
    }
    return last;
}

// Slots of tokens: int32 (n,), or those from `first` on.
class Positions {
public:
    Positions(std::optional<Array> array, std::int64_t first, std::int64_t length)
        : array_(std::move(array)), first_(first) {
        check_slots(first, length);
        last_ = first + length - 1;
        if (!array_) return;
        check_kind("positions", *array_, nb::dlpack::dtype_code::Int, 32, "int32");
        check_shape("positions", *array_, {length});
        check_inner("positions", *array_, 1);
        last_ = last_of(data(), length);
    }
    const std::int32_t* data() const { return array_ ? static_cast<const std::int32_t*>(array_->data()) : nullptr; }
    std::int64_t first() const { return first_; }
    std::int64_t last() const { return last_; }

private:
    std::optional<Array> array_;
    std::int64_t first_, last_ = -1;
};

void check_pair(const Array& keys, const Array& values, std::size_t axes) {
    for (const auto& [name, array] : {std::pair{"keys", &keys}, std::pair{"values", &values}}) {
        dtype_of(name, *array);
        if (array->ndim() != axes) refuse_all(name, ": shape is ", shape_of(*array), "; allowed: ", axes, " axes");
        check_inner(name, *array, 1);
        check_dim(name, static_cast<std::int64_t>(array->shape(axes - 1)));
    }
    for (std::size_t i = 0; i + 1 < axes; ++i)
        if (keys.shape(i) != values.shape(i))
            refuse_all("keys and values have shapes ", shape_of(keys), " and ", shape_of(values),
                       "; allowed: the same number of heads and tokens");
}

// A sealed stretch of tokens, the same for all heads.
class PySegment {
public:
    PySegment(Array keys, Array values, std::optional<Array> positions, std::int64_t first)
        : keys_(std::move(keys)), values_(std::move(values)),
          positions_(std::move(positions), first, keys_->ndim() == 3 ? static_cast<std::int64_t>(keys_->shape(1)) : 0) {
        check_pair(*keys_, *values_, 3);
        length_ = static_cast<std::int64_t>(keys_->shape(1));
        if (length_ < 1) refuse("a segment of 0 tokens; allowed: 1 or more");
        if (heads() < 1) refuse("a segment of 0 heads; allowed: 1 or more");
    }
    PySegment(const PyCodes& keys, const PyCodes& values, std::optional<Array> positions, std::int64_t first)
        : key_codes_(keys), value_codes_(values), positions_(std::move(positions), first, keys.length()),
          length_(keys.length()) {
        if (keys.values() || !values.values()) refuse("codes of keys and of values were given in the wrong order");
        if (keys.heads() != values.heads() || keys.length() != values.length())
            refuse_all("packed keys of ", keys.heads(), " heads and ", keys.length(), " tokens with values of ",
                       values.heads(), " and ", values.length(), "; allowed: the same");
        values.check_scales();
    }
    // Keys alone, for scores.
    explicit PySegment(const PyCodes& keys)
        : key_codes_(keys), positions_(std::nullopt, 0, keys.length()), length_(keys.length()) {
        if (keys.values()) refuse("codes of values were given as keys");
    }
    std::int64_t heads() const { return key_codes_ ? key_codes_->heads() : static_cast<std::int64_t>(keys_->shape(0)); }
    int key_dim() const { return key_codes_ ? key_codes_->dim() : static_cast<int>(keys_->shape(2)); }
    // 0 where there are keys alone.
    int value_dim() const {
        return value_codes_ ? value_codes_->dim() : values_ ? static_cast<int>(values_->shape(2)) : 0;
    }
    std::int64_t last_slot() const { return positions_.last(); }
    std::int64_t length() const { return length_; }

    Piece of_head(std::int64_t head) const {
        Piece piece;
        piece.length = length_;
        piece.positions = positions_.data();
        piece.first = positions_.first();
        if (key_codes_) {
            piece.packed = true;
            piece.key_codes = key_codes_->of_head(head);
            if (value_codes_) piece.value_codes = value_codes_->of_head(head);
            return piece;
        }
        piece.keys = {at(*keys_, head * keys_->stride(0)), keys_->stride(1), dtype_of("keys", *keys_)};
        piece.values = {at(*values_, head * values_->stride(0)), values_->stride(1), dtype_of("values", *values_)};
        return piece;
    }

private:
    std::optional<Array> keys_, values_;
    std::optional<PyCodes> key_codes_, value_codes_;
    Positions positions_;
    std::int64_t length_ = 0;
};

// The dense end of a row: each head owns a run of rows in flat arrays.
class PyTail {
public:
    PyTail(Array keys, Array values, std::optional<Array> positions, std::vector<std::int64_t> starts,
           std::vector<std::int64_t> rooms)
        : keys_(std::move(keys)), values_(std::move(values)), positions_(std::move(positions)),
          starts_(std::move(starts)), rooms_(std::move(rooms)) {
        check_pair(keys_, values_, 2);
        check_inner("keys", keys_, 2);
        check_inner("values", values_, 2);
        if (positions_) {
            check_kind("positions", *positions_, nb::dlpack::dtype_code::Int, 32, "int32");
            check_shape("positions", *positions_, {static_cast<std::int64_t>(keys_.shape(0))});
            check_inner("positions", *positions_, 1);
        }
        if (starts_.size() != rooms_.size() || starts_.empty())
            refuse_all(starts_.size(), " starts and ", rooms_.size(), " rooms; allowed: one of each per head");
        for (std::size_t h = 0; h < starts_.size(); ++h)
            if (starts_[h] < 0 || rooms_[h] < 0 || starts_[h] > rows() - rooms_[h])
                refuse_all("head ", h, " owns rows ", starts_[h], " to ", starts_[h] + rooms_[h], " of ", rows(),
                           "; allowed: rows that are there");
        check_rows_apart();
    }

    std::int64_t rows() const { return static_cast<std::int64_t>(keys_.shape(0)); }
    std::int64_t heads() const { return static_cast<std::int64_t>(starts_.size()); }
    int key_dim() const { return static_cast<int>(keys_.shape(1)); }
    int value_dim() const { return static_cast<int>(values_.shape(1)); }

    void check_lengths(const std::vector<std::int64_t>& lengths) const {
        if (lengths.size() != rooms_.size())
            refuse_all(lengths.size(), " lengths of a tail; allowed: ", rooms_.size());
        for (std::size_t h = 0; h < lengths.size(); ++h)
            if (lengths[h] < 0 || lengths[h] > rooms_[h])
                refuse_all("head ", h, " holds ", lengths[h], " tokens in room for ", rooms_[h],
                           "; allowed: 0 to the room");
    }

    std::int64_t last_slot(const std::vector<std::int64_t>& lengths) const {
        std::int64_t last = -1;
        for (std::size_t h = 0; h < lengths.size(); ++h)
            last = std::max(last, positions_ ? last_of(slots() + starts_[h], lengths[h]) : lengths[h] - 1);
        return last;
    }

    Piece of_head(std::int64_t head, std::int64_t length) const {
        Piece piece;
        piece.length = length;
        piece.keys = {at(keys_, starts_[head] * keys_.stride(0)), keys_.stride(0), dtype_of("keys", keys_)};
        piece.values = {at(values_, starts_[head] * values_.stride(0)), values_.stride(0), dtype_of("values", values_)};
        if (positions_) piece.positions = slots() + starts_[head];
        return piece;
    }

    // Adds `count` tokens to every head: keys and values (H, count, D), in slots from `first` on.
    void append(const Array& keys, const Array& values, std::int64_t first, const std::vector<std::int64_t>& lengths) {
        check_pair(keys, values, 3);
        const std::int64_t count = static_cast<std::int64_t>(keys.shape(1));
        if (static_cast<std::int64_t>(keys.shape(0)) != heads() || static_cast<int>(keys.shape(2)) != key_dim() ||
            static_cast<int>(values.shape(2)) != value_dim())
            refuse_all("appended keys have shape ", shape_of(keys), "; allowed: (", heads(), ", any, ", key_dim(), ")");
        if (dtype_of("keys", keys) != dtype_of("keys", keys_) ||
            dtype_of("values", values) != dtype_of("values", values_))
            refuse("appended tokens have another dtype than those held");
        check_lengths(lengths);
        check_slots(first, count);
        for (std::int64_t h = 0; h < heads(); ++h)
            if (lengths[h] + count > rooms_[h])
                refuse_all("head ", h, ": ", count, " tokens do not fit behind ", lengths[h], " of ", rooms_[h]);
        for (std::int64_t h = 0; h < heads(); ++h) {
            copy(keys, keys_, h, starts_[h] + lengths[h]);
            copy(values, values_, h, starts_[h] + lengths[h]);
            if (!positions_) continue;
            std::int32_t* added = slots() + starts_[h] + lengths[h];
            for (std::int64_t i = 0; i < count; ++i) added[i] = static_cast<std::int32_t>(first + i);
        }
    }

    // Moves the rows at `index` (ascending, one array per head) to the front of each head's run.
    void keep(const std::vector<Array>& index) {
        if (static_cast<std::int64_t>(index.size()) != heads())
            refuse_all(index.size(), " choices of tokens; allowed: one per head, ", heads());
        for (std::int64_t h = 0; h < heads(); ++h) check_index(index[h], h);
        for (std::int64_t h = 0; h < heads(); ++h) {
            const std::int64_t* chosen = static_cast<const std::int64_t*>(index[h].data());
            const std::int64_t count = static_cast<std::int64_t>(index[h].shape(0));
            for (std::int64_t begin = 0, end; begin < count; begin = end) {
                for (end = begin + 1; end < count && chosen[end] == chosen[end - 1] + 1;) ++end;
                if (chosen[begin] == begin) continue;
                move(keys_, starts_[h] + begin, starts_[h] + chosen[begin], end - begin);
                move(values_, starts_[h] + begin, starts_[h] + chosen[begin], end - begin);
                if (positions_) move(*positions_, starts_[h] + begin, starts_[h] + chosen[begin], end - begin);
            }
        }
    }

private:
    std::int32_t* slots() const { return static_cast<std::int32_t*>(positions_->data()); }

    void check_rows_apart() const {
        std::vector<std::size_t> order;
        for (std::size_t h = 0; h < starts_.size(); ++h)
            if (rooms_[h] > 0) order.push_back(h);
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return starts_[a] < starts_[b]; });
        for (std::size_t i = 1; i < order.size(); ++i)
            if (starts_[order[i - 1]] + rooms_[order[i - 1]] > starts_[order[i]])
                refuse_all("heads ", order[i - 1], " and ", order[i], " both own row ", starts_[order[i]],
                           "; allowed: rows of one head each");
    }

    void check_index(const Array& index, std::int64_t head) const {
        check_kind("index", index, nb::dlpack::dtype_code::Int, 64, "int64");
        check_shape("index", index, {-1});
        check_inner("index", index, 1);
        const std::int64_t* chosen = static_cast<const std::int64_t*>(index.data());
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(index.shape(0)); ++i)
            if (chosen[i] < 0 || chosen[i] >= rooms_[head] || (i > 0 && chosen[i] <= chosen[i - 1]))
                refuse_all("index ", chosen[i], " of head ", head, "; allowed: ascending numbers from 0 to ",
                           rooms_[head] - 1);
    }

    static void move(const Array& rows, std::int64_t to, std::int64_t from, std::int64_t count) {
        const std::int64_t bytes = rows.stride(0) * (rows.dtype().bits / 8);
        char* data = static_cast<char*>(rows.data());
        std::memmove(data + to * bytes, data + from * bytes, count * bytes);
    }

    static void copy(const Array& from, const Array& to, std::int64_t head, std::int64_t row) {
        const std::int64_t bytes = from.dtype().bits / 8, width = static_cast<std::int64_t>(from.shape(2));
        for (std::int64_t t = 0; t < static_cast<std::int64_t>(from.shape(1)); ++t)
            std::memcpy(static_cast<char*>(to.data()) + (row + t) * to.stride(0) * bytes,
                        at(from, head * from.stride(0) + t * from.stride(1)), width * bytes);
    }

    Array keys_, values_;
    std::optional<Array> positions_;
    std::vector<std::int64_t> starts_, rooms_;
};

using Row = std::tuple<std::vector<const PySegment*>, const PyTail*, std::vector<std::int64_t>>;

struct Table {
    const Array* array;
    std::int64_t row, head, query, slot;  // strides; 0 where one entry serves all

    Table(const char* name, const Array& given, std::int64_t batch, std::int64_t heads, std::int64_t count)
        : array(&given) {
        if (given.ndim() != 4) refuse_all(name, ": shape is ", shape_of(given), "; allowed: 4 axes");
        const std::int64_t wanted[3] = {batch, heads, count};
        std::int64_t strides[3];
        for (int i = 0; i < 3; ++i) {
            const std::int64_t size = static_cast<std::int64_t>(given.shape(i));
            if (size != 1 && size != wanted[i])
                refuse_all(name, ": axis ", i, " is ", size, " long; allowed: 1 or ", wanted[i]);
            strides[i] = size == 1 ? 0 : given.stride(i);
        }
        row = strides[0];
        head = strides[1];
        query = strides[2];
        slot = given.stride(3);
    }

    void check_slots(const char* name, std::int64_t last) const {
        if (last >= static_cast<std::int64_t>(array->shape(3)))
            refuse_all(name, ": ", array->shape(3), " columns, and a token stands in slot ", last);
    }
};

struct Weighing {
    float scale;
    float softcap;
    bool causal;
    std::int64_t window;
    std::int64_t first;
    std::optional<Array> mask, bias;
};

struct Precision {
    int key_passes, value_passes;
};

Precision precision_named(const std::string& name) {
    if (name == "fast") return {1, 1};
    if (name == "default") return {2, 1};
    if (name == "exact") return {2, 2};
    refuse_all("precision is '", name, "'; allowed: exact, default and fast");
}

// The work of one call: a task for each KV head of each row, in that order.
class Call {
public:
    Call(const std::vector<Row>& rows, const Array& query, const Weighing& weighing, const std::string& precision)
        : batch_(static_cast<std::int64_t>(rows.size())) {
        const Dtype dtype = dtype_of("query", query);
        if (query.ndim() != 4) refuse_all("query: shape is ", shape_of(query), "; allowed: (B, Hq, q, D)");
        check_shape("query", query, {batch_, -1, -1, -1});
        check_inner("query", query, 1);
        query_heads_ = static_cast<std::int64_t>(query.shape(1));
        count_ = static_cast<std::int64_t>(query.shape(2));
        dim_ = static_cast<int>(query.shape(3));
        check_dim("query", dim_);
        if (count_ < 1 || query_heads_ < 1) refuse_all("query: shape is ", shape_of(query), "; allowed: no axis of 0");
        if (!std::isfinite(weighing.scale)) refuse_all("scale is ", weighing.scale, "; allowed: a finite number");
        if (weighing.window < 0) refuse_all("window is ", weighing.window, "; allowed: 0 (none) or more");
        const Precision passes = precision_named(precision);
        for (std::int64_t b = 0; b < batch_; ++b) add_row(rows[b], b, query, dtype, weighing, passes);
    }

    void set_sinks(const Array& sinks) {
        check_kind("sinks", sinks, nb::dlpack::dtype_code::Float, 32, "float32");
        check_shape("sinks", sinks, {query_heads_});
        check_inner("sinks", sinks, 1);
        for (std::size_t t = 0; t < tasks.size(); ++t) {
            const float* of_group =
                static_cast<const float*>(sinks.data()) + static_cast<std::int64_t>(t) % heads_ * group();
            tasks[t].sinks.assign(of_group, of_group + group());
        }
    }

    std::vector<Task> tasks;
    std::int64_t batch() const { return batch_; }
    std::int64_t group() const { return query_heads_ / heads_; }
    std::int64_t query_heads() const { return query_heads_; }
    std::int64_t count() const { return count_; }
    int value_dim() const { return value_dim_; }
    std::int64_t longest() const { return longest_; }

private:
    void agree(std::int64_t heads, int key_dim, int value_dim) {
        if (heads_ == 0) {
            heads_ = heads;
            value_dim_ = value_dim;
            if (query_heads_ % heads)
                refuse_all("query has ", query_heads_, " heads for ", heads, " of keys; allowed: a multiple");
        }
        if (heads != heads_ || key_dim != dim_ || value_dim != value_dim_)
            refuse_all("keys of ", heads, " heads with ", key_dim, " channels, values with ", value_dim,
                       "; allowed here: ", heads_, ", ", dim_, " and ", value_dim_);
    }

    void add_row(const Row& row, std::int64_t b, const Array& query, Dtype dtype, const Weighing& weighing,
                 Precision passes) {
        const auto& [segments, tail, lengths] = row;
        std::int64_t last = -1;
        for (const PySegment* segment : segments) {
            if (!segment) refuse("a segment is None");
            agree(segment->heads(), segment->key_dim(), segment->value_dim());
            last = std::max(last, segment->last_slot());
        }
        if (tail) {
            agree(tail->heads(), tail->key_dim(), tail->value_dim());
            tail->check_lengths(lengths);
        } else if (segments.empty()) {
            refuse("a row without segments and tail holds nothing; allowed: 1 token or more");
        }
        Weigh weigh;
        weigh.softcap = weighing.softcap;
        weigh.causal = weighing.causal;
        weigh.window = weighing.window;
        weigh.first = weighing.first;
        if (tail && (weighing.mask || weighing.bias)) last = std::max(last, tail->last_slot(lengths));
        const std::int64_t group = query_heads_ / heads_;
        for (std::int64_t h = 0; h < heads_; ++h) {
            Task& task = tasks.emplace_back();
            for (const PySegment* segment : segments) add_piece(task, segment->of_head(h));
            if (tail) add_piece(task, tail->of_head(h, lengths[h]));
            set_tables(weigh, weighing, b, h * group, last);
            read_queries(task, query, dtype, b, h, weighing.scale);
            Query& q = task.query;
            q.heads = static_cast<int>(group);
            q.count = static_cast<int>(count_);
            q.total = static_cast<int>(group * count_);
            q.key_dim = dim_;
            q.value_dim = value_dim_;
            q.key_passes = passes.key_passes;
            q.value_passes = passes.value_passes;
            q.weigh = weigh;
            longest_ = std::max(longest_, task.tokens);
        }
    }

    static void add_piece(Task& task, const Piece& piece) {
        if (piece.length == 0) return;
        task.pieces.push_back(piece);
        task.tokens += piece.length;
    }

    void set_tables(Weigh& weigh, const Weighing& weighing, std::int64_t b, std::int64_t head, std::int64_t last) {
        if (weighing.mask) {
            const Array& given = *weighing.mask;
            if (!is_mask(given)) refuse("mask: dtype is not allowed; allowed: bool and uint8");
            const Table table("mask", given, batch_, query_heads_, count_);
            table.check_slots("mask", last);
            weigh.mask = static_cast<const std::uint8_t*>(given.data()) + b * table.row + head * table.head;
            weigh.mask_head = table.head;
            weigh.mask_query = table.query;
            weigh.mask_slot = table.slot;
        }
        if (weighing.bias) {
            const Array& given = *weighing.bias;
            if (!is_float(given) || given.dtype().bits != 32) refuse("bias: dtype is not allowed; allowed: float32");
            const Table table("bias", given, batch_, query_heads_, count_);
            table.check_slots("bias", last);
            weigh.bias = static_cast<const float*>(given.data()) + b * table.row + head * table.head;
            weigh.bias_head = table.head;
            weigh.bias_query = table.query;
            weigh.bias_slot = table.slot;
        }
    }

    void read_queries(Task& task, const Array& query, Dtype dtype, std::int64_t b, std::int64_t h, float scale) {
        const std::int64_t group = query_heads_ / heads_;
        task.rows.resize(group * count_ * dim_);
        float* out = task.rows.data();
        for (std::int64_t g = 0; g < group; ++g)
            for (std::int64_t q = 0; q < count_; ++q, out += dim_) {
                const std::int64_t place =
                    b * query.stride(0) + (h * group + g) * query.stride(1) + q * query.stride(2);
                for (int c = 0; c < dim_; ++c) out[c] = number_at(dtype, query.data(), place + c) * scale;
            }
    }

    std::int64_t batch_, heads_ = 0, query_heads_ = 0, count_ = 0, longest_ = 0;
    int dim_ = 0, value_dim_ = 0;
};

void attend_rows(const std::string& kernels, const std::vector<Row>& rows, const Array& query, Array out,
                 std::optional<Array> lse, std::optional<Array> sinks, float scale, float softcap, bool causal,
                 std::int64_t window, std::int64_t first, std::optional<Array> mask, std::optional<Array> bias,
                 const std::string& precision, int threads) {
    Call call(rows, query, {scale, softcap, causal, window, first, std::move(mask), std::move(bias)}, precision);
    dtype_of("out", out);
    if (call.value_dim() == 0) refuse("rows hold keys alone; allowed: keys with values, or scores");
    check_shape("out", out, {call.batch(), call.query_heads(), call.count(), call.value_dim()});
    check_inner("out", out, 1);
    check_apart("out", out);
    if (lse) {
        check_kind("lse", *lse, nb::dlpack::dtype_code::Float, 32, "float32");
        check_shape("lse", *lse, {call.batch(), call.query_heads(), call.count()});
        check_inner("lse", *lse, 3);
    }
    if (sinks) call.set_sinks(*sinks);
    const Kernels& chosen = named(kernels);
    std::vector<Result> results;
    {
        nb::gil_scoped_release release;
        results = attend(chosen, call.tasks, threads);
    }
    write_attention(call.tasks, results, out, lse);
}

void score_rows(const std::string& kernels, const std::vector<Row>& rows, const Array& query, Array out, float scale,
                float softcap, bool causal, std::int64_t window, std::int64_t first, std::optional<Array> mask,
                std::optional<Array> bias, const std::string& precision, int threads) {
    const Call call(rows, query, {scale, softcap, causal, window, first, std::move(mask), std::move(bias)}, precision);
    check_kind("out", out, nb::dlpack::dtype_code::Float, 32, "float32");
    check_shape("out", out, {call.batch(), call.query_heads(), call.count(), call.longest()});
    check_inner("out", out, 4);
    std::vector<float*> outs;
    for (std::size_t t = 0; t < call.tasks.size(); ++t)
        outs.push_back(static_cast<float*>(out.data()) +
                       static_cast<std::int64_t>(t) * call.group() * call.count() * call.longest());
    const Kernels& chosen = named(kernels);
    bool finite;
    {
        nb::gil_scoped_release release;
        finite = scores(chosen, call.tasks, outs, call.longest(), threads);
    }
    if (!finite) refuse_numbers();
}

void mass_of_rows(const std::string& kernels, const std::vector<Row>& rows, const Array& query, Array out,
                  std::optional<Array> sinks, float scale, float softcap, bool causal, std::int64_t window,
                  std::int64_t first, std::optional<Array> mask, std::optional<Array> bias, int threads) {
    Call call(rows, query, {scale, softcap, causal, window, first, std::move(mask), std::move(bias)}, "exact");
    check_kind("out", out, nb::dlpack::dtype_code::Float, 32, "float32");
    check_shape("out", out, {call.batch(), call.query_heads(), call.longest()});
    check_inner("out", out, 3);
    if (sinks) call.set_sinks(*sinks);
    std::vector<float*> outs;
    for (std::size_t t = 0; t < call.tasks.size(); ++t)
        outs.push_back(static_cast<float*>(out.data()) + static_cast<std::int64_t>(t) * call.group() * call.longest());
    const Kernels& chosen = named(kernels);
    bool finite;
    {
        nb::gil_scoped_release release;
        finite = mass(chosen, call.tasks, outs, call.longest(), threads);
    }
    if (!finite) refuse_numbers();
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<PySegment>(m, "Segment")
        .def(nb::init<Array, Array, std::optional<Array>, std::int64_t>(), "keys"_a, "values"_a, "positions"_a.none(),
             "first"_a)
        .def(nb::init<const PyCodes&, const PyCodes&, std::optional<Array>, std::int64_t>(), "keys"_a, "values"_a,
             "positions"_a.none(), "first"_a)
        .def(nb::init<const PyCodes&>(), "keys"_a);
    nb::class_<PyTail>(m, "Tail")
        .def(nb::init<Array, Array, std::optional<Array>, std::vector<std::int64_t>, std::vector<std::int64_t>>(),
             "keys"_a, "values"_a, "positions"_a.none(), "starts"_a, "rooms"_a)
        .def("append", &PyTail::append, "keys"_a, "values"_a, "first"_a, "lengths"_a)
        .def("keep", &PyTail::keep, "index"_a);
    m.def("attend", &attend_rows, "kernels"_a, "rows"_a, "query"_a, "out"_a, "lse"_a.none(), "sinks"_a.none(),
          "scale"_a, "softcap"_a, "causal"_a, "window"_a, "first"_a, "mask"_a.none(), "bias"_a.none(), "precision"_a,
          "threads"_a);
    m.def("scores", &score_rows, "kernels"_a, "rows"_a, "query"_a, "out"_a, "scale"_a, "softcap"_a, "causal"_a,
          "window"_a, "first"_a, "mask"_a.none(), "bias"_a.none(), "precision"_a, "threads"_a);
    m.def("mass", &mass_of_rows, "kernels"_a, "rows"_a, "query"_a, "out"_a, "sinks"_a.none(), "scale"_a, "softcap"_a,
          "causal"_a, "window"_a, "first"_a, "mask"_a.none(), "bias"_a.none(), "threads"_a);
}

}  // namespace kvtailor
