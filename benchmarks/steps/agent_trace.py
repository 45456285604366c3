"""What drafts from the text bring to a recorded conversation of an agent that edits files.

`python -m benchmarks.steps.agent_trace [ENGINE]` takes `bench/agent.json` (`--replay FILE`: another
recording) and the embedded model's tokenizer. It prints tokens per round, twice:

- counted: the recorded answers without an engine. Each round has the drafts that `match_drafts`
  finds before the recorded position; a draft is kept where the recorded id is the same. The rates
  by position are for `benchmarks.time_step --acceptance`.
- forced: the recorded answers by the ENGINE itself (`steps.scripted`), which chooses the number of
  drafts in each round: without drafts, with those of its head, which are right by `--head`, and
  with the text's, too. Tokens a second are of this machine.

ENGINE has buckets of one sequence and was built with --draft-suffix; it may be any that has the
ids, e.g. one of drawn weights.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

import numpy as np

from benchmarks.result_files import ROOT
from benchmarks.steps.scripted import LEAST, Script, following, scripted
from spark_engine.bench.replay import OWN, read
from spark_engine.engine_file import read_manifest
from spark_engine.interface import DRAFT_HEAD, MOST_DRAFTS
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Request, SamplingParams, capacity
from spark_engine.runtime.offline.embedded import find_checkpoint
from spark_engine.runtime.text.chat import ChatTemplate, Ending
from spark_engine.runtime.text.tokenizer import Tokenizer

Turn = tuple[list[int], list[int]]  # ids of a prompt, and of the recorded answer
Rates = Sequence[float]


def turns_of(path: Path) -> list[Turn]:
    """Every answer of a recording, with all that is before it as its prompt."""
    folder, found = find_checkpoint(), list[Turn]()
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    assert template is not None
    for row in read(path):
        messages = [{k: v for k, v in m.items() if k not in OWN} for m in row["messages"]]
        for i in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
            prompt = template.prompt(messages[:i], row.get("tools")).text
            whole = template.prompt(messages[: i + 1], row.get("tools"), ending=Ending.NOTHING).text
            answer = whole[len(commonprefix([prompt, whole])) :]
            found.append((tokenizer.encode(prompt), tokenizer.encode(answer)))
    return found


@dataclass
class Rounds:
    """Rounds of one row: how many by k, their tokens, and the text's drafts by position."""

    by_k: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    verified: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    kept: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def add(self, k: int, kept: int) -> None:
        """Counts a round of k drafts of which the first `kept` were right."""
        self.by_k[k] = self.by_k.get(k, 0) + 1
        self.tokens += 1 + kept

    @property
    def per_round(self) -> float:
        return self.tokens / sum(self.by_k.values())

    def rates(self) -> list[float]:
        """How often the text's draft of each position was right, where those before it were."""
        return [round(k / max(v, 1), 3) for k, v in zip(self.kept, self.verified, strict=True)]


def counted(turns: Sequence[Turn], head: Rates, text: bool, seed: int = 0) -> Rounds:
    """The recorded answers in rounds of the head's drafts, right by `head`, and with `text` of what
    matches, in the place of the head's."""
    found, rng = Rounds(), np.random.default_rng(seed)
    for prompt, answer in turns:
        ids, at = np.array([*prompt, *answer]), len(prompt) + 1  # prefill says the first token
        while at < len(ids):
            right = int((rng.random(len(head)) < np.array(head)).cumprod().sum())
            drafts = ids[at] if right else -1  # the head's first draft
            matched = following(ids[:at], int(drafts), len(head)) if text else []
            k, kept = len(matched) or len(head), right
            if len(matched):
                wanted = ids[at : at + k]
                kept = int((matched[: len(wanted)] == wanted).cumprod().sum())
                for i in range(min(kept + 1, k)):
                    found.verified[i] += 1
                    found.kept[i] += i < kept
            kept = min(kept, len(ids) - at - 1)
            found.add(k, kept)
            at += 1 + kept
    return found


