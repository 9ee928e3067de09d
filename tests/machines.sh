#!/usr/bin/env bash
# Run the fast tests as on other machines: tests/machines.sh [PYTEST ARGUMENT …], for all or for some. About 40 minutes
# on two cores. ROWS picks rows by their numbers. PYTHON is the interpreter of the environment.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
seed=$RANDOM
failed=0

suite() { # NAME VARIABLES [OPTIONS]: in the background; prints its closing line when it ends
    # shellcheck disable=SC2086
    (
        env PYTHONPATH=src $2 "$python" -m pytest -q -n 2 --dist worksteal -p no:cacheprovider \
            -m "not slow and not cuda and not drill" ${3:-} $arguments > "$folder/$1.txt" 2>&1
        code=$?
        printf '| %-10s | %-42s | %s |\n' "$1" "$2 ${3:-}" "$(tail -n 1 "$folder/$1.txt")"
        exit $code
    ) &
}

run() { # wait for the suites of a row
    for job in $(jobs -p); do wait "$job" || failed=1; done
}

arguments="$*"
rows=" ${ROWS:-1 2 3 4 5 6} "
echo "logs: $folder"
echo "| machine    | settings                                   | result |"
echo "|---|---|---|"
row() { [[ $rows == *" $1 "* ]]; }
has() { grep -qw "$1" /proc/cpuinfo; } # else torch's kernels would end with an illegal instruction
row 1 && suite default ATEN_CPU_CAPABILITY=default && run
row 2 && has avx2 && suite avx2 ATEN_CPU_CAPABILITY=avx2 && run
row 3 && has avx512vl && suite avx512 ATEN_CPU_CAPABILITY=avx512 && run
row 4 && suite threads "OMP_NUM_THREADS=4 OMP_WAIT_POLICY=passive" && run
row 5 && suite order OMP_NUM_THREADS=1 "--shuffle=$seed" && run
row 6 && suite load-1 OMP_NUM_THREADS=1 && suite load-2 OMP_NUM_THREADS=1 "--shuffle=$seed" && run
exit $failed
