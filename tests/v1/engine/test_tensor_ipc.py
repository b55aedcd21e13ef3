"""Prompts of embeddings give the tokens that the same prompts of ids give, in any process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.engine import EngineCoreRequest
from nanovllm.v1.engine.async_llm import AsyncLLM
from nanovllm.v1.engine.exceptions import EngineGenerateError

LIMITS = {"num_gpu_blocks_override": 200, "max_model_len": 256, "max_num_seqs": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [
    "Once there was a cat",
    "I saw a boy who had a red ball and wanted to play in the park with his friends all day",
    "The little dog",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**LIMITS)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.fixture(scope="module")
def embeds(llm: LLM) -> list[torch.Tensor]:
    """What the model makes of the prompts' ids."""
    model: Any = llm.llm_engine.engine_core.engine_core.model_executor.model_runner.model
    ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    return [model.embed_input_ids(torch.tensor(token_ids)).detach() for token_ids in ids]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def as_prompts(embeds: list[torch.Tensor], **options: Any) -> list[Any]:
    return [{"prompt_embeds": tensor, **options} for tensor in embeds]


# ---- prompt_embeds ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},  # in chunks
        {"prefix_cache_backend": "radix"},
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
        # With preemptions: five blocks for six requests that need two to three each.
        {"num_gpu_blocks_override": 6, "max_model_len": 64},
    ],
)
def test_embeddings_give_the_tokens_of_their_ids(
    expected: list[list[int]], embeds: list[torch.Tensor], options: dict[str, Any]
) -> None:
    llm = LLM(**LIMITS | options)
    mixed = [*as_prompts(embeds), *PROMPTS]
    for _ in range(2):  # the second time out of the prefix cache
        outputs = llm.generate(mixed, GREEDY, use_tqdm=False)
        assert tokens(outputs) == [*expected, *expected]
    assert outputs[0].prompt is None
    assert outputs[0].prompt_token_ids == [0] * len(embeds[0])


def test_gpt2_takes_embeddings_too(tmp_path: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=20, dtype="float32")
    model: Any = llm.llm_engine.engine_core.engine_core.model_executor.model_runner.model
    ids = [5, 17, 3, 88]
    prompts: list[Any] = [ids, {"prompt_embeds": model.embed_input_ids(torch.tensor(ids)).detach()}]
    from_ids, from_embeds = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert from_ids == from_embeds


def test_other_embeddings_never_share_blocks(llm: LLM, embeds: list[torch.Tensor]) -> None:
    """As ids all are [0, 0, ...]; only the same content may be found in the prefix cache."""
    llm.reset_prefix_cache()
    base = torch.cat([embeds[1]] * 3)
    other = base.clone()
    other[-1, 0] += 1e-3
    zeros: Any = [0] * len(base)

    def cached(prompt: Any) -> int:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens is not None
        return output.num_cached_tokens

    assert cached({"prompt_embeds": base}) == 0
    assert cached({"prompt_embeds": base}) == (len(base) - 1) // 16 * 16 > 0
    assert cached({"prompt_embeds": other}) == 0
    assert cached(zeros) == 0
    assert cached({"prompt_embeds": base, "cache_salt": "alice"}) == 0


def test_samples_of_one_prompt(llm: LLM, embeds: list[torch.Tensor]) -> None:
    sampling = SamplingParams(n=3, seed=1, max_tokens=12)
    by_ids, by_embeds = llm.generate(
        [PROMPTS[1], {"prompt_embeds": embeds[1]}], sampling, use_tqdm=False
    )
    assert [c.token_ids for c in by_ids.outputs] == [c.token_ids for c in by_embeds.outputs]
    assert [c.text for c in by_ids.outputs] == [c.text for c in by_embeds.outputs]


