"""fattn/dlpack.h with NumPy arrays, through ctypes: fattn reads what NumPy exports, NumPy reads what fattn
exports, and unsupported arrays are rejected."""

import ctypes as c
import os
import unittest

import numpy as np

lib = os.path.join(os.environ["FATTN_BUILD"], "lib")
fattn = c.CDLL(os.path.join(lib, "libfattn.so"))
bridge = c.CDLL(os.path.join(lib, "libtest_dlpack_bridge.so"))

OK, ARG, ABI, SHAPE, DTYPE, DEVICE = 0, 1, 2, 3, 4, 5
F64, F32, F16, BF16, I32, U8, F8E4M3, I8 = 1, 2, 3, 4, 5, 6, 7, 8
MAX_DIMS = 5


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("shape", c.c_int64 * MAX_DIMS),
                ("stride", c.c_int64 * MAX_DIMS), ("ndim", c.c_int32), ("dtype", c.c_int32),
                ("device", c.c_int32), ("device_id", c.c_int32)]


class DLTensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32),
                ("ndim", c.c_int32), ("code", c.c_uint8), ("bits", c.c_uint8),
                ("lanes", c.c_uint16), ("shape", c.POINTER(c.c_int64)),
                ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


class Managed(c.Structure):
    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", c.c_void_p), ("deleter", c.c_void_p)]


class Versioned(c.Structure):
    _fields_ = [("major", c.c_uint32), ("minor", c.c_uint32), ("manager_ctx", c.c_void_p),
                ("deleter", c.c_void_p), ("flags", c.c_uint64), ("dl_tensor", DLTensor)]


get_pointer = c.pythonapi.PyCapsule_GetPointer
get_pointer.restype, get_pointer.argtypes = c.c_void_p, [c.py_object, c.c_char_p]
new_capsule = c.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = c.py_object, [c.c_void_p, c.c_char_p, c.c_void_p]


def dl_tensor(array):
    """The DLTensor that NumPy makes of an array, and the capsule that keeps it alive."""
    capsule = array.__dlpack__()
    return Managed.from_address(get_pointer(capsule, b"dltensor")).dl_tensor, capsule


def imported(array):
    x, capsule = dl_tensor(array)
    t = Tensor()
    assert bridge.bridge_import(c.byref(x), c.byref(t)) == OK
    return t, capsule


