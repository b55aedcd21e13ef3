"""A trace in the terminal, drawn with `rich`: step by step, at 100 columns, with or without colour.

Colour only repeats what the characters say: a request's letter stands wherever its colour does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanovllm.trace.latency import Latency, latency
from nanovllm.trace.step_trace import (
    BlockState,
    EngineInfo,
    Event,
    PackedBatch,
    PoolState,
    RequestInfo,
    SamplingTrace,
    Scheduled,
    StepTrace,
    Trace,
)
from nanovllm.v1.metrics.estimate import show
from nanovllm.v1.metrics.hardware import Hardware
from nanovllm.v1.metrics.perf import ExecutionContext, ModelMetrics, utilization

PIPED_WIDTH = 100
LABEL_WIDTH = 10  # of the column with the sections' names
PALETTE = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
GRID_COLUMNS = 16  # half as many on a narrow page
NUM_NEXT_SHOWN = 12

LEGEND = """\
How to read a step
  budget     one character a token (scaled if there are many), the request's
             letter; · is unused
  blocks     A held by request A            2 held by two requests
             c cached, held by nobody       · free
             A* can be found by its content (a later request may hit it)
             A + taken in this step
             ## the null block: block tables are padded with it
  free queue the blocks in the order in which they will be taken; c: its content
             will be evicted
  batch      what the model ran on: tokens of all requests in one row, each with
             the position in its request and the slot (block * block size +
             offset) that its key and value go to"""


def make_console() -> Console:
    """Standard output; 100 columns wide where it is no terminal."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED_WIDTH if piped else None, highlight=False, soft_wrap=False)


