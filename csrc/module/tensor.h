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
    // Of a contiguous tensor of float32 or bfloat16 on the CPU, [..., columns]; else nothing. Nor of one whose memory
    // is not its numbers: subclasses, tensors without memory (fake, wrapped by a transform, or shrunk), those that are
    // read with another sign (of floats, none is conjugated), or that carry a tangent. Nor while PyTorch records what
    // is called: it would see an empty tensor made.
    //
    // Throws std::invalid_argument: numbers at an odd address.
    static std::optional<Tensor> of(nb::handle object) {
        const Torch& torch = Torch::get();
        const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
        if (type != torch.tensor && type != torch.parameter) return std::nullopt;
        Tensor made{object};
        const nb::object dtype = attribute(object, torch.dtype);
        const bool floats = dtype.ptr() == torch.float32;
        if (!floats && dtype.ptr() != torch.bfloat16) return std::nullopt;
        made.numbers = floats ? Numbers::f32 : Numbers::bf16;
        if (attribute(object, torch.is_cpu).ptr() != Py_True) return std::nullopt;
        if (call(object, torch.is_contiguous).ptr() != Py_True) return std::nullopt;
        if (call(object, torch.is_neg).ptr() != Py_False || has_tangent(object) || records()) return std::nullopt;
        made.shape_ = attribute(object, torch.shape);
        const Py_ssize_t dims = PyTuple_GET_SIZE(made.shape_.ptr());
        if (dims == 0) return std::nullopt;
        made.columns = size(made.shape_, dims - 1);
        for (Py_ssize_t i = 0; i + 1 < dims; ++i) made.rows *= size(made.shape_, i);
        const std::optional<void*> data = data_of(object);
        if (!data || (*data == nullptr && made.rows * made.columns > 0)) return std::nullopt;
        made.data = *data;
        if (!is_aligned(made.data, anybit::size_of(made.numbers))) refuse(std::string("x lies") + ODD);
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
        PyObject *tensor, *parameter, *float32, *bfloat16;
        PyObject* forward_ad;                                                             // the module
        PyObject *dtype, *shape, *is_cpu, *is_contiguous, *is_neg, *data_ptr, *new_empty; // names
        PyObject *current_level, *unpack_dual;                                            // in forward_ad
        PyObject *modes, *tracing;                                                        // functions

        static const Torch& get() {
            static std::atomic<const Torch*> found{nullptr}; // no guard: who waits for one may hold the GIL
            if (const Torch* kept = found.load(std::memory_order_acquire)) return *kept;
            const nb::module_ torch = nb::module_::import_("torch");
            const auto own = [&](const char* name) { return nb::object(torch.attr(name)).release().ptr(); };
            const auto name = PyUnicode_InternFromString;
            auto* made = new Torch{};
            made->tensor = own("Tensor");
            made->parameter = nb::object(torch.attr("nn").attr("Parameter")).release().ptr();
            made->float32 = own("float32");
            made->bfloat16 = own("bfloat16");
            made->forward_ad = nb::module_::import_("torch.autograd.forward_ad").release().ptr();
            made->modes = nb::object(torch.attr("_C").attr("_len_torch_dispatch_stack")).release().ptr();
            made->tracing = nb::object(torch.attr("_C").attr("_get_tracing_state")).release().ptr();
            made->dtype = name("dtype");
            made->shape = name("shape");
            made->is_cpu = name("is_cpu");
            made->is_contiguous = name("is_contiguous");
            made->is_neg = name("is_neg");
            made->data_ptr = name("data_ptr");
            made->new_empty = name("new_empty");
            made->current_level = name("_current_level");
            made->unpack_dual = name("unpack_dual");
            found.store(made, std::memory_order_release);
            return *made;
        }
    };

    static nb::object checked(PyObject* made) {
        if (made == nullptr) throw nb::python_error();
        return nb::steal(made);
    }
    static nb::object attribute(nb::handle object, const char* name) {
        return checked(PyObject_GetAttrString(object.ptr(), name));
    }
    static nb::object attribute(nb::handle object, PyObject* name) {
        return checked(PyObject_GetAttr(object.ptr(), name));
    }
    static nb::object call(nb::handle object, PyObject* name) {
        PyObject* arguments[] = {object.ptr()};
        return checked(PyObject_VectorcallMethod(name, arguments, 1, nullptr));
    }
    // The address of its numbers; nothing where it says that it has no memory.
    static std::optional<void*> data_of(nb::handle object) {
        PyObject* arguments[] = {object.ptr()};
        const nb::object address = nb::steal(PyObject_VectorcallMethod(Torch::get().data_ptr, arguments, 1, nullptr));
        if (!address.is_valid()) {
            if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw nb::python_error();
            PyErr_Clear();
            return std::nullopt;
        }
        void* data = PyLong_AsVoidPtr(address.ptr());
        if (data == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
        return data;
    }
    // Whether it carries one of forward-mode differentiation, which is asked where some level of that is open.
    static bool has_tangent(nb::handle object) {
        const Torch& torch = Torch::get();
        const nb::object level = nb::steal(PyObject_GetAttr(torch.forward_ad, torch.current_level));
        if (!level.is_valid()) PyErr_Clear(); // it has no such name: ask the tensor
        else if (PyLong_AsLong(level.ptr()) < 0) return false;
        PyObject* arguments[] = {torch.forward_ad, object.ptr()};
        const nb::object dual = checked(PyObject_VectorcallMethod(torch.unpack_dual, arguments, 2, nullptr));
        return attribute(dual, "tangent").ptr() != Py_None;
    }
    // Whether a mode sees every call (fake tensors, torch.fx), or torch.jit traces.
    static bool records() {
        const Torch& torch = Torch::get();
        const nb::object modes = checked(PyObject_CallNoArgs(torch.modes));
        return PyLong_AsLong(modes.ptr()) != 0 || checked(PyObject_CallNoArgs(torch.tracing)).ptr() != Py_None;
    }
    static int64_t size(const nb::object& shape, Py_ssize_t i) {
        return PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
    }

    nb::handle object_;
    nb::object shape_;
};

} // namespace anybit
