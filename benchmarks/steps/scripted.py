"""An engine that follows a script: the tokens of target and draft head are decided beforehand.

Everything runs as it would, but that just before a token is chosen from logits, those of the id
that the script has are set to the largest. So an engine of drawn weights answers as recorded, with
drafts that are right as often as is asked, and drafts from the text are those of that text. Native
buckets get one more small launch for each choice (some 2 us), onnxruntime's a few nodes. One
sequence at a time; a draft head, or none.

What each round keeps follows from the script, so the host knows it when it launches the next one.
If drafts differ from what `match_drafts` defines, the engine's tokens differ from the script.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.graphs import target_here
from spark_engine.device.resources import DeviceResources
from spark_engine.engine_file import EngineFile
from spark_engine.interface import BLOCK_DRAFTER, DRAFT_HEAD, MOST_DRAFTS, PREFILL, drafts_of
from spark_engine.kernel import Shape
from spark_engine.plugins.ops.drafts.match_drafts import OP
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.bucket_graphs import BucketGraphs, QueuedLaunch
from spark_engine.runtime.executors.executor import Wait
from spark_engine.runtime.executors.ort import OrtExecutor
from spark_engine.runtime.executors.program import MemoryOperand, Program
from spark_engine.tensors import Array, DType, TensorSpec

LEAST = 6  # ids of a match, as docs/models.md has them
LOUD = 1e6  # a logit above all others
SAID, DRAFTED = "said", "drafted"  # inputs of onnxruntime's buckets: ids, -1 for none
TOKEN, MATCH = "draft_token", "match_drafts"
SAY = """
extern "C" __global__ void say(float* logits, const int* ids, unsigned long long width, int rows) {
  if (threadIdx.x < rows && ids[threadIdx.x] >= 0)
    logits[threadIdx.x * width + ids[threadIdx.x]] = 1e6f;
}
"""


def following(text: Array, first: int, held: int, least: int = LEAST) -> Array:
    """The drafts of a text of ids, by the op's reference; none without a match."""
    pages = text.reshape(1, 1, -1, 1).astype(np.int32)
    drafts = np.full((1, MOST_DRAFTS), first, np.int32)
    zero, end = np.zeros(1, np.int32), np.array([len(text) - 1], np.int32)
    given = pages, zero.reshape(1, 1), text[-1:].astype(np.int32), drafts, zero, zero, end
    matched, drafts = OP.reference({"least": least, "held": held}, given)
    return np.asarray(drafts[0] if matched[0] else [])


