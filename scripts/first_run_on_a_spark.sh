#!/usr/bin/env bash
# A first run on a DGX Spark, to be sent back: installs, tests, times kernels, checks and measures,
# and packs what every step said into one archive. A step that fails is noted, and the next one runs.
#
#   scripts/first_run_on_a_spark.sh [CHECKPOINT]
#
# CHECKPOINT: a folder, or a name on Hugging Face or its page's address, e.g.
# nvidia/Qwen3.6-27B-NVFP4; without it the small embedded model alone is built. Its engine stays
# under engines/, named as spark-build names it. Without a GPU it goes as far as
# cross-building and ends with 3. Ctrl-C ends it; what it has found by then is packed.
#   OUT=first_run        the folder that is packed into OUT.tar.gz
#   VENV=.venv           the environment, made where there is none
#   PYTHON=python3       the interpreter that it is made with
#   LIMIT=7200           seconds that one step may take
#
# Exit codes: 0 every step went well, 1 one did not, 2 nothing could begin or be packed, 3 well, but
# without a GPU, 129, 130 or 143 after a lost terminal, Ctrl-C or SIGTERM.
# The archive holds what the steps printed: the system, processor, memory, disk and GPU (what
# nvidia-smi says of it), this repository's commit, and the words of pip, tests, builds, the doctor
# and the benches. No environment variable, key or weight: values of variables that are named like
# keys, and the hub's token, are cut out, and so are the GPU's UUIDs and serial numbers and the
# programs on it; the home folder is written ~. Other paths and the model's name stay.
set -u

# usage: the comment above.
usage() {
    sed -n '2,/^set -u/{s/^# \{0,1\}//p;}' "$0"
}

case ${1:-} in
    -h | --help)
        usage
        exit 0
        ;;
    -*)
        echo "$1 is no option of this script, which has --help alone" >&2
        usage >&2
        exit 2
        ;;
esac
if [ $# -gt 1 ]; then
    echo "$# words were given ($*): give one checkpoint, or none" >&2
    exit 2
fi
CHECKPOINT=${1:-}
[ -d "$CHECKPOINT" ] && CHECKPOINT=$(CDPATH='' cd -- "$CHECKPOINT" && pwd)
CDPATH='' cd -- "$(dirname -- "$0")/.." || exit 2
OUT=${OUT:-first_run}
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-7200}
BIN=$VENV/bin
TINY=models/tiny/checkpoint
failed=0
running=

case $LIMIT in
    *[!0-9]* | 0* | '')
        echo "LIMIT=$LIMIT is no number of seconds: give a whole number from 1 on" >&2
        exit 2
        ;;
esac
for there in "$OUT" "$OUT.tar.gz"; do
    if [ -e "$there" ]; then
        echo "$there is there already: move it away, or name another folder with OUT=..." >&2
        exit 2
    fi
done
mkdir -p "$OUT" || exit 2
rm -rf "$OUT.engines" # of a run that was killed
printf 'step\tcode\tseconds\n' > "$OUT/steps.tsv"
now=beginning

# limited SECONDS NAME COMMAND...: its output goes to OUT/NAME.txt; its code. It has its own group
# and runs behind `wait`, which a signal interrupts: Ctrl-C reaches it through `interrupted` alone.
# What bash starts with & ignores Ctrl-C, and so would all that a step starts: `env` resets that.
limited() {
    local limit=$1 name=$2 code
    shift 2
    { echo "\$ $*"; exec env --default-signal=INT,QUIT timeout -k 30 "$limit" "$@"; } > "$OUT/$name.txt" 2>&1 < /dev/null &
    running=$!
    wait "$running"
    code=$?
    running=
    return "$code"
}

