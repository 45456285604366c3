"""Opens what is compared: an engine, one with exposed layers, its reference, its checkpoint.

Knows folders and the entry points of builder and runtime; compares nothing.
"""

import errno
import os
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import CPU, Options
from spark_engine.check.engines.ranks import Rendezvous, threads_of, together
from spark_engine.check.engines.reference import ReferenceExecutor
from spark_engine.check.verdicts.defined_values import HEAD
from spark_engine.engine_file import MANIFEST, EngineFile, EngineFolder, open_folder, read_manifest
from spark_engine.errors import InternalError, OptionError
from spark_engine.interface import BLOCK_DRAFTER, DECODE, PREFILL, drafts_of
from spark_engine.manifest import Bucket, Manifest
from spark_engine.plugins.formats.nvfp4 import W4A8
from spark_engine.progress import Say
from spark_engine.runtime.engine.load import EXECUTORS, Loaded, OpenExecutor, load
from spark_engine.runtime.executors.executor import Executor
from spark_engine.runtime.executors.memory import BucketKey
from spark_engine.runtime.ranks.leader import LeadExecutor, LeadStates
from spark_engine.runtime.ranks.segments import SegmentsExecutor
from spark_engine.segments import Collective, Segment, Segments
from spark_engine.tensors import DType, TensorSpec
from spark_engine.vision import VISION

GRAPH = "ort"  # the executor with a graph in its payload, which references can compute


def is_engine(path: Path) -> bool:
    """True if it is an engine folder, not a checkpoint. Raises OptionError if it is neither."""
    if (path / MANIFEST).is_file():
        return True
    if (path / "config.json").is_file():
        return False
    raise OptionError(
        f"{path} is neither an engine (no {MANIFEST}) nor a checkpoint (no config.json)"
    )


def open_engine(path: Path) -> Loaded:
    """The engine as it is served; several ranks on a CPU are threads of this process. Of several
    ranks on GPUs, the states are rank 0's. Raises EngineError or CapacityError."""
    manifest = read_manifest(path)
    if manifest.ranks == 1:
        return load(path, cache_bytes=0)
    if manifest.executor != GRAPH:
        loaded = load(path, cache_bytes=0)
        assert isinstance(loaded.device_states, LeadStates)
        return replace(loaded, device_states=loaded.device_states.inner)
    rendezvous, threads = Rendezvous(manifest.ranks), threads_of(manifest.ranks)
    ranks = [load(path, threads=threads, cache_bytes=0, comm=comm) for comm in rendezvous.comms]
    return together(ranks[0], rendezvous, [one.executors for one in ranks])


def has_graph(loaded: Loaded) -> bool:
    """True if the engine has a graph of nodes; a native one has launches and cubins."""
    return folder_of(loaded).manifest.executor == GRAPH


def with_exposed_layers(loaded: Loaded) -> Loaded:
    """The same engine on the same executor, with its residual stream as outputs if possible.

    A native engine is returned unchanged: it has these outputs if it was built with `--debug`, and
    it always shows its states, which every layer has.
    """
    if not has_graph(loaded):
        return loaded
    return _reopened(loaded, EXECUTORS[GRAPH], SegmentsExecutor)


def by_reference(loaded: Loaded) -> Loaded:
    """The same engine, with its residual stream as outputs, computed by the ops' float64
    references."""
    return _reopened(loaded, ReferenceExecutor, ReferenceExecutor)


def open_by_reference(path: Path) -> Loaded:
    """`by_reference` of a folder; its executor need not support the engine's dtypes.

    Raises EngineError.
    """
    folder = open_folder(path, CPU)
    m = folder.manifest
    closed = Loaded(m.limits, m.eos_token_ids, m.states, m.tables, {}, folder)
    return by_reference(closed)


def is_fused(manifest: Manifest) -> bool:
    """True if the engine's graph was rewritten."""
    return any(sum(counts.values()) for counts in manifest.fusions.values())


def build_twin(
    checkpoint: Path, engine: Loaded, where: Path, say: Say, fuse: bool, ranks: int = 1
) -> Path:
    """Builds the checkpoint into `where` with the engine's options, fused or not; returns the twin.

    The twin has `ranks` ranks. It is always a CPU engine, which has a graph; values between its
    nodes, KV pages and states have the engine's dtypes. `where` is in the temporary folder. Raises
    CheckpointError or OptionError.
    """
    manifest = folder_of(engine).manifest
    limits = manifest.limits
    if any(state.spec.name.startswith(BLOCK_DRAFTER) for state in manifest.states):
        raise OptionError(
            f"{manifest.name} has a block drafter, which is no part of {checkpoint}: build it for "
            "the CPU with the same --drafter, and give that engine to --against"
        )
    decode, prefill = (
        tuple(b.tokens for b in manifest.buckets if b.family == family)
        for family in (DECODE, PREFILL)
    )
    rounds = tuple((b.rows, k) for b in manifest.buckets if (k := drafts_of(b.family)))
    options = Options(
        target=CPU,
        decode=decode,
        prefill=prefill,
        verify=rounds if limits.drafts else None,
        drafts=limits.drafts,
        draft_dtype=_draft_dtype(manifest),
        draft_vocab=_shortlist(engine),
        draft_suffix=limits.suffix,
        max_context=limits.max_context,
        max_seqs=limits.max_seqs,
        kv_tokens=limits.pages * limits.page_size,
        cache_gib=0,
        kv_dtype="fp8" if manifest.dtypes.kv.value == "f8e4m3" else manifest.dtypes.kv.value,
        state_dtype=manifest.dtypes.state.value,
        mlp_activations="fp8" if W4A8.name in (q.format for q in manifest.quantisation) else "bf16",
        gdn_ring=limits.gdn_ring,
        activation=manifest.dtypes.activation.value,
        fuse=fuse,
        vision=False,
        tp=ranks,
    )
    with _named_by_tmpdir(where):
        build(checkpoint, where, options, say)
    return where


