// pycollect_extension: links the core a second time, next to pycollect._core.
#include <Python.h>

#include "../consumer/use.h"

namespace {

PyObject* frames(PyObject*, PyObject*) { return PyLong_FromLongLong(frames_of_a_batch()); }

PyObject* error(PyObject*, PyObject*) { return PyUnicode_FromString(text_of_an_error().c_str()); }

PyMethodDef methods[] = {{"frames", frames, METH_NOARGS, nullptr},
                         {"error", error, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "pycollect_extension",
                          nullptr,
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_pycollect_extension() { return PyModule_Create(&definition); }
