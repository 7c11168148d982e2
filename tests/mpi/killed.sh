#!/bin/sh
# killed.sh COMMAND...: mpirun with a program, one of whose processes dies. The others are ended within seconds.
begin=$(date +%s)
timeout -s KILL 40 "$@"
status=$?
seconds=$(($(date +%s) - begin))
echo "mpirun has ended with status $status after $seconds s"
[ $status != 0 ] && [ $seconds -le 20 ]
