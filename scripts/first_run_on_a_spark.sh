#!/usr/bin/env bash
# A first run on a DGX Spark, to be sent back: installs, tests, times kernels, checks and measures,
# and packs what every step said into one archive. A step that fails is noted, and the next one runs.
#
#   scripts/first_run_on_a_spark.sh [CHECKPOINT]
#
# CHECKPOINT: a folder or a name on Hugging Face, e.g. nvidia/Qwen3.6-27B-NVFP4; without it the small
# embedded model alone is built. Without a GPU it goes as far as cross-building and ends with 3.
#   OUT=first_run        the folder that is packed into OUT.tar.gz
#   VENV=.venv           the environment, made where there is none
#   PYTHON=python3       the interpreter that it is made with
#   LIMIT=7200           seconds that one step may take
#
# Exit codes: 0 every step went well, 1 one did not, 2 nothing could begin, 3 well, but without a GPU.
# The archive holds what the steps printed, and no environment variable, key or weight.
set -u
cd "$(dirname "$0")/.." || exit 2

CHECKPOINT=${1:-}
OUT=${OUT:-first_run}
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-7200}
BIN=$VENV/bin
TINY=models/tiny/checkpoint
failed=0

if [ -e "$OUT" ]; then
    echo "$OUT is there already: move it away, or name another folder with OUT=..." >&2
    exit 2
fi
mkdir -p "$OUT" || exit 2
printf 'step\tcode\tseconds\n' > "$OUT/steps.tsv"

# step NAME COMMAND...: its words go to OUT/NAME.txt, its code and seconds to OUT/steps.tsv.
step() {
    local name=$1 code begin
    shift
    echo "-- $name: $*"
    begin=$SECONDS
    { echo "\$ $*"; timeout "$LIMIT" "$@"; } > "$OUT/$name.txt" 2>&1 < /dev/null
    code=$?
    printf '%s\t%s\t%s\n' "$name" "$code" $((SECONDS - begin)) >> "$OUT/steps.tsv"
    if [ "$code" -ne 0 ]; then
        failed=1
        echo "   ended with $code; see $OUT/$name.txt"
        tail -n 3 "$OUT/$name.txt" | sed 's/^/   | /'
    fi
    return "$code"
}

# fact NAME COMMAND...: what the machine says of itself; a command that is missing is no failure.
fact() {
    local name=$1
    shift
    { echo "\$ $*"; timeout 60 "$@"; } > "$OUT/$name.txt" 2>&1 < /dev/null
}

pack() {
    tar -czf "$OUT.tar.gz" -C "$(dirname "$OUT")" "$(basename "$OUT")" || exit 2
    echo
    cat "$OUT/steps.tsv"
    echo "send back $OUT.tar.gz"
    exit "$1"
}

# 1. What is there.
fact system cat /etc/os-release /proc/version
fact cpu lscpu
fact memory cat /proc/meminfo
fact disk df -h .
fact gpu nvidia-smi -q
fact commit git log -1 --oneline

# 2. Installing.
if [ ! -x "$BIN/python" ]; then
    step venv "$PYTHON" -m venv "$VENV" || pack 1
fi
step install "$BIN/python" -m pip install -e '.[cuda,hub,check,bench,test]' || pack 1

# 3. What needs no GPU: the contracts, the doctor, an engine for the Spark built across.
step tests "$BIN/pytest" -q -p no:cacheprovider tests/test_kernel.py tests/test_cuda_driver.py \
    tests/test_unified_memory.py tests/runtime/doctor tests/runtime/engine/test_load.py
step cross_build "$BIN/spark-build" "$TINY" -o "$OUT.engines/cross" --target sm_121a --no-timing
step cpu_build "$BIN/spark-build" "$TINY" -o "$OUT.engines/cpu" --target cpu
step cpu_answer "$BIN/spark-run" "$OUT.engines/cpu" --prompt "Once upon a time" --max-tokens 32

# The doctor ends with 0 where the engine that was built across can be served here.
fact doctor "$BIN/spark-run" doctor "$OUT.engines/cross"
fact doctor_json "$BIN/spark-run" doctor "$OUT.engines/cross" --json
if ! "$BIN/spark-run" doctor "$OUT.engines/cross" --no-load > /dev/null 2>&1; then
    cat "$OUT/doctor.txt"
    echo "no GPU here serves an engine for sm_121a: the rest needs one"
    rm -rf "$OUT.engines"
    [ "$failed" -eq 0 ] && pack 3
    pack 1
fi
cat "$OUT/doctor.txt"

# 4. Every kernel against its reference, then timed tactics: the small model.
step gpu_tests "$BIN/pytest" -q -p no:cacheprovider -m gpu
step timed_build "$BIN/spark-build" "$TINY" -o "$OUT.engines/tiny"
step timed_report "$BIN/spark-inspect" "$OUT.engines/tiny"
step tiny_check "$BIN/spark-check" "$OUT.engines/tiny" --against "$OUT.engines/cpu"
step tiny_answer "$BIN/spark-run" "$OUT.engines/tiny" --chat "What is 3 plus 4?" --max-tokens 64
step tiny_bench "$BIN/spark-bench" serve "$OUT.engines/tiny" --closed 8 --requests 64 \
    --input 64-128 --output 32-64 --json

# 5. The model that was named. It is kept, since it took long to build.
if [ -n "$CHECKPOINT" ]; then
    engine=engines/$(basename "$CHECKPOINT")
    if step build "$BIN/spark-build" "$CHECKPOINT" -o "$engine"; then
        step report "$BIN/spark-inspect" "$engine"
        step doctor_of_it "$BIN/spark-run" doctor "$engine"
        step record "$BIN/spark-check" "$engine" --level record
        step answer "$BIN/spark-run" "$engine" --chat "What is 3 plus 4?" --max-tokens 256
        for clients in 1 8 32; do
            step "bench_$clients" "$BIN/spark-bench" serve "$engine" --closed "$clients" \
                --requests $((clients * 4)) --json
        done
        step doctor_after "$BIN/spark-run" doctor "$engine"
    fi
fi
rm -rf "$OUT.engines"
pack "$failed"
