"""Runs of `fattn train` on ranks that are threads or processes, for test_ranks*.py."""
import atexit
import json
import os
import re
import resource
import shutil
import signal
import subprocess

import h5py
import numpy as np

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
TINY = ["--layers", "1", "--channels", "16", "--heads", "2", "--batch", "2", "--steps", "6", "--warmup", "2",
        "--eval-every", "3", "--eval-sequences", "10", "--checkpoint-every", "2", "--sample", "0", "--threads", "1",
        "--target", "0"]
RECALL = ["--task", "recall", "--context", "16", *TINY, "--total-batch", "128"] # four passes a step

# For root, more processes than cores, containers; Open MPI keeps memory until a process ends.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_mpi_yield_when_idle": "1",
       "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # the next two: Open MPI 5
       "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none",
       "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}


def start(*words, processes=0, largest_file=None, **environment):
    """`fattn train`, by mpirun if processes is not 0."""
    def prepare():
        if largest_file is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    by = ["mpirun", "-n", str(processes)] if processes else []
    p = subprocess.Popen([*by, FATTN, "train", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         encoding="utf-8", errors="backslashreplace", preexec_fn=prepare,
                         env={**os.environ, **(MPI if processes else {}), **environment})
    atexit.register(lambda: p.poll() is None and p.kill()) # after a failure of the test
    return p


def finish(process, code=0, says="", once="", timeout=60):
    """code None: any but 0."""
    try:
        said = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{process.args}\nhangs: {process.communicate()[0]}")
    shown = f"{process.args}\nexit code {process.returncode}, not {code}\n{said}"
    assert process.returncode == code if code is not None else process.returncode != 0, shown
    assert says in said, f"{shown}\nnot said: {says}"
    assert not once or said.count(once) == 1, f"{shown}\nnot once: {once}"
    return said


def train(*words, code=0, says="", once="", processes=0, timeout=60, **environment):
    return finish(start(*words, processes=processes, **environment), code, says, once, timeout)


def built_with_mpi():
    said = train("--task", "recall", code=None, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    if "built without MPI" in said:
        return False
    assert "Open MPI's mpirun has started 2 processes, MPI knows of one" in said, said
    return True


def can_mpirun():
    why = "mpirun is missing" if not shutil.which("mpirun") else "" if built_with_mpi() else "fattn has no MPI"
    if why:
        print("skipped, with processes:", why)
    return not why


def after_signal(by_mpirun, text):
    """The text, if it can be seen: Open MPI 5's mpirun, once it has a signal, passes on nothing that its ranks say."""
    if not by_mpirun:
        return text
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    known = re.search(r"\(Open MPI\) (\d+)", version)
    return "" if known and int(known[1]) >= 5 else text


def events(log, *kinds):
    """Of the log, without clocks, memory and how the ranks were placed."""
    with open(log) as f:
        lines = [json.loads(line) for line in f]
    return [{k: e[k] for k in sorted(e) if k not in ("elapsed", "tokens_per_second", "peak_bytes")}
            for e in lines if e["event"] in (kinds or ("step", "eval", "end"))]


def steps_in(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name[5:-3]) for name in names if name.startswith("step-"))


def stored(folder, step=None):
    """What a checkpoint has, but its clock and the options that differ on purpose."""
    found = {}
    with h5py.File(os.path.join(folder, f"step-{step or steps_in(folder)[-1]:09d}.h5"), "r") as f:
        f.visititems(lambda name, x: found.update({name: x[()].tobytes()}) if isinstance(x, h5py.Dataset)
                     and not name.startswith("config/") else None)
        found.update({"state/" + k: np.asarray(v).tobytes() for k, v in f["state"].attrs.items() if k != "elapsed"})
        found.update({"config/" + k: np.asarray(v).tobytes() for k, v in f["config"].attrs.items() if k != "threads"})
    assert any(name.startswith("params/") for name in found)
    return found


def assert_same(a, b, what=""):
    assert a.keys() == b.keys(), (what, a.keys() ^ b.keys())
    different = [name for name in a if a[name] != b[name]]
    assert not different, (what, different)
