"""Rounds of drafts on a real GPU: tokens equal, bit for bit, those without drafts, for the embedded
model and for random weights of every format.

The engine is built with `--invariant`: a sequence's bits depend neither on its bucket nor on other
rows.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.interface import BLOCKS, MTP
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import FinishReason, Request, SamplingParams
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.checkpoints import write_checkpoint
from tests.device.on_gpu import HERE, on_gpu
from tests.models.drafters import write_drafter
from tests.repository import ROOT
from tests.runtime.engine.invariants import check_idle

pytestmark = on_gpu()
TINY = ROOT / "models" / "tiny" / "checkpoint"
REQUESTS, TOKENS = 64, 40
STORY = (
    "Once upon a time there was a little girl named Lily. She had a small red boat. One day she "
    "took it to the river. The water was warm and the sun was high. "
)
Said = dict[int, list[tuple[int, float | None]]]
# A cache that lets the engines of several workers share a card; no swap.
ALONE = EngineOptions(depth=1, swap_bytes=0, cache_bytes=2 << 30)


FORMATS = ("bf16", "fp8_block", "ct_fp8_channel", "nvfp4_a4", "gptq", "ct_int4")
CASES = ["tiny", *(f"{kind} {format}" for format in FORMATS for kind in ("dense", "moe"))]
CASES += [f"drafter {dtype}" for dtype in ("checkpoint", "nvfp4", "fp8")]  # a block drafter's
BOTH = "both nvfp4"  # the embedded model's head, and a block drafter
CASES.append(BOTH)


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine for this GPU, in buckets of 1, 16 and 64 rows; of BOTH with few pages."""
    made, checkpoint = tmp_path_factory.mktemp("drafts") / "engine", TINY
    kind, _, format = request.param.partition(" ")
    verify: tuple[tuple[int, int], ...] = (1, 1), (1, 3), (16, 3), (64, 1), (64, 3)
    more: dict[str, object] = {}
    if kind in ("drafter", "both"):
        target = json.loads((TINY / "config.json").read_text())
        if kind == "both":
            verify, more = (*verify, (1, 7), (64, 7)), {"kv_tokens": 64 * 12}
        else:
            checkpoint, wide = made.parent / "checkpoint", {"hidden_size": 256}
            target = write_checkpoint(checkpoint, {**wide, "intermediate_size": 512}).config
        sizes = {"intermediate_size": 256, "head_dim": 64, "sliding_window": 100}
        path = write_drafter(made.parent / "drafter", target, **sizes)
        more |= {"drafter": str(path), "draft_dtype": format}
    elif kind != "tiny":
        checkpoint = made.parent / "checkpoint"
        head: dict[str, int] = {"mtp_num_hidden_layers": 1}
        if format == "fp8_block":  # its producers write blocks of 128 values
            head |= dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 128)
        write_checkpoint(checkpoint, head, format=format, moe=kind == "moe")
    options = Options(
        target=HERE,
        decode=(1, 16, 64),
        verify=verify,
        prefill=(256,),
        max_seqs=64,
        max_context=512,
        drafts=max(k for _, k in verify),
        timing=False,
        invariant=True,
        **more,  # type: ignore[arg-type]
    )
    build(checkpoint, made, options, lambda text: None)
    return made


def requests(vocab: int, most: int = TOKENS) -> list[Request]:
    """Prompts of several lengths, greedy and sampled, with penalties, bias, min_tokens and stops.
    Half are the beginning of a story, with accepted drafts; the others are random ids. Some are
    urgent."""
    rng = random.Random(7)
    story = [token % vocab for token in Tokenizer.load(TINY).encode(STORY)]
    made = []
    for i in range(REQUESTS):
        size = rng.choice((1, 5, 63, 64, 65, 150))
        drawn = [rng.randrange(vocab) for _ in range(size)]
        prompt = tuple((story * size)[:size] if i % 2 else drawn)
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.7,
            top_p=0.9 if i % 3 == 0 else 1.0,
            top_k=20 if i % 5 == 0 else 0,
            presence=0.5 if i % 4 == 0 else 0.0,
            repetition=1.2 if i % 7 == 0 else 1.0,
            logit_bias={5: 2.0, 9: -3.0} if i % 6 == 0 else {},
            min_tokens=9 if i % 8 == 0 else 0,
            stop_token_ids=(rng.randrange(vocab),),
            max_tokens=rng.randrange(9, most),
            logprobs=1 if i % 3 else None,
            seed=i,
        )
        made.append(Request(prompt, params, priority=int(i % 4 == 3)))
    return made


def play(engine: Engine, given: list[Request]) -> list[list[tuple[int, float | None]]]:
    """The tokens and log-probabilities of each request; a new request arrives every second step."""
    said: Said = {}
    waiting = list(given)
    while waiting or not engine.idle:
        if waiting:
            said[engine.submit(waiting.pop(0))] = []
        for _ in range(2):
            for event in engine.step():
                assert event.finish is not FinishReason.ERROR, event.message
                if event.token is not None:
                    said[event.request_id].append((event.token, event.logprob))
    check_idle(engine)
    return list(said.values())


def test_64_ragged_requests_with_drafts_are_their_solo_runs_without(folder: Path) -> None:
    """Of head and drafter together also preempted, and behind prefixes that others left."""
    with_drafts = Engine.open(folder, ALONE)
    choice, rng = with_drafts.scheduler.depth, random.Random(5)
    depths = [0, *(k for k, rows in enumerate(with_drafts.scheduler.sizes.verify, 1) if rows)]
    inner = choice.choose

    def choose(seqs: object, bounded: bool = False) -> int:
        inner(seqs, bounded)  # type: ignore[arg-type]
        return rng.choice(depths)

    choice.choose = choose  # type: ignore[method-assign]
    both = {MTP, BLOCKS} <= {*with_drafts.scheduler.sizes.makers}
    given = requests(min(with_drafts.loaded.limits.vocab, 4000), 3 * TOKENS if both else TOKENS)
    together = play(with_drafts, given)
    stats = with_drafts.stats()
    with_drafts.close()
    without = Engine.open(folder, replace(ALONE, drafts=0))
    alone = [play(without, [request])[0] for request in given]
    without.close()
    assert together == alone
    kept = stats["accepted_by_position"]
    assert isinstance(kept, list) and len(kept) == max(depths)
    trained = not (folder.parent / "checkpoint").exists()
    assert all(n > 0 for n in kept[:3]) or not trained, "random weights are hardly ever right"
    if both:
        assert stats["preempted_recompute"] and stats["prefix_hits"], "few pages, and one story"