def _draft_dtype(manifest: Manifest) -> str:
    if not any(state.spec.name.startswith(HEAD) for state in manifest.states):
        return "auto"
    formats = {q.format for q in manifest.quantisation if q.module.startswith(HEAD)}
    return {"nvfp4": "nvfp4", "fp8_block": "fp8"}.get("+".join(sorted(formats)), "checkpoint")


def _shortlist(engine: Loaded) -> tuple[int, ...] | str:
    """The ids that may be drafted; "auto", which is all on the CPU, where there is no list."""
    ids = folder_of(engine).weights().get(f"{HEAD}shortlist")
    return "auto" if ids is None else tuple(int(i) for i in ids)


@contextmanager
def _named_by_tmpdir(where: Path) -> Iterator[None]:
    """Adds to an error about space the variable that decides `where`, which is no option."""
    remedy = "TMPDIR in the environment chooses another folder"
    try:
        yield
    except OptionError as error:
        words = str(error).removeprefix(f"-o {where}: ")
        if words == str(error):
            raise
        twin = f"what spark-check builds to compare with, in {where.parent}: {words}"
        raise OptionError(f"{twin}; {remedy}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OptionError(f"{where}: {error.strerror}; {remedy}") from error


def own_executor(loaded: Loaded, key: BucketKey) -> Executor:
    """A bucket's executor on this process's device: rank 0's, if other processes have other
    ranks."""
    found = loaded.executors[key]
    return found.inner if isinstance(found, LeadExecutor) else found


def folder_of(loaded: Loaded) -> EngineFolder:
    if loaded.folder is None:
        raise InternalError("only an engine that was opened from a folder can be taken apart")
    return loaded.folder


def _reopened(
    loaded: Loaded, open_alone: OpenExecutor, open_rank: Callable[..., Executor]
) -> Loaded:
    """`open_alone` opens a bucket of an engine with one rank, `open_rank` one rank's bucket of
    several."""
    folder = folder_of(loaded)
    ranks = folder.manifest.ranks

    def opened(open_one: OpenExecutor) -> dict[BucketKey, Executor]:
        def one(bucket: Bucket) -> tuple[BucketKey, Executor]:
            file = expose_layers(folder.engine(bucket), folder.manifest)
            threads = 0 if ranks == 1 else threads_of(ranks)
            executor = open_one(file.header, file.payload, folder.path, threads)
            return (bucket.family, bucket.rows), executor

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # a session takes a second to open
            text = (b for b in folder.manifest.buckets if b.family != VISION)
            return dict(pool.map(one, text))

    if ranks == 1:
        return replace(loaded, executors=opened(open_alone))
    rendezvous = Rendezvous(ranks)
    by_rank = [opened(partial(open_rank, comm=comm)) for comm in rendezvous.comms]
    return together(loaded, rendezvous, by_rank)


LAYER_OUTPUTS = re.compile(r"^layers\.\d+\.(mixed|out)$")  # after the mixer, after the MLP


def expose_layers(file: EngineFile, manifest: Manifest) -> EngineFile:
    """The bucket with `layers.{i}.mixed` and `layers.{i}.out` [tokens, H] as outputs too."""
    if file.header.executor != "ort":
        return file
    tokens = file.header.rows * file.header.tile
    shape = (tokens, manifest.model.hidden)
    added = _LayerOutputs(manifest.dtypes.activation, shape, {s.name for s in file.header.outputs})
    if manifest.ranks == 1:
        payload = added.of(file.payload)
    else:
        payload = _between(Segments.decode(file.payload), added).encode()
    header = replace(file.header, outputs=(*file.header.outputs, *added.specs))
    return EngineFile(header, payload)


class _LayerOutputs:
    """The outputs added to the models so far, without those that the bucket has already."""

    def __init__(self, dtype: DType, shape: tuple[int, int], shown: Collection[str]) -> None:
        self._dtype, self._shape, self._shown = dtype, shape, shown
        self.specs: list[TensorSpec] = []

    def of(self, payload: bytes) -> bytes:
        """The model with the residual stream among its outputs."""
        model = onnx.load_from_string(payload)
        known = {value.name for value in model.graph.output}
        for name in (name for node in model.graph.node for name in node.output):
            if not LAYER_OUTPUTS.match(name) or name in self._shown:
                continue
            spec = TensorSpec(name, self._dtype, self._shape)
            self.specs.append(spec)
            if name not in known:
                value = onnx.helper.make_tensor_value_info(name, spec.dtype.onnx, spec.dims)
                model.graph.output.append(value)
        return bytes(model.SerializeToString())

    @property
    def names(self) -> list[str]:
        """Names of all added outputs."""
        return [spec.name for spec in self.specs]


def _between(segments: Segments, added: _LayerOutputs) -> Segments:
    """Added values that pass from step to step become outputs of the bucket."""
    steps: list[Segment | Collective] = []
    for step in segments.steps:
        if isinstance(step, Segment):
            before = len(added.specs)
            model = added.of(step.model)
            more = [name for name in added.names[before:] if name not in step.outputs]
            step = replace(step, model=model, outputs=(*step.outputs, *more))
        steps.append(step)
    values = tuple(spec for spec in segments.values if spec.name not in added.names)
    return Segments(tuple(steps), values)
