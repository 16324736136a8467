// What the processor has, and what instruction sets need of it.
#pragma once

#include "common/dispatch.h"

#include <map>
#include <string>
#include <vector>

namespace anybit {

// What the processor has of what kernels could use, and the operating system lets programs use.
const std::map<std::string, bool>& cpu_features();

// What an instruction set needs of the processor, by these names.
std::vector<std::string> isa_needs(Isa isa);

} // namespace anybit
