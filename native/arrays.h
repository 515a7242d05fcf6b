// What every binding checks of the tensors that it is given.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "core.h"

namespace nb = nanobind;

namespace kvtailor {

using Array = nb::ndarray<nb::device::cpu>;
using Given = nb::ndarray<nb::ro, nb::device::cpu>;  // only read

[[noreturn]] inline void refuse(const std::string& message) {
    const nb::object kind = nb::module_::import_("kvtailor.errors").attr("KernelError");
    PyErr_SetString(kind.ptr(), message.c_str());
    throw nb::python_error();
}

template <class... Parts>
[[noreturn]] void refuse_all(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    refuse(out.str());
}

inline std::string shape_of(const Array& array) {
    std::ostringstream out;
    out << "(";
    for (std::size_t i = 0; i < array.ndim(); ++i) out << (i ? ", " : "") << array.shape(i);
    out << ")";
    return out.str();
}

inline bool is_float(const Array& array) {
    const nb::dlpack::dtype dtype = array.dtype();
    if (dtype.lanes != 1) return false;
    if (dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float))
        return dtype.bits == 32 || dtype.bits == 16;
    return dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16;
}

// Whether its bytes say yes or no.
inline bool is_mask(const Array& array) {
    const nb::dlpack::dtype dtype = array.dtype();
    return dtype.bits == 8 && dtype.lanes == 1 &&
           (dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bool) ||
            dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt));
}

inline Dtype dtype_of(const char* name, const Array& array) {
    if (!is_float(array)) refuse_all(name, ": dtype is not allowed; allowed: float32, float16 and bfloat16");
    if (array.dtype().bits == 32) return Dtype::f32;
    return array.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) ? Dtype::f16 : Dtype::bf16;
}

inline void check_kind(const char* name, const Array& array, nb::dlpack::dtype_code code, int bits,
                       const char* allowed) {
    if (array.dtype().code != static_cast<std::uint8_t>(code) || array.dtype().bits != bits || array.dtype().lanes != 1)
        refuse_all(name, ": dtype is not allowed; allowed: ", allowed);
}

inline void check_shape(const char* name, const Array& array, const std::vector<std::int64_t>& wanted) {
    bool same = array.ndim() == wanted.size();
    for (std::size_t i = 0; same && i < wanted.size(); ++i)
        same = wanted[i] < 0 || static_cast<std::int64_t>(array.shape(i)) == wanted[i];
    if (same) return;
    std::ostringstream out;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        out << (i ? ", " : "");
        if (wanted[i] < 0) out << "any";
        else out << wanted[i];
    }
    refuse_all(name, ": shape is ", shape_of(array), "; allowed: (", out.str(), ")");
}

inline void check_inner(const char* name, const Array& array, std::size_t axes) {
    std::int64_t step = 1;
    for (std::size_t i = 0; i < axes && i < array.ndim(); ++i) {
        const std::size_t axis = array.ndim() - 1 - i;
        if (array.shape(axis) > 1 && array.stride(axis) != step)
            refuse_all(name, ": the stride of axis ", axis, " is ", array.stride(axis), "; allowed: ", step);
        step *= static_cast<std::int64_t>(array.shape(axis));
    }
    for (std::size_t i = 0; i < array.ndim(); ++i)
        if (array.stride(i) < 0) refuse_all(name, ": the stride of axis ", i, " is negative; allowed: 0 or more");
}

// For what is written to: no two places may be one.
inline void check_apart(const char* name, const Array& array) {
    std::vector<std::size_t> axes;
    for (std::size_t i = 0; i < array.ndim(); ++i)
        if (array.shape(i) > 1) axes.push_back(i);
    std::sort(axes.begin(), axes.end(), [&](std::size_t a, std::size_t b) {
        return array.stride(a) < array.stride(b);
    });
    std::int64_t size = 1;
    for (const std::size_t axis : axes) {
        if (array.stride(axis) < size)
            refuse_all(name, ": the stride of axis ", axis, " is ", array.stride(axis), "; allowed: ", size,
                       " or more");
        size += (static_cast<std::int64_t>(array.shape(axis)) - 1) * array.stride(axis);
    }
}

inline void check_dim(const char* name, std::int64_t dim) {
    if (dim < 16 || dim > MOST_DIM || dim % 16)
        refuse_all(name, ": heads have ", dim, " channels; allowed: multiples of 16 up to ", MOST_DIM);
}

inline const char* at(const Array& array, std::int64_t offset) {
    return static_cast<const char*>(array.data()) + offset * (array.dtype().bits / 8);
}

// Kernels by name; refused where this processor cannot run them.
const Kernels& named(const std::string& name);

}  // namespace kvtailor
