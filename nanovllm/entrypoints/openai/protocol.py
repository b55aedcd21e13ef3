"""What travels in the bodies of requests and responses, as pydantic models; the chunks of a stream
as msgspec structs.

A request's model says which fields there are and of which type; what a value may be is checked in
SamplingParams and InputProcessor, for the server and `LLM` alike. Fields of OpenAI's that ask for
what is not here (tools, formats) are declared so that they can be refused in a sentence
(`UNSUPPORTED`); unknown fields are ignored, as upstream does.

A chunk is written once a token by a thread that shares the interpreter's lock with the engine's, so
that its every microsecond is one less for the engine. A struct is made and encoded in one, where
pydantic takes ten (and upstream's are pydantic's).

Upstream: vllm/entrypoints/openai/{engine,completion,chat_completion}/protocol.py and
vllm/entrypoints/serve/tokenize/protocol.py (0.23.0), one file here.
Left out: tools, reasoning, structured outputs, beam search, truncation of prompts, embeddings as
prompts, KV-transfer parameters, vllm_xargs.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, FailFast, Field

from nanovllm.exceptions import VLLMValidationError
from nanovllm.sampling_params import (
    INT64_MAX,
    INT64_MIN,
    RequestOutputKind,
    SamplingParams,
)

# More would cost every step of every request: each is looked for in each new piece of text.
MAX_STOP_STRINGS = 256

# Of these fields a request may only hold what changes nothing: null, an empty list, false ...
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "prompt_embeds": ([],),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "kv_transfer_params": ({},),
}


class _FailFast(FailFast):
    """A million bad entries are one error. (Hashable, so that a Union may hold it.)"""

    __hash__ = object.__hash__


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], _FailFast()]
Strings = Annotated[list[str], _FailFast()]


class OpenAIBaseModel(BaseModel):
    """Unknown fields are kept apart in `model_extra`, where the server finds what to log."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


# ---- errors, models, usage ----


