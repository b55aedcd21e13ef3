"""`python -m nanovllm` is the `nanovllm` command (handy under `python -m pdb -m nanovllm`)."""

from __future__ import annotations

import sys

from nanovllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
