#include <pybind11/stl.h>

#include <optional>

#include "address.h"
#include "bindings.h"
#include "message.h"
#include "pycollect/detail/slot.h"

namespace pycollect::python {

void bind_slot(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;

  py::class_<ServerSlots>(module, "ServerSlots", "The server's end of slots.")
      .def(py::init([](const std::optional<Address>& address) {
             return address ? ServerSlots(from_python(*address)) : ServerSlots();
           }),
           py::arg("address") = py::none())
      .def_property_readonly("address",
                             [](const ServerSlots& self) { return to_python(self.address()); })
      .def("__len__", &ServerSlots::count)
      .def("add", &ServerSlots::add)
      .def("asking", &ServerSlots::asking)
      .def("with_message", &ServerSlots::with_message)
      .def(
          "question",
          [](const ServerSlots& self, std::size_t slot) {
            const auto question = self.question(slot);
            return question ? std::optional(to_bytes(*question)) : std::nullopt;
          },
          py::arg("slot"))
      .def("asked_at", &ServerSlots::asked_at, py::arg("slot"))
      .def(
          "answer",
          [](ServerSlots& self, std::size_t slot, const py::bytes& message, std::uint64_t note) {
            self.answer(slot, view_of(message), note);
          },
          py::arg("slot"), py::arg("message") = py::bytes(), py::arg("note") = 0)
      .def(
          "answer_all",
          [](ServerSlots& self, const std::vector<std::size_t>& slots, std::uint64_t note) {
            self.answer_all(slots, note);
          },
          py::arg("slots"), py::arg("note"))
      .def_readonly_static("BYTES", &kSlotBytes);

  py::class_<WorkerSlot>(module, "WorkerSlot", "The worker's end of a slot.")
      .def(py::init([](const Address& slots, std::size_t slot, const Address& bell) {
             return WorkerSlot(from_python(slots), slot, from_python(bell));
           }),
           py::arg("slots"), py::arg("slot"), py::arg("bell"))
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