class ErrorInfo(OpenAIBaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(OpenAIBaseModel):
    error: ErrorInfo


class ModelCard(OpenAIBaseModel):
    id: str
    object: str = "model"
    created: int = Field(default_factory=lambda: int(time.time()))
    owned_by: str = "nanovllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(OpenAIBaseModel):
    object: str = "list"
    data: list[ModelCard] = Field(default_factory=list)


class PromptTokenUsageInfo(OpenAIBaseModel):
    cached_tokens: int | None = None


class UsageInfo(OpenAIBaseModel):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokenUsageInfo | None = None


class StreamOptions(OpenAIBaseModel):
    include_usage: bool | None = False
    # Usage so far in every chunk.
    continuous_usage_stats: bool | None = False


# ---- what completions and chats have in common ----


class GenerationRequest(OpenAIBaseModel):
    """Fields of both kinds of request; those that are None take the model's defaults."""

    # Fields handed to SamplingParams under the same name.
    SAMPLING_FIELDS: ClassVar[tuple[str, ...]] = (
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "bad_words",
        "ignore_eos",
        "min_tokens",
        "prompt_logprobs",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "logit_bias",
        "allowed_token_ids",
    )

    model: str | None = None
    # OpenAI's
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | Strings | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    # vLLM's sampling parameters
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    prompt_logprobs: int | None = None
    # vLLM's other parameters
    priority: int = Field(
        0,
        ge=INT64_MIN,
        le=INT64_MAX,
        description="the lower, the sooner; with --scheduling-policy priority",
    )
    request_id: str | None = Field(None, max_length=128, description="becomes part of the id")
    cache_salt: str | None = Field(
        None, description="cached prefixes are shared only with requests of the same salt"
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='write tokens of logprobs as "token_id:N"'
    )
    return_token_ids: bool | None = Field(None, description="token ids beside the text")
    # Declared to be refused: see UNSUPPORTED.
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    modalities: Any = None
    audio: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    kv_transfer_params: Any = None

    def check(self) -> None:
        """Refuse what is not here and what contradicts itself.

        Raises:
            VLLMValidationError: naming the field.
        """
        for name, harmless in UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise VLLMValidationError(
                    f"{name} is not supported by nanovllm; leave it out.", parameter=name
                )
        if self.stream_options is not None and not self.stream:
            raise VLLMValidationError(
                "stream_options needs stream=true.", parameter="stream_options"
            )
        for name in ("stop", "bad_words"):
            strings = getattr(self, name)
            if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
                raise VLLMValidationError(
                    f"{name} must hold at most {MAX_STOP_STRINGS} strings, but has {len(strings)}.",
                    parameter=name,
                )
        if self.stream and self.prompt_logprobs is not None:
            raise VLLMValidationError(
                "prompt_logprobs is not available with stream=true.", parameter="prompt_logprobs"
            )

    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def include_usage(self) -> tuple[bool, bool]:
        """(usage in a chunk of its own at the end, usage so far in every chunk)."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return False, False
        return True, bool(options.continuous_usage_stats)

    def _to_sampling_params(
        self, max_tokens: int, default_sampling_params: dict[str, Any], **others: Any
    ) -> SamplingParams:
        given = {name: getattr(self, name) for name in self.SAMPLING_FIELDS}
        given |= others
        defaults = {k: v for k, v in default_sampling_params.items() if k != "max_tokens"}
        return SamplingParams.from_optional(
            **defaults | {name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )


# ---- /v1/completions ----


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: TokenIds | Annotated[list[TokenIds], _FailFast()] | str | Strings | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.prompt is None or self.prompt in ("", []):
            raise VLLMValidationError("prompt must be given and not empty.", parameter="prompt")
        if self.logprobs is not None and self.logprobs < 0:
            raise VLLMValidationError(
                f"logprobs must be non-negative, got {self.logprobs}.", parameter="logprobs"
            )

    def echo_without_generation(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def to_sampling_params(
        self, max_tokens: int, default_sampling_params: dict[str, Any]
    ) -> SamplingParams:
        """What the engine is asked for; one token is generated (and dropped) for a bare echo.

        Raises:
            VLLMValidationError: as SamplingParams.
        """
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is None and self.echo:
            prompt_logprobs = self.logprobs
        return self._to_sampling_params(
            1 if self.echo_without_generation() else max_tokens,
            default_sampling_params,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CompletionLogProbs(OpenAIBaseModel):
    text_offset: list[int] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)


class PromptLogprob(OpenAIBaseModel):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionResponseChoice(OpenAIBaseModel):
    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    # The stop string or token that ended it; None for the end-of-sequence token and other ends.
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(OpenAIBaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None = None


class CompletionResponseStreamChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionStreamResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


# ---- /v1/chat/completions ----


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_tokens: int | None = Field(None, deprecated="max_completion_tokens goes before it")
    max_completion_tokens: int | None = None
    # vLLM's
    echo: bool = Field(
        False, description="put the last message before the answer, if it is of the same role"
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = Field(
        None, description="Jinja; refused without --trust-request-chat-template"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and self.top_logprobs != 0:
            if self.top_logprobs < -1:
                raise VLLMValidationError(
                    f"top_logprobs must be non-negative or -1, got {self.top_logprobs}.",
                    parameter="top_logprobs",
                )
            if not self.logprobs:
                raise VLLMValidationError(
                    "top_logprobs needs logprobs=true.", parameter="top_logprobs"
                )

    def requested_max_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.__dict__["max_tokens"]  # past the warning that it is deprecated

    def to_sampling_params(
        self, max_tokens: int, default_sampling_params: dict[str, Any]
    ) -> SamplingParams:
        """What the engine is asked for.

        Raises:
            VLLMValidationError: as SamplingParams.
        """
        return self._to_sampling_params(
            max_tokens,
            default_sampling_params,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class ChatCompletionLogProb(OpenAIBaseModel):
    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    top_logprobs: list[ChatCompletionLogProb] = Field(default_factory=list)


class ChatCompletionLogProbs(OpenAIBaseModel):
    content: list[ChatCompletionLogProbsContent] | None = None


class ChatMessage(OpenAIBaseModel):
    role: str
    content: str | None = None


class ChatCompletionResponseChoice(OpenAIBaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(OpenAIBaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class DeltaMessage(msgspec.Struct):
    content: str
    role: str | UnsetType = UNSET


class ChatCompletionResponseStreamChoice(msgspec.Struct):
    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionStreamResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


# ---- server-sent events ----

# (The hook is for the pydantic models within: usage and logprobs.)
_encoder = msgspec.json.Encoder(enc_hook=lambda model: model.model_dump(exclude_unset=True))
LAST_EVENT = b"data: [DONE]\n\n"


def to_event(
    data: CompletionStreamResponse | ChatCompletionStreamResponse | ErrorResponse,
) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _encoder.encode(data)


# ---- /v1/.../render, /tokenize, /detokenize ----


class RenderResponse(OpenAIBaseModel):
    """What a request becomes before the engine sees it.

    Upstream's GenerateRequest, plus `prompt` (the text) and `token_strs`, which is what one wants
    to look at.
    """

    request_id: str
    model: str
    prompt: str | None
    token_ids: list[int]
    token_strs: list[str] | None
    sampling_params: dict[str, Any]


class TokenizeRequest(OpenAIBaseModel):
    """Body of POST /tokenize: a `prompt`, or a conversation in `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    # Default: true for a prompt, false for messages, whose template writes them.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(OpenAIBaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(OpenAIBaseModel):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(OpenAIBaseModel):
    prompt: str