# engine_of CHECKPOINT: the name that spark-build gives its engine (`name_of` in builder/fetch.py).
engine_of() {
    local name=$1
    if [ -d "$name" ]; then
        name=$(CDPATH='' cd -- "$name" && pwd -P)
    else
        name=${name#http*://}
        name=${name#www.}
        case $name in
            huggingface.co/* | hf.co/*) name=${name%%/tree/*} ;;
        esac
        name=${name%%@*}
    fi
    basename -- "$name"
}

# noted NAME CODE SECONDS: a line of OUT/steps.tsv.
noted() {
    printf '%s\t%s\t%s\n' "$1" "$2" "$3" >> "$OUT/steps.tsv"
}

# step NAME COMMAND...: as `limited`, with its code and seconds in OUT/steps.tsv.
step() {
    local code begin=$SECONDS
    now=$1
    shift
    echo "-- $now: $*"
    limited "$LIMIT" "$now" "$@"
    code=$?
    noted "$now" "$code" $((SECONDS - begin))
    if [ "$code" -ne 0 ]; then
        failed=1
        echo "   ended with $code; see $OUT/$now.txt"
        tail -n 3 "$OUT/$now.txt" | sed 's/^/   | /'
    fi
    return "$code"
}

# fact NAME COMMAND...: what the machine says of itself; a command that is missing is no failure.
fact() {
    now=$1
    limited 600 "$@"
}

# Ctrl-C, a lost terminal or SIGTERM: ends the step that runs, and packs what there is.
interrupted() {
    trap '' INT HUP TERM
    echo "ended by SIG$1 in $now" >&2
    if [ -n "$running" ]; then
        kill "$running" 2> /dev/null # timeout hands it on to its command, and kills it 30 s later
        wait "$running"
    fi
    noted "$now" "$2" ended
    pack "$2"
}
trap 'interrupted INT 130' INT
trap 'interrupted HUP 129' HUP
trap 'interrupted TERM 143' TERM

# Cuts keys out of what was said (the values of variables that are named like them, the token that
# `hf auth login` keeps), what tells this GPU and its programs from others, and the home folder.
cut_keys() {
    local python=$PYTHON
    command -v "$python" > /dev/null || python=$BIN/python
    command -v "$python" > /dev/null || {
        rm -f "$OUT/gpu.txt" # nothing of ours ran, but nvidia-smi did
        return 0
    }
    "$python" - "$OUT" << 'END'
import os, re, sys
from pathlib import Path

named = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.I)
keys = [value for name, value in os.environ.items() if named.search(name)]
home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
keys += [path.read_text().strip()] if path.is_file() else []
homes = {str(Path.home()), str(Path.home().resolve())} - {"/"}
homes = "|".join(map(re.escape, sorted(homes, key=len, reverse=True))).encode()
for file in Path(sys.argv[1]).iterdir():
    said = old = file.read_bytes()
    for key in sorted({k.encode() for k in keys if len(k) >= 8}, key=len, reverse=True):
        said = said.replace(key, b"[cut out]")
    said = re.sub(rb"(://)[^/\s:@]+:[^/\s@]+@", rb"\1[cut out]@", said)  # an index's password
    if file.name == "gpu.txt":
        said = re.sub(rb"(?m)^.*(?:Serial Number|[UG]UID)\b.*\n?", b"", said)
        said = re.sub(rb"(?m)^( *)Processes\b.*\n?(?:\1 +.*\n?)*", b"", said)
    said = re.sub(rb"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]+)+", b"[cut out]", said)
    if homes:
        said = re.sub(rb"(?<![\w.-])(?:" + homes + rb")(?![\w.-])", b"~", said)
    if said != old:
        file.unlink()  # first, for where the disk is full: then it is not packed
        file.write_bytes(said)
END
}

# pack CODE: the archive, next to OUT or where there is space, and the end.
pack() {
    local to
    trap '' INT HUP TERM
    rm -rf "$OUT.engines"
    if ! cut_keys; then
        echo "keys could not be cut out of $OUT: nothing is packed; look through it yourself" >&2
        exit 2
    fi
    for to in "$OUT.tar.gz" "$(mktemp -u "${TMPDIR:-/tmp}/first_run.XXXXXX").tar.gz" \
        "$(mktemp -u /dev/shm/first_run.XXXXXX).tar.gz"; do
        if tar -czf "$to" -C "$(dirname -- "$OUT")" -- "$(basename -- "$OUT")"; then
            echo
            cat "$OUT/steps.tsv"
            echo "send back $to"
            exit "$1"
        fi
        rm -f -- "$to"
    done
    echo "no disk has space for the archive: free some, then tar -czf $OUT.tar.gz $OUT" >&2
    exit 2
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
    if ! step venv "$PYTHON" -m venv "$VENV"; then
        rm -rf "$VENV" # half of one has a python and no pip: the next run would take it
        pack 1
    fi
fi
step install "$BIN/python" -m pip install -e '.[cuda,hub,check,bench,test]' || pack 1

# 3. What needs no GPU: the contracts, the doctor, an engine for the Spark built across.
step tests "$BIN/pytest" -q -p no:cacheprovider tests/spark_engine/test_kernel.py tests/device/test_cuda_driver.py \
    tests/device/test_unified_memory.py tests/runtime/doctor tests/runtime/engine/test_load.py
step cross_build "$BIN/spark-build" "$TINY" -o "$OUT.engines/cross" --target sm_121a --no-timing
step cpu_build "$BIN/spark-build" "$TINY" -o "$OUT.engines/cpu" --target cpu
step cpu_answer "$BIN/spark-run" "$OUT.engines/cpu" --prompt "Once upon a time" --max-tokens 32

# The doctor ends with 0 where the engine that was built across can be served here.
fact doctor "$BIN/spark-run" doctor "$OUT.engines/cross"
fact doctor_json "$BIN/spark-run" doctor "$OUT.engines/cross" --json
fact doctor_no_load "$BIN/spark-run" doctor "$OUT.engines/cross" --no-load
served=$?
cat "$OUT/doctor.txt"
if [ "$served" -ne 0 ]; then
    echo "no GPU here serves an engine for sm_121a: the rest needs one; the doctor says why"
    [ "$served" -ne 1 ] && failed=1 # 1 is the doctor's word, and others that it could not say it
    [ "$failed" -eq 0 ] && pack 3
    pack 1
fi

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
    engine=engines/$(engine_of "$CHECKPOINT")
    if step build "$BIN/spark-build" "$CHECKPOINT" -o "$engine"; then
        step report "$BIN/spark-inspect" "$engine"
        step doctor_of_it "$BIN/spark-run" doctor "$engine"
        step record "$BIN/spark-check" "$engine" --level record
        step answer "$BIN/spark-run" "$engine" --chat "What is 3 plus 4?" --max-tokens 256
        for clients in 1 8 32; do
            step "bench_$clients" "$BIN/spark-bench" serve "$engine" --closed "$clients" \
                --requests $((clients * 4)) --json
        done
        step arena "$BIN/spark-bench" arena "$engine" --repeats 1
        step doctor_after "$BIN/spark-run" doctor "$engine"
    fi
fi
pack "$failed"
