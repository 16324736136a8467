#pragma once

#include <nanobind/nanobind.h>

// The classes Layer and Tables of anybit._native.
void add_layer(nanobind::module_& m);