def counted_lines(turns: Sequence[Turn], head: Rates) -> list[str]:
    """What is printed of the counted answers."""
    lines = []
    for name, own, text in (
        ("no drafts", (), False),
        ("the text's", (), True),
        ("the head's", head, False),
        ("both", head, True),
    ):
        rounds = counted(turns, own, text)
        line = f"counted, {name}: {rounds.tokens} tokens, {rounds.per_round:.2f} a round"
        if text:
            drafted = rounds.by_k.get(MOST_DRAFTS, 0) / sum(rounds.by_k.values())
            line += f"; {drafted:.0%} of the rounds match, right by position {rounds.rates()}"
        lines.append(line)
    return lines


@dataclass
class Ran:
    """Tokens of answers after each one's first, their rounds by k, and seconds."""

    by_k: dict[int, int]
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        each = ", ".join(f"{n} of k {k}" for k, n in sorted(self.by_k.items()) if n)
        rate = f"{self.tokens / self.seconds:.1f} tokens/s"
        a_round = self.tokens / sum(self.by_k.values())
        return f"{self.tokens} tokens, {a_round:.2f} a round, {rate} ({each})"


def run(folder: Path, turns: Sequence[Turn], script: Script, **options: object) -> Ran:
    """The recorded answers by an engine. Raises SystemExit where the script was not followed."""
    with ExitStack() as undo:
        graphs = ExitStack()
        loaded = scripted(load(folder), script, graphs.callback)
        engine = Engine(loaded, EngineOptions(**options))  # type: ignore[arg-type]
        undo.callback(engine.close)
        undo.callback(graphs.close)  # before the engine closes the device
        before, found = engine.stats()["rounds_by_k"], Ran({})
        for prompt, answer in turns:
            if len(prompt) + len(answer) >= capacity(loaded.limits):
                raise SystemExit(f"{len(prompt)} tokens of prompt: use a larger --max-context")
            script.begin(prompt, answer)
            bound = ConstraintSpec(forced=tuple(answer[:1]))
            most = max(2, len(answer))
            params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
            engine.submit(Request(tuple(prompt), params, constraint=bound))
            said, start = list[int](), 0.0
            while not engine.idle:
                said += [e.token for e in engine.step() if e.token is not None]
                start = start or (time.perf_counter() if said else 0.0)
            found.seconds += time.perf_counter() - start
            found.tokens += len(said) - 1
            if said != answer:
                raise SystemExit(f"the engine did not follow its script: {said}, not {answer}")
        after = engine.stats()["rounds_by_k"]
    found.by_k = {k: n - before.get(k, 0) for k, n in after.items()} or {0: found.tokens}
    return found


def main(words: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("engine", nargs="?", type=Path, help="built with --draft-suffix")
    parser.add_argument("--replay", type=Path, default=ROOT / "bench" / "agent.json")
    parser.add_argument("--head", default="0.8,0.75,0.7", help="how often its drafts are right")
    args = parser.parse_args(words)
    turns = turns_of(args.replay)
    sizes = [(len(prompt), len(answer)) for prompt, answer in turns]
    print(f"{len(turns)} answers (tokens of prompt, of answer): {json.dumps(sizes)}")
    head = [float(word) for word in args.head.split(",")]
    print("\n".join(counted_lines(turns, head)), flush=True)
    if args.engine is None:
        return
    states = read_manifest(args.engine).states
    has_head = any(state.spec.name.startswith(DRAFT_HEAD) for state in states)
    own = head if has_head else []
    scripts: dict[str, tuple[Script, dict[str, object]]] = {
        "no drafts": (Script(own, 0), {"drafts": 0}),
        "the head's": (Script(own, 0), {}),
        "both" if has_head else "the text's": (Script(own, LEAST), {}),
    }
    for name, (script, options) in scripts.items():
        if own or name != "the head's":
            print(f"forced, {name}: {run(args.engine, turns, script, **options)}", flush=True)


if __name__ == "__main__":
    main()
