#include <pybind11/stl.h>

#include <atomic>
#include <optional>

#include "address.h"
#include "bindings.h"
#include "message.h"
#include "pycollect/detail/mailbox.h"
#include "pycollect/detail/process.h"

namespace pycollect::python {

void bind_mailbox(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;

  module.def("adopt_orphans", &adopt_orphans,
             "Make this process the parent of each descendant when its parent dies.");
  module.def("kill_descendants", &kill_descendants, Release(),
             "Kill all descendants of this process.");
  module.def("end_with_process", &end_with_process, py::arg("pid"),
             "Kill this process and its descendants when a process is gone.");
  module.def("merge_freed_memory", &merge_freed_memory,
             "Make malloc merge small blocks as they are freed.");

  using Number = std::atomic<std::uint64_t>;
  py::class_<Number, SharedNumber>(module, "SharedNumber", "A number that others see at once.")
      .def(py::init<>())
      .def_property(
          "value", [](const Number& self) { return self.load(); },
          [](Number& self, std::uint64_t value) { self.store(value); });

  py::class_<Bell>(module, "Bell", "The signal of all workers to their driver.")
      .def(py::init([](const std::optional<Address>& address) {
             return address ? Bell(from_python(*address)) : Bell();
           }),
           py::arg("address") = py::none())
      .def_property_readonly("address", [](const Bell& self) { return to_python(self.address()); })
      .def_property_readonly("count", &Bell::count)
      .def("ring", &Bell::ring)
      .def(
          "wait_ring",
          [](const Bell& self, std::uint64_t seen, double seconds) {
            return self.wait_ring(seen, Seconds(seconds));
          },
          py::arg("seen"), py::arg("seconds"), Release())
      .def("ring_when_gone", &Bell::ring_when_gone, py::arg("pid"))
      .def_property_readonly("knocks", &Bell::knocks)
      .def("knock", &Bell::knock, py::arg("times") = 1)
      .def(
          "wait_knock",
          [](const Bell& self, std::uint64_t heard, double seconds, std::uint64_t number) {
            return self.wait_knock(heard, Seconds(seconds), number);
          },
          py::arg("heard"), py::arg("seconds"), py::arg("number") = 1, Release());

  py::class_<Mailbox>(module, "Mailbox", "The driver's end of a mailbox.")
      .def(py::init<std::int64_t>(), py::arg("capacity"))
      .def_property_readonly("address",
                             [](const Mailbox& self) { return to_python(self.address()); })
      .def_property_readonly("asked", &Mailbox::asked)
      .def_property_readonly("answered", &Mailbox::answered)
      .def(
          "ask", [](Mailbox& self, const py::bytes& message) { return self.ask(view_of(message)); },
          py::arg("message"))
      .def_property_readonly("has_answer", &Mailbox::has_answer)
      .def("take_answer", [](Mailbox& self) { return to_bytes(self.take_answer()); })
      .def("stop", &Mailbox::stop, py::arg("number"))
      .def(
          "publish",
          [](Mailbox& self, const py::bytes& message) { self.publish(view_of(message)); },
          py::arg("message"))
      .def_property_readonly("steps", &Mailbox::steps)
      .def_readonly_static("ASK_BYTES", &kAskBytes)
      .def_readonly_static("ANSWER_BYTES", &kAnswerBytes);

  py::class_<WorkerMailbox>(module, "WorkerMailbox", "The worker's end of a mailbox.")
      .def(py::init([](const Address& mailbox, const Address& bell) {
             return WorkerMailbox(from_python(mailbox), from_python(bell));
           }),
           py::arg("mailbox"), py::arg("bell"))
      .def(
          "wait_ask",
          [](const WorkerMailbox& self, double seconds) { return self.wait_ask(Seconds(seconds)); },
          py::arg("seconds"), Release())
      .def("question", [](const WorkerMailbox& self) { return to_bytes(self.question()); })
      .def_property_readonly("number", &WorkerMailbox::number)
      .def(
          "answer",
          [](WorkerMailbox& self, const py::bytes& message) { self.answer(view_of(message)); },
          py::arg("message"))
      .def("published", [](const WorkerMailbox& self) { return to_bytes(self.published()); })
      .def_property_readonly("stop", &WorkerMailbox::stop)
      .def_property_readonly("steps", &WorkerMailbox::steps);
}

}  // namespace pycollect::python
