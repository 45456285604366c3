"""Odd files from public bug reports: what differs from a published layout.

Each change takes a checkpoint before it is written, or its folder afterwards. Knows nothing of
the package.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.published.checkpoint import SINGLE, Written
from tests.published.networks import BF16, Array, Json
from tests.published.schemes import nvfp4_dynamic

Change = Callable[[Written], None]
INDEX = "model.safetensors.index.json"
STEM = "model.language_model."
EXPERT = f"{STEM}layers.0.mlp.experts.2"
YARN: Json = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
YARN |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
FLAT_ROPE = {"rope_theta": 10000000, "partial_rotary_factor": 0.25}


def text_of(written: Written) -> Json:
    part: Json = written.config.get("text_config", written.config)
    return part


def text(**changes: object) -> Change:
    """Keys of the text config; None removes one."""

    def change(written: Written) -> None:
        part = text_of(written)
        part.update(changes)
        for key in [key for key, value in part.items() if value is None]:
            del part[key]

    return change


def quantisation(**changes: object) -> Change:
    """Keys of every declaration of the quantisation."""

    def change(written: Written) -> None:
        written.config.setdefault("quantization_config", {}).update(changes)
        for other in written.others.values():
            other["quantization"] |= {k: v for k, v in changes.items() if k == "quant_algo"}

    return change


def uncalibrated(value: float | None) -> Change:
    """An expert that calibration never met; the largest scale of the others is in its place."""

    def change(written: Written) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            found = re.compile(rf".*layers\.0\.mlp\.experts\.\d+\.{part}\.input_(global_)?scale")
            scales = {n: a for n, a in written.tensors.items() if found.fullmatch(n)}
            mine = next(n for n in scales if n.startswith(EXPERT))
            others = [float(a.reshape(-1)[0]) for n, a in scales.items() if n != mine]
            scale = 1 / min(others) if "global" in mine else max(others)
            written.rounds[f"{EXPERT}.{part}"] = nvfp4_dynamic(scale)
            del written.tensors[mine]
            if value is not None:
                written.tensors[mine] = np.full(scales[mine].shape, value, np.float32)

    return change


def next_to(end: str, name: str, array: Callable[[Array], Array]) -> Change:
    """A tensor `name` next to each with a name that ends with `end`, the draft head's too."""

    def change(written: Written) -> None:
        for tensors in written.files.values():
            for found in [n for n in tensors if n.endswith(end)]:
                tensors[found.removesuffix(end) + name] = array(tensors[found])

    return change


def alone(file: str, *without: str) -> Change:
    """The quantisation in a separate file, as older exporters write it."""

    def change(written: Written) -> None:
        config = written.config.pop("quantization_config")
        written.others[file] = {k: v for k, v in config.items() if k not in without}

    return change


def one_cache_scale(written: Written) -> None:
    """Of keys and values together, and zero points."""
    at = f"{STEM}layers.1.self_attn."
    for side in "kv":
        del written.tensors[f"{at}{side}_proj.{side}_scale"]
        written.tensors[f"{at}{side}_zero_point"] = np.zeros(1, np.int8)
    written.tensors[f"{at}kv_scale"] = np.full(1, 0.03, np.float32)
    written.kv = {1: (0.03, 0.03)}


def renamed(old: str, new: str) -> Change:
    def change(written: Written) -> None:
        kept = {n: a for n, a in written.tensors.items() if "visual" not in n}
        above = "language_model." if new.startswith("language_model.") else ""
        kept = {n.replace("lm_head.", f"{above}lm_head."): a for n, a in kept.items()}
        written.files[SINGLE] = {n.replace(old, new): a for n, a in kept.items()}

    return change


def added(name: str, array: Array, file: str = SINGLE) -> Change:
    def change(written: Written) -> None:
        written.files.setdefault(file, {})[name] = array
        written.others[INDEX] = None  # type: ignore[assignment]

    return change


def split_files(written: Written) -> None:
    names = [*written.tensors]
    for i in range(2):
        part = {n: written.tensors[n] for n in names[i::2]}
        written.files[f"model-0000{i + 1}-of-00002.safetensors"] = part
    del written.files[SINGLE]
    written.others[INDEX] = None  # type: ignore[assignment]


def no_index(written: Written) -> None:
    written.others[INDEX] = None  # type: ignore[assignment]


def listed(written: Written) -> None:
    """The base's index, though a merge of adapters has dropped the head."""
    names = [*written.tensors, *written.network.head]
    written.others[INDEX] = {"weight_map": dict.fromkeys(names, SINGLE)}


def unlisted(written: Written) -> None:
    names = [n for n in written.tensors if not n.startswith("mtp.")]
    written.others[INDEX] = {"weight_map": dict.fromkeys(names, SINGLE)}


def changed(end: str, function: Callable[[Array], Array]) -> Change:
    def change(written: Written) -> None:
        for name in [n for n in written.tensors if n.endswith(end)]:
            written.tensors[name] = function(written.tensors[name])

    return change


def retyped(end: str, dtype: object) -> Change:
    return changed(end, lambda array: array.astype(np.float32).astype(dtype))


