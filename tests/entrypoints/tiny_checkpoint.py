"""A checkpoint of a few kilobytes: random weights, one token a byte, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

EOS, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_MODEL_LEN = 128


def make_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, bos: bool = False
) -> PreTrainedTokenizerFast:
    """With `bos`, text is encoded with an end-of-text token before it, as some models want."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [USER, ASSISTANT, "<|system|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, additional_special_tokens=special
    )
    tokenizer.chat_template = chat_template
    if bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.eos_token_id)]
        )
    return tokenizer


def save_tiny_checkpoint(
    folder: Path, chat_template: str | None = CHAT_TEMPLATE, bos: bool = False
) -> Path:
    """Write it to `folder`; generation_config.json sets top_k, to tell defaults apart."""
    tokenizer = make_tokenizer(chat_template, bos)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.3,  # large, so that greedy text is not one token for ever
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    generation_config = {"eos_token_id": tokenizer.eos_token_id, "top_k": 50}
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder
