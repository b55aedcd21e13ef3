"""What every step of the engine did: as data, as text, as a page, as a Perfetto timeline.

    from nanovllm.trace import trace

    run = trace(llm, ["Once upon a time"], SamplingParams(max_tokens=8))    # a Trace: StepTraces
    run.steps[0].batch.input_ids

`nanovllm trace PROMPT...` is the same from the command line. None of this has a counterpart in
vLLM, which sends such facts to OpenTelemetry and to its KV-event publisher instead.

    tracer.py      stands between EngineCore and its two halves and makes a StepTrace a step
    step_trace.py  the StepTrace
    sampling.py    the sampler's stages
    run.py         `trace`
    text.py        the view in a terminal
    latency.py     TTFT, TPOT, ITL
    perfetto.py    the view in ui.perfetto.dev
    html.py        the view in a browser
"""

from nanovllm.trace.run import trace
from nanovllm.trace.step_trace import StepTrace, Trace
from nanovllm.trace.tracer import Tracer

__all__ = ["StepTrace", "Trace", "Tracer", "trace"]
