// Coded planes in Python: arrays checked, one call at a time.
#include "module/coding_module.h"

#include "coding/plane_coder.h"
#include "module/arrays.h"

#include <nanobind/stl/vector.h>

#include <mutex>

using namespace anybit;

namespace {

// Rows of a plane as they come, checked. Shapes are copied: what is checked stays what is read.
class CheckedRows {
public:
    template <typename A>
    CheckedRows(int64_t plane, const std::vector<Input>& above, const Input& shapes, int64_t columns, const A& words) {
        check_range("plane", plane, FIRST_CODED, LAST_CODED);
        check_range("columns", columns, 1, MAX_SIZE - 1);
        rows.plane = static_cast<int>(plane);
        rows.columns = columns;
        rows.rows = size_of("words", words, 0, 2);
        check("words", words, {Type::u32, Type::i32}, {rows.rows, rows.words()}, Layout::dense);
        check("shapes", shapes, {Type::u8}, {rows.rows}, Layout::dense);
        if (static_cast<int64_t>(above.size()) != plane - 1)
            refuse(std::to_string(above.size()) + " planes above plane " + std::to_string(plane));
        for (size_t p = 0; p < above.size(); ++p) {
            check("above", above[p], {Type::u32, Type::i32}, {rows.rows, rows.words()}, Layout::dense);
            rows.above[p] = static_cast<const uint32_t*>(above[p].data());
        }
        const auto* from = static_cast<const uint8_t*>(shapes.data());
        shapes_.assign(from, from + rows.rows);
        for (size_t i = 0; i < shapes_.size(); ++i)
            if (shapes_[i] >= CODED_SHAPES)
                refuse("shapes[" + std::to_string(i) + "] is not below " + std::to_string(CODED_SHAPES));
        rows.shapes = shapes_.data();
    }

    PlaneRows rows{};

private:
    std::vector<uint8_t> shapes_;
};

class Writer {
public:
    void write(int64_t plane, const std::vector<Input>& above, const Input& shapes, int64_t columns,
               const Input& words) {
        const CheckedRows checked(plane, above, shapes, columns, words);
        nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> alone(mutex_);
        writer_.write(checked.rows, static_cast<const uint32_t*>(words.data()));
    }

    nb::bytes finish() {
        std::vector<uint8_t> made;
        {
            nb::gil_scoped_release release;
            const std::lock_guard<std::mutex> alone(mutex_);
            made = writer_.finish();
            writer_ = PlaneWriter();
        }
        return nb::bytes(made.data(), made.size());
    }

private:
    std::mutex mutex_;
    PlaneWriter writer_;
};

class Reader {
public:
    Reader(const Input& coded, bool fast) : coded_(checked(coded)), reader_(coded_.data(), size(), fast) {}

    void read(int64_t plane, const std::vector<Input>& above, const Input& shapes, int64_t columns,
              const Output& words) {
        const CheckedRows checked(plane, above, shapes, columns, words);
        bool good;
        {
            nb::gil_scoped_release release;
            const std::lock_guard<std::mutex> alone(mutex_);
            good = reader_.read(checked.rows, static_cast<uint32_t*>(words.data()));
        }
        if (!good) refuse("the coded planes are damaged: they end too early, or say what no writer says");
    }

    void finish() {
        const std::lock_guard<std::mutex> alone(mutex_);
        if (!reader_.at_end()) refuse("the coded planes are damaged: they do not end where they should");
    }

private:
    // A copy, which nobody changes meanwhile.
    static std::vector<uint8_t> checked(const Input& coded) {
        check("coded", coded, {Type::u8}, {size_of("coded", coded, 0, 1)}, Layout::dense);
        const auto* from = static_cast<const uint8_t*>(coded.data());
        return {from, from + coded.size()};
    }
    int64_t size() const { return static_cast<int64_t>(coded_.size()); }

    std::mutex mutex_;
    const std::vector<uint8_t> coded_;
    PlaneReader reader_;
};

} // namespace

void add_coding(nb::module_& m) {
    nb::class_<Writer>(m, "PlaneWriter", "Codes planes, given the planes above them, as one stream.")
        .def(nb::init<>())
        .def("write", &Writer::write, nb::arg("plane"), nb::arg("above").noconvert(), nb::arg("shapes").noconvert(),
             nb::arg("columns"), nb::arg("words").noconvert(),
             "Put rows of plane 2 to 4: words uint32 (or int32) [rows, (columns + 31) / 32], above: the planes before\n"
             "it, alike; shapes uint8 [rows].")
        .def("finish", &Writer::finish, "The stream; the next one begins.");
    nb::class_<Reader>(m, "PlaneReader", "Planes that a PlaneWriter has coded, in the order in which they were put.")
        .def(nb::init<const Input&, bool>(), nb::arg("coded").noconvert(), nb::arg("fast") = true,
             "coded uint8 [n]; fast: by instructions for it, where the processor has them.")
        .def("read", &Reader::read, nb::arg("plane"), nb::arg("above").noconvert(), nb::arg("shapes").noconvert(),
             nb::arg("columns"), nb::arg("words").noconvert(),
             "Fill words, rows of plane 2 to 4; the other arguments as those of `PlaneWriter.write`.")
        .def("finish", &Reader::finish, "Raise ValueError unless the stream ends here.");
}
