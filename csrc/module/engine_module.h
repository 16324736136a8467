#pragma once

#include <nanobind/nanobind.h>

// The classes Decoder and KvCache of anybit._native.
void add_engine(nanobind::module_& m);
