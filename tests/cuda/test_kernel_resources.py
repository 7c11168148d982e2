"""ptxas's report of each attention kernel of this build against tests/golden/kernels-<nvcc version>.txt.

    test_kernel_resources.py BUILD GOLDEN [TABLE] [--update]

BUILD holds *.ptxas files (cmake/keep_ptxas.sh). TABLE, when the kernels are linked, prints the attention
kernels' threads and dynamic shared memory. A golden line is

    kernel architecture registers stack spill-stores spill-loads static-shared [threads dynamic-shared]

with sizes in bytes. --update writes the lines of this build's kernels; without TABLE it keeps the others. A kernel
without a line is named and not held to anything; without a golden file of this nvcc the test is skipped."""
import pathlib
import re
import subprocess
import sys

SKIPPED = 77
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
ATTENTION = re.compile("fattn_(fwd|bwd)_")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def read_build(build):
    """{(kernel, architecture): its numbers}; ptxas tells of one entry at a time."""
    found = {}
    for path in pathlib.Path(build).rglob("*.ptxas"):
        entry, memory = None, ("0", "0", "0")
        for line in path.read_text().splitlines():
            if match := ENTRY.search(line):
                entry = match.groups()
            elif match := MEMORY.search(line):
                memory = match.groups()
            elif match := USED.search(line):
                shared = SHARED.search(line)
                if ATTENTION.match(entry[0]):
                    found[entry] = [match[1], *memory, shared[1] if shared else "0"]
    return found


def main():
    arguments = [a for a in sys.argv[1:] if a != "--update"]
    build, golden, table = arguments[0], pathlib.Path(arguments[1]), arguments[2:]
    found = read_build(build)
    if not found:
        sys.exit(f"no *.ptxas under {build}")
    for line in subprocess.check_output(table, text=True).splitlines() if table else ():
        name, threads, shared = line.split()
        for entry in found:
            if entry[0] == name:
                found[entry] += [threads, shared]
    known = {}
    if golden.exists():
        for line in golden.read_text().splitlines():
            words = line.split()
            known[tuple(words[:2])] = words[2:]
    if "--update" in sys.argv:
        if table: # of all kernels: the others are gone
            known = {}
        golden.write_text("".join(f"{' '.join(e)} {' '.join(n)}\n" for e, n in sorted((known | found).items())))
        return 0
    if not golden.exists():
        print(f"skipped: there is no {golden.name}")
        return SKIPPED
    wrong = new = 0
    for entry, numbers in sorted(found.items()):
        want = known.get(entry)
        if want is None:
            new += 1
            print(f"{' '.join(entry)}: {' '.join(numbers)}, no golden line")
        elif want[:len(numbers)] != numbers:
            wrong += 1
            print(f"{' '.join(entry)}: {' '.join(numbers)}, golden: {' '.join(want)}")
    print(f"{len(found)} kernels: {wrong} differ from {golden.name}, {new} are not in it (--update writes it)")
    return wrong != 0


if __name__ == "__main__":
    sys.exit(main())
