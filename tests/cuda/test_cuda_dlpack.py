"""fattn/dlpack.h with arrays of PyTorch and CuPy in GPU memory: fattn computes on what they export, and they
read what fattn allocates. Skipped (77) where neither finds a GPU."""

import ctypes as c
import importlib
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["FATTN_SOURCE"], "tests", "package"))
try:
    from test_dlpack import BF16, F16, F32, F64, OK, Exporter, Tensor, bridge, fattn, dl_tensor
except ImportError as e:
    print("skipped:", e)
    sys.exit(77)

CUDA, CAUSAL = 2, 1
WORDS = """q k v o lse bias alibi sink seqlens_q seqlens_k cu_seqlens_q cu_seqlens_k rng_step
           d_o d_lse delta dq dk dv d_bias d_sink"""


class Options(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("flags", c.c_uint32), ("device", c.c_int32),
                ("device_id", c.c_int32), ("rest", c.c_uint64 * 8)]


class Params(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("flags", c.c_uint32)]


class Io(c.Structure):
    _fields_ = ([("struct_size", c.c_uint32), ("reserved", c.c_uint32)] +
                [(name, c.POINTER(Tensor)) for name in WORDS.split()] +
                [("saved", c.c_void_p), ("saved_bytes", c.c_size_t), ("workspace", c.c_void_p),
                 ("workspace_bytes", c.c_size_t)])


class OnDevice(Exporter):
    def __dlpack__(self, **stream_and_version):
        return super().__dlpack__()

    def __dlpack_device__(self):
        return CUDA, 0


def imported(array):
    """The fattn tensor of a device array; the capsule keeps the array alive."""
    x, capsule = dl_tensor(array)
    t = Tensor()
    assert bridge.bridge_import(c.byref(x), c.byref(t)) == OK
    return t, capsule


class Frame(unittest.TestCase):
    """For each library: `new(shape, dtype)` of random numbers, `read(array)` as nested lists."""
    library = None

    def setUp(self):
        if self.library is None:
            self.skipTest("not here")
        self.ctx = c.c_void_p()
        fattn.fattn_ctx_error.restype = c.c_char_p
        options = Options(struct_size=c.sizeof(Options), device=CUDA)
        self.assertEqual(fattn.fattn_ctx_create(c.byref(options), c.byref(self.ctx)), OK)

    def tearDown(self):
        if self.library is not None:
            fattn.fattn_ctx_destroy(self.ctx)

    def must(self, status):
        self.assertEqual(status, OK, fattn.fattn_ctx_error(self.ctx).decode())

    def views(self, dtype):
        base = self.new((4, 6, 10), dtype)
        return base, base[::2, 1:5:3], base[2], base[1:1]

    def test_views_are_read_where_they_lie(self):
        for dtype, code in self.dtypes.items():
            for view in self.views(dtype):
                of, keep = imported(view)
                self.assertEqual((of.dtype, of.device, of.ndim), (code, CUDA, view.ndim))
                out = self.new(tuple(view.shape), dtype)
                to, keep_to = imported(out)
                self.must(fattn.fattn_tensor_copy(self.ctx, c.byref(to), c.byref(of)))
                self.must(fattn.fattn_ctx_sync(self.ctx))
                self.assertEqual(self.read(out), self.read(view))

    def test_what_fattn_allocates_is_read_there(self):
        source = self.new((3, 5), self.library.float32)
        of, keep = imported(source)
        t = Tensor()
        self.must(fattn.fattn_tensor_alloc(self.ctx, F32, 2, of.shape, c.byref(t)))
        self.must(fattn.fattn_tensor_copy(self.ctx, c.byref(t), c.byref(of)))
        self.must(fattn.fattn_ctx_sync(self.ctx))
        e = OnDevice(t)
        back = self.library.from_dlpack(e)
        self.assertEqual(self.read(back), self.read(source))
        back[1, 2] = 77  # the same memory
        out = self.new((3, 5), self.library.float32)
        to, keep_to = imported(out)
        self.wait()
        self.must(fattn.fattn_tensor_copy(self.ctx, c.byref(to), c.byref(t)))
        self.must(fattn.fattn_ctx_sync(self.ctx))
        self.assertEqual(self.read(out)[1][2], 77)
        del back
        fattn.fattn_tensor_free(self.ctx, c.byref(t))

    def test_attention_on_slices_of_one_array(self):
        """q, k, v are slices of one [B,S,3,H,D]; o is an array of the other library."""
        lib, (B, S, H, D) = self.library, (2, 33, 3, 16)
        qkv = self.new((B, S, 3, H, D), lib.float64)
        parts = [self.swap(qkv[:, :, n]) for n in range(3)]
        o, lse = self.new((B, H, S, D), lib.float64), self.new((B, H, S), lib.float64)
        room = self.new((1 << 16,), lib.float64)
        tensors = [imported(x) for x in (*parts, o, lse, room)]
        io = Io(struct_size=c.sizeof(Io), **{name: c.pointer(t) for name, (t, keep) in
                                             zip(("q", "k", "v", "o", "lse"), tensors)})
        io.workspace, io.workspace_bytes = (tensors[-1][0].data + 255) // 256 * 256, 7 << 16
        params = Params(struct_size=c.sizeof(Params), flags=CAUSAL)
        self.wait()
        self.must(fattn.fattn_attention_fwd(self.ctx, c.byref(params), c.byref(io)))
        self.must(fattn.fattn_ctx_sync(self.ctx))
        q, k, v = parts
        s = (q @ k.swapaxes(2, 3)) / D ** 0.5
        i = self.count(S)
        s = lib.where(i[:, None] >= i[None, :], s, -float("inf"))
        p = lib.exp(s - lse[..., None])
        self.assertLess(float(abs(p.sum(-1) - 1).max()), 1e-12)
        self.assertLess(float(abs(p @ v - o).max()), 1e-12)


