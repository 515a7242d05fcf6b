// The parts of the module.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtailor {

void bind_attention(nanobind::module_& m);
void bind_packing(nanobind::module_& m);
void bind_retrieval(nanobind::module_& m);

}  // namespace kvtailor
