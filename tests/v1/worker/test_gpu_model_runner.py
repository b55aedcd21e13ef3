"""The model runner: from a scheduler's plan to tokens, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.core.sched.output import SchedulerOutput
from nanovllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from nanovllm.v1.worker import gpu_model_runner
from tests.v1.worker.driver import BLOCK_SIZE, VOCAB_SIZE, Driver

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def prepare(driver: Driver, num_tokens: dict[str, int]):
    """_update_states and _prepare_inputs of one step, without running the model."""
    runner = driver.runner
    runner._update_states(driver.schedule(num_tokens))
    order = runner.input_batch.req_ids
    scheduled = np.array([num_tokens[req_id] for req_id in order], dtype=np.int32)
    return order, *runner._prepare_inputs(scheduled)


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    )
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_prepared_inputs_equal_a_token_by_token_oracle(runner, requests):
    """input_ids, positions, slots, query_start_loc, seq_lens, logits_indices and the rows to
    discard are what a loop over every request's every token gives."""
    runner.reset()
    driver = Driver(runner)
    num_tokens = {}
    for i, (length, computed, scheduled) in enumerate(requests):
        driver.add(f"r{i}", prompt(length, seed=i))
        driver.num_computed[f"r{i}"] = min(computed, length - 1)
        num_tokens[f"r{i}"] = min(scheduled, driver.remaining(f"r{i}"))
    order, logits_indices, metadata = prepare(driver, num_tokens)

    input_ids, positions, slots, starts = [], [], [], [0]
    for req_id in order:
        first = driver.num_computed[req_id]
        for position in range(first, first + num_tokens[req_id]):
            input_ids.append(driver.tokens[req_id][position])
            positions.append(position)
            block = driver.blocks[req_id][position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(input_ids))
    seq_lens = [driver.num_computed[req_id] + num_tokens[req_id] for req_id in order]
    n = metadata.num_actual_tokens
    assert n == len(input_ids) and metadata.num_reqs == len(order)
    assert runner.input_ids.gpu[:n].tolist() == input_ids
    assert runner.positions.gpu[:n].tolist() == positions
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.query_start_loc.tolist() == metadata.query_start_loc_cpu.tolist() == starts
    assert metadata.seq_lens.tolist() == metadata.seq_lens_cpu.tolist() == seq_lens
    assert metadata.max_query_len == max(num_tokens.values())
    assert metadata.max_seq_len == max(seq_lens)
    assert logits_indices.tolist() == [start - 1 for start in starts[1:]]
    assert runner.discard_request_mask[: len(order)].tolist() == [
        seq_len < len(driver.tokens[req_id])
        for seq_len, req_id in zip(seq_lens, order, strict=True)
    ]
    for row, req_id in enumerate(order):
        blocks = driver.blocks[req_id]
        assert metadata.block_table_tensor[row, : len(blocks)].tolist() == blocks


def test_greedy_tokens_equal_transformers_batched_chunked_and_mixed(driver, greedy):
    """Prompts of many lengths, in chunks of at most 5 beside decoding requests, give transformers'
    greedy tokens; the KV cache starts out as NaN."""
    prompts = {f"r{i}": prompt(length, seed=i) for i, length in enumerate([1, 3, 4, 11, 17, 30])}
    for req_id, tokens in prompts.items():
        driver.add(req_id, tokens)
    waiting, running = list(prompts), []
    while any(len(driver.outputs(req_id)) < 8 for req_id in prompts):
        if waiting:
            running.append(waiting.pop(0))
        running = [req_id for req_id in running if len(driver.outputs(req_id)) < 8]
        driver.step({req_id: min(5, driver.remaining(req_id)) for req_id in running})
    for req_id, tokens in prompts.items():
        assert driver.outputs(req_id) == greedy(tokens, 8)


