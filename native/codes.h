// Packed keys or values as the kernels are given them.
#pragma once

#include <bitset>
#include <limits>
#include <optional>
#include <utility>

#include "arrays.h"

namespace kvtailor {

// Packed keys, or values, of all heads.
class PyCodes {
public:
    PyCodes(int bits, int dim, int group, bool per_channel, bool rotated, bool values, std::int64_t length,
            std::vector<Array> planes, Array scale, Array zero, std::optional<Array> outlier_channels,
            std::optional<Array> outliers)
        : planes_(std::move(planes)), scale_(std::move(scale)), zero_(std::move(zero)),
          channels_(std::move(outlier_channels)), outliers_(std::move(outliers)), length_(length), values_(values) {
        if (bits != 1 && bits != 2 && bits != 3 && bits != 4 && bits != 8)
            refuse_all("bits is ", bits, "; allowed: 1, 2, 3, 4 and 8");
        check_dim(values ? "packed values" : "packed keys", dim);
        constexpr std::int64_t MOST_TOKENS = std::numeric_limits<std::int32_t>::max();
        if (length < 1 || length > MOST_TOKENS)
            refuse_all("packed tokens: ", length, "; allowed: 1 to ", MOST_TOKENS);
        if (per_channel ? group != 32 && group != 64 : group < 1 || dim % group || group % 16)
            refuse_all("group is ", group, "; allowed: ",
                       per_channel ? "32 or 64 tokens" : "divisors of the head size that 16 divides");
        if (per_channel && values) refuse("values with scales per channel cannot be used; allowed: per token");
        const std::int64_t blocks = (length + BLOCK - 1) / BLOCK;
        codes_.bits = bits;
        codes_.dim = dim;
        codes_.group = group;
        codes_.per_channel = per_channel;
        codes_.rotated = rotated;
        const std::size_t count = bits == 3 ? 2 : 1;
        if (planes_.size() != count) refuse_all("planes: ", planes_.size(), "; allowed at ", bits, " bits: ", count);
        for (std::size_t p = 0; p < count; ++p) {
            const int width = bits == 3 ? (p == 0 ? 2 : 1) : bits;
            const int lines = values ? dim / 16 * ((16 * width + 7) / 8) : 4 * ((dim / 4 * width + 7) / 8);
            check_kind("codes", planes_[p], nb::dlpack::dtype_code::UInt, 8, "uint8");
            check_shape("codes", planes_[p], {-1, blocks, 64 * lines});
            check_inner("codes", planes_[p], 2);
            codes_.plane_bytes[p] = 64 * lines;
            if (planes_[p].shape(0) != planes_[0].shape(0)) refuse("planes have different numbers of heads");
        }
        const std::int64_t heads = this->heads();
        if (heads < 1) refuse("codes of 0 heads; allowed: 1 or more");
        const std::int64_t rows = per_channel ? BLOCK / group : dim / group, width = per_channel ? dim : BLOCK;
        codes_.scales = static_cast<int>(rows * width);
        for (const auto& [name, array] : {std::pair{"scales", &scale_}, std::pair{"zeros", &zero_}}) {
            if (!is_float(*array) || array->dtype().bits != 16)
                refuse_all(name, ": dtype is not allowed; allowed: float16 and bfloat16");
            check_shape(name, *array, {heads, blocks, rows, width});
            check_inner(name, *array, 3);
        }
        codes_.scale_dtype = dtype_of("scales", scale_);
        if (dtype_of("zeros", zero_) != codes_.scale_dtype) refuse("scales and zeros have different dtypes");
        if (channels_.has_value() != outliers_.has_value())
            refuse("outlier channels and outliers come together or not at all");
        if (channels_) check_outliers(heads);
    }

    std::int64_t heads() const { return static_cast<std::int64_t>(planes_[0].shape(0)); }
    std::int64_t length() const { return length_; }
    int dim() const { return codes_.dim; }
    bool values() const { return values_; }

    Codes of_head(std::int64_t head) const {
        Codes codes = codes_;
        for (std::size_t p = 0; p < planes_.size(); ++p)
            codes.planes[p] = static_cast<const std::uint8_t*>(planes_[p].data()) + head * planes_[p].stride(0);
        codes.scale = reinterpret_cast<const std::uint16_t*>(at(scale_, head * scale_.stride(0)));
        codes.zero = reinterpret_cast<const std::uint16_t*>(at(zero_, head * zero_.stride(0)));
        if (channels_) {
            codes.outlier_channels = reinterpret_cast<const std::int16_t*>(at(*channels_, head * channels_->stride(0)));
            codes.outliers = at(*outliers_, head * outliers_->stride(0));
        }
        return codes;
    }

    // Weights are multiplied by the scales of values, and a product below zero or that is no number would be lost.
    void check_scales() const {
        const std::int64_t blocks = static_cast<std::int64_t>(scale_.shape(1));
        for (std::int64_t h = 0; h < heads(); ++h) {
            const Codes codes = of_head(h);
            if (!are_finite(codes.scale, blocks * codes_.scales, 0x8000))
                refuse_all("scales of head ", h, ": one is negative or not finite; allowed: finite ones, 0 or more");
            if (!are_finite(codes.zero, blocks * codes_.scales, 0xffff))
                refuse_all("zeros of head ", h, ": one is not finite; allowed: finite ones");
        }
    }

private:
    // Whether numbers of 16 bits are finite and none is above `most`, as bits.
    bool are_finite(const std::uint16_t* numbers, std::int64_t count, std::uint16_t most) const {
        const std::uint16_t infinite = codes_.scale_dtype == Dtype::f16 ? 0x7c00 : 0x7f80;
        std::uint16_t wrong = 0;
        for (std::int64_t i = 0; i < count; ++i) wrong |= (numbers[i] & 0x7fff) >= infinite || numbers[i] > most;
        return !wrong;
    }

    void check_outliers(std::int64_t heads) {
        if (codes_.rotated) refuse("outliers with rotated codes; allowed: codes that are not rotated");
        check_kind("outlier channels", *channels_, nb::dlpack::dtype_code::Int, 16, "int16");
        if (channels_->ndim() != 2 || channels_->shape(1) == 0)
            refuse_all("outlier channels: shape is ", shape_of(*channels_), "; allowed: (", heads, ", 1 or more)");
        const std::int64_t count = static_cast<std::int64_t>(channels_->shape(1));
        check_shape("outlier channels", *channels_, {heads, count});
        check_inner("outlier channels", *channels_, 1);
        check_shape("outliers", *outliers_, {heads, length_, count});
        check_inner("outliers", *outliers_, 2);
        codes_.outlier_dtype = dtype_of("outliers", *outliers_);
        codes_.outlier_count = static_cast<int>(count);
        for (std::int64_t h = 0; h < heads; ++h) {
            std::bitset<MOST_DIM> seen;
            for (std::int64_t m = 0; m < count; ++m) {
                const int channel = reinterpret_cast<const std::int16_t*>(at(*channels_, h * channels_->stride(0)))[m];
                if (channel < 0 || channel >= codes_.dim)
                    refuse_all("outlier channel ", channel, "; allowed: 0 to ", codes_.dim - 1);
                if (seen[channel]) refuse_all("outlier channel ", channel, " of head ", h, " twice; allowed: once");
                seen.set(channel);
            }
        }
    }

    std::vector<Array> planes_;
    Array scale_, zero_;
    std::optional<Array> channels_, outliers_;
    Codes codes_;
    std::int64_t length_;
    bool values_;
};

}  // namespace kvtailor
