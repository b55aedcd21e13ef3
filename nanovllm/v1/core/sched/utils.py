"""Small decisions the scheduler takes about one request.

Upstream: vllm/v1/core/sched/utils.py (0.23.0)
Left out: repetition detection.
"""

from __future__ import annotations

from nanovllm.v1.request import Request, RequestStatus


def check_stop(request: Request, max_model_len: int) -> bool:
    """Has the token just appended ended the request? If so, set its status and stop_reason.

    Stop strings are not seen here: they need text, so the output processor finds them and aborts.
    The order is upstream's: below `min_tokens` nothing stops (but the model's length), EOS goes
    before stop tokens (and leaves stop_reason None), and both before the length limits.
    """
    sampling_params = request.sampling_params
    if request.num_output_tokens < sampling_params.min_tokens:
        if request.num_tokens < max_model_len:
            return False
        # No room for min_tokens. (Upstream goes on, and the request can neither run nor end.)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True

    last_token_id = request.output_token_ids[-1]
    if last_token_id == sampling_params.eos_token_id:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    if last_token_id in (sampling_params.stop_token_ids or ()):
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = last_token_id
        return True
    if request.num_tokens >= max_model_len or request.num_output_tokens >= request.max_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False
