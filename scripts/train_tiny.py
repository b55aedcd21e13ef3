"""Make the embedded model ``nanovllm/assets/tiny-stories``: data, tokenizer, training, evaluation.

Why it exists: tests, examples and first steps need a real language model that is there without a
download and is fast on a laptop's CPU.  Random weights would exercise the code but show nothing;
a few million weights that have read many simple stories already write readable English.

    python scripts/train_tiny.py generate  --model SMOLLM2_FOLDER --work W  # needs a GPU
    python scripts/train_tiny.py compose   --work W     # stories from the grammar in make_stories
    python scripts/train_tiny.py tokenizer --work W     # BPE, chat template, held-out set
    python scripts/train_tiny.py train     --work W     # two minutes on one NVIDIA H200
    python scripts/train_tiny.py eval                   # held-out perplexity, on a CPU

``W`` is a scratch folder; the steps leave their results there, and ``--out`` (default: the folder
in the package) receives the finished checkpoint.  The model itself is transformers'
``Qwen3ForCausalLM``, so what is trained is by construction what others load.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ASSET = HERE.parent / "nanovllm" / "assets" / "tiny-stories"

VOCAB = 3072
CONTEXT = 1024
EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML without a default system prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT_SHARE = 0.35  # of the documents; the others are the bare story
HELD_OUT_BYTES = 150_000


# ----------------------------------------------------------------------------------------------
# Data
# ----------------------------------------------------------------------------------------------


def read_stories(work: Path) -> list[dict[str, str]]:
    """All stories of the scratch folder, shuffled with a fixed seed."""
    from make_stories import select

    rows = []
    for file in sorted(work.glob("stories-*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            source = "grammar" if "grammar" in file.name else "SmolLM2"
            for row in map(json.loads, lines):
                story = select(row["story"]) if source == "SmolLM2" else row["story"]
                if story:
                    rows.append({"source": source, "request": row["request"], "story": story})
    random.Random(1234).shuffle(rows)
    return rows


def split(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training stories, held-out stories): the first HELD_OUT_BYTES bytes are held out."""
    size = 0
    for i, row in enumerate(rows):
        size += len(row["story"].encode()) + 2
        if size > HELD_OUT_BYTES:
            return rows[i:], rows[:i]
    raise SystemExit("error: too few stories; run the steps generate and compose first")


def make_tokenizer(work: Path, out: Path) -> None:
    """Train the tokenizer on the training stories and write the held-out ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    train_rows, held_out = split(read_stories(work))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS, IM_START, IM_END],  # ids 0, 1, 2
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any byte can be written
        show_progress=False,
    )
    texts = (row["request"] + "\n" + row["story"] for row in train_rows)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    # JSON lines: one story each, with where it comes from
    with open(out / "heldout.txt", "w") as file:
        for row in held_out:
            file.write(json.dumps({"source": row["source"], "story": row["story"]}) + "\n")
    for source in ("SmolLM2", "grammar"):
        texts = [row["story"] for row in train_rows if row["source"] == source]
        size, tokens = sum(map(len, texts)), sum(map(len, tokenizer(texts)["input_ids"]))
        held = sum(row["source"] == source for row in held_out)
        print(
            f"{source}: {len(texts):,} training stories, {size:,} bytes, {tokens:,} tokens, "
            f"{size / tokens:.2f} bytes a token; {held:,} stories held out"
        )


def documents(rows: list[dict[str, str]], tokenizer: Any) -> list[np.ndarray]:
    """Token ids of each training document, in the plain or in the chat form."""
    rng = random.Random(99)
    texts = []
    for row in rows:
        story = row["story"]
        if rng.random() < CHAT_SHARE:
            texts.append(
                f"{IM_START}user\n{row['request']}{IM_END}\n"
                f"{IM_START}assistant\n{story}{IM_END}\n{EOS}"
            )
        else:
            texts.append(story + EOS)
    return [np.array(ids) for ids in tokenizer(texts)["input_ids"]]


def pack(docs: list[np.ndarray], rng: random.Random) -> Iterator[np.ndarray]:
    """Yield rows of CONTEXT + 1 tokens for one pass over the shuffled documents.

    Every row begins where a document begins, as a prompt does; the end of the last document that
    does not fit is lost for this pass, and another pass cuts elsewhere.
    """
    order = list(range(len(docs)))
    rng.shuffle(order)
    row: list[np.ndarray] = []
    length = 0
    for i in order:
        row.append(docs[i])
        length += len(docs[i])
        if length > CONTEXT:
            yield np.concatenate(row)[: CONTEXT + 1]
            row, length = [], 0


# ----------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------


def make_config() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        max_window_layers=7,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 200 steps (a tenth of a short run), then a cosine to 2 % of the peak."""
    warm = min(200, steps // 10 + 1)
    if step < warm:
        return peak * (step + 1) / warm
    x = (step - warm) / max(1, steps - warm)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * x)))


