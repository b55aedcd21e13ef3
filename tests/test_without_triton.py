"""What the engine does without."""

from __future__ import annotations

import os
import subprocess
import sys

BLOCKED = """
import sys
sys.modules["triton"] = None  # importing it fails
from nanovllm import LLM, SamplingParams
llm = LLM(max_model_len=64)
params = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=1)
print(len(llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids))
"""


def test_the_engine_works_without_triton_and_cuda() -> None:
    """Triton is for kernels on a GPU; without it nothing else is missing."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", BLOCKED]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "4"
