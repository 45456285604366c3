"""Compares greedy texts: finds the tokens that a candidate chooses differently from the reference.

Both sides read the reference's tokens, so that every position is judged, also after the first that
differs; a candidate alone generates the same text exactly if no position differs. Knows sessions
and runners; knows no engine.

The reference's text does not depend on the candidate, so `reference_process.py` may compute it
earlier.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import numpy as np

from spark_engine.check.engines.prompts import CheckLaunch, CheckSession, next_launches
from spark_engine.check.engines.runner import Feed, SessionRunner, feed
from spark_engine.check.texts.verify_buckets import Decoded, check_verify_buckets
from spark_engine.check.verdicts.compare import Verdict
from spark_engine.check.verdicts.metrics import near_tie_rows
from spark_engine.check.verdicts.report import Finding, Level
from spark_engine.check.verdicts.thresholds import Thresholds
from spark_engine.interface import DECODE, drafts_of
from spark_engine.progress import Progress
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.memory import BucketKey
from spark_engine.tensors import Array


def decode_rows(common: Sequence[BucketKey], session: CheckSession) -> int:
    """The decode bucket: the smallest of both sides in which all texts fit, or the largest."""
    decode = sorted(rows for family, rows in common if family == DECODE)
    return next((rows for rows in decode if rows >= len(session.texts)), decode[-1])


def read_texts(reference: Loaded, session: CheckSession, rows: int) -> Iterator[Array]:
    """The reference's logits [emitting rows, V] of each launch of its greedy decoding."""
    tokens: dict[int, list[int]] = {text.slot: [] for text in session.texts}
    with SessionRunner("reference", reference) as runner:
        for launch in _launches(session, tokens, rows):
            truth, _ = _logits(runner, feed(session, launch, 0))
            for slot, best in zip(_emitting(launch), truth.argmax(axis=1).tolist(), strict=True):
                tokens[slot].append(best)
            yield truth


def compare_texts(
    candidate: Loaded,
    reference: tuple[str, Iterable[Array]],
    session: CheckSession,
    rows: int,
    thresholds: Thresholds,
    shown: Progress,
) -> Level:
    """Decodes a greedy session to its end; returns one finding over all tokens of all texts.

    `reference`: its name, and the result of `read_texts` for the same session and rows. The finding
        fails if the candidate chooses a token that is worse in the reference by more than a near
        tie (`thresholds.tie`), or if a verify bucket samples another token than decode.
    """
    name, truths = reference
    level = Level("text", name, asdict(thresholds))
    tokens: dict[int, list[int]] = {text.slot: [] for text in session.texts}
    seen: dict[int, list[Array]] = {slot: [] for slot in tokens}  # logits
    flips: dict[int, int] = dict.fromkeys(tokens, 0)
    near, wrong = 0, []
    total = sum(len(text.ids) - text.prompt + 1 for text in session.texts)
    with (
        SessionRunner("candidate", candidate) as one,
        shown.track("text level, tokens", total) as step,
    ):
        for launch, truth in zip(_launches(session, tokens, rows), truths, strict=True):
            logits, sampled = _logits(one, feed(session, launch, 0))
            apart = logits.shape[1] < truth.shape[1]  # several GPUs show rank 0's ids
            chosen = sampled if apart else logits.argmax(axis=1)
            logits = truth if apart else logits
            level.launches += 1
            ties = near_tie_rows(truth, chosen, thresholds.tie)
            for row, slot in enumerate(_emitting(launch)):
                best = int(truth[row].argmax())
                if chosen[row] != best:
                    flips[slot] += 1
                    near += bool(ties[row])
                    if not ties[row]:
                        where = f"text in slot {slot}, token {len(tokens[slot])}"
                        wrong.append(f"{where}: {chosen[row]} for {best}")
                tokens[slot].append(best)
                seen[slot].append(logits[row])
                step()
        verify = [key for key in candidate.executors if drafts_of(key[0])]
        decoded = Decoded(tokens, seen)
        rounds = check_verify_buckets(one, verify, session, decoded, thresholds.tie, shown)
    figures = {
        "texts": float(len(tokens)),
        "same": float(sum(not n for n in flips.values())),
        "tokens": float(sum(map(len, tokens.values()))),
        "flips": float(sum(flips.values())),
        "near_ties": float(near),
    }
    finding = Finding("greedy text", "greedy text")
    reason = f"{len(wrong)} tokens differ" if wrong else ""
    verdict = Verdict("greedy text", reason, figures, hard=bool(wrong))
    finding.add(verdict, wrong[0] if wrong else "")
    level.findings += [finding, *rounds]
    level.settle(lambda f: f.name, 0)
    return level


def _launches(
    session: CheckSession, tokens: dict[int, list[int]], rows: int
) -> Iterator[CheckLaunch]:
    """The prefills, then decode steps over the tokens sampled so far, until all contexts are
    full."""
    yield from session.launches
    while True:
        step = list(next_launches(session, tokens, rows))
        if not step:
            return
        yield from step


def _emitting(launch: CheckLaunch) -> list[int]:
    """The slots of the rows that sample, in order."""
    slots: list[int] = launch.slots[launch.emit == 1].tolist()
    return slots


def _logits(runner: SessionRunner, inputs: Feed) -> tuple[Array, Array]:
    """Logits [emitting rows, V] of one launch, and the ids that it sampled."""
    shown = runner.launch(inputs)
    if not shown.get("emitted", np.empty(0)).size:
        return np.empty((0, 1), np.float32), np.empty(0, np.int32)
    sampled = shown["next_tokens"].copy() if "next_tokens" in shown else np.empty(0, np.int32)
    return shown["logits"][shown["emitted"]].copy(), sampled
