"""Rounds of drafts on a real GPU: tokens equal, bit for bit, those without drafts, for the embedded
model and for random weights of every format.

The engine is built with `--invariant`: a sequence's bits depend neither on its bucket nor on other
rows.
"""

import random
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.device.gpu import architecture  # noqa: E402
from spark_engine.runtime.engine.engine import Engine, EngineOptions  # noqa: E402
from spark_engine.runtime.engine.request import FinishReason, Request, SamplingParams  # noqa: E402
from spark_engine.runtime.text.tokenizer import Tokenizer  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402
from tests.models.drafters import write_drafter  # noqa: E402
from tests.repository import ROOT  # noqa: E402
from tests.runtime.engine.invariants import check_idle  # noqa: E402

HERE = architecture()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(HERE is None, reason="needs a GPU with a target's name"),
]
TINY = ROOT / "models" / "tiny" / "checkpoint"
REQUESTS, TOKENS = 64, 40
STORY = (
    "Once upon a time there was a little girl named Lily. She had a small red boat. One day she "
    "took it to the river. The water was warm and the sun was high. "
)
Said = dict[int, list[tuple[int, float | None]]]


FORMATS = ("bf16", "fp8_block", "ct_fp8_channel", "nvfp4_a4", "gptq", "ct_int4")
CASES = ["tiny", *(f"{kind} {format}" for format in FORMATS for kind in ("dense", "moe"))]
CASES += [f"drafter {dtype}" for dtype in ("checkpoint", "nvfp4", "fp8")]  # a block drafter's


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine for this GPU, in buckets of 1, 16 and 64 rows."""
    assert HERE is not None
    made, checkpoint = tmp_path_factory.mktemp("drafts") / "engine", TINY
    kind, _, format = request.param.partition(" ")
    drafter: dict[str, str] = {}
    if kind == "drafter":
        checkpoint = made.parent / "checkpoint"
        target = write_checkpoint(checkpoint, {"hidden_size": 256, "intermediate_size": 512}).config
        sizes = {"intermediate_size": 256, "head_dim": 64, "sliding_window": 100}
        path = write_drafter(made.parent / "drafter", target, **sizes)
        drafter = {"drafter": str(path), "draft_dtype": format}
    elif kind != "tiny":
        checkpoint = made.parent / "checkpoint"
        more: dict[str, int] = {"mtp_num_hidden_layers": 1}
        if format == "fp8_block":  # its producers write blocks of 128 values
            more |= dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 128)
        write_checkpoint(checkpoint, more, format=format, moe=kind == "moe")
    options = Options(
        target=HERE,
        decode=(1, 16, 64),
        verify=((1, 1), (1, 3), (16, 3), (64, 1), (64, 3)),
        prefill=(256,),
        max_seqs=64,
        max_context=512,
        drafts=3,
        timing=False,
        invariant=True,
        **drafter,  # type: ignore[arg-type]
    )
    build(checkpoint, made, options, lambda text: None)
    return made


def requests(vocab: int) -> list[Request]:
    """Prompts of several lengths, greedy and sampled, with penalties, bias, min_tokens and stops.
    Half are the beginning of a story, with accepted drafts; the others are random ids.
    """
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
            max_tokens=rng.randrange(9, TOKENS),
            logprobs=1 if i % 3 else None,
            seed=i,
        )
        made.append(Request(prompt, params))
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
    with_drafts = Engine.open(folder, EngineOptions(depth=1, swap_bytes=0))
    with_drafts.scheduler.depth.choose = lambda seqs, brisk=False: random.choice((0, 1, 3))  # type: ignore
    given = requests(min(with_drafts.loaded.limits.vocab, 4000))
    together = play(with_drafts, given)
    stats = with_drafts.stats()
    with_drafts.close()
    without = Engine.open(folder, EngineOptions(depth=1, swap_bytes=0, drafts=0))
    alone = [play(without, [request])[0] for request in given]
    without.close()
    assert together == alone
    kept = stats["accepted_by_position"]
    assert isinstance(kept, list) and len(kept) == 3
    trained = not (folder.parent / "checkpoint").exists()
    assert all(n > 0 for n in kept) or not trained, "a head of random weights is hardly ever right"
