#!/usr/bin/env bash
# Runs every GPU test of this folder, then, when all have passed, every benchmark; a table comes last.
#
# Needs a GPU and its driver, and neither Rust nor a CUDA toolkit. Logs go to $OUT, or else to `out` here.
# KV_GPU_TIMEOUT_S bounds each program, in seconds: a kernel that hangs must not hide the other results.
set -u

here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/out}
limit_s=${KV_GPU_TIMEOUT_S:-300}
# Without a device the tests fail instead of being listed as ignored.
export KV_REQUIRE_GPU=1

# Programs are packed where the machine that packed them has gzip.
for packed in "$here"/*/*.gz; do
    [ -e "$packed" ] || continue
    gunzip --force "$packed" || exit 2
done

mkdir -p "$out" || exit 2
tests_log=$out/tests.log
benches_log=$out/benches.log
table=$out/results.txt
: >"$tests_log"
: >"$benches_log"
printf '%-40s %-12s %8s\n' name result seconds >"$table"
failures=0

bounded() {
    if command -v timeout >/dev/null 2>&1; then
        timeout "$limit_s" "$@"
    else
        "$@"
    fi
}

# run_one LOG NAME PROGRAM [ARGUMENT…]
run_one() {
    local log=$1 name=$2
    shift 2
    local part=$out/.part
    local start=$SECONDS
    echo "== $name"
    bounded "$@" >"$part" 2>&1
    local status=$?
    local seconds=$((SECONDS - start))
    { echo "== $name: status $status, $seconds s"; cat "$part"; echo; } >>"$log"
    local result=ok
    if [ "$status" -ne 0 ]; then
        result="FAILED ($status)"
    elif [ "$log" = "$tests_log" ] && ! grep '^test result: ok\. [1-9]' "$part"; then
        # Neither a program without trials nor one that left them all out shows anything.
        result="RAN NOTHING"
    fi
    if [ "$result" != ok ]; then
        failures=$((failures + 1))
        tail -n 60 "$part"
    fi
    rm -f "$part"
    printf '%-40s %-12s %8d\n' "$name" "$result" "$seconds" >>"$table"
}

if command -v nvidia-smi >/dev/null 2>&1; then
    nvidia-smi -L
    echo "driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
else
    echo "nvidia-smi: not found"
fi | tee -a "$tests_log"

for program in "$here"/tests/*; do
    [ -x "$program" ] || continue
    run_one "$tests_log" "tests/$(basename "$program")" "$program"
done

if [ "$failures" -eq 0 ]; then
    for program in "$here"/benches/*; do
        [ -x "$program" ] || continue
        run_one "$benches_log" "benches/$(basename "$program")" "$program" --bench
    done
    cat "$benches_log"
else
    echo "a test failed: no benchmark was run"
fi

echo
cat "$table"
[ "$failures" -eq 0 ]
