"""The worker: device, memory budget, and one step."""

from __future__ import annotations

import re

import pytest
import torch

from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.kv_cache_interface import KVCacheConfig
from nanovllm.v1.worker import gpu_worker
from nanovllm.v1.worker.gpu_worker import Worker, free_memory_bytes
from tests.v1.worker.driver import BLOCK_SIZE, MAX_MODEL_LEN, Driver, make_config


@pytest.fixture
def worker(vllm_config) -> Worker:
    worker = Worker(vllm_config)
    worker.init_device()
    return worker


def test_the_worker_runs_a_step_to_its_end(worker, greedy):
    """After set-up in the documented order, one call of execute_model gives a token."""
    worker.load_model()
    worker.initialize_from_config(KVCacheConfig(64, 2, worker.get_kv_cache_spec()))
    driver = Driver(worker.model_runner)
    driver.add("a", [5, 6, 7])
    output = worker.execute_model(driver.schedule({"a": 3}))
    assert output.sampled_token_ids == [greedy([5, 6, 7], 1)]


def test_a_small_model_s_cache_is_no_larger_than_its_requests_can_fill(worker, monkeypatch):
    """With memory in plenty: max_num_seqs requests of max_model_len tokens, and the null block."""
    monkeypatch.setattr(gpu_worker, "free_memory_bytes", lambda: 1 << 40)
    num_blocks = 6 * MAX_MODEL_LEN // BLOCK_SIZE + 1
    block_bytes = (
        2 * 2 * BLOCK_SIZE * 2 * 16 * 4
    )  # layers, k and v, tokens, heads, head size, bytes
    assert worker.determine_available_memory() == num_blocks * block_bytes


def test_a_large_model_s_cache_takes_its_share_of_the_free_memory(worker, monkeypatch):
    """With little memory: CPU_KV_CACHE_MEMORY_SHARE of what is free."""
    monkeypatch.setattr(gpu_worker, "free_memory_bytes", lambda: 10_000)
    share = gpu_worker.CPU_KV_CACHE_MEMORY_SHARE
    assert worker.determine_available_memory() == int(10_000 * share)


def test_kv_cache_memory_bytes_overrides_every_estimate(hf_model):
    """The user's own number is taken as it is."""
    worker = Worker(make_config(hf_model.path, kv_cache_memory_bytes=12345))
    worker.init_device()
    assert worker.determine_available_memory() == 12345


def test_free_memory_is_between_nothing_and_the_physical_memory():
    """A plausible number on the machine that runs this test."""
    assert 1 << 20 < free_memory_bytes() < 1 << 50


def test_a_device_that_is_not_there_is_refused(hf_model):
    """One sentence that names the device, not a traceback from torch."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = make_config(hf_model.path)
    config.device_config.device = "cuda"
    with pytest.raises(VLLMValidationError, match="device 'cuda' cannot be used") as error:
        Worker(config).init_device()
    assert error.value.parameter == "device"


def test_a_cache_that_does_not_fit_names_the_knob(worker):
    """A petabyte of KV cache: the error says what to lower."""
    config = KVCacheConfig(1 << 45, 1, worker.get_kv_cache_spec())
    with pytest.raises(VLLMValidationError, match="kv_cache_memory_bytes") as error:
        worker.initialize_from_config(config)
    assert re.search(r"\d+\.\d\d GiB", str(error.value))


def test_shutdown_lets_go_of_the_cache(worker):
    """After shutdown the worker holds neither runner nor cache."""
    worker.initialize_from_config(KVCacheConfig(8, 2, worker.get_kv_cache_spec()))
    worker.shutdown()
    assert not hasattr(worker, "model_runner")