class TraceView:
    """Prints a trace. A request keeps its colour from step to step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours: dict[str, str] = {}
        self._hardware: Hardware | None = None
        self._metrics: ModelMetrics | None = None

    def print_trace(self, trace: Trace) -> None:
        self.print_header(trace.engine)
        for step in trace:
            self.print_step(step)
        self.print_summary(trace.requests)

    def print_header(self, engine: EngineInfo, hardware: Hardware | None = None) -> None:
        """What the steps have in common. With `hardware`, every step also shows its work."""
        if hardware is not None and engine.model_shape is not None:
            self._hardware = hardware
            self._metrics = ModelMetrics(engine.model_shape, engine.dtype)
        self._console.print(
            f"{engine.model} on {engine.device}: {engine.num_blocks - 1} blocks of "
            f"{engine.block_size} tokens, at most {engine.max_num_batched_tokens} tokens and "
            f"{engine.max_num_seqs} requests a step, max_model_len {engine.max_model_len}, "
            f"{engine.policy}, prefix cache: {engine.prefix_cache_backend}"
            + (", async scheduling" if engine.async_scheduling else ""),
            markup=False,
        )
        self._console.print(LEGEND, style="dim", markup=False)

    def print_step(self, step: StepTrace) -> None:
        """All there is to say about one step."""
        times = ", ".join(
            f"{name} {step.span(name).duration / 1e3:.2f}"
            for name in ("schedule", "execute", "sample", "update")
            if step.batch is not None or name in ("schedule", "update")
        )
        self._console.print()
        self._console.rule(f"[bold]step {step.step}[/]  ms: {times}", align="left", characters="─")
        requests = self._requests(step)
        if requests.row_count:
            self._console.print(requests)
        self._section("budget", self._budget(step.scheduled))
        self._section("events", [self._event(event) for event in step.events])
        self._section("blocks", self._pool(step.pool, step.events))
        if step.batch is not None:
            self._section("batch", self._batch(step.batch))
            self._section("work", self._work(step, step.batch))
        for sampling in step.sampling:
            self._section("sampling", [Text.assemble("how ", self._name(sampling.request_id))])
            table = self._sampling(sampling)
            self._console.print(Padding(table, (0, 0, 0, LABEL_WIDTH + 1)))
        self._section("sampled", self._sampled(step))

    def print_summary(self, requests: Sequence[RequestInfo]) -> None:
        """Each request's text and latencies."""
        self._console.print()
        self._console.rule("[bold]requests[/]", align="left", characters="─")
        table = _table(
            "request", "arrived", "prompt", "output", "TTFT", "TPOT", "ITL p50", "max", "E2EL ms"
        )
        for column in table.columns[1:]:
            column.justify = "right"
        for request in requests:
            times = latency(request)
            table.add_row(
                self._name(request.request_id),
                f"step {request.arrival_step}",
                str(request.num_prompt_tokens),
                str(len(request.token_times)),
                *(_ms(t) for t in latency_columns(times)),
            )
        self._console.print(table)
        for request in requests:
            reason = f"  [{request.finish_reason}]"
            self._section(
                request.request_id,
                [
                    Text.assemble(
                        (_printable(request.prompt), "dim"),
                        (_printable(request.text), self._colour(request.request_id)),
                        (reason, "dim"),
                    )
                ],
            )

    # ---- sections --------------------------------------------------------------------------------

    def _requests(self, step: StepTrace) -> Table:
        """Running ones first, then those that wait, in the queues' order after the step."""
        table = _table("request", "status", "in the cache", "", "prompt", "output", "this step")
        for column in table.columns[4:6]:
            column.justify = "right"
        scheduled = {r.request_id: r for r in step.scheduled.requests}
        lengths = {e.request_id: e.num_tokens for e in step.events if e.kind == "finish"}
        finished = {s.request_id: s.finish_reason for s in step.sampled if s.finish_reason}
        after = step.after.running + step.after.waiting
        ended = [r for r in step.before.running + step.before.waiting if r.request_id in finished]
        for state in [*ended, *after]:
            req_id = state.request_id
            was = step.before.find(req_id)
            part = scheduled.get(req_id)
            status = state.status.lower()
            if was is not None and was.status != state.status:
                status = f"{was.status.lower()} → {status}"
            if req_id in finished:
                status = "finished"
            computed = state.num_computed_tokens
            num_output = state.num_output_tokens
            if req_id in finished:  # `state` is the one before the step
                computed = part.start + part.num_scheduled_tokens if part else computed
                num_output = lengths.get(req_id, num_output)
            total = state.num_prompt_tokens + num_output
            what = "waits" if part is None else f"{plural(part.num_scheduled_tokens, 'token')}"
            if part is not None and part.num_cached_tokens:
                what += f", {part.num_cached_tokens} from the cache"
            if req_id in step.scheduled.preempted_req_ids:
                what = "gives its blocks back"
            elif part is None and state in step.after.running:
                what = "not in this step"
            table.add_row(
                self._name(req_id),
                status,
                _progress(computed, total),
                f"{computed}/{total}",
                str(state.num_prompt_tokens),
                str(num_output),
                what,
            )
        return table

    def _budget(self, scheduled: Scheduled) -> list[Text]:
        width = min(scheduled.token_budget, 56)
        bar, filled = Text(), 0
        done = 0
        for request in scheduled.requests:
            done += request.num_scheduled_tokens
            # Everyone gets at least one character, as long as there is room.
            end = max(round(done / scheduled.token_budget * width), filled + 1)
            end = min(end, width)
            bar.append(_repeat(request.request_id, end - filled), self._colour(request.request_id))
            filled = end
        bar.append("·" * (width - filled), "dim")
        bar.append(f"  {scheduled.total_num_scheduled_tokens} of {scheduled.token_budget} tokens")
        parts = ", ".join(f"{r.request_id} {r.num_scheduled_tokens}" for r in scheduled.requests)
        bar.append(f" ({parts})" if parts else "")
        ended = ", ".join(scheduled.finished_req_ids)
        return [bar, Text(f"and the runner is told to forget {ended}")] if ended else [bar]

    def _event(self, event: Event) -> Text:
        line = Text.assemble(
            (f"{event.kind:9}", "bold"),
            (f"{event.request_id or '':4}", self._colour(event.request_id)),
        )
        blocks = ranges(event.block_ids)
        noun = "block" if len(event.block_ids) == 1 else "blocks"
        size = plural(event.num_tokens, "token")
        what = {
            "hit": f"{size} found in {noun} {blocks} ({event.detail})",
            "allocate": f"{noun} {blocks} taken, to compute {size}",
            "store": f"{noun} {blocks} can be found from now on ({event.detail})",
            "evict": f"{noun} {blocks} forgotten: {size} of content ({event.detail})",
            "preempt": f"back to the queue; {noun} {blocks} and {size} of progress given up",
            "finish": f"{event.detail}, {noun} {blocks} given back",
            "clear": "the whole prefix cache was forgotten",
        }[event.kind]
        return line.append(what)

    def _pool(self, pool: PoolState, events: Iterable[Event]) -> list[Text]:
        new = {b for event in events if event.kind == "allocate" for b in event.block_ids}
        blocks = {block.block_id: block for block in pool.blocks}
        lines = [
            Text(
                f"{pool.num_held} held, {pool.num_cached} cached, {pool.num_free} in the free "
                f"queue, of {pool.num_blocks - 1}; usage {pool.usage:.0%}"
            )
        ]
        columns = GRID_COLUMNS if self._console.width >= PIPED_WIDTH else GRID_COLUMNS // 2
        for first in range(0, pool.num_blocks, columns):
            row = [blocks.get(i) for i in range(first, min(first + columns, pool.num_blocks))]
            if not any(row):
                continue  # of a large pool: nothing to be seen here
            line = Text.assemble((f"{first:5} ", "dim"))
            for block in row:
                line.append(self._cell(block, block is not None and block.block_id in new))
            lines.append(line)
        in_line = sorted(
            (b for b in pool.blocks if b.free_position is not None),
            key=lambda b: b.free_position or 0,
        )
        shown = " ".join(
            f"{b.block_id}{'c' if b.block_hash else ''}" for b in in_line[:NUM_NEXT_SHOWN]
        )
        more = pool.num_free - min(len(in_line), NUM_NEXT_SHOWN)
        lines.append(Text(f"free queue: {shown or 'empty'}" + (f" ... {more} more" * (more > 0))))
        return lines

    def _cell(self, block: BlockState | None, is_new: bool) -> Text:
        """Five columns: holder, whether it can be found, whether it is new."""
        if block is None:
            return Text("     ")
        if block.is_null:
            return Text("##   ", "dim")
        found = "*" if block.block_hash is not None else " "
        mark = found + ("+" if is_new else " ")
        if not block.held_by:
            cached = block.state == "cached"
            return Text("c    " if cached else "·    ", "yellow" if cached else "dim")
        one = len(block.held_by) == 1
        holder = block.held_by[0] if one else str(len(block.held_by))
        colour = f"black on {self._colour(block.held_by[0])}" if one else "bold black on white"
        return Text.assemble((f"{holder[:2] + mark:4}", colour), " ")

    def _batch(self, batch: PackedBatch) -> list[Text]:
        lines = [
            Text(
                f"{plural(len(batch.input_ids), 'token')} in {plural(len(batch.req_ids), 'row')}, "
                f"query_start_loc "
                f"{_short(batch.query_start_loc)}, seq_lens {_short(batch.seq_lens)}"
            )
        ]
        for row, req_id in enumerate(batch.req_ids):
            part = slice(batch.query_start_loc[row], batch.query_start_loc[row + 1])
            line = Text.assemble(
                f"{row:3} ",
                (f"{req_id:3}", self._colour(req_id)),
                f" positions {ranges(batch.positions[part])}, slots "
                f"{ranges(batch.slot_mapping[part])}"
                + ("" if batch.samples[row] else ": a chunk, its sample is dropped"),
            )
            lines.append(line)
            texts = batch.input_texts[part] or list(map(str, batch.input_ids[part]))
            lines += self._tokens(texts, self._colour(req_id))
        return lines

    def _work(self, step: StepTrace, batch: PackedBatch) -> list[Text]:
        """What the model had to compute and move, and the share of the ceilings that is."""
        if self._metrics is None or self._hardware is None:
            return []
        query_lens = (b - a for a, b in pairwise(batch.query_start_loc))
        ctx = ExecutionContext.from_lens(query_lens, batch.seq_lens)
        stats = self._metrics.get_step_perf_stats_per_gpu(ctx)
        seconds = (step.span("execute").duration + step.span("sample").duration) / 1e6
        used = utilization(stats, seconds, self._hardware, self._metrics.weight_dtype)
        return [
            Text(
                f"{show(stats.num_flops_per_gpu, 'FLOP')}, {show(stats.num_bytes_per_gpu, 'B')} in "
                f"{seconds * 1e3:.2f} ms: {show(used.flops_per_s, 'FLOP/s')} (MFU {used.mfu:.1%}), "
                f"{show(used.bytes_per_s, 'B/s')} (MBU {used.mbu:.1%})"
            )
        ]

    def _tokens(self, texts: Sequence[str], colour: str) -> list[Text]:
        """Tokens set apart by bars, broken between tokens only."""
        room = self._console.width - LABEL_WIDTH - 10
        lines, line = [], Text("        ")
        for text in texts:
            token = _printable(text)
            if cell_len(line.plain) + cell_len(token) > room:
                lines.append(line)
                line = Text("        ")
            line.append("│", "dim").append(token, colour)
        return [*lines, line.append("│", "dim")]

    def _sampled(self, step: StepTrace) -> list[Text]:
        lines = []
        for sampled in step.sampled:
            text = Text.assemble(self._name(sampled.request_id), "  ")
            text.append(f'"{_printable(sampled.text)}"', self._colour(sampled.request_id))
            text.append(f"  id {', '.join(map(str, sampled.token_ids))}", "dim")
            if sampled.finish_reason:
                text.append(f"  finished: {sampled.finish_reason}", "bold")
            lines.append(text)
        return lines or [Text("nothing")]

    def _sampling(self, sampling: SamplingTrace) -> Table:
        """Tokens down, stages across, probabilities in the cells."""
        titles = [f"{s.name}\n{s.setting}" for s in sampling.stages]
        bar_width = 8 if len(titles) <= 5 else 0  # six stages fill 100 columns
        table = _table("  token", "id", *titles, "")
        table.columns[0].no_wrap = True
        for column in table.columns[1:-1]:
            column.justify = "right"
        for token in sampling.tokens:
            chosen = token.token_id == sampling.sampled_token_id
            table.add_row(
                f'{"→" if chosen else " "} "{_printable(token.text)}"',
                str(token.token_id),
                *(f"{prob:.4f}" if prob > 0 else "-" for prob in token.probs),
                "█" * round(token.probs[-1] * bar_width),
                style=self._colour(sampling.request_id) if chosen else "",
            )
        table.add_row("  tokens left", "", *(str(s.num_tokens) for s in sampling.stages), "")
        table.add_row("  bits (entropy)", "", *(f"{s.entropy:.2f}" for s in sampling.stages), "")
        return table

    # ---- pieces ----------------------------------------------------------------------------------

    def _section(self, name: str, lines: Sequence[Text]) -> None:
        """Lines with the section's name before the first; long ones go on below themselves."""
        table = Table.grid(padding=(0, 1))
        table.add_column(width=LABEL_WIDTH)
        table.add_column(overflow="fold")
        for i, line in enumerate(lines):
            table.add_row(Text(name if i == 0 else "", "bold"), line)
        if lines:
            self._console.print(table)

    def _colour(self, req_id: str | None) -> str:
        if req_id is None:
            return ""
        return self._colours.setdefault(req_id, PALETTE[len(self._colours) % len(PALETTE)])

    def _name(self, req_id: str) -> Text:
        return Text(req_id, f"bold {self._colour(req_id)}")


def ranges(numbers: Sequence[int]) -> str:
    """1 2 3 7 8 -> "1-3 7-8", in the order given."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def latency_columns(times: Latency) -> tuple[float | None, ...]:
    return times.ttft, times.tpot, times.median_itl, times.max_itl, times.e2el


def plural(number: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _progress(computed: int, total: int, width: int = 16) -> Text:
    filled = min(computed * width // max(total, 1), width)
    return Text("█" * filled + "░" * (width - filled))


def _repeat(name: str, length: int) -> str:
    """`name` over and over, `length` characters of it."""
    return (name * length)[:length]


def _short(numbers: Sequence[int], limit: int = 10) -> str:
    if len(numbers) <= limit:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[:limit]))}, ... {numbers[-1]}]"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _printable(text: str) -> str:
    """Line breaks and other control characters as symbols."""
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
