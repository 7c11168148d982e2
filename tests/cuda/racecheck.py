"""compute-sanitizer's racecheck over our kernels: racecheck.py SANITIZER PROGRAM [ARGUMENTS].

It takes what all lanes of a warp read before __syncwarp and an arrival of lane 0 for a race with what the arrival
allows: __syncwarp is no instruction to it. Kernels that do this are KNOWN: what it says of them is counted, not judged.
They run under ThreadSanitizer instead, where no race is reported (FATTN_RACES_OF_KERNELS). To leave them out by
--kernel-name-exclude ends racecheck with an internal error."""
import re
import subprocess
import sys

KNOWN = re.compile(r"fattn_(bwd_sm90_b?f16_d64_(full|causal|short|banded|biased|general)_128x128|"
                   r"fwd_decode_rows_b?f16_d64_few_\w+|fwd_sm90_b?f16_d64_parts_128x128)$")
SKIPPED = 77

command = [sys.argv[1], "--tool", "racecheck", "--print-limit", "1000000", "--kernel-name", "kernel_substring=fattn",
           *sys.argv[2:]]
done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
if done.returncode == SKIPPED:
    sys.exit(SKIPPED)
reports = re.findall(r"Race reported between \w+ access at (\w+)\+", done.stdout)
others = [name for name in reports if not KNOWN.match(name)]
whole = "RACECHECK SUMMARY" in done.stdout and "Internal Sanitizer Error" not in done.stdout
if done.returncode or others or not whole or len(reports) != len(re.findall("Race reported", done.stdout)):
    sys.exit(f"{done.stdout}\n{' '.join(command)}: exit code {done.returncode}, reports of {sorted(set(others))}")
print(f"{len(reports)} reports, all of kernels whose synchronisation racecheck does not know: {sorted(set(reports))}")
