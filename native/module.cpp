// The binding: tensors are checked here and handed to the kernels as pointers.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sstream>

#include "arrays.h"
#include "bind.h"
#include "dispatch.h"

namespace kvtailor {

const Kernels& named(const std::string& name) {
    const Kernels* found = kernels_named(name);
    if (found) return *found;
    std::ostringstream out;
    for (const std::string& one : instruction_sets()) out << " " << one;
    refuse_all("kernels ", name, " cannot run on this processor; allowed:", out.str());
}

}  // namespace kvtailor

NB_MODULE(_native, m) {
    m.doc() = "Kernels in C++; kvtailor.kernels.native says what they are given.";
    nanobind::set_leak_warnings(false);  // what a module keeps for good is no leak
    m.def("instruction_sets", &kvtailor::instruction_sets);
    kvtailor::bind_packing(m);
    kvtailor::bind_attention(m);
    kvtailor::bind_retrieval(m);
}
