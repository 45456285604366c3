"""Odd files: those that must build compute the right tokens and say what was done about them;
those that must not are refused in a sentence that names the format in its first words."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from spark_engine.builder import cli
from spark_engine.builder.graph.lower import facts_of
from spark_engine.models.open_model import open_model
from tests.published import damage
from tests.published.checkpoint import Layout, Written, make
from tests.published.damage import STEM, YARN, Change, quantisation, text, text_of
from tests.published.layouts import GROUP, HEAD, LAYOUTS, LINEAR, linear
from tests.published.networks import BF16

pytest.importorskip("transformers")

from tests.published.test_published import follow  # noqa: E402

DENSE, MOE = "bf16 wrapper, dense", "bf16 wrapper, fused experts"
NO_HEAD = replace(LAYOUTS[DENSE], head=None)
WORDS, CHARACTERS = 8, 300  # words in which a format is named; of a refusal
DEAD = {
    "missing": ("nvidia 122B", None),
    "zero": ("nvidia 122B", 0.0),
    "denormal": ("nvidia 122B", 9.99994610111476e-41),
    "infinite": ("nvidia 122B", math.inf),
    "compressed-tensors, missing": ("CT NVFP4, experts", None),
    "compressed-tensors, zero": ("CT NVFP4, experts", 0.0),
    "compressed-tensors, infinite": ("CT NVFP4, experts", math.inf),
}


def _nothing(written: Written) -> None:
    """The layout's file as it is."""


@dataclass(frozen=True)
class Odd:
    """`base` is a layout or the name of one. `says`: a pattern of the notes of a build, or of a
    refusal. `head`: whether a draft head is found."""

    base: str | Layout
    change: Change = _nothing
    says: str = ""
    folder: Callable[[Path], Path] = lambda folder: folder
    head: bool = True

    def written(self) -> Written:
        layout = LAYOUTS[self.base] if isinstance(self.base, str) else self.base
        written = make(layout)
        self.change(written)
        return written


def _rope(**keys: object) -> Layout:
    return replace(LAYOUTS[DENSE], changes=keys)


