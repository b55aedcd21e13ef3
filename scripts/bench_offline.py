"""Offline throughput: many requests at once, ours against transformers' generate and vLLM.

    python scripts/bench_offline.py --engine nanovllm --engine hf
    python scripts/bench_offline.py --engine nanovllm --device cuda --model CHECKPOINT \\
        --num-prompts 256 --min-len 100 --max-len 1024 --temperature 0.6     # and with vllm

Prompts and outputs have lengths drawn uniformly (seeded) and random tokens; EOS is ignored, so
every request gives exactly the tokens it was drawn to give. Only those count: what a static batch
generates past a request's length is waste. transformers is measured with its best static batch size
of those given: requests sorted by prompt length (output lengths are not known beforehand in real
life), left-padded, each batch run to its longest output.

One JSON line a run, with repetitions interleaved between engines. vLLM runs in a process of its
own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DEFAULT_MODEL = Path(
    os.environ.get("NANOVLLM_CACHE", Path.home() / ".cache" / "nanovllm"), "SmolLM2-135M-Instruct"
)


@dataclass
class Workload:
    """What every engine is given."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def make_workload(args: argparse.Namespace, vocab_size: int) -> Workload:
    rng = random.Random(args.seed)
    lens = [
        (rng.randint(args.min_len, args.max_len), rng.randint(args.min_len, args.max_len))
        for _ in range(args.num_prompts)
    ]
    prompts = [[rng.randrange(5, vocab_size) for _ in range(prompt)] for prompt, _ in lens]
    return Workload(prompts, [output for _, output in lens])


def make_offline(package: str, args: argparse.Namespace) -> tuple[int, Callable[[Workload], None]]:
    """vLLM's LLM class, or ours, which has its interface."""
    module = importlib.import_module(package)
    kwargs = {"device": args.device} if package == "nanovllm" else {}
    llm = module.LLM(
        model=args.model, dtype=args.dtype, enable_prefix_caching=False,
        max_num_seqs=args.num_prompts, max_model_len=2 * args.max_len, skip_tokenizer_init=True,
        **kwargs,
    )  # fmt: skip

    def run(workload: Workload) -> None:
        params = [
            module.SamplingParams(
                temperature=args.temperature, max_tokens=n, ignore_eos=True, detokenize=False
            )
            for n in workload.output_lens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        got = [len(output.outputs[0].token_ids) for output in outputs]
        assert got == workload.output_lens, got

    return json.loads(Path(args.model, "config.json").read_text())["vocab_size"], run


def make_hf(args: argparse.Namespace, batch_size: int) -> tuple[int, Callable[[Workload], None]]:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = "float32" if args.dtype == "auto" and args.device != "cuda" else args.dtype
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    device = "cuda" if args.device == "cuda" else "cpu"
    model.to(device)

    @torch.inference_mode()
    def run(workload: Workload) -> None:
        order = sorted(range(len(workload.prompts)), key=lambda i: len(workload.prompts[i]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            longest = max(len(workload.prompts[i]) for i in batch)
            pads = [longest - len(workload.prompts[i]) for i in batch]
            ids = [[0] * pad + workload.prompts[i] for pad, i in zip(pads, batch, strict=True)]
            mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
            num_new = max(workload.output_lens[i] for i in batch)
            output = model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )
            assert output.shape[1] == longest + num_new

    return model.config.vocab_size, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", action="append", choices=("nanovllm", "vllm", "hf"))
    parser.add_argument("--model", default=str(DEFAULT_MODEL))
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--min-len", type=int, default=16, help="prompt and output tokens, least")
    parser.add_argument("--max-len", type=int, default=256, help="prompt and output tokens, most")
    parser.add_argument("--hf-batch-sizes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file that the medians are appended to, as a JSON line each")
    args = parser.parse_args()

    runs: dict[str, Callable[[Workload], None]] = {}
    vocab_size = 0
    for engine in args.engine or ["nanovllm"]:
        if engine != "hf":
            vocab_size, runs[engine] = make_offline(engine, args)
        else:
            for batch_size in args.hf_batch_sizes:
                vocab_size, runs[f"hf, batch {batch_size}"] = make_hf(args, batch_size)
    workload = make_workload(args, vocab_size)

    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(args.repeat):
        for name, run in runs.items():
            start = time.perf_counter()
            run(workload)
            seconds = time.perf_counter() - start
            rates[name].append(workload.num_output_tokens / seconds)
            line = {"engine": name, "repetition": repetition, "seconds": round(seconds, 2),
                    "output_tokens": workload.num_output_tokens,
                    "output_tokens_per_s": round(rates[name][-1], 1)}  # fmt: skip
            print(json.dumps(line), flush=True)

    medians = {name: statistics.median(values) for name, values in rates.items()}
    summary: dict[str, object] = {name: round(median, 1) for name, median in medians.items()}
    hf = [median for name, median in medians.items() if name.startswith("hf")]
    if "nanovllm" in medians and hf:
        summary["nanovllm / best hf"] = round(medians["nanovllm"] / max(hf), 2)
    print(json.dumps({"median_output_tokens_per_s": summary}))
    if args.out:
        with open(args.out, "a", encoding="utf-8") as file:
            for name, values in rates.items():
                line = {"workload": "throughput", "engine": name, "unit": "tokens/s",
                        "median": round(medians[name], 1), "all": values}  # fmt: skip
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