def save_checkpoint(model: Any, out: Path) -> None:
    """Write weights in bfloat16, config, and generation defaults that change no behaviour.

    The weights are stored in half the space, while the config says float32: the loader widens
    them, which is exact, and a CPU computes in its fastest type.
    """
    import torch
    from safetensors.torch import save_file

    state = {k: v.detach().cpu().to(torch.bfloat16) for k, v in model.state_dict().items()}
    state.pop("lm_head.weight")  # tied to the embedding
    save_file(
        {k: v.contiguous() for k, v in state.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    (out / "model.safetensors").chmod(0o644)
    make_config().save_pretrained(out)
    generation = {"eos_token_id": [0, 2], "pad_token_id": 0}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def train(work: Path, out: Path, args: argparse.Namespace) -> None:
    import torch
    import torch.nn.functional as F
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(out)
    train_rows, held_rows = split(read_stories(work))
    if args.only:
        train_rows = [row for row in train_rows if row["source"] == args.only]
    docs = documents(train_rows, tokenizer)
    held = [[*ids, 0] for ids in tokenizer([row["story"] for row in held_rows])["input_ids"]]
    total = sum(len(d) for d in docs)
    print(f"{len(docs):,} documents, {total:,} tokens, {device}", flush=True)

    if args.init:
        model = Qwen3ForCausalLM.from_pretrained(args.init).to(device)
    else:
        model = Qwen3ForCausalLM(make_config()).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights", flush=True)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=device == "cuda",
    )

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    step_loss = torch.compile(loss_of) if args.compile else loss_of

    def held_out_loss() -> float:
        rows = torch.tensor([r[:513] for r in _rows_of(held, 513)], device=device)
        with torch.no_grad():
            losses = [loss_of(part).item() * len(part) for part in rows.split(64)]
        return sum(losses) / len(rows)

    rng = random.Random(args.seed)
    rows = np.empty((0, CONTEXT + 1), dtype=np.int64)
    begin = time.time()
    used = passes = 0
    mark = begin
    steps = args.steps
    step = 0
    while step < steps:
        if used + args.batch > len(rows):
            rows = np.stack(list(pack(docs, rng)))
            used, passes = 0, passes + 1
        batch = torch.from_numpy(rows[used : used + args.batch]).to(device, non_blocking=True)
        used += args.batch
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, args.lr)
        loss = step_loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if args.seconds and step in (50, 150):  # fit the schedule to the time there is
            loss.item()  # wait for the GPU
            if step == 50:
                mark = time.time()
            else:
                left = args.seconds - (time.time() - begin)
                steps = 150 + int(left / ((time.time() - mark) / 100))
                print(f"{steps:,} steps fit into {args.seconds:.0f} s", flush=True)
        if step % args.every == 0 or step == steps - 1:
            seen = (step + 1) * args.batch * CONTEXT
            print(
                f"step {step:5d}  loss {loss.item():.4f}  held-out {held_out_loss():.4f}  "
                f"{seen / 1e6:.0f}M tokens, pass {passes}, {time.time() - begin:.0f} s",
                flush=True,
            )
        step += 1
    save_checkpoint(model, out)


def _rows_of(docs: list[list[int]], length: int) -> Iterator[list[int]]:
    """Whole documents end to end, cut into rows of one length (for a quick held-out figure)."""
    stream = [t for d in docs for t in d]
    for i in range(0, len(stream) - length + 1, length):
        yield stream[i : i + length]


