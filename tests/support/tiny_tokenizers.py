"""Small tokenizers in the two forms that decoder-only models come with, saved as checkpoints do."""

import json

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

CORPUS = ["Hello world, how are you?", "to be or not to be", "123 žluťoučký kůň 🔥 你好"] * 4
SPECIAL = ["<s>", "</s>", "<|turn|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|turn|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def byte_level():
    """Every byte is a token to begin with: as in Llama 3, Qwen and SmolLM2."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return backend, trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )


def sentencepiece_like():
    """Words begin with `▁`, unknown characters fall back to bytes: as in Llama 2 and Mistral."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    special = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    trainer.limit_alphabet = 60
    return backend, trainer


def save_tokenizer(directory, make=byte_level, *, template=TEMPLATE, bos=True, **more):
    """Train a tokenizer on a few words and write it as a checkpoint's files."""
    backend, trainer = make()
    backend.train_from_iterator(CORPUS, trainer)
    if make is sentencepiece_like:  # the byte pieces are ordinary text, not control tokens
        plain = json.loads(backend.to_str())
        plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] in SPECIAL]
        backend = Backend.from_str(json.dumps(plain))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config | more))
    return directory
