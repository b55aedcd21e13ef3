"""A debugger stops everywhere between LLM.generate and Sampler.forward, in one thread, in order."""

from __future__ import annotations

import ast
import bdb
import inspect
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from dense_backend import save_random_checkpoint
from test_models import CONFIGS

from nanovllm import LLM, SamplingParams
from nanovllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from nanovllm.v1.core.sched.scheduler import Scheduler
from nanovllm.v1.sample.sampler import Sampler
from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner


class Debugger(bdb.Bdb):
    """pdb without its prompt: notes where it stops, and goes on."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.stops: list[tuple[str, int, int]] = []
        self.seen_locals: dict[str, dict[str, Any]] = {}
        for function in functions:
            code = function.__code__
            error = self.set_break(code.co_filename, first_line_of_body(function))
            assert error is None, error

    def user_line(self, frame: FrameType) -> None:
        name = frame.f_code.co_qualname
        if self.break_here(frame):
            self.stops.append((name, os.getpid(), threading.get_ident()))
            self.seen_locals.setdefault(name, dict(frame.f_locals))
        self.set_continue()


def first_line_of_body(function: Callable[..., Any]) -> int:
    """The first line after the docstring, where a reader would set the breakpoint."""
    lines, start = inspect.getsourcelines(inspect.unwrap(function))
    (node,) = ast.parse(inspect.cleandoc("\n".join(["", *map(str.rstrip, lines)]))).body
    assert isinstance(node, ast.FunctionDef)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return start + body[0].lineno - 1


def test_breakpoints_are_hit_in_order_in_one_process_and_thread(tmp_path: Path) -> None:
    """Two steps on a model of two layers: schedule, prepare, attend twice, sample."""
    save_random_checkpoint(tmp_path, CONFIGS["qwen3"])
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
    debugger = Debugger(
        [
            Scheduler.schedule,
            inspect.unwrap(GPUModelRunner._prepare_inputs),
            CPUAttentionBackendImpl.forward,
            Sampler.forward,
        ]
    )
    prompt = {"prompt_token_ids": [5, 6, 7]}
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    output = debugger.runcall(llm.generate, [prompt], params, use_tqdm=False)

    one_step = [
        "Scheduler.schedule",
        "GPUModelRunner._prepare_inputs",
        "CPUAttentionBackendImpl.forward",
        "CPUAttentionBackendImpl.forward",
        "Sampler.forward",
    ]
    assert [name for name, _, _ in debugger.stops] == 2 * one_step
    assert {(pid, thread) for _, pid, thread in debugger.stops} == {
        (os.getpid(), threading.get_ident())
    }
    assert len(output[0].outputs[0].token_ids) == 2
    # Real values, not tracers' stand-ins.
    assert debugger.seen_locals["GPUModelRunner._prepare_inputs"]["num_scheduled_tokens"] == [3]
    query = debugger.seen_locals["CPUAttentionBackendImpl.forward"]["query"]
    assert type(query) is torch.Tensor
    assert query.shape == (3, 4, 16)
    assert debugger.seen_locals["Sampler.forward"]["logits"].shape == (1, 97)