class Exporter:
    """A fattn tensor as an object that NumPy's from_dlpack takes."""

    def __init__(self, t):
        self.shape, self.strides = (c.c_int64 * MAX_DIMS)(), (c.c_int64 * MAX_DIMS)()
        self.managed = Managed()
        self.status = bridge.bridge_export(c.byref(t), self.shape, self.strides,
                                           c.byref(self.managed.dl_tensor))

    def __dlpack__(self, stream=None):
        return new_capsule(c.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return 1, 0


class Dlpack(unittest.TestCase):
    def setUp(self):
        self.ctx = c.c_void_p()
        self.assertEqual(fattn.fattn_ctx_create(None, c.byref(self.ctx)), OK)

    def tearDown(self):
        fattn.fattn_ctx_destroy(self.ctx)

    def copy(self, dst, src):
        return fattn.fattn_tensor_copy(self.ctx, c.byref(dst), c.byref(src))

    def through_fattn(self, array, dtype):
        """A contiguous copy of the array, made by fattn."""
        out = np.full(array.shape, 99, dtype)
        (to, keep_to), (of, keep_of) = imported(out), imported(array)
        self.assertEqual(self.copy(to, of), OK)
        return out

    def test_dtypes(self):
        codes = {"f8": F64, "f4": F32, "f2": F16, "i4": I32, "u1": U8, "i1": I8}
        for name, code in codes.items():
            array = np.arange(6).reshape(2, 3).astype(name)
            t, keep = imported(array)
            self.assertEqual((t.dtype, t.ndim, t.device, t.device_id), (code, 2, 1, 0))
            self.assertEqual(t.data, array.ctypes.data)
            np.testing.assert_array_equal(self.through_fattn(array, np.float64), array)

    def test_strided_transposed_reversed_and_sliced(self):
        for dtype in (np.float32, np.float64):
            base = np.random.default_rng(1).standard_normal((4, 6, 5)).astype(dtype)
            for view in (base, base.transpose(2, 0, 1), base[::2, 1:5:3], base[:, ::-1, 3],
                         base[1:1], base[2, 3, 4:5], base[None, ..., None]):
                t, keep = imported(view)
                self.assertEqual(list(t.shape[:t.ndim]), list(view.shape))
                np.testing.assert_array_equal(self.through_fattn(view, dtype), view)

    def test_scalar(self):
        t, keep = imported(np.array(2.5))
        self.assertEqual(t.ndim, 0)
        self.assertEqual(self.through_fattn(np.array(2.5), np.float32), 2.5)

    def test_broadcast_is_read_with_stride_0_and_rejected_as_output(self):
        row = np.arange(3.0)
        view = np.lib.stride_tricks.as_strided(row, (4, 3), (0, 8))
        t, keep = imported(view)
        self.assertEqual(list(t.stride[:2]), [0, 1])
        np.testing.assert_array_equal(self.through_fattn(view, np.float64), view)
        source, keep_source = imported(np.ones((4, 3)))
        self.assertEqual(self.copy(t, source), SHAPE)
        np.testing.assert_array_equal(row, [0, 1, 2])

    def test_read_only(self):
        """NumPy's DLPack 0.x export raises an error; a producer of 1.0 sets a flag, which fattn checks."""
        array = np.ones(3)
        x, keep = dl_tensor(array)
        array.flags.writeable = False
        with self.assertRaises((BufferError, TypeError)):
            array.__dlpack__()
        t, m = Tensor(), Versioned(major=1, minor=1, dl_tensor=x)
        for flags, write, want in ((0, 0, OK), (0, 1, OK), (1, 0, OK), (1, 1, ARG)):
            m.flags = flags
            self.assertEqual(bridge.bridge_import_versioned(c.byref(m), write, c.byref(t)), want)
        m.major = 2
        self.assertEqual(bridge.bridge_import_versioned(c.byref(m), 0, c.byref(t)), ABI)
        self.assertEqual(bridge.bridge_import_versioned(None, 0, c.byref(t)), ARG)

    def test_no_strides_and_byte_offset(self):
        array = np.arange(24.0)
        shape = (c.c_int64 * 3)(2, 3, 2)
        x = DLTensor(data=array.ctypes.data, device_type=1, ndim=3, code=2, bits=64, lanes=1,
                     shape=shape, byte_offset=5 * 8)
        t = Tensor()
        self.assertEqual(bridge.bridge_import(c.byref(x), c.byref(t)), OK)
        self.assertEqual(list(t.stride[:3]), [6, 2, 1])
        out = np.zeros((2, 3, 2))
        to, keep = imported(out)
        self.assertEqual(self.copy(to, t), OK)
        np.testing.assert_array_equal(out.ravel(), np.arange(5.0, 17.0))

    def test_strides_of_empty_arrays_mean_nothing(self):
        for shape in ((0,), (2, 0, 3), (0, 3), (3, 0), (1, 0, 1)):
            for array in (np.zeros(shape), np.zeros(shape).T, np.zeros((5,) + shape)[::2]):
                t, keep = imported(array)
                want = np.cumprod([1, *array.shape[:0:-1]])[::-1] # row-major
                self.assertEqual(list(t.stride[:array.ndim]), want.tolist(), array.shape)
                self.assertEqual(self.copy(t, t), OK)

    def test_errors_write_nothing(self):
        array = np.ones((2, 2))
        shape = (c.c_int64 * 6)(2, 2, 1, 1, 1, 1)
        good = dict(data=array.ctypes.data, device_type=1, ndim=2, code=2, bits=64, lanes=1,
                    shape=shape)
        negative = (c.c_int64 * 2)(2, -1)
        cases = [(dict(code=5), DTYPE), (dict(code=6, bits=8), DTYPE), (dict(code=0), DTYPE),
                 (dict(bits=128), DTYPE), (dict(lanes=2), DTYPE), (dict(code=1, bits=16), DTYPE),
                 (dict(device_type=8), DEVICE), (dict(device_type=13), DEVICE),
                 (dict(ndim=6), SHAPE), (dict(ndim=-1), SHAPE), (dict(shape=negative), SHAPE),
                 (dict(shape=None), ARG)]
        for spoil, want in cases:
            x, t = DLTensor(**{**good, **spoil}), Tensor(ndim=77)
            self.assertEqual(bridge.bridge_import(c.byref(x), c.byref(t)), want, spoil)
            self.assertEqual(t.ndim, 77)
        self.assertEqual(bridge.bridge_import(None, c.byref(Tensor())), ARG)
        self.assertEqual(bridge.bridge_import(c.byref(DLTensor(**good)), None), ARG)

    def test_devices(self):
        shape = (c.c_int64 * 1)(4)
        for device_type, device_id, want in ((1, 0, (1, 0)), (2, 3, (2, 3)), (3, 5, (1, 0))):
            x = DLTensor(data=4096, device_type=device_type, device_id=device_id, ndim=1, code=4,
                         bits=16, lanes=1, shape=shape)
            t = Tensor()
            self.assertEqual(bridge.bridge_import(c.byref(x), c.byref(t)), OK)
            self.assertEqual((t.device, t.device_id, t.dtype), want + (BF16,))

    def test_export(self):
        for name in ("f8", "f4", "f2", "i4", "u1", "i1"):
            base = np.arange(24).reshape(4, 6).astype(name)
            for view in (base, base.T, base[::2, ::3], base[:0]):
                t, keep = imported(view)
                e = Exporter(t)
                self.assertEqual(e.status, OK)
                back = np.from_dlpack(e)
                self.assertEqual(back.dtype, view.dtype)
                np.testing.assert_array_equal(back, view)
                if view.size:
                    self.assertEqual(back.ctypes.data, view.ctypes.data)
                del back  # before e: NumPy then looks for a deleter in e.managed

    def test_e4m3(self):
        codes = np.array([0, 0x38, 0xbc, 0x7e], np.uint8)
        x = DLTensor(data=codes.ctypes.data, device_type=1, ndim=1, code=10, bits=8, lanes=1,
                     shape=(c.c_int64 * 1)(4))
        t, out = Tensor(), np.zeros(4)
        self.assertEqual(bridge.bridge_import(c.byref(x), c.byref(t)), OK)
        self.assertEqual(t.dtype, F8E4M3)
        to, keep = imported(out)
        self.assertEqual(self.copy(to, t), OK)
        np.testing.assert_array_equal(out, [0, 1, -1.5, 448])
        e = Exporter(t)
        back = e.managed.dl_tensor
        self.assertEqual((e.status, back.code, back.bits, back.data), (OK, 10, 8, codes.ctypes.data))

    def test_export_of_bf16_and_errors(self):
        t = Tensor(data=4096, ndim=1, dtype=BF16, device=2, device_id=1)
        e = Exporter(t)
        x = e.managed.dl_tensor
        self.assertEqual((e.status, x.code, x.bits, x.device_type, x.device_id), (OK, 4, 16, 2, 1))
        for spoil, want in ((dict(dtype=9), DTYPE), (dict(device=7), DEVICE), (dict(ndim=6), SHAPE),
                            (dict(ndim=-1), SHAPE)):
            fields = dict(dict(ndim=1, dtype=F32, device=1), **spoil)
            self.assertEqual(Exporter(Tensor(**fields)).status, want)

    def test_sizes(self):
        self.assertEqual((c.sizeof(Tensor), c.sizeof(DLTensor)), (104, 48))


if __name__ == "__main__":
    unittest.main()
