"""trace: run prompts and keep what every step did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from nanovllm.entrypoints.llm import params_to_seq, prompt_to_seq
from nanovllm.exceptions import VLLMValidationError
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.tokenizers import convert_ids_list_to_tokens, decode
from nanovllm.trace.step_trace import EngineInfo, RequestInfo, StepTrace, Trace
from nanovllm.trace.tracer import Tracer
from nanovllm.v1.metrics.perf import ModelShape

if TYPE_CHECKING:
    from nanovllm.entrypoints.llm import LLM
    from nanovllm.inputs import PromptType
    from nanovllm.outputs import RequestOutput


def trace(
    llm: LLM,
    prompts: PromptType | Sequence[PromptType],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    arrivals: Sequence[int] | None = None,
    watch: Sequence[str | int] = (),
    watch_step: Callable[[int], bool] = lambda step: True,
    on_step: Callable[[StepTrace], None] = lambda step: None,
) -> Trace:
    """LLM.generate, with a StepTrace of every step.

        from nanovllm import LLM, SamplingParams
        from nanovllm.trace import trace

        llm = LLM(block_size=4, num_gpu_blocks_override=33, max_model_len=128)
        run = trace(llm, ["Once upon a time", "Once upon a hill"], SamplingParams(max_tokens=8))
        for step in run:
            print(step.step, step.scheduled.total_num_scheduled_tokens, step.pool.num_free)
        run.save_jsonl("run.jsonl")

    Requests are called A, B, C ... in the order of the prompts; with n > 1 the samples of A are
    0_A, 1_A ... The tokens are those that `generate` would have given.

    Args:
        llm: must be idle.
        arrivals: one a prompt: it arrives when so many steps have been scheduled (0: before the
            first; when nothing else is left to do, at once).
        watch: requests, by id or by index, whose sampling is looked at.
        watch_step: in which steps, from 1.
        on_step: is handed each step as soon as it is complete.

    Raises:
        VLLMValidationError: a prompt, its parameters, `arrivals` or `watch` cannot be used.
    """
    prompts = prompt_to_seq(prompts)
    if sampling_params is None:
        sampling_params = llm.get_default_sampling_params()
    params = [copy(one) for one in params_to_seq(sampling_params, len(prompts))]
    for one in params:
        one.output_kind = RequestOutputKind.FINAL_ONLY
    arrivals = [0] * len(prompts) if arrivals is None else list(arrivals)
    if len(arrivals) != len(prompts) or any(arrival < 0 for arrival in arrivals):
        raise VLLMValidationError(
            f"arrivals must be one number from 0 for each of the {len(prompts)} prompts, "
            f"got {arrivals}.",
            parameter="arrivals",
            value=arrivals,
        )
    ids = [request_name(i) for i in range(len(prompts))]
    tokenizer = llm.llm_engine.tokenizer
    tracer = Tracer(
        decode=None
        if tokenizer is None
        else lambda i: convert_ids_list_to_tokens(tokenizer, [i])[0],
        watch=_watched_ids(watch, ids),
        watch_step=watch_step,
        on_step=on_step,
    )
    run = Trace(engine_info(llm), steps=tracer.steps)
    engine = llm.llm_engine
    core = engine.engine_core.engine_core  # type: ignore[attr-defined]  # in this process
    if engine.has_unfinished_requests():
        raise VLLMValidationError("the engine still has requests; a trace begins with an idle one.")

    waiting = sorted(range(len(prompts)), key=lambda i: arrivals[i])
    outputs: dict[str, RequestOutput] = {}
    core.set_tracer(tracer)
    try:
        while waiting or engine.has_unfinished_requests():
            while waiting and (
                arrivals[waiting[0]] <= tracer.num_planned or not engine.has_unfinished_requests()
            ):
                index = waiting.pop(0)
                engine.add_request(ids[index], prompts[index], params[index])
                _note_arrival(run, tracer, core.scheduler, ids[index], tokenizer)
            for output in engine.step():
                outputs[output.request_id] = output
        while core.batch_queue:  # async: a step planned before it was known to be one too many
            engine.step()
    except BaseException:
        engine.abort_request(ids)
        raise
    finally:
        core.set_tracer(None)
    _note_outputs(run, outputs)
    return run


def request_name(index: int) -> str:
    """A, B ... Z, AA, AB ..."""
    name = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        name = chr(ord("A") + digit) + name
    return name


def engine_info(llm: LLM) -> EngineInfo:
    config = llm.llm_engine.vllm_config
    cache, scheduler = config.cache_config, config.scheduler_config
    assert cache.num_gpu_blocks is not None  # set by EngineCore
    return EngineInfo(
        model=config.model_config.served_model_name or config.model_config.model,
        device=config.device_config.device,
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
        prefix_cache_backend=cache.prefix_cache_backend if cache.enable_prefix_caching else "off",
        policy=scheduler.policy,
        async_scheduling=scheduler.async_scheduling,
        dtype=str(config.model_config.torch_dtype).removeprefix("torch."),
        model_shape=ModelShape.from_hf_config(config.model_config.hf_config),
    )


def _watched_ids(watch: Sequence[str | int], ids: list[str]) -> list[str]:
    """Ids of the requests to watch, which may be given by index."""
    watched = []
    for name in watch:
        text = str(name)
        if text.isdigit() and int(text) < len(ids):
            watched.append(ids[int(text)])
        elif text.partition("_")[2] in ids or text in ids:
            watched.append(text)
        else:
            raise VLLMValidationError(
                f"there is no request {text!r} to watch; there are {', '.join(ids)} "
                f"(or 0 to {len(ids) - 1}).",
                parameter="watch",
                value=name,
            )
    return watched


def _note_arrival(run: Trace, tracer: Tracer, scheduler: Any, name: str, tokenizer: Any) -> None:
    """Enter the prompt's request into the trace, or with n > 1 its requests."""
    for request in scheduler.requests.values():
        if request.request_id != name and request.request_id.partition("_")[2] != name:
            continue
        prompt = request.prompt_token_ids
        run.requests.append(
            RequestInfo(
                request_id=request.request_id,
                prompt=" ".join(map(str, prompt))
                if tokenizer is None
                else decode(tokenizer, prompt),
                num_prompt_tokens=request.num_prompt_tokens,
                arrival_step=tracer.num_planned + 1,
                arrival=tracer.clock.now(),
            )
        )


def _note_outputs(run: Trace, outputs: dict[str, RequestOutput]) -> None:
    """Enter texts, and when each token came: when its step's result had been taken in."""
    requests = {request.request_id: request for request in run.requests}
    for step in run.steps:
        for sampled in step.sampled:
            request = requests[sampled.request_id]
            request.token_times += [step.spans[-1].end] * len(sampled.token_ids)
            request.token_steps += [step.step] * len(sampled.token_ids)
    for request in run.requests:
        prefix, _, parent = request.request_id.rpartition("_")
        output = outputs[parent or request.request_id]
        sample = output.outputs[int(prefix) if prefix else 0]
        request.text = sample.text
        request.finish_reason = sample.finish_reason and str(sample.finish_reason)
