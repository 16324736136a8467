// A torch.Tensor by its own attributes, which cost a tenth of what DLPack or a view of numpy does: a narrow layer's
// product takes microseconds. Nothing of PyTorch is linked.
#pragma once

#include "layer/tile.h"

#include <nanobind/nanobind.h>

#include <atomic>
#include <optional>

namespace anybit {

namespace nb = nanobind;

class Tensor {
public:
    // Of a contiguous tensor of float32 or bfloat16 on the CPU, [..., columns]; else nothing.
    //
    // Throws std::invalid_argument: numbers at an odd address.
    static std::optional<Tensor> of(nb::handle object) {
        const Torch& torch = Torch::get();
        if (!PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(torch.tensor))) return std::nullopt;
        Tensor made{object};
        const nb::object dtype = attribute(object, torch.dtype);
        const bool floats = dtype.ptr() == torch.float32;
        if (!floats && dtype.ptr() != torch.bfloat16) return std::nullopt;
        made.numbers = floats ? Numbers::f32 : Numbers::bf16;
        if (attribute(object, torch.is_cpu).ptr() != Py_True) return std::nullopt;
        if (call(object, torch.is_contiguous).ptr() != Py_True) return std::nullopt;
        made.shape_ = attribute(object, torch.shape);
        const Py_ssize_t dims = PyTuple_GET_SIZE(made.shape_.ptr());
        if (dims == 0) return std::nullopt;
        made.columns = size(made.shape_, dims - 1);
        for (Py_ssize_t i = 0; i + 1 < dims; ++i) made.rows *= size(made.shape_, i);
        made.data = PyLong_AsVoidPtr(call(object, torch.data_ptr).ptr());
        if (made.data == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
        if (!lies_well(made.data, anybit::size_of(made.numbers))) refuse(std::string("x lies") + ODD);
        return made;
    }

    // Uninitialized, of the same dtype, [..., columns].
    nb::object new_empty(int64_t columns) const {
        const Torch& torch = Torch::get();
        const Py_ssize_t dims = PyTuple_GET_SIZE(shape_.ptr());
        const nb::object shape = nb::steal(PyTuple_New(dims));
        if (!shape.is_valid()) throw nb::python_error();
        for (Py_ssize_t i = 0; i + 1 < dims; ++i)
            PyTuple_SET_ITEM(shape.ptr(), i, Py_NewRef(PyTuple_GET_ITEM(shape_.ptr(), i)));
        PyTuple_SET_ITEM(shape.ptr(), dims - 1, PyLong_FromLongLong(columns));
        PyObject* arguments[] = {object_.ptr(), shape.ptr()};
        return checked(PyObject_VectorcallMethod(torch.new_empty, arguments, 2, nullptr));
    }

    void* data = nullptr;
    Numbers numbers = Numbers::f32;
    int64_t rows = 1, columns = 0;

private:
    explicit Tensor(nb::handle object) : object_(object) {}

    // Looked up once, and kept to the end of the process.
    struct Torch {
        PyObject *tensor, *float32, *bfloat16;
        PyObject *dtype, *shape, *is_cpu, *is_contiguous, *data_ptr, *new_empty; // names

        static const Torch& get() {
            static std::atomic<const Torch*> found{nullptr}; // no guard: who waits for one may hold the GIL
            if (const Torch* kept = found.load(std::memory_order_acquire)) return *kept;
            const nb::module_ torch = nb::module_::import_("torch");
            const auto own = [&](const char* name) { return nb::object(torch.attr(name)).release().ptr(); };
            const auto name = PyUnicode_InternFromString;
            const auto* made =
                new Torch{own("Tensor"),  own("float32"),        own("bfloat16"),  name("dtype"),    name("shape"),
                          name("is_cpu"), name("is_contiguous"), name("data_ptr"), name("new_empty")};
            found.store(made, std::memory_order_release);
            return *made;
        }
    };

    static nb::object checked(PyObject* made) {
        if (made == nullptr) throw nb::python_error();
        return nb::steal(made);
    }
    static nb::object attribute(nb::handle object, PyObject* name) {
        return checked(PyObject_GetAttr(object.ptr(), name));
    }
    static nb::object call(nb::handle object, PyObject* name) {
        PyObject* arguments[] = {object.ptr()};
        return checked(PyObject_VectorcallMethod(name, arguments, 1, nullptr));
    }
    static int64_t size(const nb::object& shape, Py_ssize_t i) {
        return PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
    }

    nb::handle object_;
    nb::object shape_;
};

} // namespace anybit
