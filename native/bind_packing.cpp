// Packed codes: what they are, how they are made and read back.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "bind.h"
#include "codes.h"
#include "dispatch.h"
#include "half.h"

using namespace nb::literals;

namespace kvtailor {
namespace {

constexpr std::int64_t BLOCKS_OF_JOB = 32;

// Numbers of heads that are only read: (H, n, D), any strides but the innermost.
class Heads {
public:
    explicit Heads(const Given& given) : x_(given), dtype_(dtype_of("x", x_)) {
        if (x_.ndim() != 3) refuse_all("x: shape is ", shape_of(x_), "; allowed: (H, n, D)");
        check_inner("x", x_, 1);
        check_dim("x", static_cast<std::int64_t>(x_.shape(2)));
        if (heads() < 1 || tokens() < 1) refuse_all("x: shape is ", shape_of(x_), "; allowed: no axis of 0");
    }

    std::int64_t heads() const { return static_cast<std::int64_t>(x_.shape(0)); }
    std::int64_t tokens() const { return static_cast<std::int64_t>(x_.shape(1)); }
    int dim() const { return static_cast<int>(x_.shape(2)); }

    Rows rows(std::int64_t head, std::int64_t token) const {
        return {at(x_, head * x_.stride(0) + token * x_.stride(1)), x_.stride(1), dtype_};
    }

