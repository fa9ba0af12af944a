/* Loops over a worker's own values that read them once, where torch's functions read them several
   times.

   A large tensor does not stay in the caches between one function and the next: its moments by a sum,
   squared distances and their sum are three passes over memory and one that writes. Here a short block
   is read from memory, and its passes find it in the nearest cache. Nothing here moves data between
   workers, and torch's functions compute the same where this is not compiled. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>
#include <string.h>

/* values of a block: few enough for the nearest cache, and for float32 to sum them well */
enum { BLOCK = 1024, SUMS = 4 };

#define REAL float
#define OF(name) name##_of_floats
#include "moments.h"
#undef REAL
#undef OF
#define REAL double
#define OF(name) name##_of_doubles
#include "moments.h"

static PyObject *py_moments(PyObject *self, PyObject *args) {
    Py_ssize_t x, found, rows, channels, length, itemsize;
    if (!PyArg_ParseTuple(args, "nnnnnn", &x, &found, &rows, &channels, &length, &itemsize)) return NULL;
    if (rows < 1 || channels < 0 || length < 1 || (itemsize != sizeof(float) && itemsize != sizeof(double))) {
        PyErr_SetString(PyExc_ValueError, "moments are of float32 or float64, of one value at least");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (itemsize == sizeof(float))
        moments_of_floats((const float *)x, (float *)found, rows, channels, length);
    else
        moments_of_doubles((const double *)x, (double *)found, rows, channels, length);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"moments", py_moments, METH_VARARGS,
     "moments(x, found, rows, channels, length, itemsize): means and variances of channels."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "loops", "Loops over a worker's values that read them once.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_loops(void) { return PyModule_Create(&module); }
