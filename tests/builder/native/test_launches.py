"""From any launch of a native engine to its kernel, its reference and its variants' figures."""

from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder import inspect  # noqa: E402
from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.native.cuda_sources import entry, logs, sources  # noqa: E402
from spark_engine.builder.native.launches import describe, launches  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.engine_file import read_engine, read_manifest  # noqa: E402
from spark_engine.errors import InternalError  # noqa: E402
from tests.builder.empty_cubins import built  # noqa: E402
from tests.models.test_synthetic import folder as drawn  # noqa: E402
from tests.repository import ROOT, files  # noqa: E402

FORMATS = ("tiny", "bf16", "modelopt_mixed", "nvfp4_a4", "gptq")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's."""
    return built(tmp_path_factory.mktemp("tiny"), "tiny")


def call(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(inspect.main, [str(w) for w in words])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("format", FORMATS)
def test_every_launch_leads_to_kernel_reference_and_figures(tmp_path: Path, format: str) -> None:
    engine = built(tmp_path, format)
    manifest = read_manifest(engine)
    for bucket in manifest.buckets:
        for launch in launches(read_engine(engine / bucket.file).payload):
            path, line = launch.kernel.split(":")
            at = (ROOT / path).read_text().splitlines()[int(line) - 1 :]
            assert at[0].startswith('extern "C"') and f"{launch.symbol}(" in "".join(at[:2]), launch
            if not launch.reference.startswith("https://onnx.ai/"):
                path, line = launch.reference.split(":")
                first = (ROOT / path).read_text().splitlines()[int(line) - 1]
                assert first.lstrip().startswith("def reference("), launch
            assert launch.logs and all((ROOT / log).is_file() for log in launch.logs), launch
            decided = {
                (r["op"], r["chosen"]) for r in manifest.tactics if r["bucket"] == bucket.file
            }
            assert (launch.op, launch.tactic) in decided


def test_the_command_lists_them_and_tells_of_one(engine: Path) -> None:
    code, text, _ = call(engine, "--bucket", "decode_b1")
    found = launches(read_engine(engine / "decode_b1.engine").payload)
    assert code == 0 and len(text.splitlines()) == 1 + len(found)
    number, node, op, *_ = text.splitlines()[4].split()
    assert (number, node, op) == ("3", found[3].node, found[3].op)
    number = next(i for i, launch in enumerate(found) if "linear" in launch.op)
    code, text, _ = call(engine, "--bucket", "decode_b1.engine", "--launch", number)
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert code == 0 and lines["reference"] == found[number].reference
    assert lines["kernel"] == f"{found[number].kernel} ({found[number].symbol})"
    assert lines["variants"] == ", ".join(found[number].logs)
    assert "layers.0.linear_attn.in_proj_" in lines["weights"]
    assert "predicted" in lines["timed"] and f"{found[number].tactic} " in lines["timed"]


def test_the_times_are_those_of_its_bucket(engine: Path) -> None:
    tactics = read_manifest(engine).tactics
    for file in ("decode_b1.engine", "decode_b32.engine"):
        found = launches(read_engine(engine / file).payload)
        rows = [
            r for r in tactics if (r["bucket"], r["op"], r["chosen"]) == (file, "embed", "rows")
        ]
        assert describe(found, 0, tactics, file).count("\ntimed ") == len(rows) == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--bucket", "decode_b2"), "its buckets are decode_b1.engine, decode_b32.engine, prefill"),
        (("--launch", "0"), "name its bucket too"),
        (("--bucket", "decode_b1", "--launch", "100000"), "give 0 to"),
        (("--bucket", "decode_b1", "--launch", "-1"), "give 0 to"),
    ],
)
def test_what_is_not_there_is_said(engine: Path, words: tuple[str, ...], complaint: str) -> None:
    code, _, error = call(engine, *words)
    assert code == 2 and complaint in error


def test_a_cpu_engine_has_no_launches(tmp_path: Path) -> None:
    options = Options("cpu", decode=(1,), prefill=(64,), max_context=64, max_seqs=1)
    build(drawn(tmp_path / "m", "bf16", False), tmp_path / "e", options, lambda text: None)
    code, _, error = call(tmp_path / "e", "--bucket", "decode_b1")
    assert code == 2 and "--bucket: cpu has no CUDA launches" in error


def test_sources_headers_and_logs(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "k.cu").write_text(
        '// Fast (benchmarks/log/k.md,\n// log/more.md).\n#include "a/h.cuh"\n#include "a/i.cuh"\n'
        'extern "C" __global__ void __launch_bounds__(32)\n    k(int* x) {}\n'
    )
    (tmp_path / "a" / "h.cuh").write_text(
        '// See log/h.md.\nextern "C" __global__ void other(int* k) {}\n'
    )
    (tmp_path / "a" / "i.cuh").write_text("// One.\nint i;\n// log/late.md\n")
    assert list(sources("a/k.cu", tmp_path))[0] == "a/k.cu"
    assert set(sources("a/k.cu", tmp_path)) == {"a/k.cu", "a/h.cuh", "a/i.cuh"}
    assert logs("a/k.cu", tmp_path) == tuple(f"benchmarks/log/{n}.md" for n in ("k", "more", "h"))
    assert entry("k", "a/k.cu", tmp_path) == (tmp_path / "a" / "k.cu", 5)
    assert entry("other", "a/k.cu", tmp_path) == (tmp_path / "a" / "h.cuh", 2)
    with pytest.raises(InternalError, match="no kernel x"):
        entry("x", "a/k.cu", tmp_path)


@pytest.mark.parametrize("path", [p for p in files("plugins/**/*.cu")], ids=str)
def test_every_source_leads_to_a_log(path: Path) -> None:
    found = logs(path.relative_to("plugins/kernels").as_posix())
    assert found and all((ROOT / log).is_file() for log in found)


def test_every_log_is_led_to() -> None:
    """Those of kernels, at least: a log that no source names is not found."""
    sources = (str(p.relative_to("plugins/kernels")) for p in files("plugins/**/*.cu"))
    named = {log for source in sources for log in logs(source)}
    held = {p.as_posix() for p in files("benchmarks/log/*.md")}
    alone = ("README", "sampling/masks", "runtime")
    assert held - named == {f"benchmarks/log/{name}.md" for name in alone}
