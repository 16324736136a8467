#pragma once

#include <nanobind/nanobind.h>

// The classes PlaneReader and PlaneWriter of anybit._native.
void add_coding(nanobind::module_& m);
