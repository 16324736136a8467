#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace anybit {
class Layer;
}

// What a Python object of the class Layer holds.
//
// Throws nanobind::type_error: another object.
std::shared_ptr<const anybit::Layer> native_layer(nanobind::handle object);

// The classes Layer and Tables of anybit._native.
void add_layer(nanobind::module_& m);