# ----------------------------------------------------------------------------------------------
# Evaluation
# ----------------------------------------------------------------------------------------------


def evaluate(folder: Path) -> None:
    """Perplexity per token and bits per byte on the held-out stories, then two samples.

    Each story is scored alone, from its second token on, with the end-of-text token as its last;
    the first token has no context and counts as log2(vocabulary) bits in the bits per byte.
    """
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begin = time.time()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with open(folder / "heldout.txt") as file:
        rows = [json.loads(line) for line in file]
    totals = {name: [0, 0, 0.0, 0] for name in ("all", "SmolLM2", "grammar")}
    with torch.inference_mode():
        for row in rows:
            ids = torch.tensor([[*tokenizer(row["story"])["input_ids"], 0]])
            logits = model(ids[:, :-1]).logits[0]
            nats = F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            for name in ("all", row["source"]):
                found = (1, len(row["story"].encode()), nats, ids.shape[1] - 1)
                totals[name] = [x + y for x, y in zip(totals[name], found, strict=True)]
    print(f"weights in {model.dtype}, {sum(p.numel() for p in model.parameters()):,} of them")
    for name, (stories, size, nats, tokens) in totals.items():
        bits = (nats + stories * math.log(VOCAB)) / math.log(2)
        print(
            f"{name:8s} {stories:4d} stories, {size:7,} bytes, {tokens:6,} tokens: "
            f"perplexity per token {math.exp(nats / tokens):.3f}, bits per byte {bits / size:.4f}"
        )
    print(f"({time.time() - begin:.0f} s)")

    torch.manual_seed(0)
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write a story about a brave cat."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    for title, inputs, options in (
        ("greedy", prompt, {"do_sample": False}),
        ("sampled, temperature 0.8, seed 0", prompt, {"do_sample": True, "temperature": 0.8}),
        ("chat, greedy: Write a story about a brave cat.", chat, {"do_sample": False}),
    ):
        inputs = {k: inputs[k] for k in ("input_ids", "attention_mask")}
        output = model.generate(**inputs, max_new_tokens=300, **options)[0]
        skip = inputs["input_ids"].shape[1] if "chat" in title else 0
        print(f"\n--- {title}\n{tokenizer.decode(output[skip:], skip_special_tokens=True)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("step", choices=["generate", "compose", "tokenizer", "train", "eval"])
    parser.add_argument("--work", type=Path, default=Path("build/tiny-stories"), help="scratch")
    parser.add_argument("--out", type=Path, default=ASSET, help="checkpoint folder")
    parser.add_argument("--model", type=Path, help="generate: SmolLM2 checkpoint folder")
    parser.add_argument("--count", type=int, default=80000, help="compose: how many stories")
    parser.add_argument("--steps", type=int, default=3500, help="train: optimizer steps")
    parser.add_argument("--batch", type=int, default=64, help="train: rows of 1024 tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="train: peak learning rate")
    parser.add_argument("--init", type=Path, help="train: continue from this checkpoint")
    parser.add_argument("--only", help="train: use the stories of one source, grammar or SmolLM2")
    parser.add_argument("--every", type=int, default=250, help="train: steps between reports")
    parser.add_argument("--seconds", type=float, default=0, help="train: fit --steps to this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.step == "generate":
        if args.model is None:
            parser.error("generate needs --model (see scripts/fetch_smollm2.py)")
        command = [sys.executable, str(HERE / "make_stories.py"), "--model", str(args.model)]
        subprocess.run([*command, "--out", str(args.work)], check=True)
    elif args.step == "compose":
        from make_stories import compose

        rng = random.Random(args.seed)
        with gzip.open(args.work / "stories-grammar.jsonl.gz", "wt") as file:
            for row in compose(args.count, rng):
                file.write(json.dumps(row) + "\n")
    elif args.step == "tokenizer":
        make_tokenizer(args.work, args.out)
    elif args.step == "train":
        train(args.work, args.out, args)
    else:
        evaluate(args.out)


if __name__ == "__main__":
    main()
