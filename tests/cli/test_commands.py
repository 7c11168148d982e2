"""The results of check, memory and bench: small runs, whose JSON lines are compared."""
import contextlib
import glob
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

import h5py

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
DATA = os.path.join(os.environ["FATTN_SOURCE"], "data")
SANITIZED = b"__asan_init" in open(FATTN, "rb").read()


def fattn(*words, code=0):
    """Runs the program; its output as text, its exit code as expected."""
    done = subprocess.run([FATTN, *words], capture_output=True, text=True)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def lines(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def check_passes():
    text = fattn("check", "attention/g*", "block", "masks/causal_tall", "--fixtures", DATA,
                 "--json", "check.json")
    assert "3 cases: 3 ok, 0 failed" in text, text
    rows = lines("check.json")
    assert [r["case"] for r in rows[::3]] == ["attention/gqa", "block", "masks/causal_tall"], rows
    assert [r["algorithm"] for r in rows] == ["standard", "flash1", "flash2"] * 3, rows
    for row in rows:
        assert row["state"] == "ok", row
        assert row["checked"] > 50, row
        assert row["worst_relative_error"] < 1e-6, row


def check_in_f32():
    """The same cases, gradients in F32, some of them small sums of large terms: right, and visibly not F64."""
    fattn("check", "attention/causal", "block", "masks/causal_tall", "--fixtures", DATA, "--dtype", "f32",
          "--json", "single.json")
    rows = lines("single.json")
    assert len(rows) == 9, rows
    for row in rows:
        assert row["state"] == "ok" and 1e-9 < row["worst_relative_error"] < 1e-4, row


def check_lists():
    names = fattn("check", "--list", "--fixtures", DATA).split()
    for name in ("attention/plain", "attention/gqa", "attention/one_key", "block", "model"):
        assert name in names, name
    recorded = 0
    for file in os.listdir(DATA):
        if file.endswith(".h5"):
            with h5py.File(os.path.join(DATA, file)) as f:
                recorded += sum("q" in case for case in f["cases"].values())
    masks = fattn("check", "--list", "masks", "--fixtures", DATA).split()
    assert masks == [n for n in names if n.startswith("masks/")] and masks, masks
    assert sum("/" in n and not n.startswith("attention/") for n in names) == recorded, names


def check_finds_installed_fixtures():
    os.makedirs("prefix/bin")
    os.makedirs("prefix/share/fattn")
    shutil.copy(FATTN, "prefix/bin")
    shutil.copy(os.path.join(DATA, "dropout.h5"), "prefix/share/fattn")
    done = subprocess.run(["prefix/bin/fattn", "check", "--list"], capture_output=True, text=True)
    assert done.returncode == 0, done
    names = done.stdout.split()
    assert "dropout/plain" in names and "masks/sink" not in names, names


def check_fails():
    """One wrong number in a file is found, named, and makes the exit code 1."""
    os.mkdir("wrong")
    with h5py.File(os.path.join(DATA, "masks.h5")) as right, \
            h5py.File(os.path.join("wrong", "masks.h5"), "w", libver="latest") as wrong:
        for name, value in right.attrs.items():
            wrong.attrs[name] = value
        right.copy("cases/causal_tall", wrong.create_group("cases"))
        dk = wrong["cases/causal_tall/dk"]
        numbers = dk[...]
        numbers.flat[3] += 1e-9
        dk[...] = numbers
    text = fattn("check", "masks/causal_tall", "--fixtures", "wrong", code=1)
    assert "FAIL" in text and "flash2: dk: " in text and "1 failed" in text, text

    check_extremes()
    with open(os.path.join("wrong", "broken.h5"), "wb") as f:
        f.write(b"not a fixture")
    assert "FATTN_E_IO" in fattn("check", "--fixtures", "wrong", "--list", code=1)
    assert "cannot read the folder" in fattn("check", "--fixtures", "none", "--list", code=1)
    os.mkdir("empty")
    assert "no fixture" in fattn("check", "--fixtures", "empty", "--list", code=1)
    assert 'no case is called "nosuch"' in fattn("check", "nosuch", "--fixtures", DATA, code=2)


def check_extremes():
    """Finds an L of 1e9 that is off by a hundredth, and a gradient off by 1e-9 of its terms; rejects an invalid
    size of terms."""
    wrongs = {"lse": (0.01, "lse: compare"), "dk": (4e-7, "dk: compare"), "unit": (-1e9, "unit[0] is -"),
              "right": (0, "")}
    with h5py.File(os.path.join(DATA, "extremes.h5")) as right, \
            h5py.File(os.path.join("wrong", "extremes.h5"), "w", libver="latest") as wrong:
        for name, value in right.attrs.items():
            wrong.attrs[name] = value
        cases = wrong.create_group("cases")
        for name, (by, _) in wrongs.items():
            right.copy("cases/rows_masked_2_30", cases, name)
            numbers = cases[name].get(name, cases[name]["o"])
            numbers[...] = numbers[...] + by
        right.copy("cases/rows_masked_2_30", cases, "short")
        del cases["short/unit"]
        cases["short/unit"] = [1.0, 1.0, 1.0]
    text = fattn("check", "extremes", "--fixtures", "wrong", code=1)
    assert "1 ok, 4 failed" in text and "unit has 3 numbers, not 7" in text, text
    for _, message in wrongs.values():
        assert message in text, (message, text)
    os.unlink("wrong/extremes.h5")


def memory_is_as_predicted():
    fattn("memory", "--n", "256,512", "--layers", "1", "--json", "memory.json", "--plot", "a/m.svg")
    rows = {(r["what"], r["algorithm"], r["n"]): r for r in lines("memory.json")}
    assert len(rows) == 8, rows
    for row in rows.values():
        predicted = "predicted_bytes" if row["what"] == "layer" else "predicted_at_least_bytes"
        assert all(type(row[key]) is int for key in (predicted, "counted_bytes", "process_bytes")), row
    for n in (256, 512):
        for algorithm in ("standard", "flash"):
            row = rows["layer", algorithm, n]
            assert row["state"] == "measured", row
            assert row["counted_bytes"] == row["predicted_bytes"], row
            # The system counts pages, and memory other than tensors: a few pages more, and never much less.
            if not SANITIZED:
                assert abs(row["process_bytes"] - row["counted_bytes"]) < 2 << 20, row
        for what in ("layer", "model"):
            stored, flash = rows[what, "standard", n], rows[what, "flash", n]
            # Two heads, one layer: P is 2 n^2 floats; flash keeps nothing of that size.
            assert stored["counted_bytes"] - flash["counted_bytes"] > 0.9 * 8 * n * n, (what, n)
    xml.etree.ElementTree.parse("a/m.svg")

    text = fattn("memory", "--n", "64", "--dtype", "bf16", code=2)
    assert "--device cuda" in text and "--layers 0" in text and "embedding" not in text, text
    fattn("memory", "--n", "64", "--dtype", "bf16", "--layers", "0")
    model = {}
    for dtype in ("f32", "f16"):
        fattn("memory", "--n", "512", "--layers", "1", "--dtype", dtype, "--json", "f16.json")
        model[dtype] = [r for r in lines("f16.json") if (r["what"], r["algorithm"]) == ("model", "flash")][0]
    assert model["f16"]["counted_bytes"] < model["f32"]["counted_bytes"], model

    text = fattn("memory", "--n", "64,4096", "--layers", "0", "--limit", "20", "--json", "limit.json")
    assert "no fit" in text, text
    rows = lines("limit.json")
    assert all((r["counted_bytes"] is None) == (r["state"] == "no fit") for r in rows), rows
    states = {(r["algorithm"], r["n"]): r["state"] for r in rows}
    assert states == {("standard", 64): "measured", ("flash", 64): "measured",
                      ("standard", 4096): "no fit", ("flash", 4096): "measured"}, states


def has_child(pid):
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(path) as f:
            if int(f.read().rsplit(")", 1)[1].split()[1]) == pid:
                return True
    return False


def memory_ends_with_its_child():
    """A command that is killed leaves no process that measures on: all ends of the pipe are closed."""
    read, write = os.pipe()
    command = subprocess.Popen([FATTN, "memory", "--n", "1000000", "--d", "2", "--heads", "1", "--layers", "0",
                                "--limit", "1000"], stdout=subprocess.DEVNULL, pass_fds=[write])
    os.close(write)
    time.sleep(1) # the row that stores N x N is not started; the other one takes minutes
    until = time.monotonic() + 20
    while not has_child(command.pid):
        assert time.monotonic() < until and command.poll() is None, command
    command.kill()
    command.wait()
    assert select.select([read], [], [], 20)[0], "the measuring process is still there"
    os.close(read)


def bench_measures():
    fattn("bench", "attention", "--n", "64,128", "--heads", "1", "--repeat", "2", "--causal",
          "--json", "bench.json")
    rows = lines("bench.json")
    assert [(r["n"], r["algorithm"]) for r in rows] == [
        (n, a) for n in (64, 128) for a in ("standard", "flash1", "flash2")], rows
    for row in rows:
        flop = 4 * row["n"] ** 2 * row["head_dim"] / 2
        assert abs(row["forward_gflops"] * row["forward_seconds_best"] * 1e9 / flop - 1) < 1e-6
        assert abs(row["backward_gflops"] * row["backward_seconds_best"] * 1e9 / flop - 2.5) < 1e-5
        assert row["forward_seconds_best"] <= row["forward_seconds_median"]
        assert type(row["peak_bytes"]) is int, row
        assert row["sgemm_gflops"] > 0.1 and row["fma_peak_gflops"] > 0.1, row
    for dtype in ("f64", "f16", "bf16"):
        fattn("bench", "--n", "64", "--heads", "1", "--repeat", "1", "--dtype", dtype, "--algorithm", "auto",
              "--json", "bench.json")
        assert [r["dtype"] for r in lines("bench.json")] == [dtype]
        assert not lines("bench.json")[0]["fp8"]
    said = fattn("bench", "--n", "64", "--heads", "1", "--repeat", "1", "--dtype", "bf16", "--fp8",
                 "--json", "bench.json")
    [row] = lines("bench.json")
    assert row["fp8"] and row["algorithm"] == "flash2" and row["forward_kernel"].startswith("fattn_fwd_fp8_cpu"), row
    assert "forward on 8-bit copies" in said and said.count("not supported") == 2, said
    assert '"cake" cannot be measured' in fattn("bench", "cake", code=2)


def bench_on_a_gpu():
    """Its table where there is a GPU, else an error message."""
    words = ["bench", "--device", "cuda", "--n", "256", "--d", "64", "--repeat", "2", "--seconds", "1"]
    done = subprocess.run([FATTN, *words, "--json", "gpu.json"], capture_output=True, text=True)
    if done.returncode == 1:
        assert "context:" in done.stderr and "CUDA" in done.stderr, done.stderr
        return
    assert done.returncode == 0 and "TFLOP/s" in done.stdout, (done.stdout, done.stderr)
    rows = lines("gpu.json")
    assert [(r["n"], r["causal"], r["dtype"], r["batch"], r["heads"]) for r in rows] == [
        (256, False, "bf16", 64, 32), (256, True, "bf16", 64, 32)], rows
    for row in rows:
        flop = 4 * 64 * 32 * 256 ** 2 * 64 / (1 + row["causal"])
        assert abs(row["forward_gflops"] * row["forward_seconds_best"] * 1e9 / flop - 1) < 1e-6
        assert abs(row["backward_gflops"] * row["backward_seconds_best"] * 1e9 / flop - 2.5) < 1e-5
        assert 0 < row["forward_gflops"] < row["product_gflops"], row
        assert row["copy_gbytes_per_second"] > 10, row


def full_disks_are_failures():
    small = {"check": ["attention/one_key", "--fixtures", DATA],
             "memory": ["--n", "32", "--layers", "0"],
             "bench": ["--n", "16", "--heads", "1", "--repeat", "1"]}
    for command, words in small.items():
        text = fattn(command, *words, "--json", "/dev/full", code=1)
        assert "cannot write /dev/full" in text, text
    assert "cannot write /dev/full" in fattn("memory", *small["memory"], "--plot", "/dev/full", code=1)
    for command, words in small.items():
        with open("/dev/full", "w") as full:
            done = subprocess.run([FATTN, command, *words], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1 and b"standard output" in done.stderr, (command, done)


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for test in (check_passes, check_in_f32, check_lists, check_finds_installed_fixtures, check_fails,
                     memory_is_as_predicted, memory_ends_with_its_child, bench_measures, bench_on_a_gpu,
                     full_disks_are_failures):
            test()
            print("ok", test.__name__)
        os.chdir("/")
    return 0


sys.exit(main())
