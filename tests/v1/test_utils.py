"""nanovllm/v1/utils.py, what is not about buffers (tests/v1/worker has those)."""

from __future__ import annotations

import gc

from nanovllm.v1.utils import freeze_gc_heap


def test_collections_pass_over_what_was_there_and_find_what_came_later() -> None:
    class Node:
        pass

    def make_cycle() -> None:
        node = Node()
        node.itself = node  # type: ignore[attr-defined]

    try:
        freeze_gc_heap()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 1_000
        make_cycle()
        assert any(isinstance(one, Node) for one in gc.get_objects())
        gc.collect()
        assert not any(isinstance(one, Node) for one in gc.get_objects())
    finally:
        gc.unfreeze()
