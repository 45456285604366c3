"""The same requests again and again: texts that differ are reported one by one."""

import io
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from spark_engine.check.cli import main
from spark_engine.check.texts import repeat as module
from spark_engine.check.texts.repeat import GENERATED, TEXTS, Repeated, Run, repeat, show_repeated
from spark_engine.interface import DECODE, Limits
from spark_engine.progress import Progress
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.executor import Wait
from spark_engine.tensors import Array
from tests.runtime.fake_executor import VOCAB, FakeExecutor, build_fake

LIMITS = Limits(max_seqs=8, max_context=512, pages=80, vocab=VOCAB)
BUCKETS = (1, 4, 8), (2, 8)
QUIET = Progress(None)


class Rounding(FakeExecutor):
    """Gives another token at one position, as a bucket does that rounds a near tie differently."""

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        wait = super().launch(buffers)

        def changed() -> None:
            wait()
            tokens = buffers["next_tokens"]
            tied = (buffers["starts"] % 50 == 49) & (buffers["slots"] >= 0)
            tokens[tied] = (tokens[tied] + 1) % VOCAB

        return changed


def _rounding() -> Loaded:
    loaded = build_fake(LIMITS, *BUCKETS, lazy=False)
    one = loaded.executors[DECODE, 4]
    assert isinstance(one, FakeExecutor)
    other = Rounding(LIMITS, DECODE, 4, one._device)
    return replace(loaded, executors={**loaded.executors, (DECODE, 4): other})


def test_an_engine_that_never_parts_from_itself() -> None:
    loaded = replace(build_fake(LIMITS, *BUCKETS), invariant=True)
    found = repeat(loaded, "e", 3, [[5, 6, 7]], QUIET)
    assert (found.texts, found.tokens, found.invariant) == (TEXTS, TEXTS * GENERATED, True)
    assert [run.arriving for run in found.runs] == ["as before", *["at other times"] * 2]
    assert all((run.same, run.agreement, run.prompt) == (TEXTS, 1.0, -1) for run in found.runs)
    assert found.passed


def test_a_bucket_that_rounds_otherwise_is_noise_unless_it_was_built_invariant() -> None:
    found = repeat(_rounding(), "e", 3, [], QUIET, seed=3)
    later = found.runs[1:]
    assert any(run.same < TEXTS for run in later) and found.passed
    worst = min(later, key=lambda run: run.same)
    assert 0 < worst.agreement < 1 and 0 <= worst.prompt < TEXTS and 0 < worst.token < GENERATED
    again = repeat(replace(_rounding(), invariant=True), "e", 3, [], QUIET, seed=3)
    assert not again.passed


def test_runs_meet_other_company(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[list[int]] = []
    true = module._together

    def together(engine: object, requests: object, steps: list[int]) -> object:
        late.append(list(steps))
        return true(engine, requests, steps)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_together", together)
    repeat(build_fake(LIMITS, *BUCKETS), "e", 3, [], QUIET)
    assert late[0] == late[1] == [0] * TEXTS
    assert late[2] != late[3] and max(late[2]) > 0 and late[2] != sorted(late[2])


def test_prompts_fit_the_engine_and_half_of_them_begin_alike() -> None:
    loaded = build_fake(LIMITS, *BUCKETS)
    prompts = [r.prompt for r in module._requests(loaded, [[5, 6, 7]], random.Random(0))]
    assert prompts[0] == (5, 6, 7) and len(prompts) == TEXTS
    assert max(map(len, prompts)) == 512 - GENERATED, "the longest is cut"
    heads = [prompt[:130] for prompt in prompts]
    assert max(map(heads.count, heads)) >= TEXTS // 2 - 1
    small = build_fake(replace(LIMITS, max_context=8), *BUCKETS)
    assert repeat(small, "e", 1, [[1] * 20], QUIET).tokens == 4 * TEXTS


def test_a_text_that_parts_is_counted_by_hand() -> None:
    first = [(1, 2, 3, 4), (5, 6), (7, 8)]
    other = [(1, 2, 9, 4), (5, 6), (7,)]
    assert module._compared("x", first, other) == Run("x", 1, (0.5 + 1 + 0.5) / 3, 2, 1)
    assert module._compared("x", first, first) == Run("x", 3, 1.0)


def test_what_is_printed() -> None:
    runs = (Run("as before", 16, 1.0), Run("at other times", 13, 0.8125, 4, 7))
    for invariant, words in ((False, "not built invariant"), (True, "built invariant")):
        stream = io.StringIO()
        show_repeated(Repeated("e", invariant, 16, 1024, runs), Console(file=stream, width=120))
        text = stream.getvalue()
        assert "text 4, token 7" in text and "0.812" in text
        assert f"e ({words}): 3 of 32 texts differed" in text


def _call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize("option", [("--against", "x"), ("--level", "op"), ("--level", "all")])
def test_what_means_nothing_with_repeat_is_refused(option: tuple[str, str], tmp_path: Path) -> None:
    done = _call(tmp_path, "--repeat", 2, *option)
    assert done.exit_code == 2
    assert f"{option[0]} does nothing with --repeat" in done.stderr


def test_repeat_must_be_a_count_and_needs_an_engine(tmp_path: Path) -> None:
    assert "0 is not in the range x>=1" in _call(tmp_path, "--repeat", 0).stderr
    done = _call(tmp_path / "none", "--repeat", 1)
    assert done.exit_code == 2 and "there is no engine folder" in done.stderr


@pytest.mark.parametrize(("same", "code"), [(16, 0), (15, 3)])
def test_the_exit_code_of_an_invariant_engine(
    same: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Repeated("e", True, 16, 1024, (Run("as before", same, 1.0),))
    monkeypatch.setattr("spark_engine.check.check.run_repeat", lambda *_: found)
    done = _call(tmp_path, "--repeat", 1, "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout)["runs"][0]["same"] == same
    assert json.loads(done.stdout)["passed"] is (code == 0)