@dataclass
class Script:
    """The tokens of one sequence, round after round.

    `rates`: how often the head's draft of each position is right; none: there is no head. `least`:
    ids of a match in the text, 0: the text drafts nothing. `at`: tokens that the rounds launched so
    far leave. `drafts`: the slot's.
    """

    rates: Sequence[float]
    least: int
    rng: Any = field(default_factory=lambda: np.random.default_rng(0))
    ids: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    at: int = 0
    drafts: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def begin(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A sequence of which prefill samples the first token of the answer."""
        self.ids, self.at = np.array([*prompt, *answer]), len(prompt) + 1
        self.drafts = self.ids[:0]

    def round(self, count: int, k: int) -> tuple[Array, Array]:
        """The ids of a round's samples [count], and of the k drafts that the head then makes; -1
        where the answer has ended."""
        said, held = self._of(self.at, count), self.drafts[: count - 1]
        kept = int((held == said[: len(held)]).cumprod().sum())
        self.at = min(self.at + 1 + kept, len(self.ids))
        rates = [*self.rates, *[0.0] * k][:k]
        wanted, right = self._of(self.at, k), self.rng.random(k) < rates
        made = np.where(right | (wanted < 0), wanted, (wanted + 1) % (self.ids.max() + 1))
        own = k if self.rates else 0
        self.drafts = made[:own]
        if self.least:
            first = int(made[0]) if own else -1
            found = following(self.ids[: self.at], first, own, self.least)
            self.drafts = found if len(found) else self.drafts
        return said, made

    def _of(self, at: int, count: int) -> Array:
        own = self.ids[at : at + count]
        return np.concatenate([own, np.full(count - len(own), -1)])


class Scripted:
    """A bucket of rounds that follows its script; `write` takes the forced samples and drafts."""

    def __init__(
        self, inner: Any, script: Script, k: int, write: Callable[[Any, Array, Array], None]
    ) -> None:
        self.inner, self.specs = inner, inner.specs
        self._script, self._k, self._write = script, k, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Launches a round of the script's tokens."""
        self._write(buffers, *self._script.round(int(buffers["counts"][0]), self._k))
        wait: Wait = self.inner.launch(buffers)
        return wait


def scripted(loaded: Loaded, script: Script, close: Callable[[Callable[[], None]], Any]) -> Loaded:
    """The engine with rounds that say the script; `close` gets what is to be done at its end."""
    assert loaded.folder is not None
    weights = loaded.folder.weights()
    if any(name.startswith(BLOCK_DRAFTER) for name in weights):
        raise SystemExit("a block drafter cannot be scripted: build with a draft head, or without")
    listed = weights.get(f"{DRAFT_HEAD}shortlist")
    executors = dict(loaded.executors)
    for bucket in loaded.folder.manifest.buckets:
        key = bucket.family, bucket.rows
        if bucket.family == PREFILL or key not in executors:
            continue
        assert bucket.rows == 1, "one sequence at a time"
        file, k = loaded.folder.engine(bucket), drafts_of(bucket.family)
        if isinstance(executors[key], OrtExecutor):
            inner: Any = _edited(file, loaded.folder.path, script.least == 0, listed)
            write = _write_inputs
        else:
            inner = executors[key]
            write = _recorded(inner, file.payload, bucket.tile, k, script.least == 0, close)
        executors[key] = Scripted(inner, script, k, _by_place(write, listed))
    return replace(loaded, executors=executors)


def _by_place(
    write: Callable[[Any, Array, Array], None], listed: Array | None
) -> Callable[[Any, Array, Array], None]:
    """`write` with drafts as places in the list of ids that may be drafted."""
    if listed is None:
        return write

    def placed(buffers: Any, said: Array, drafted: Array) -> None:
        at = np.searchsorted(listed, drafted).clip(max=len(listed) - 1)
        write(buffers, said, np.where(np.asarray(listed)[at] == drafted, at, -1))

    return placed


def _write_inputs(buffers: Mapping[str, Array], said: Array, drafted: Array) -> None:
    buffers[SAID].fill(-1)
    buffers[SAID][: len(said)] = said
    if len(drafted):
        buffers[DRAFTED][:] = drafted


def _edited(file: EngineFile, folder: Path, mute: bool, listed: Array | None) -> OrtExecutor:
    """The bucket with its tokens as inputs; `mute`: the text drafts nothing."""
    model, header = onnx.load_from_string(file.payload), file.header
    graph, nodes, k = model.graph, [], drafts_of(header.family)
    vocab = next(s.dims[-1] for s in header.outputs if s.name == "logits")
    sizes = {SAID: header.rows * header.tile} | ({DRAFTED: k} if k else {})
    new = [TensorSpec(name, DType.I32, (n,)) for name, n in sizes.items()]
    graph.input.extend(helper.make_tensor_value_info(s.name, 6, s.dims) for s in new)

    def constant(name: str, value: Array) -> str:
        graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    loud = constant("say.loud", np.array(LOUD, np.float32))
    drafted = iter(range(k))
    for node in list(graph.node):
        token = node.op_type.startswith(TOKEN)
        if node.op_type.startswith("sample_") or token:
            name, which = f"{node.input[0]}.said", DRAFTED if token else SAID
            width = vocab if listed is None or not token else len(listed)
            at = [next(drafted)] if token else [*range(sizes[SAID])]
            ids = constant(f"{name}.at", np.array(at, np.int64).reshape(-1, 1))
            columns = constant(f"{name}.columns", np.arange(width, dtype=np.int32)[None])
            nodes += [
                helper.make_node("Gather", [which, ids], [f"{name}.ids"]),
                helper.make_node("Equal", [columns, f"{name}.ids"], [f"{name}.is"]),
                helper.make_node("Where", [f"{name}.is", loud, node.input[0]], [name]),
            ]
            node.input[0] = name
        if mute and node.op_type.startswith(MATCH):
            zeros = constant("say.none", np.zeros(header.rows, np.int32))
            nodes.append(helper.make_node("Identity", [zeros], [node.output[0]]))
            nodes.append(helper.make_node("Identity", [node.input[3]], [node.output[1]]))
            continue
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    own = replace(header, inputs=(*header.inputs, *new))
    return OrtExecutor(own, model.SerializeToString(), folder)


def _recorded(
    executor: Any,
    payload: bytes,
    tile: int,
    k: int,
    mute: bool,
    close: Callable[[Callable[[], None]], Any],
) -> Callable[[Any, Array, Array], None]:
    """Records the bucket's graph again with launches of `say`; returns what writes their ids."""
    gpu, held = executor.gpu, DeviceResources(executor.gpu)
    close(held.close)
    ids, function = held.zeros(4 * (tile + MOST_DRAFTS)), _compiled(gpu)
    vocab = next(s.dims[-1] for s in executor.specs.outputs if s.name == "logits")
    shape = Shape((1, 1, 1), (32, 1, 1), ("address", "address", "i64", "i32"))

    def say(logits: MemoryOperand, at: int, rows: int) -> QueuedLaunch:
        args = (executor.address(logits), ids + 4 * at, vocab, rows)
        return QueuedLaunch("say", "say", gpu.prepare(function, shape, args))

    queue, sampled, drafted = list[QueuedLaunch](), False, 0
    program = Program.read(payload)
    for record, launch in zip(program.launches, executor.launches(payload), strict=True):
        if launch.reads_masks and not sampled:
            queue.append(say(MemoryOperand("output", "logits"), 0, tile))
            sampled = True
        if launch.symbol == TOKEN:
            logits = program.operands[record.args[0]]
            assert isinstance(logits, MemoryOperand)
            queue.append(say(logits, tile + drafted, 1))
            drafted += 1
        if not (mute and launch.symbol.startswith(MATCH)):
            queue.append(launch)
    assert sampled and drafted in (0, k), f"{drafted} of {k} drafts are made by {TOKEN}"
    executor._graphs = BucketGraphs("scripted", queue, held, True)

    def write(_: Mapping[str, Array], said: Array, made: Array) -> None:
        own = np.full(tile + MOST_DRAFTS, -1, np.int32)
        own[: len(said)], own[tile : tile + len(made)] = said, made
        gpu.upload(ids, own)

    return write


def _compiled(gpu: Any) -> Any:
    """The kernel `say`."""
    from spark_engine.builder.native import nvrtc  # needs the extra `cuda`

    job = nvrtc.Job("say.cu", (), ("say",))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / job.source).write_text(SAY)
        code = nvrtc.compile(job, target_here(), None, Path(folder)).code
    return gpu.load(code, job.symbols)["say"]