def test_a_chunk_that_ends_inside_the_prompt_samples_nothing(driver):
    """Its entry is an empty list, nothing is appended, and the last chunk gives one token."""
    driver.add("a", prompt(10))
    assert driver.step({"a": 4}).sampled_token_ids == [[]]
    assert driver.runner.requests["a"].output_token_ids == []
    assert driver.step({"a": 5}).sampled_token_ids == [[]]
    (sampled,) = driver.step({"a": 1}).sampled_token_ids
    assert len(sampled) == 1
    assert driver.runner.requests["a"].output_token_ids == sampled
    assert driver.runner.input_batch.token_ids_cpu[0, 10] == sampled[0]


def test_a_preempted_request_resumes_as_if_nothing_had_happened(driver, greedy):
    """Blocks lost and replaced, outputs recomputed in chunks: the tokens stay the same."""
    driver.add("a", prompt(9, seed=1))
    driver.add("b", prompt(6, seed=2))
    driver.step({"a": 9, "b": 6})
    for _ in range(5):
        driver.step({"a": 1, "b": 1})
    driver.preempt("a")
    driver.step({"b": 1})
    assert driver.runner.input_batch.req_ids == ["b"] and "a" in driver.runner.requests
    # 15 known tokens, 6 of them outputs: a chunk that ends among the outputs keeps no sample.
    assert driver.step({"b": 1, "a": 12}).sampled_token_ids[1] == []
    driver.step({"b": 1, "a": 3})
    for _ in range(3):
        driver.step({"a": 1, "b": 1})
    assert driver.outputs("a") == greedy(driver.prompts["a"], len(driver.outputs("a")))
    assert driver.outputs("b") == greedy(driver.prompts["b"], len(driver.outputs("b")))


def test_a_request_preempted_and_resumed_between_two_steps_takes_its_new_blocks(driver, greedy):
    """It still has its row when it comes back, with a block table that does not extend the old."""
    driver.add("a", prompt(9, seed=1))
    driver.step({"a": 9})
    driver.step({"a": 1})
    driver.preempt("a")
    driver.step({"a": 11})
    assert driver.outputs("a") == greedy(driver.prompts["a"], 3)


def test_outputs_of_a_request_without_a_row_come_from_the_scheduler(driver):
    """all_token_ids is what counts for it (the runner's own copy may lag behind under async
    scheduling), and the list that logits processors hold stays the same object."""
    driver.add("a", prompt(5))
    driver.add("b", prompt(5, seed=1))
    driver.step({"a": 5, "b": 5})
    outputs = driver.runner.requests["a"].output_token_ids
    driver.step({"b": 1})
    driver.tokens["a"].append(7)
    driver.step({"a": 2, "b": 1})
    assert outputs[1] == 7 and len(outputs) == 3
    assert driver.runner.requests["a"].output_token_ids is outputs


def test_a_request_that_is_not_scheduled_loses_its_row_but_not_its_state(driver, greedy):
    """Rows are for this step's requests; one that sits out a step comes back where it was."""
    for i, req_id in enumerate("abc"):
        driver.add(req_id, prompt(4 + i, seed=i))
    driver.step({"a": 4, "b": 5, "c": 6})
    for running in ("ac", "bc", "ab", "abc"):
        driver.step(dict.fromkeys(running, 1))
        assert set(driver.runner.input_batch.req_ids) == set(running)
    for req_id in "abc":
        outputs = driver.outputs(req_id)
        assert outputs == greedy(driver.prompts[req_id], len(outputs))


def test_a_prefix_cache_hit_computes_only_the_rest(driver, greedy):
    """A request that starts at num_computed_tokens reads blocks that another has filled."""
    shared = prompt(12, seed=3)
    driver.add("a", [*shared, 1])
    driver.step({"a": 13})
    driver.add("b", [*shared, 2, 3])
    driver.blocks["b"], driver.num_computed["b"] = driver.blocks["a"][:3], 12
    driver.step({"a": 1, "b": 2})
    assert driver.outputs("b") == greedy([*shared, 2, 3], 1)


