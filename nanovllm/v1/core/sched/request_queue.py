"""The waiting queue, in the order of the policy.

Upstream: vllm/v1/core/sched/request_queue.py (0.23.0)
Left out: `prepend_requests` (for requests that a step skips over: ours skips none).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.v1.request import Request


class SchedulingPolicy(Enum):
    """FCFS: first come, first served. PRIORITY: lowest `priority` value first, then arrival."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class RequestQueue(ABC):
    """Requests waiting for their turn. The head is the only one that may be scheduled next."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a newly arrived request."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Take the head."""

    @abstractmethod
    def peek_request(self) -> Request:
        """Look at the head."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Put back a preempted request: at the head, where the policy knows one."""

    @abstractmethod
    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Drop requests from wherever they stand (aborted)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """From head to tail."""


class FCFSRequestQueue(RequestQueue):
    """In order of arrival; preempted requests, which arrived earlier, go back to the front."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        self._queue.append(request)

    def pop_request(self) -> Request:
        return self._queue.popleft()

    def peek_request(self) -> Request:
        return self._queue[0]

    def prepend_request(self, request: Request) -> None:
        self._queue.appendleft(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        dropped = set(requests)
        self._queue = deque(request for request in self._queue if request not in dropped)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class PriorityRequestQueue(RequestQueue):
    """A heap by Request.__lt__. It has no front: a preempted request queues by rank."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def pop_request(self) -> Request:
        return heapq.heappop(self._heap)

    def peek_request(self) -> Request:
        return self._heap[0]

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        dropped = set(requests)
        self._heap = [request for request in self._heap if request not in dropped]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty waiting queue for `policy`."""
    return PriorityRequestQueue() if policy is SchedulingPolicy.PRIORITY else FCFSRequestQueue()