def test_the_tensor_may_change_after_it_was_given(
    llm: LLM, expected: list[list[int]], embeds: list[torch.Tensor]
) -> None:
    given = embeds[0].clone()
    llm.llm_engine.add_request("x", {"prompt_embeds": given}, GREEDY)
    given.zero_()
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
    assert tokens(outputs) == [expected[0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.tolist(), "must be a torch.Tensor, but is a list"),
        (lambda t: t[0], "must be of shape"),
        (lambda t: t[:, :-1], "must be of shape"),
        (lambda t: t[:0], "is empty"),
        (lambda t: t.repeat(100, 1), "max_model_len"),
        (lambda t: t.long(), "float dtype"),
        (lambda t: t * float("nan"), "finite"),
        (lambda t: t.double() * 1e300, "finite"),
    ],
)
def test_tensors_that_cannot_be_a_prompt_are_refused(
    llm: LLM, embeds: list[torch.Tensor], change: Any, message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        llm.generate([{"prompt_embeds": change(embeds[0])}], GREEDY, use_tqdm=False)


def test_what_needs_token_ids_is_refused(llm: LLM, embeds: list[torch.Tensor]) -> None:
    prompt: Any = {"prompt_embeds": embeds[0]}
    for kwargs in ({"prompt_logprobs": 1}, {"repetition_penalty": 1.1}):
        with pytest.raises(VLLMValidationError, match="needs token ids"):
            llm.generate([prompt], SamplingParams(**kwargs), use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="cannot stand beside"):
        llm.generate([{**prompt, "prompt_token_ids": [1]}], GREEDY, use_tqdm=False)


# ---- the way between processes ----

ipc = pytest.importorskip("nanovllm.v1.engine.tensor_ipc", exc_type=ImportError)
serial = pytest.importorskip("nanovllm.v1.serial_utils", exc_type=ImportError)


@pytest.fixture
def queue() -> Iterator[Any]:
    queue = ipc.make_tensor_queue()
    yield queue
    queue.cancel_join_thread()
    queue.close()


def decoder(receiver: Any) -> Any:
    return serial.MsgpackDecoder(oob_tensor_provider=receiver)


def test_tensors_come_beside_their_messages_in_any_order(queue: Any) -> None:
    senders = [serial.MsgpackEncoder(ipc.TensorIpcSender(queue)) for _ in range(2)]
    messages = [
        (which, {"a": torch.full((3, 4), float(i)), "b": [torch.tensor([i]), "text"]})
        for i, which in enumerate([0, 1, 1, 0, 1])
    ]
    sent = [(which, senders[which].encode(message)) for which, message in messages]
    receive = decoder(ipc.TensorIpcReceiver(queue))
    # Of one sender in order; of several, anyhow.
    for i in sorted(range(5), key=lambda i: -sent[i][0]):
        message = receive.decode(sent[i][1])
        assert torch.equal(message["a"], messages[i][1]["a"])
        assert message["a"].is_shared()
        assert torch.equal(message["b"][0], messages[i][1]["b"][0])


def test_the_message_itself_stays_small_and_the_senders_tensor_its_own(queue: Any) -> None:
    tensor = torch.randn(1000, 64)
    buffers = serial.MsgpackEncoder(ipc.TensorIpcSender(queue)).encode([tensor])
    assert sum(len(buffer) for buffer in buffers) < 200
    assert not tensor.is_shared()


def test_tensors_of_a_message_that_was_never_decoded_are_let_go(queue: Any) -> None:
    encoder = serial.MsgpackEncoder(ipc.TensorIpcSender(queue))
    encoder.encode([torch.zeros(3)])
    later = encoder.encode([torch.ones(3)])
    receiver = ipc.TensorIpcReceiver(queue)
    (tensor,) = decoder(receiver).decode(later)
    assert torch.equal(tensor, torch.ones(3))
    assert not any(receiver.buffered.values())


def test_a_tensor_that_does_not_come_is_an_error(queue: Any) -> None:
    buffers = serial.MsgpackEncoder(ipc.TensorIpcSender(queue)).encode([torch.zeros(3)])
    queue.get(timeout=5)  # lost
    with pytest.raises(RuntimeError, match="has not come"):
        decoder(ipc.TensorIpcReceiver(queue, timeout=0.05)).decode(buffers)


def test_embeddings_reach_the_core_in_its_own_process(
    expected: list[list[int]], embeds: list[torch.Tensor]
) -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs(**LIMITS), client="mp")
    client: Any = engine.engine_core

    async def one(prompt: Any, request_id: str) -> list[int]:
        outputs = [output async for output in engine.generate(prompt, GREEDY, request_id)]
        return list(outputs[-1].outputs[0].token_ids)

    async def test() -> None:
        prompts = [*as_prompts(embeds), *PROMPTS] * 3
        results = await asyncio.gather(*(one(p, f"r{i}") for i, p in enumerate(prompts)))
        assert results == [*expected, *expected] * 3

        # A tensor that is lost ends its request, alone.
        send, client._process._encoder = client._process._encoder, LosingEncoder()
        lost = asyncio.create_task(one(as_prompts(embeds)[0], "lost"))
        await asyncio.sleep(0)
        client._process._encoder = send
        with pytest.raises(EngineGenerateError, match="KeyError"):
            await lost
        assert await one(PROMPTS[0], "after") == expected[0]
        while not await engine.is_idle():
            await asyncio.sleep(0.002)
        assert await engine.reset_prefix_cache()

    asyncio.run(asyncio.wait_for(test(), 60))
    engine.shutdown()


class LosingEncoder:
    """Names a tensor that was never sent, in a way that the core can tell at once."""

    def encode(self, request: EngineCoreRequest) -> Any:
        class Loser(serial.OOBTensorConsumer):
            def new_message(self) -> None: ...

            def __call__(self, tensor: torch.Tensor) -> dict[str, Any]:
                return {"sender_id": "nobody"}

        assert time.time() > request.arrival_time
        return serial.MsgpackEncoder(Loser()).encode(request)
