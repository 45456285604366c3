"""A small byte-level BPE with Qwen's special tokens and a chat template, for tests."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPLIT = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s+"
TEXT = (
    "Once upon a time a small bear went to the river and saw a fish. The bear was happy.",
    "«Où est la clé?» 猫が座っている。 Привет, мир! 🙂🙃 naïve café — 12 + 30 = 42",
    '<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n{"a": [1, 2]}',
)

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('Unexpected message role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- for name, value in call.function.arguments.items() %}
            {{- name + '=' + (value | string) }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""


@cache
def train() -> str:
    """tokenizer.json as text: 256 bytes, some merges, the special tokens last."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    return backend.to_str()


def write(folder: Path) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = train()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    size = Tokenizer.from_str(text).get_vocab_size()
    extra = {str(size): {"content": "<|audio_start|>", "special": True}}
    config = json.dumps({"added_tokens_decoder": extra})
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