class PyTorch(Frame):
    def setUp(self):
        if self.library is None:
            self.skipTest("no PyTorch with a GPU")
        self.dtypes = {torch.float64: F64, torch.float32: F32, torch.float16: F16,
                       torch.bfloat16: BF16}
        super().setUp()

    def new(self, shape, dtype):
        return torch.randn(shape, device="cuda", dtype=torch.float64).to(dtype)

    def read(self, x):
        return x.double().tolist()

    def swap(self, x):
        return x.transpose(1, 2)

    def count(self, n):
        return torch.arange(n, device="cuda")

    def wait(self):
        torch.cuda.synchronize()

    def test_transposed(self):
        view = self.new((4, 6), torch.float32).T
        of, keep = imported(view)
        self.assertEqual(list(of.stride[:2]), [1, 6])


class CuPy(Frame):
    def setUp(self):
        if self.library is None:
            self.skipTest("no CuPy with a GPU")
        self.dtypes = {cupy.float64: F64, cupy.float32: F32, cupy.float16: F16}
        super().setUp()

    def new(self, shape, dtype):
        return cupy.random.standard_normal(shape).astype(dtype)

    def read(self, x):
        return x.astype(cupy.float64).tolist()

    def swap(self, x):
        return x.swapaxes(1, 2)

    def count(self, n):
        return cupy.arange(n)

    def wait(self):
        cupy.cuda.Device().synchronize()


def found(name, works):
    try:
        library = importlib.import_module(name)
        return library if works(library) else None
    except Exception as e:  # an installed library without a driver may raise any exception
        print(f"{name}: {e}")
        return None


torch = PyTorch.library = found("torch", lambda t: t.cuda.is_available())
cupy = CuPy.library = found("cupy", lambda t: t.cuda.runtime.getDeviceCount() > 0)
del Frame

if __name__ == "__main__":
    if not (torch or cupy):
        print("skipped: neither PyTorch nor CuPy finds a GPU")
        sys.exit(77)
    unittest.main()