    [[noreturn]] void refuse_numbers() const {
        for (std::int64_t h = 0; h < heads(); ++h)
            for (std::int64_t t = 0; t < tokens(); ++t)
                for (int c = 0; c < dim(); ++c) {
                    const float number = number_at(dtype_, rows(h, t).data, c);
                    if (!std::isfinite(number))
                        refuse_all("x is ", number, " in head ", h, ", token ", t, ", channel ", c,
                                   "; allowed: finite numbers");
                }
        refuse("x holds numbers too large to rotate; allowed: those whose sums over a head are finite");
    }

private:
    Array x_;
    Dtype dtype_;
};

Codes from_block(Codes codes, std::int64_t block) {
    for (int p = 0; p < 2; ++p)
        if (codes.planes[p]) codes.planes[p] += block * codes.plane_bytes[p];
    codes.scale += block * codes.scales;
    codes.zero += block * codes.scales;
    if (codes.outliers)
        codes.outliers = static_cast<const char*>(codes.outliers) +
                         block * BLOCK * codes.outlier_count * (codes.outlier_dtype == Dtype::f32 ? 4 : 2);
    return codes;
}

Levels levels_named(const std::string& name, int bits) {
    if (name == "minmax") return Levels::minmax;
    if (name == "fit") return Levels::fit;
    if (name != "centroid") refuse_all("levels is '", name, "'; allowed: minmax, centroid and fit");
    if (bits != 1) refuse_all("levels is 'centroid' at ", bits, " bits; allowed: minmax and fit, centroid at 1 bit");
    return Levels::centroid;
}

void pack_heads(const std::string& kernels, const Given& given, int bits, int group, bool per_channel, bool rotated,
                bool values, const std::string& levels, std::vector<Array> planes, Array scale, Array zero,
                int threads) {
    const Heads x(given);
    if (x.tokens() % BLOCK) refuse_all("x: ", x.tokens(), " tokens; allowed: whole blocks of ", BLOCK);
    for (const Array& plane : planes) check_apart("codes", plane);
    check_apart("scales", scale);
    check_apart("zeros", zero);
    const PyCodes codes(bits, x.dim(), group, per_channel, rotated, values, x.tokens(), std::move(planes),
                        std::move(scale), std::move(zero), std::nullopt, std::nullopt);
    if (codes.heads() != x.heads())
        refuse_all("codes of ", codes.heads(), " heads for x of ", x.heads(), "; allowed: the same");
    const Levels chosen = levels_named(levels, bits);
    const Kernels& table = named(kernels);
    std::vector<PackJob> jobs;
    for (std::int64_t h = 0; h < x.heads(); ++h)
        for (std::int64_t t = 0; t < x.tokens(); t += BLOCKS_OF_JOB * BLOCK)
            jobs.push_back({x.rows(h, t), std::min(BLOCKS_OF_JOB * BLOCK, x.tokens() - t), chosen, values,
                            from_block(codes.of_head(h), t / BLOCK)});
    bool finite;
    {
        nb::gil_scoped_release release;
        finite = pack(table, jobs, threads);
    }
    if (!finite) x.refuse_numbers();
}

void unpack_heads(const std::string& kernels, const PyCodes& codes, Array out, int threads, bool unrotate) {
    check_kind("out", out, nb::dlpack::dtype_code::Float, 32, "float32");
    check_shape("out", out, {codes.heads(), codes.length(), codes.dim()});
    check_inner("out", out, 2);
    check_apart("out", out);
    const Kernels& table = named(kernels);
    const std::int64_t dim = codes.dim(), blocks = (codes.length() + BLOCK - 1) / BLOCK;
    const std::int64_t jobs = (blocks + BLOCKS_OF_JOB - 1) / BLOCKS_OF_JOB;
    const double numbers = static_cast<double>(out.size());
    nb::gil_scoped_release release;
    run_all(codes.heads() * jobs, threads_for(numbers, LEAST_NUMBERS, threads), [&](std::int64_t job) {
        const std::int64_t head = job / jobs, first = job % jobs * BLOCKS_OF_JOB;
        const Codes of_head = codes.of_head(head);
        float* x = static_cast<float*>(out.data()) + head * out.stride(0);
        for (std::int64_t b = first; b < std::min(first + BLOCKS_OF_JOB, blocks); ++b) {
            const std::int64_t tokens = std::min<std::int64_t>(BLOCK, codes.length() - b * BLOCK);
            table.unpack(from_block(of_head, b), codes.values(), tokens, x + b * BLOCK * dim);
            if (unrotate && of_head.rotated) table.rotate(x + b * BLOCK * dim, tokens, codes.dim());
        }
    });
}

float peak_of_heads(const std::string& kernels, const Given& given, bool rotated, int threads) {
    const Heads x(given);
    const Kernels& table = named(kernels);
    std::vector<float> peaks(x.heads());
    {
        const double numbers = static_cast<double>(x.heads() * x.tokens() * x.dim());
        nb::gil_scoped_release release;
        run_all(x.heads(), threads_for(numbers, LEAST_NUMBERS, threads),
                [&](std::int64_t h) { peaks[h] = table.peak(x.rows(h, 0), x.tokens(), x.dim(), rotated); });
    }
    float most = 0;
    for (const float peak : peaks) {
        if (!(peak <= std::numeric_limits<float>::max())) x.refuse_numbers();
        most = std::max(most, peak);
    }
    return most;
}

}  // namespace

void bind_packing(nb::module_& m) {
    nb::class_<PyCodes>(m, "Codes")
        .def(nb::init<int, int, int, bool, bool, bool, std::int64_t, std::vector<Array>, Array, Array,
                      std::optional<Array>, std::optional<Array>>(),
             "bits"_a, "dim"_a, "group"_a, "per_channel"_a, "rotated"_a, "values"_a, "length"_a, "planes"_a, "scale"_a,
             "zero"_a, "outlier_channels"_a.none(), "outliers"_a.none());
    m.def("pack", &pack_heads, "kernels"_a, "x"_a, "bits"_a, "group"_a, "per_channel"_a, "rotated"_a, "values"_a,
          "levels"_a, "planes"_a, "scale"_a, "zero"_a, "threads"_a);
    m.def("unpack", &unpack_heads, "kernels"_a, "codes"_a, "out"_a, "threads"_a, "unrotate"_a);
    m.def("peak", &peak_of_heads, "kernels"_a, "x"_a, "rotated"_a = false, "threads"_a = 1);
}

}  // namespace kvtailor
