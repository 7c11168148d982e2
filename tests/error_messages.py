"""Which error messages has no test provoked? error_messages.py BUILD, after the tests have run in a build with gcc's
--coverage (preset cpu-coverage). Prints each call of fattn_ctx_fail, or of what stands for it, in the
libraries that never ran, with its error message.
"""
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ERRORS = re.compile(r"(?:return|=)\s+"
                      r"(?:fattn_ctx_fail|fattni_fixture_fail|fattni_misfit|fail|fail_create|fail_case|refuse)\(")
PARTS = ("core", "fwd", "bwd", "autograd_c")


def counts(build):
    """How often each line ran: {file: {line: times}}."""
    found = {}
    for data in pathlib.Path(build).resolve().glob("CMakeFiles/**/*.gcda"):
        run = subprocess.run(["gcov", "--json-format", "--stdout", data], capture_output=True,
                             cwd=build, check=True)
        for report in run.stdout.decode().splitlines():
            report = json.loads(report)
            for file in report["files"]:
                path = pathlib.Path(report["current_working_directory"], file["file"]).resolve()
                lines = found.setdefault(path, {})
                for line in file["lines"]:
                    number = line["line_number"]
                    lines[number] = lines.get(number, 0) + line["count"]
    return found


def message(code):
    """The strings of the call that begins at that line."""
    return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', code.split(");")[0]))


def main(build):
    found, total, silent = counts(build), 0, 0
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*")):
            if path not in found:
                continue
            text = path.read_text()
            for call in ERRORS.finditer(text):
                line = text.count("\n", 0, call.start()) + 1
                if line not in found[path]:
                    continue
                total += 1
                if not found[path][line]:
                    silent += 1
                    print(f"{path.relative_to(ROOT)}:{line}: {message(text[call.start():])}")
    print(f"{total} error messages, {silent} of them never provoked")


if __name__ == "__main__":
    main(*sys.argv[1:])