def test_a_finished_request_is_forgotten_and_its_id_can_be_used_again_at_once(driver, greedy):
    """An id that finished and one that is new may be the same string in one SchedulerOutput."""
    driver.add("a", prompt(5, seed=1))
    driver.step({"a": 5})
    driver.finish("a")
    driver.add("a", prompt(7, seed=2))
    driver.step({"a": 7})
    assert driver.outputs("a") == greedy(prompt(7, seed=2), 1)


def test_a_step_without_tokens_only_forgets(driver):
    """Nothing scheduled: an empty output, no sampling, and finished requests are gone."""
    driver.add("a", prompt(5))
    driver.step({"a": 5})
    driver.finish("a")
    assert driver.runner.execute_model(driver.schedule({})) is EMPTY_MODEL_RUNNER_OUTPUT
    assert not driver.runner.requests and driver.runner.input_batch.num_reqs == 0


def test_the_scheduler_s_lists_are_not_kept(driver):
    """The runner extends its own block list; the scheduler's would be extended twice."""
    driver.add("a", prompt(5))
    scheduler_output = driver.schedule({"a": 5})
    before = list(scheduler_output.scheduled_new_reqs[0].block_ids)
    driver.runner._update_states(scheduler_output)
    driver.runner.requests["a"].block_ids.append(99)
    assert driver.blocks["a"] == before


def test_sampling_positions_are_the_number_of_tokens_before_the_sampled_one(driver):
    """A seeded row's noise depends on this number, not on how the row got there."""
    seeded = SamplingParams(seed=5, temperature=1.0)
    driver.add("a", prompt(5), seeded)
    driver.add("b", prompt(8), GREEDY)
    driver.step({"a": 5, "b": 3})
    positions = driver.runner.input_batch.sampling_metadata.positions
    assert positions.tolist() == [5, 3]
    driver.step({"a": 1, "b": 5})
    assert driver.runner.input_batch.sampling_metadata.positions.tolist() == [6, 8]


@pytest.mark.parametrize("rows", [256, 3])
@pytest.mark.parametrize("chunks", [[13], [5, 8], [1, 11, 1], [12, 1], [4, 4, 4, 1]])
def test_prompt_logprobs_are_dense_log_softmax_however_the_prompt_is_cut(
    driver, hf_model, monkeypatch, chunks, rows
):
    """All chunkings give log_softmax of the dense logits, once, when the prompt is done."""
    monkeypatch.setattr(gpu_model_runner, "PROMPT_LOGPROBS_ROWS", rows)
    tokens = prompt(13, seed=7)
    driver.add("other", prompt(20))
    driver.add("a", tokens, SamplingParams(temperature=0, prompt_logprobs=2))
    driver.step({"other": 2})
    outputs = [driver.step({"other": 1, "a": n}) for n in chunks]
    assert all(output.prompt_logprobs_dict == {} for output in outputs[:-1])
    got = outputs[-1].prompt_logprobs_dict["a"]
    with torch.inference_mode():
        expected = hf_model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    targets = torch.tensor(tokens[1:])
    assert got.logprob_token_ids[:, 0].tolist() == tokens[1:]
    torch.testing.assert_close(
        got.logprobs[:, 0], expected.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-4
    )
    best = expected.topk(2)
    assert got.logprob_token_ids[:, 1:].tolist() == best.indices.tolist()
    torch.testing.assert_close(got.logprobs[:, 1:], best.values, rtol=0, atol=1e-4)
    ranks = (expected >= expected.gather(1, targets[:, None])).sum(1)
    assert got.selected_token_ranks.tolist() == ranks.tolist()
    assert driver.step({"a": 1}).prompt_logprobs_dict == {}


