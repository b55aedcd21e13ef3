"""LLM: prompts in, texts out, in one call.

    LLM.generate -> LLMEngine.add_request (all prompts) -> LLMEngine.step until all have finished

Upstream: vllm/entrypoints/llm.py and vllm/entrypoints/offline_utils.py (0.23.0)
Left out: pooling, beam search, LoRA, multimodal prompts, collective RPC, enqueue and
wait_for_completion, a tqdm of the user's own. Request metrics are kept by default (upstream: only
with disable_log_stats=False), for they are what a first look wants to see.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanovllm.engine.arg_utils import DEFAULT_MODEL, EngineArgs, UsageContext
from nanovllm.entrypoints.chat_utils import (
    ChatCompletionMessageParam,
    apply_chat_template,
    load_chat_template,
)
from nanovllm.entrypoints.progress import ProgressBar
from nanovllm.exceptions import VLLMValidationError
from nanovllm.inputs import PromptType, TokensPrompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.v1.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM:
    """A model, its tokenizer and an engine, for offline use.

    llm = LLM("path/to/checkpoint", dtype="float32")
    outputs = llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=64))
    print(outputs[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        chat_template: Path | str | None = None,
        **engine_args: Any,
    ) -> None:
        """Load the model and allocate its KV cache.

        Args:
            model: checkpoint folder or known name; by default the model that comes with the
                package.
            chat_template: Jinja, or a file of it, for `chat`; None: the tokenizer's own.
            engine_args: any field of EngineArgs (nanovllm/engine/arg_utils.py), named as in vLLM.

        Raises:
            VLLMValidationError: an argument is unknown or cannot be used.
        """
        self.chat_template = load_chat_template(chat_template)
        self.llm_engine = LLMEngine.from_engine_args(
            EngineArgs.from_kwargs(model=model, **engine_args), UsageContext.LLM_CLASS
        )
        self.model_config = self.llm_engine.model_config
        self.request_counter = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**{f.name: getattr(engine_args, f.name) for f in fields(engine_args)})

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams() with what the model's generation_config.json changes."""
        return SamplingParams.from_optional(**self.model_config.get_diff_sampling_param())

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts, batched as the engine sees fit.

        Args:
            prompts: one prompt or a sequence of them; the forms of nanovllm/inputs.py. A list of
                int is one prompt.
            sampling_params: for all prompts, or one each; None: get_default_sampling_params(). Not
                changed.
            use_tqdm: show a progress bar (of rich, not tqdm) on standard error.
            priority: one each, with scheduling_policy="priority": the lower, the sooner.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            VLLMValidationError: a prompt or its parameters cannot be used; nothing is run.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        seq_prompts = prompt_to_seq(prompts)
        request_ids = self._render_and_add_requests(
            seq_prompts,
            params_to_seq(sampling_params, len(seq_prompts)),
            _priority_to_seq(priority, len(seq_prompts)),
        )
        return self._run_engine(request_ids, use_tqdm)

    def chat(
        self,
        messages: list[ChatCompletionMessageParam] | Sequence[list[ChatCompletionMessageParam]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        Args:
            messages: a conversation is a list of {"role": ..., "content": ...}.
            sampling_params, use_tqdm, priority: as for `generate`.
            chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs: see
                apply_chat_template.

        Returns:
            One output a conversation, in order; `prompt` is the conversation as the template put
            it.

        Raises:
            VLLMValidationError: as `generate`, or the template refuses the messages.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        conversations = _conversation_to_seq(messages)
        request_ids = self._render_and_add_requests(
            (
                self.preprocess_chat(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                )
                for conversation in conversations
            ),
            params_to_seq(sampling_params, len(conversations)),
            _priority_to_seq(priority, len(conversations)),
        )
        return self._run_engine(request_ids, use_tqdm)

    def preprocess_chat(
        self,
        conversation: list[ChatCompletionMessageParam],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> TokensPrompt:
        """The prompt that `chat` makes of a conversation."""
        text = apply_chat_template(
            self.get_tokenizer(),
            conversation,
            chat_template=load_chat_template(chat_template) or self.chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        # The template has written the special tokens already.
        token_ids = self.llm_engine.input_processor.encode(text, add_special_tokens=False)
        return TokensPrompt(prompt_token_ids=token_ids, prompt=text)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks."""
        return self.llm_engine.reset_prefix_cache()

    def _render_and_add_requests(
        self,
        prompts: Iterable[PromptType],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> list[str]:
        """Add all requests, or none: when one is refused, those added before it are dropped."""
        added_request_ids: list[str] = []
        try:
            for prompt, param, priority in zip(prompts, params, priorities, strict=True):
                added_request_ids.append(self._add_request(prompt, param, priority))
        except BaseException:
            self.llm_engine.abort_request(added_request_ids)
            raise
        return added_request_ids

    def _add_request(self, prompt: PromptType, params: SamplingParams, priority: int) -> str:
        if isinstance(params, SamplingParams):
            # Only the end result is of interest: this spares the making of every step's output.
            params = copy(params)
            params.output_kind = RequestOutputKind.FINAL_ONLY
        request_id = str(next(self.request_counter))
        return self.llm_engine.add_request(request_id, prompt, params, priority=priority)

    def _run_engine(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        """Step until these requests have finished; they are dropped if that is cut short.

        Requests that were added to `llm_engine` directly run along; their outputs are not kept.
        """
        finished: dict[str, RequestOutput] = {}
        wanted = set(request_ids)
        try:
            with ProgressBar(len(request_ids), enabled=use_tqdm) as progress:
                while len(finished) < len(wanted) and self.llm_engine.has_unfinished_requests():
                    for output in self.llm_engine.step():
                        if output.finished and output.request_id in wanted:
                            finished[output.request_id] = output
                            progress.update(output)
        except BaseException:
            self.llm_engine.abort_request(request_ids)
            raise
        return [finished[request_id] for request_id in request_ids]


def prompt_to_seq(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """A single prompt becomes a sequence of one."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        _fail("prompts", prompts, f"must be a prompt or a list of them, not {_type(prompts)}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]  # type: ignore[list-item]  # one prompt of token ids
    return prompts  # type: ignore[return-value]


def _conversation_to_seq(
    messages: list[ChatCompletionMessageParam] | Sequence[list[ChatCompletionMessageParam]],
) -> Sequence[list[ChatCompletionMessageParam]]:
    """A single conversation becomes a sequence of one."""
    if not isinstance(messages, (list, tuple)):
        _fail("messages", messages, f"must be a list, not {_type(messages)}")
    if messages and isinstance(messages[0], dict):
        return [messages]  # type: ignore[list-item]
    return messages  # type: ignore[return-value]


def params_to_seq(
    params: SamplingParams | Sequence[SamplingParams], num_requests: int
) -> Sequence[SamplingParams]:
    """One set of parameters for all requests becomes one each."""
    if not isinstance(params, (list, tuple)):
        return [params] * num_requests  # type: ignore[list-item]  # checked when it is added
    if len(params) != num_requests:
        _fail(
            "sampling_params",
            len(params),
            f"must be one or as many as the prompts ({num_requests}), but there are {len(params)}",
        )
    return params


def _priority_to_seq(priority: Sequence[int] | None, num_requests: int) -> Sequence[int]:
    if priority is None:
        return [0] * num_requests
    if not isinstance(priority, (list, tuple)):
        _fail("priority", priority, f"must be a list of int, not {_type(priority)}")
    if len(priority) != num_requests:
        _fail(
            "priority",
            len(priority),
            f"must be as many as there are prompts ({num_requests}), but there are {len(priority)}",
        )
    return priority


def _type(value: Any) -> str:
    return type(value).__name__


def _fail(parameter: str, value: Any, problem: str) -> NoReturn:
    raise VLLMValidationError(f"{parameter} {problem}.", parameter=parameter, value=value)
