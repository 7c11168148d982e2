#!/bin/sh
# keep_ptxas.sh COMPILER ARGUMENT...: runs the compiler; writes ptxas's report of each kernel to
# OBJECT.ptxas beside the object (tests/cuda/test_kernel_resources.py reads it), other messages to stderr.
object=
previous=
for word in "$@"; do
  if [ "$previous" = -o ]; then object=$word; fi
  previous=$word
done
"$@" 2> "$object.ptxas"
status=$?
grep -v -e '^ptxas info' -e 'bytes stack frame' "$object.ptxas" >&2
exit $status