def _several_dtypes(written: Written) -> None:
    damage.retyped("experts.2.gate_proj.weight", np.float16)(written)
    damage.retyped("experts.1.down_proj.weight", np.float32)(written)
    for name in (n for n in written.values if n.endswith("experts.gate_up_proj")):
        w = written.values[name][2]
        w[: len(w) // 2] = w[: len(w) // 2].astype(np.float16)


def _columns(written: Written) -> None:
    for name in [n for n in written.tensors if n.endswith("weight_scale")]:
        written.tensors[name] = written.tensors[name].reshape(-1, 1)


def _one_scale(written: Written) -> None:
    for name in [n for n in written.tensors if n.endswith("weight_scale")]:
        weight, scale = name.removesuffix("_scale"), written.tensors[name].max()
        written.tensors[name] = np.asarray(scale).astype(BF16)
        wide = written.tensors[weight].astype(np.float32)
        written.values[weight] = wide * written.tensors[name].astype(np.float32)


def _inverse(written: Written) -> None:
    for name in [n for n in written.tensors if n.endswith("weight_scale")]:
        written.tensors[f"{name}_inv"] = written.tensors.pop(name)[:, 0, :, 0]


def _cache_alone(written: Written) -> None:
    inner = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    written.others["hf_quant_config.json"] = {"quantization": inner}
    written.kv = {1: (1.0, 1.0)}


QUANTISATION, COMPRESSION = "quantization_config", "compression_config"
GROUP_128 = {"weights": GROUP["int4_g128"][1] | {"actorder": "group"}, "targets": ["Linear"]}
ACTORDER = quantisation(config_groups={"group_0": GROUP_128})
IN_ORDER = damage.next_to(
    "weight_packed", "weight_g_idx", lambda words: np.arange(8 * words.shape[1], dtype="i4") // 128
)
ALONE = {"GPTQ, dense": "quantize_config.json", "AutoRound, dense": "quantization_config.json"}
ALONE |= {"AWQ, dense": "quant_config.json"}
NO_BIAS = lambda words: np.zeros(words.shape[1], np.float16)  # noqa: E731
ONE, ONES = np.ones((), np.float32), np.ones(384, np.float16)
UP, K_ZERO = f"{STEM}layers.0.mlp.up_proj", f"{STEM}layers.1.self_attn.k_zero_point"
SCALE = r"(?i)scales? of .*experts?|experts?.*scale"
CT = "CT NVFP4, dense"
INV_FREQ = f"{STEM}layers.1.self_attn.rotary_emb.inv_freq"
LORA = "base_model.model.layers.0.mlp.gate_proj.lora_A.weight"
YARN_ALONE = YARN | {"rope_theta": 10000000, "partial_rotary_factor": 0.25}
BUILDS: dict[str, Odd] = {
    **{
        f"input scale of an expert {name}": Odd(base, damage.uncalibrated(value), SCALE)
        for name, (base, value) in DEAD.items()
    },
    "weights only, declared NVFP4": Odd("ModelOpt NVFP4", damage.weight_only),
    "index names a head that no shard has": Odd(NO_HEAD, damage.listed, r"mtp|head", head=False),
    "index leaves out the head": Odd(DENSE, damage.unlisted),
    "mtp.safetensors without an index": Odd(
        replace(LAYOUTS[DENSE], head_file="mtp.safetensors"), damage.no_index
    ),
    "several files without an index": Odd(DENSE, damage.split_files),
    "adapter next to the model": Odd(
        DENSE,
        damage.added(LORA, np.zeros((4, 256), np.float32), "adapter_model.safetensors"),
        r"adapter",
    ),
    "config names a head that is not there": Odd(NO_HEAD, head=False),
    "config does not name the head": Odd(DENSE, text(mtp_num_hidden_layers=None)),
    "head of NaN": Odd(DENSE, damage.head_of_nans),
    "YaRN in rope_parameters": Odd(_rope(rope_parameters=YARN_ALONE)),
    "YaRN in rope_scaling": Odd(_rope(rope_parameters=None, rope_scaling=YARN, **damage.FLAT_ROPE)),
    "flat names under a nested config": Odd(DENSE, damage.renamed(STEM, "model.")),
    "names of the language model": Odd(DENSE, damage.renamed(STEM, "language_model.model.")),
    "nested names under a flat config": Odd(
        "bf16 text only", damage.renamed("model.", STEM), head=False
    ),
    "inv_freq": Odd(DENSE, damage.added(INV_FREQ, np.ones(32, np.float32))),
    "f32 of one expert": Odd(
        "bf16 text only, split experts",
        damage.retyped("experts.2.up_proj.weight", np.float32),
        head=False,
    ),
    "f16 of one expert, f32 of another's down": Odd(
        "bf16 text only, split experts", _several_dtypes, head=False
    ),
    "f32 keys": Odd(DENSE, damage.retyped("1.self_attn.k_proj.weight", np.float32)),
    "f16 scales of blocks": Odd("FP8 blocks, dense", damage.retyped("scale_inv", np.float16)),
    "scales [1, 1] of tensors": Odd(
        "CT FP8 static", damage.changed("_scale", lambda scale: scale.reshape(1, 1))
    ),
    "scales [N, 1] of channels": Odd("ModelOpt FP8 per channel", _columns),
    "one bf16 scale for all channels": Odd("ModelOpt FP8 per channel", _one_scale),
    "weight_scale_inv of blocks": Odd("ModelOpt FP8_PB_WO", _inverse),
    "cache scales in vLLM's names": Odd(
        "ModelOpt FP8, FP8 cache", damage.renamed("k_proj.k_scale", "attn.k_scale")
    ),
    "cache scales of outputs": Odd(
        "ModelOpt FP8, FP8 cache", damage.renamed("k_proj.k_scale", "k_proj.output_scale")
    ),
    "scales of queries": Odd(DENSE, damage.added(f"{STEM}layers.1.self_attn.q_scale", ONE)),
    "a cache scale of keys and values": Odd(
        "ModelOpt FP8, FP8 cache", damage.one_cache_scale, "2 of them: .*zero_point"
    ),
    "biases of 0": Odd("GPTQ, dense", damage.next_to("qweight", "bias", NO_BIAS), "effect.*bias"),
    "desc_act, in order": Odd("GPTQ, dense", quantisation(desc_act=True)),
    "actorder, in order": Odd("CT int4 g128", damage.each(ACTORDER, IN_ORDER)),
    **{
        f"{base} in {file}": Odd(base, damage.alone(file, "quant_method"))
        for base, file in ALONE.items()
    },
    **{
        f"scales [1, N], {base}": Odd(
            base, damage.changed("weight_scale", lambda rows: rows.reshape(1, -1))
        )
        for base in ("FP8 dynamic, dense", "qwen3_next FP8 dynamic")
    },
    "scales of dynamic inputs": Odd(
        "FP8 blocks, dense",
        damage.next_to("weight_scale_inv", "input_scale", lambda scale: ONE),
        "effect.*input_scale",
    ),
    "compression_config": Odd(
        CT, lambda w: w.config.update({COMPRESSION: w.config.pop(QUANTISATION)})
    ),
    "no model_type": Odd(DENSE, lambda w: [p.pop("model_type") for p in (w.config, text_of(w))]),
    "no architectures": Odd(DENSE, lambda w: w.config.pop("architectures")),
    **{
        f"empty {file}, {name}": Odd(base, change, f"{file} is empty", damage.emptied(file), False)
        for file in ("mtp.safetensors", "model_mtp.safetensors")
        for name, base, change in (
            ("no index", NO_HEAD, _nothing),
            ("in the index", replace(LAYOUTS[DENSE], head_file=file), _nothing),
            ("next to shards", NO_HEAD, damage.split_files),
        )
    },
    "ModelOpt's cache alone": Odd(DENSE, _cache_alone),
    "f32 norms": Odd(DENSE, damage.retyped("norm.weight", np.float32)),
    "zeros under a scale of zero": Odd("nvidia 3.8", damage.zero_block),
    "tied, and an equal head stored": Odd(DENSE, damage.tie(different=False)),
    "fused FP8 experts": Odd("FP8 blocks, experts", damage.fused_blocks),
    "float16 declared": Odd(DENSE, text(dtype=None, torch_dtype="float16")),
    "no layer types": Odd(DENSE, text(layer_types=None)),
    "status frozen": Odd(CT, quantisation(quantization_status="frozen")),
    "quantisation in the text config": Odd(CT, damage.nested_quantisation),
    "ignore in the text model's names": Odd(CT, damage.short_names),
    "sparsity of none": Odd(CT, quantisation(sparsity_config={"format": "dense"})),
    "byte order mark": Odd(DENSE, folder=damage.marked),
    "symbolic links": Odd(DENSE, folder=damage.linked),
}


def _algorithm(name: str) -> Odd:
    return Odd("ModelOpt NVFP4", quantisation(quant_algo=name), name)


def _outputs(written: Written) -> None:
    group = written.config["quantization_config"]["config_groups"]["group_0"]
    group["output_activations"] = group["weights"]


def _groups_of_32(written: Written) -> None:
    written.others["hf_quant_config.json"]["quantization"]["group_size"] = 32


def _packed_embedding(written: Written) -> None:
    del written.tensors[f"{STEM}embed_tokens.weight"]
    packed = np.zeros((512, 32), np.int32)
    written.tensors[f"{STEM}embed_tokens.weight_packed"] = packed


def _in_cache(folder: Path) -> Path:
    snapshot = folder.with_name("models--a--b") / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    return snapshot.parents[1]


INPUTS_ALONE = {"group_0": {"weights": None, "input_activations": {}, "targets": ["Linear"]}}
TURNED = {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}
INT8 = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}
NEXT = {"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForConditionalGeneration"]}
# A pattern of the format, which the first eight words hold.
FORMATS: dict[str, Odd] = {
    "GGUF and a config": Odd(DENSE, says="GGUF", folder=damage.gguf(config=True)),
    "GGUF alone": Odd(DENSE, says="GGUF", folder=damage.gguf(config=False)),
    "a GGUF file": Odd(DENSE, says="GGUF", folder=damage.gguf(True, path=True)),
    "MLX": Odd(DENSE, damage.mlx, "MLX"),
    "bitsandbytes": Odd(DENSE, damage.bitsandbytes, "bitsandbytes"),
    "MXFP4": Odd(Layout("dense", {LINEAR: "mxfp4"}, linear("mxfp4")), says="MXFP4|mxfp4"),
    "quark": Odd(DENSE, quantisation(quant_method="quark"), "quark"),
    "mxfp4": Odd(DENSE, quantisation(quant_method="mxfp4"), "(?i)mxfp4"),
    "int8": Odd(Layout("dense", {LINEAR: "int8"}, linear("int8")), says="(?i)int8|W8A8"),
    **{f"ModelOpt {name}": _algorithm(name) for name in ("MXFP8", "W4A8_NVFP4_FP8", "INT4_AWQ")},
    "GPTQ with a bias": Odd(
        "GPTQ, dense", damage.added(f"{UP}.bias", np.ones(384, np.float16)), "(?i)gptq"
    ),
    "zero points of the cache": Odd(
        "unsloth 3.8", damage.added(K_ZERO, np.ones(1, np.float32)), "compressed-tensors"
    ),
    "permuted columns": Odd(
        "GPTQ, dense", damage.changed("1.mlp.up_proj.g_idx", np.flip), "GPTQ int4.*desc_act"
    ),
    "permuted columns of compressed-tensors": Odd(
        "CT int4 g128",
        damage.each(IN_ORDER, damage.changed("o_proj.weight_g_idx", np.flip)),
        "int4",
    ),
    "no order of columns": Odd("CT int4 g128", ACTORDER, "int4"),
    "a transform": Odd(CT, quantisation(transform_config=TURNED), "Hadamard"),
    "rounded outputs": Odd(CT, _outputs, "output"),
    "marlin": Odd(CT, quantisation(format="marlin-24"), "marlin-24"),
    "no weights": Odd(CT, quantisation(config_groups=INPUTS_ALONE), "without weights"),
    "NVFP4 in groups of 32": Odd("ModelOpt NVFP4", _groups_of_32, "NVFP4"),
    "sparse": Odd(CT, quantisation(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity"),
    "int8 cache": Odd(CT, quantisation(kv_cache_scheme=INT8), "KV cache in static int8"),
    "a quantised embedding": Odd(DENSE, _packed_embedding, "quantised embedding"),
    "qwen4_exp": Odd(DENSE, lambda w: w.config.update(NEXT), "qwen4_exp"),
}
SCALE_2, ZERO = f"{damage.EXPERT}.up_proj.weight_scale_2", np.zeros((), np.float32)
NOT_FINITE = [
    (DENSE, f"{STEM}layers.0.input_layernorm.weight", np.full(256, np.nan, BF16)),
    (DENSE, f"{STEM}layers.0.linear_attn.A_log", np.full(3, np.inf, np.float32)),
    (DENSE, f"{STEM}embed_tokens.weight", np.full((512, 256), np.nan, BF16)),
    (DENSE, f"{STEM}layers.1.self_attn.o_proj.weight", np.full((256, 512), np.inf, BF16)),
    (MOE, f"{STEM}layers.1.mlp.experts.down_proj", np.full((4, 256, 128), np.nan, BF16)),
]


def _no_target(written: Written) -> None:
    written.config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Qwen3_5MLP"]


# A pattern of the key, file or tensor that is at fault.
REFUSED: dict[str, Odd] = {
    "YaRN next to other rope_parameters": Odd(_rope(rope_scaling=YARN), says="rope_scaling"),
    "swiglu_limit": Odd(DENSE, text(swiglu_limit=7.0), "swiglu_limit"),
    "logits_soft_cap": Odd(DENSE, text(logits_soft_cap=30.0), "logits_soft_cap"),
    "targets that fit nothing": Odd(CT, _no_target, "no entry fits"),
    **{
        f"not finite: {name}": Odd(base, damage.added(name, array), r"\[.*\] is (nan|inf)")
        for base, name, array in NOT_FINITE
    },
    "root of a cached model": Odd(DENSE, says="give .*snapshots/abc", folder=_in_cache),
    "hc_count": Odd(DENSE, text(hc_count=4), "hc_count"),
    "ple_layer_ids": Odd(DENSE, text(ple_layer_ids=[1]), "ple_layer_ids"),
    "indexer_n_heads": Odd(DENSE, text(indexer_n_heads=4), "indexer_n_heads"),
    "rows above the vocabulary": Odd(DENSE, text(vocab_size=500), "vocab_size|embed_tokens"),
    "tied, and another head stored": Odd(DENSE, damage.tie(True), "tie_word_embeddings|lm_head"),
    "tied, and a quantised head": Odd(
        Layout("dense", {rf"{LINEAR}|{HEAD}": "fp8_rows"}, linear("fp8_rows")),
        damage.tie(True),
        "tie_word_embeddings",
    ),
    "stale hf_quant_config.json": Odd(DENSE, damage.stale, r"hf_quant_config\.json"),
    "transposed experts": Odd(MOE, damage.transposed, "experts"),
    "eos_token_id as text": Odd(DENSE, text(eos_token_id="1"), "eos_token_id"),
    "weight scale of zero": Odd("nvidia 122B", damage.added(SCALE_2, ZERO), "weight_scale_2"),
}


@pytest.mark.parametrize("odd", BUILDS.values(), ids=BUILDS)
def test_builds(odd: Odd, tmp_path: Path) -> None:
    written = odd.written()
    checkpoint = odd.folder(written.write(tmp_path / "checkpoint"))
    facts = facts_of(open_model(checkpoint))
    assert (facts.head is not None) == odd.head, facts.no_head
    said = follow(checkpoint, written)
    assert re.search(odd.says, said), said


def refusal(odd: Odd, folder: Path) -> str:
    checkpoint = odd.folder(odd.written().write(folder / "checkpoint"))
    words = [str(checkpoint), "-o", str(folder / "engine"), "--target", "cpu", "--no-record"]
    done = CliRunner().invoke(cli.main, [*words, "--decode", "1", "--prefill", "64"])
    assert done.exit_code != 0, "it was built"
    assert "spark-build: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    message = done.stderr.rpartition("spark-build: ")[2].strip()
    assert len(message) <= CHARACTERS, f"{len(message)} characters: {message}"
    return message


@pytest.mark.parametrize("odd", FORMATS.values(), ids=FORMATS)
def test_a_format_is_refused_by_its_name(odd: Odd, tmp_path: Path) -> None:
    message = refusal(odd, tmp_path)
    assert re.search(odd.says, " ".join(message.split()[:WORDS])), message


@pytest.mark.parametrize("odd", REFUSED.values(), ids=REFUSED)
def test_what_is_at_fault_is_named(odd: Odd, tmp_path: Path) -> None:
    message = refusal(odd, tmp_path)
    assert re.search(odd.says, message), message