def each(*changes: Change) -> Change:
    return lambda written: [change(written) for change in changes][0]


def zero_block(written: Written) -> None:
    """Sixteen columns of zeros under a scale of zero."""
    name = f"{STEM}layers.0.mlp.down_proj"
    written.tensors[f"{name}.weight"][:, :8] = 0
    written.tensors[f"{name}.weight_scale"][:, 0] = 0
    written.values[f"{name}.weight"][:, :16] = 0


def weight_only(written: Written) -> None:
    """Declared NVFP4, but its groups have no inputs and its files no scale of them."""
    written.config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    names = [n for n in written.tensors if n.endswith("input_scale")]
    for name in names:
        del written.tensors[name]
    written.rounds.clear()


def nested_quantisation(written: Written) -> None:
    text_of(written)["quantization_config"] = written.config.pop("quantization_config")


def short_names(written: Written) -> None:
    """`ignore` in the spelling of the text model."""
    config = written.config["quantization_config"]
    config["ignore"] = [n.replace(STEM, "model.") for n in config["ignore"]]


def stale(written: Written) -> None:
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    written.others["hf_quant_config.json"] = {"quantization": inner}


def head_of_nans(written: Written) -> None:
    name = "mtp.layers.0.self_attn.q_proj.weight"
    written.tensors[name] = np.full(written.tensors[name].shape, np.nan, BF16)


def tie(different: bool) -> Change:
    def change(written: Written) -> None:
        text(tie_word_embeddings=True)(written)
        written.config["tie_word_embeddings"] = True
        if not different:
            head = written.tensors[f"{STEM}embed_tokens.weight"]
            written.tensors["lm_head.weight"] = head
            written.values["lm_head.weight"] = head.astype(np.float32)

    return change


def transposed(written: Written) -> None:
    for name in [n for n in written.tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        written.tensors[name] = np.ascontiguousarray(written.tensors[name].swapaxes(1, 2))


def fused_blocks(written: Written) -> None:
    """Experts of FP8 blocks as transformers saves them: 3-D, with 3-D scales."""
    for layer in (0, 1):
        stem = f"{STEM}layers.{layer}.mlp.experts"
        for suffix, to in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            take = written.tensors.pop
            rows = [
                [take(f"{stem}.{e}.{part}_proj.{suffix}") for part in ("gate", "up", "down")]
                for e in range(text_of(written)["num_experts"])
            ]
            gate_up = np.stack([np.concatenate(row[:2]) for row in rows])
            written.tensors[f"{stem}.gate_up_proj{to}"] = gate_up
            written.tensors[f"{stem}.down_proj{to}"] = np.stack([row[2] for row in rows])


def mlx(written: Written) -> None:
    """MLX's names and its 4-bit matrices."""
    kept = {n: a for n, a in written.tensors.items() if "visual" not in n and "mtp" not in n}
    out: dict[str, Array] = {}
    for name, array in kept.items():
        name = name.replace(STEM, "language_model.model.")
        name = name.replace("lm_head", "language_model.lm_head")
        if array.ndim == 2 and array.shape[1] % 64 == 0:
            stem, columns = name.removesuffix(".weight"), array.shape[1]
            out[name] = np.zeros((len(array), columns // 8), np.uint32)
            for suffix in ("scales", "biases"):
                out[f"{stem}.{suffix}"] = np.ones((len(array), columns // 64), BF16)
        else:
            out[name] = array
    written.files[SINGLE] = out
    for key in ("quantization", "quantization_config"):
        written.config[key] = {"group_size": 64, "bits": 4, "mode": "affine"}


def bitsandbytes(written: Written) -> None:
    for name in [n for n in written.tensors if n.endswith("_proj.weight") and "visual" not in n]:
        count = written.tensors[name].size
        written.tensors[name] = np.zeros((count // 2, 1), np.uint8)
        written.tensors[f"{name}.absmax"] = np.zeros(count // 64, np.uint8)
        written.tensors[f"{name}.quant_map"] = np.zeros(16, np.float32)
        written.tensors[f"{name}.quant_state.bitsandbytes__nf4"] = np.zeros(90, np.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    written.config["quantization_config"] = config | {"llm_int8_skip_modules": ["lm_head"]}


# -- of the folder -------------------------------------------------------------------------------


def marked(folder: Path) -> Path:
    """A byte order mark before the JSON."""
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    return folder


def linked(folder: Path) -> Path:
    """As the hub's cache: names that are links to blobs."""
    for i, file in enumerate(sorted(folder.iterdir())):
        blob = folder.with_name(f"blob{i}")
        file.rename(blob)
        file.symlink_to(Path("..") / blob.name)
    return folder


def emptied(name: str) -> Callable[[Path], Path]:
    """A file of no bytes, as a download that broke off leaves it."""

    def change(folder: Path) -> Path:
        (folder / name).write_bytes(b"")
        return folder

    return change


def gguf(config: bool, path: bool = False) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        for file in folder.iterdir():
            if file.suffix == ".safetensors" or not config:
                file.unlink()
        file = folder / "Qwen3.6-27B-UD-Q4_K_M.gguf"
        file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
        return file if path else folder

    return change