def test_prompt_logprobs_survive_a_preemption_inside_the_prompt(driver, hf_model):
    """Preempted after the first chunk, resumed from the start: the logprobs arrive whole."""
    tokens = prompt(10, seed=8)
    driver.add("a", tokens, SamplingParams(temperature=0, prompt_logprobs=0))
    driver.add("b", prompt(3))
    driver.step({"a": 4})
    driver.preempt("a")
    assert driver.step({"b": 3}).prompt_logprobs_dict == {}
    got = driver.step({"a": 10}).prompt_logprobs_dict["a"]
    with torch.inference_mode():
        expected = hf_model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(tokens[1:])[:, None])
    torch.testing.assert_close(got.logprobs, expected, rtol=0, atol=1e-4)


def test_logprobs_come_in_row_order_with_the_sampled_token_first(driver):
    """Column 0 is the sampled token; a request that asked for none shares the batch's width."""
    driver.add("a", prompt(5), SamplingParams(temperature=0, logprobs=3))
    driver.add("b", prompt(6, seed=1))
    output = driver.step({"a": 5, "b": 6})
    assert output.logprobs.logprobs.shape == (2, 4)
    for req_id in "ab":
        row = output.req_id_to_index[req_id]
        assert output.logprobs.logprob_token_ids[row, 0] == driver.tokens[req_id][-1]
        assert output.sampled_token_ids[row] == [driver.tokens[req_id][-1]]


def test_the_output_is_not_changed_by_the_next_step(driver):
    """req_ids and req_id_to_index are copies: the scheduler may read them later."""
    driver.add("a", prompt(5))
    driver.add("b", prompt(5))
    output = driver.step({"a": 5, "b": 5})
    driver.step({"b": 1})
    assert output.req_ids == ["a", "b"] and output.req_id_to_index == {"a": 0, "b": 1}


def test_after_a_failed_step_the_runner_can_be_reset(driver, greedy, monkeypatch):
    """A model that fails half way leaves nothing behind once reset() has been called."""
    driver.add("a", prompt(5))
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner, "_model_forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.step({"a": 5})
    driver.runner.reset()
    fresh = Driver(driver.runner)
    fresh.add("a", prompt(6, seed=4))
    fresh.step({"a": 6})
    assert fresh.outputs("a") == greedy(prompt(6, seed=4), 1)


def test_a_reset_leaves_the_model_s_inputs_where_they_are(driver):
    """CUDA graphs have recorded their addresses; and no row's blocks are left in them."""
    driver.add("a", prompt(5))
    driver.step({"a": 5})
    runner = driver.runner

    def addresses() -> list[int]:
        metadata = runner._common_attn_metadata(1, 1, max_query_len=1)
        tensors = [value for value in vars(metadata).values() if isinstance(value, torch.Tensor)]
        tensors += [runner.input_ids.gpu, runner.positions.gpu, *runner.kv_caches]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    assert runner.input_batch.block_table.get_numpy_array().any()
    runner.reset()
    assert addresses() == before
    assert not runner.input_batch.block_table.get_numpy_array().any()
    assert not runner.input_batch.block_table.num_blocks_per_row.any()


def test_an_empty_plan_is_what_make_empty_says(driver):
    """SchedulerOutput.make_empty() is accepted by a fresh runner."""
    output = driver.runner.execute_model(SchedulerOutput.make_empty())
    assert output is EMPTY_MODEL_RUNNER_OUTPUT


def test_a_profile_run_fills_the_largest_step_and_leaves_nothing(vllm_config, monkeypatch):
    """max_num_batched_tokens tokens over max_num_seqs requests; no cache and no rows remain."""
    runner = gpu_model_runner.GPUModelRunner(vllm_config, torch.device("cpu"))
    runner.load_model()
    seen = []
    forward = runner._model_forward
    monkeypatch.setattr(runner, "_model_forward", lambda m: seen.append(m) or forward(m))
    runner.profile_run()
    assert seen[0].num_actual_tokens == 128 and seen[0].num_reqs == 6
    assert runner.kv_caches == [] and runner.input_batch.num_reqs == 0
