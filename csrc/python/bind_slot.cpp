#include <pybind11/stl.h>

#include "address.h"
#include "bindings.h"
#include "message.h"
#include "pycollect/detail/slot.h"

namespace pycollect::python {

void bind_slot(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;

  py::class_<ServerSlot>(module, "ServerSlot", "The server's end of a slot.")
      .def(py::init<>())
      .def_property_readonly("address",
                             [](const ServerSlot& self) { return to_python(self.address()); })
      .def_property_readonly("has_question", &ServerSlot::has_question)
      .def("question", [](ServerSlot& self) { return to_bytes(self.question()); })
      .def(
          "answer",
          [](ServerSlot& self, const py::bytes& message, std::uint64_t note) {
            self.answer(view_of(message), note);
          },
          py::arg("message") = py::bytes(), py::arg("note") = 0)
      .def_readonly_static("BYTES", &kSlotBytes);

  py::class_<WorkerSlot>(module, "WorkerSlot", "The worker's end of a slot.")
      .def(py::init([](const Address& slot, const Address& bell) {
             return WorkerSlot(from_python(slot), from_python(bell));
           }),
           py::arg("slot"), py::arg("bell"))
      .def(
          "ask",
          [](WorkerSlot& self, const py::bytes& message, double seconds) {
            self.ask(view_of(message));
            const py::gil_scoped_release release;
            return self.wait_answer(Seconds(seconds));
          },
          py::arg("message") = py::bytes(), py::arg("seconds") = 0)
      .def(
          "wait_answer",
          [](const WorkerSlot& self, double seconds) { return self.wait_answer(Seconds(seconds)); },
          py::arg("seconds"), Release())
      .def("answer", [](const WorkerSlot& self) { return to_bytes(self.answer()); })
      .def_property_readonly("note", &WorkerSlot::note);
}

}  // namespace pycollect::python
